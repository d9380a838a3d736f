"""Running trials of one workload in real child processes, several at once."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tuner.execution.launcher import LocalLauncher, Running
from tuner.execution.run_folder import Request, RunFolder, StopRequest
from tuner.records import Outcome, TrialResult
from tuner.units import GIB


def request_for(reference: str, params: dict[str, Any], **changes: Any) -> Request:
    """Return a request on the CPU, capped at 2 GiB, one thread, no profile."""
    plain: dict[str, Any] = {
        "device": "cpu",
        "reservation_bytes": 2 * GIB,
        "context_bytes": None,
        "seed": 1,
        "threads": 1,
        "example_steps": (0, 0),
    }
    return Request(workload=reference, params=params, **{**plain, **changes})


def finish(trial: Running, seconds: float = 240) -> TrialResult:
    """Wait for the end of a trial; return what became of it."""
    deadline = time.monotonic() + seconds
    while (result := trial.poll()) is None:
        if time.monotonic() > deadline:
            trial.kill()
            pytest.fail(f"the trial runs for more than {seconds} s")
        select.select([trial], [], [], 0.1)
    return result


def finished(
    trial: Running,
    *,
    timeout: float = 300.0,
    should_stop: Callable[[], bool] = lambda: False,
    grace: float = 0.0,
) -> TrialResult:
    """Return what became of a trial; stop it at the time-out, or when told to."""
    deadline = time.monotonic() + timeout
    while (result := trial.poll()) is None:
        if time.monotonic() > deadline:
            trial.stop(StopRequest(Outcome.TIMED_OUT, "ran too long"), grace_seconds=grace)
        elif should_stop():
            trial.stop(StopRequest(Outcome.INTERRUPTED, "interrupted"), grace_seconds=grace)
        time.sleep(0.05)
    return result


def run_one(root: Path, name: str, request: Request) -> TrialResult:
    """Run one trial in a launcher of its own, in the folder `name` below `root`."""
    with LocalLauncher(root, request.workload) as launcher:
        return finish(launcher.start(RunFolder.create(root / name), request))


def run_together(root: Path, requests: Mapping[str, Request], at_once: int) -> dict[str, TrialResult]:
    """Run trials, `at_once` at a time; return their results by name."""
    with ThreadPoolExecutor(at_once) as threads:
        results = threads.map(lambda item: run_one(root, *item), requests.items())
        return dict(zip(requests, results, strict=True))
