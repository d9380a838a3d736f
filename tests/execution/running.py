"""Waiting for a trial to end, as the loop does between its turns."""

from __future__ import annotations

import time
from collections.abc import Callable

from tuner.execution.launcher import Running
from tuner.execution.run_folder import StopRequest
from tuner.records import Outcome, TrialResult


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
