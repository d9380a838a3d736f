"""The process that traces: `python -m tuner.memory.predictor_child REQUESTS ANSWERS`.

Reads one JSON request per line from file descriptor REQUESTS and writes one answer per line to
ANSWERS. It stays warm, so that PyTorch is imported and CPU kernels are probed once per study, and
a crash or a hang in user code costs one prediction.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from tuner.errors import Untraceable
from tuner.memory.prediction import Estimate, estimate, untraceable
from tuner.memory.prediction_cache import Fingerprint
from tuner.memory.targets import Target, resolve_target
from tuner.processes import process_memory
from tuner.workload import Workload, load_workload


def main(requests_fd: int, answers_fd: int) -> None:
    """Serve requests until the driver closes its end."""
    with os.fdopen(requests_fd, encoding="utf-8") as requests, os.fdopen(answers_fd, "w") as answers:
        first = json.loads(requests.readline())
        server = PredictorServer(first["workload"], first["target"], threads=first["threads"])
        for line in requests:
            answer = server.answer(json.loads(line))
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


class PredictorServer:
    """Answers requests about one workload on one target."""

    def __init__(self, reference: str, target_name: str, *, threads: int) -> None:
        import torch

        from tuner.memory.target_rules import rules_for
        from tuner.warmup import warm_up

        torch.set_num_threads(threads)
        warm_up(torch.device("cpu"))
        self._target: Target = resolve_target(target_name)
        self._workload: Workload = load_workload(reference).workload
        self._rules = rules_for(self._target)
        self._fingerprint = Fingerprint(sys.modules[type(self._workload).__module__])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request, by its `kind`, and what the cache needs to know."""
        kind, params = request["kind"], request["params"]
        if kind == "context":
            answer: dict[str, Any] = {"context_bytes": self._context_bytes(params)}
        elif kind == "training_set":
            answer = {"training_set": self._training_set(params)}
        else:
            answer = {"estimate": self.estimate(params).to_json()}
        # Last, since a trace may import more of the workload's modules.
        return {
            **answer,
            "fingerprint": self._fingerprint.hexdigest(),
            "memory_free": sorted(self._workload.memory_free),
        }

    def estimate(self, params: dict[str, Any]) -> Estimate:
        """Trace one configuration."""
        from tuner.memory.trace import trace_workload

        start = time.perf_counter()
        try:
            trace = trace_workload(self._workload, params, self._rules)
            return estimate(trace, self._target, time.perf_counter() - start)
        except Untraceable as reason:
            return untraceable(reason.message, time.perf_counter() - start)

    def _context_bytes(self, params: dict[str, Any]) -> int | None:
        """Return what a trial's process takes on a CPU before its first tensor of its own.

        The interpreter, PyTorch after a warm-up, the study's imports, and its data.
        """
        loaders = self._workload.open_loaders(params)
        memory = process_memory()
        del loaders
        return None if memory is None else memory.resident_bytes

    def _training_set(self, params: dict[str, Any]) -> dict[str, Any] | None:
        """Return length, batch size and drop_last of the training loader, or None."""
        try:
            loader = self._workload.open_loaders(params).train
            samples = len(loader.dataset)
        except Exception:  # user code, or a set without a length: then nothing is known
            return None
        size = getattr(loader, "batch_size", None)
        return {
            "samples": samples,
            "batch_size": size if isinstance(size, int) else None,
            "drop_last": bool(getattr(loader, "drop_last", False)),
        }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
