"""Starts a trial's process, waits for it, and collects what it left.

A `Launcher` is the edge between the driver and whatever runs trials; `LocalLauncher` runs them on
this host, below a supervisor.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tuner.execution.failures import classify_exit
from tuner.execution.run_folder import Request, RunFolder
from tuner.processes import Child, ExitStatus
from tuner.records import EpochMetrics, Failure, Outcome, Peaks, TrialResult
from tuner.units import MIB, format_seconds

# Tensors of 1 MiB and more go back to the system when freed, so that the resident peak follows the
# allocator's. Measured on studies/digits_cnn.py: resident - imports - allocated is 7 to 18 MiB with
# this threshold, 7 MiB with 64 KiB (and twice the time per epoch), 14 to 120 MiB with glibc's own.
_CPU_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_TRIM_THRESHOLD_": str(4 * MIB),
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
}


class Launcher(Protocol):
    """Runs one trial to its end."""

    def run(
        self,
        folder: RunFolder,
        request: Request,
        *,
        timeout_seconds: float | None,
        should_stop: Callable[[], bool],
        more_to_come: bool = False,
    ) -> TrialResult:
        """Return what became of the trial that `request` describes.

        Args:
            folder: Its run folder.
            request: What the worker is told.
            timeout_seconds: After this the trial is killed; None: never.
            should_stop: Asked several times a second; True kills the trial.
            more_to_come: Whether another trial will follow, so that its process may get ready.
        """


class LocalLauncher:
    """Runs trials as child processes of this host; a context manager.

    A process that has imported PyTorch stands by while a trial runs, since that import takes longer
    than many a trial. It touches no device before it gets its run folder: on a GPU, the study is
    therefore not imported in advance.

    Args:
        runs_dir: Where the log of a process lies until it has a run folder.
        study: The workload's reference.
        visible_device: What a child sees as its only GPU (a UUID), or None for a CPU target.
    """

    def __init__(self, runs_dir: Path, study: str, visible_device: str | None = None) -> None:
        self._runs_dir = runs_dir
        self._in_advance = [study] if visible_device is None else []
        self._environment = (
            _CPU_ENVIRONMENT
            if visible_device is None
            else {"CUDA_VISIBLE_DEVICES": visible_device, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        )
        self._standby: _Standby | None = None

    def __enter__(self) -> LocalLauncher:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that stands by."""
        if self._standby is not None:
            self._standby.discard()
            self._standby = None

    def prepare(self) -> None:
        """Have a process stand by for the next trial."""
        if self._standby is None:
            self._standby = _Standby(self._runs_dir, self._environment, self._in_advance)

    def run(
        self,
        folder: RunFolder,
        request: Request,
        *,
        timeout_seconds: float | None,
        should_stop: Callable[[], bool],
        more_to_come: bool = False,
    ) -> TrialResult:
        """Run the trial; kill its whole process group at the time-out or when told to stop."""
        folder.write_request(request)
        self.prepare()
        standby, self._standby = self._standby, None
        assert standby is not None
        started = time.monotonic()
        child = standby.assign(folder)
        if more_to_come:
            with contextlib.suppress(OSError):  # it only saves time; the next trial starts its own
                self.prepare()
        cut_short: Failure | None = None
        outcome = Outcome.INTERRUPTED
        status = None
        try:
            while (status := child.wait(0.1)) is None:
                if timeout_seconds is not None and time.monotonic() - started > timeout_seconds:
                    outcome = Outcome.TIMED_OUT
                    cut_short = Failure(f"ran longer than {format_seconds(timeout_seconds)}")
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


class _Standby:
    """A worker that has no trial yet."""

    def __init__(self, runs_dir: Path, environment: dict[str, str], in_advance: list[str]) -> None:
        runs_dir.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".standby-", suffix=".txt", dir=runs_dir)
        os.close(descriptor)
        self._log = Path(name)
        channel, self._assign = os.pipe()
        self._child = Child(
            [sys.executable, "-P", "-m", "tuner.execution.worker", str(channel), *in_advance],
            log=self._log,
            environment={**environment, "PYTHONUNBUFFERED": "1"},
            channels=(channel,),
        )
        os.close(channel)

    def assign(self, folder: RunFolder) -> Child:
        """Give the worker its run folder; its log moves there."""
        Path(self._log).replace(folder.log)
        with contextlib.suppress(BrokenPipeError):  # it died: its exit status tells how
            os.write(self._assign, f"{folder.path}\n".encode())
        os.close(self._assign)
        return self._child

    def discard(self) -> None:
        """End the worker without a trial."""
        os.close(self._assign)
        self._child.kill()
        self._log.unlink(missing_ok=True)


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
