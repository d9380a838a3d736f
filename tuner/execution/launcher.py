"""Starts a trial's process, waits for it, and collects what it left.

A `Launcher` is the edge between the driver and whatever runs trials; `LocalLauncher` runs them on
this host, below a supervisor.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

from tuner.execution.failures import classify_exit
from tuner.execution.run_folder import Request, RunFolder
from tuner.processes import Child, ExitStatus
from tuner.records import EpochMetrics, Failure, Outcome, Peaks, TrialResult

_GRACE_SECONDS = 5.0  # after `stop` was written, before the group is killed
# Large tensors go back to the system when freed, and the resident peak repeats (FACTS).
_CPU_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "CUDA_VISIBLE_DEVICES": ""}


class Launcher(Protocol):
    """Runs one trial to its end."""

    def run(
        self,
        folder: RunFolder,
        request: Request,
        *,
        timeout_seconds: float | None,
        should_stop: Callable[[], bool],
    ) -> TrialResult:
        """Return what became of the trial that `request` describes."""


class LocalLauncher:
    """Runs trials as child processes of this host.

    Args:
        visible_device: What the child sees as its only GPU (a UUID), or None for a CPU target.
    """

    def __init__(self, visible_device: str | None = None) -> None:
        self._environment = (
            _CPU_ENVIRONMENT
            if visible_device is None
            else {"CUDA_VISIBLE_DEVICES": visible_device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        )

    def run(
        self,
        folder: RunFolder,
        request: Request,
        *,
        timeout_seconds: float | None,
        should_stop: Callable[[], bool],
    ) -> TrialResult:
        """Run the trial; kill its whole process group at the time-out or when told to stop."""
        folder.write_request(request)
        started = time.monotonic()
        child = Child(
            [sys.executable, "-P", "-m", "tuner.execution.worker", str(folder.path)],
            log=folder.log,
            environment={**self._environment, "PYTHONUNBUFFERED": "1"},
        )
        cut_short: Failure | None = None
        outcome = Outcome.INTERRUPTED
        status = None
        try:
            while (status := child.wait(0.1)) is None:
                if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                    outcome = Outcome.TIMED_OUT
                    cut_short = Failure(f"ran longer than {timeout_seconds:.0f} s")
                elif should_stop():
                    cut_short = Failure("interrupted by the user")
                if cut_short is not None:
                    status = child.kill()
                    break
        finally:
            if status is None:
                child.kill()
        seconds = time.monotonic() - started
        if cut_short is not None and folder.read_report() is None:
            return unreported(folder, outcome, cut_short, seconds)
        return collect(folder, status, request, seconds)


def collect(folder: RunFolder, status: ExitStatus, request: Request, seconds: float) -> TrialResult:
    """Return the result in a run folder whose process has ended."""
    report = folder.read_report()
    if report is not None:
        return TrialResult.from_json({**report, "seconds": seconds})
    capped = request.device == "cpu" and request.reservation_bytes is not None
    outcome, failure = classify_exit(status, folder.log_tail(), capped=capped)
    return unreported(folder, outcome, failure, seconds)


def unreported(folder: RunFolder, outcome: Outcome, failure: Failure, seconds: float) -> TrialResult:
    """Return a result for a process that wrote no report, with what its events tell."""
    events = folder.read_events()
    epochs = tuple(
        EpochMetrics(**{name: value for name, value in event.items() if name != "kind"})
        for event in events
        if event["kind"] == "epoch"
    )
    baselines = [event for event in events if event["kind"] == "baseline"]
    peaks = Peaks(
        device_bytes=max((epoch.peak_bytes or 0 for epoch in epochs), default=None),
        source=baselines[0]["source"] if baselines else None,
        baseline_bytes=baselines[0]["baseline_bytes"] if baselines else None,
    )
    return TrialResult(outcome=outcome, epochs=epochs, peaks=peaks, failure=failure, seconds=seconds)


def visible_threads() -> int:
    """Return how many threads a trial may use: the cores this process may run on."""
    return len(os.sched_getaffinity(0))
