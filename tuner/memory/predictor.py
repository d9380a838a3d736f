"""The driver's side of prediction: a warm child that traces, restarted when it dies or hangs."""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import TunerError
from tuner.memory.prediction import Estimate, untraceable
from tuner.memory.prediction_cache import PredictionCache
from tuner.processes import Child
from tuner.units import MIB

DEFAULT_TIMEOUT_SECONDS = 120.0
# The same heap settings as a trial on a CPU has (execution/launcher.py): the context is read here.
CHILD_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_TRIM_THRESHOLD_": str(4 * MIB),
}


class PredictorError(TunerError):
    """The predictor's process cannot be started at all; the message holds the end of its log."""


@dataclass(frozen=True)
class TrainingSet:
    """What a workload trains on.

    Attributes:
        samples: The training set's length.
        batch_size: The training loader's batch size, or None when it has none.
        drop_last: Whether the loader leaves out a last batch that is not full.
    """

    samples: int
    batch_size: int | None
    drop_last: bool


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


class Predictor:
    """Estimates the memory of configurations of one workload on one target; a context manager.

    Args:
        reference: The workload, as `load_workload` takes it.
        target: The target's name.
        log: File for what user code prints while it is traced.
        threads: Intra-op threads, as the trial will use: CPU kernels allocate by them.
        timeout_seconds: How long one trace may take before it counts as untraceable.

    Attributes:
        on_warning: Called with a sentence that a person must see; by default a `RuntimeWarning`.
    """

    def __init__(
        self,
        reference: str,
        target: str,
        *,
        log: Path,
        threads: int,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._first = {"workload": reference, "target": target, "threads": threads}
        self._log = log
        self._timeout_seconds = timeout_seconds
        self._child: Child | None = None
        self._requests = self._answers = -1
        self._cache = PredictionCache(target, threads, lambda message: self.on_warning(message))
        self.on_warning: Callable[[str], None] = _warn

    def __enter__(self) -> Predictor:
        self._start()  # its imports take seconds, in which the driver has other things to do
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def estimate(self, params: dict[str, Any], *, exact: bool = False) -> Estimate:
        """Return the estimate for one configuration; what was traced before takes under 1 ms.

        Args:
            params: The configuration.
            exact: Whether another value of a `memory_free` parameter is traced as well, so that the
                list is not believed.
        """
        hit = self._cache.find(params)
        if hit is not None and exact and not hit.exact:
            hit = None
        if hit is not None and not hit.due:
            return hit.estimate
        start = time.perf_counter()
        answer, problem = self._ask({"kind": "predict", "params": params})
        if answer is None:
            return untraceable(problem, time.perf_counter() - start)
        traced = Estimate.from_json(answer["estimate"])
        if hit is not None:
            return self._cache.check(params, hit, traced)
        return self._cache.keep(params, traced)

    def context_bytes(self, params: dict[str, Any]) -> int | None:
        """Return the measured context of a trial on a CPU target.

        Raises:
            PredictorError: The workload cannot be loaded or its data opened; with the reason.
        """
        answer, problem = self._ask({"kind": "context", "params": params})
        if answer is None:
            raise PredictorError(f"the workload's data cannot be opened: {problem}", hint=f"see {self._log}")
        context: int | None = answer["context_bytes"]
        return context

    def training_set(self, params: dict[str, Any]) -> TrainingSet | None:
        """Return what a configuration trains on; None when its loader does not tell."""
        answer, _ = self._ask({"kind": "training_set", "params": params})
        found = None if answer is None else answer["training_set"]
        return None if found is None else TrainingSet(**found)

    def cancel(self) -> None:
        """End a trace that another thread waits for: it counts as untraceable there."""
        child = self._child
        if child is not None:
            child.begin_to_kill()  # that thread takes note of its end: two must not wait for one child

    def close(self) -> None:
        """End the child."""
        self._cache.code_is(None)  # a next child loads the files as they are then
        if self._child is not None:
            os.close(self._requests)
            self._child.kill()
            os.close(self._answers)
            self._child = None

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """Return the child's answer, or None and what went wrong."""
        if self._child is None:
            self._start()
        try:
            os.write(self._requests, (json.dumps(request) + "\n").encode())
        except BrokenPipeError:
            self.close()
            return None, self._last_words()
        line = self._read_line()
        if line:
            answer: dict[str, Any] = json.loads(line)
            self._cache.code_is(answer["fingerprint"], answer["memory_free"])
            return answer, ""
        ended = self._child.wait(0 if line is None else 10) if self._child is not None else None
        self.close()
        if ended is None:
            return None, f"tracing took longer than {self._timeout_seconds:.0f} s"
        return None, self._last_words() or f"the tracing process ended with code {ended.code}"

    def _start(self) -> None:
        requests_read, self._requests = os.pipe()
        self._answers, answers_write = os.pipe()
        module = "tuner.memory.predictor_child"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._child = Child(
            [sys.executable, "-P", "-m", module, str(requests_read), str(answers_write)],
            log=self._log,
            environment=CHILD_ENVIRONMENT,
            channels=(requests_read, answers_write),
        )
        os.close(requests_read)
        os.close(answers_write)
        os.write(self._requests, (json.dumps(self._first) + "\n").encode())

    def _read_line(self) -> bytes | None:
        """Return one answer; None at the child's end or after the time-out."""
        deadline = time.monotonic() + self._timeout_seconds
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                data = os.read(self._answers, 65536)
                if not data:
                    return b""
                received += data
        return received

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:300] if lines else ""
