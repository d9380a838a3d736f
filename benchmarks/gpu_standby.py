"""Child processes for `gpu_check.py`: each has imported PyTorch, waits for one job, does it, ends.

::

    Standby.ask(job) ──► a waiting child ──► answer.json ──► Asked.answer()
                    └──► a new child starts in its place

A fresh process for each job makes reserved bytes comparable; that one is always waiting hides the
seconds that importing PyTorch takes. A waiting child has not touched CUDA.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.processes import Child

ROOT = Path(__file__).resolve().parents[1]
_CHILD = (sys.executable, "-P", "-m", "benchmarks.gpu_child")
FAILED = "failed"  # the key of an answer that says why there is none


class Asked:
    """A job that a child was given.

    Args:
        child: The process.
        folder: Where it writes its log and its answer.
    """

    def __init__(self, child: Child, folder: Path) -> None:
        self._child, self._folder = child, folder

    def answer(self, timeout_seconds: float) -> dict[str, Any]:
        """Return what the child found; `failed` in it is one line that says why it found nothing.

        A child that takes longer is killed.
        """
        ended = self._child.wait(timeout_seconds)
        self.kill()
        answer = self._folder / "answer.json"
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return found
        if ended is None:
            return {FAILED: f"no answer within {timeout_seconds:g} s"}
        log = self._folder / "log.txt"
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {FAILED: f"ended with code {ended.code}{': ' + words[-1][:200] if words else ''}"}

    def kill(self) -> None:
        """End the child and everything it started."""
        self._child.kill()


class Standby:
    """Keeps children waiting; a context manager that leaves none behind.

    Args:
        environment: Variables set for the children.
        waiting: How many wait at a time; by default as many as the cores can start meanwhile.
    """

    def __init__(self, environment: Mapping[str, str], waiting: int | None = None) -> None:
        self._environment = {**environment, "PYTHONPATH": _python_path()}
        cores = len(os.sched_getaffinity(0))
        self._waiting = min(6, max(2, cores // 3)) if waiting is None else waiting
        self._ready: deque[tuple[Asked, int]] = deque()
        self._given: list[Asked] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-check-")

    def __enter__(self) -> Standby:
        self._fill()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for asked, channel in self._ready:
            os.close(channel)
            asked.kill()
        for asked in self._given:
            asked.kill()
        self._folder.cleanup()

    def ask(self, job: str, **details: Any) -> Asked:
        """Give a job to a waiting child; its answer is read later."""
        self._fill()
        asked, channel = self._ready.popleft()
        self._given.append(asked)
        with os.fdopen(channel, "w", encoding="utf-8") as request:
            request.write(json.dumps({"job": job, **details}))
        self._fill()
        return asked

    def _fill(self) -> None:
        while len(self._ready) < self._waiting:
            folder = Path(tempfile.mkdtemp(dir=self._folder.name))
            reading, writing = os.pipe()
            child = Child(
                [*_CHILD, str(reading), str(folder / "answer.json")],
                log=folder / "log.txt",
                environment=self._environment,
                channels=(reading,),
            )
            os.close(reading)
            self._ready.append((Asked(child, folder), writing))


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
