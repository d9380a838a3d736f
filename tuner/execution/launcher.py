"""Starts trials' processes, watches them, and collects what they left.

A `Launcher` is the edge between the driver and whatever runs trials; `LocalLauncher` runs them on
this host, below a supervisor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

from tuner import processes
from tuner.execution.failures import classify_exit
from tuner.execution.run_folder import Request, RunFolder, StopRequest
from tuner.measure.timeline import timeline_from_events
from tuner.processes import Child, ExitStatus
from tuner.records import EpochMetrics, Failure, Outcome, Peaks, TrialResult
from tuner.units import MIB

# Tensors of 1 MiB and more go back to the system when freed, so that the resident peak follows the
# allocator's. Measured on studies/digits_cnn.py: resident - imports - allocated is 7 to 18 MiB with
# this threshold, 7 MiB with 64 KiB (and twice the time per epoch), 14 to 120 MiB with glibc's own.
_CPU_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    "MALLOC_TRIM_THRESHOLD_": str(4 * MIB),
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
}


class Running(Protocol):
    """A trial that was launched."""

    @property
    def pid(self) -> int | None:
        """The trial's process, once it is known."""

    def fileno(self) -> int:
        """Return a descriptor that can be read when something has happened; -1 where there is none."""

    def poll(self) -> TrialResult | None:
        """Return what became of the trial, or None while it runs; never waits for it."""

    def stop(self, request: StopRequest, *, grace_seconds: float) -> None:
        """Ask the trial to end; kill its process group after the grace. The first request counts."""

    def kill(self) -> None:
        """Kill the trial's process group; of no effect after its end."""


class Launcher(Protocol):
    """Starts trials."""

    def start(self, folder: RunFolder, request: Request) -> Running:
        """Start the trial that `request` describes, in its run folder."""

    def prepare(self) -> None:
        """Get ready for a trial that will follow soon."""


class LocalLauncher:
    """Runs trials as child processes of this host; a context manager.

    A process that has imported PyTorch stands by for the next trial, since that import takes longer
    than many a trial. It touches no device before it gets its run folder: on a GPU, the study is
    therefore not imported in advance.

    Args:
        runs_dir: Where the log of a process lies until it has a run folder.
        study: The workload's reference.
        kind: `cpu` or `cuda`.
    """

    def __init__(self, runs_dir: Path, study: str, kind: str = "cpu") -> None:
        self._runs_dir = runs_dir
        self._in_advance = [study] if kind == "cpu" else []
        self._environment = _CPU_ENVIRONMENT if kind == "cpu" else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
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
            with contextlib.suppress(OSError):  # it only saves time: the next trial starts its own
                self._standby = self._new_standby()

    def start(self, folder: RunFolder, request: Request) -> LocalTrial:
        """Start the trial in the process that stands by, or in a new one.

        Raises:
            OSError: No process can be started, or the disk is full.
        """
        folder.write_request(request)
        standby, self._standby = self._standby or self._new_standby(), None
        return LocalTrial(standby.assign(folder), folder, request)

    def _new_standby(self) -> _Standby:
        return _Standby(self._runs_dir, self._environment, self._in_advance)


class LocalTrial:
    """A trial in a child process of this host."""

    def __init__(self, child: Child, folder: RunFolder, request: Request) -> None:
        self._child, self._folder, self._request = child, folder, request
        self._started = time.monotonic()
        self._stop: StopRequest | None = None
        self._kill_at = math.inf

    @property
    def pid(self) -> int | None:
        """The trial's process, which leads a group and a session of its own."""
        return self._child.pid

    def fileno(self) -> int:
        """Return a descriptor that can be read when something has happened; -1 after the end."""
        return self._child.fileno()

    def poll(self) -> TrialResult | None:
        """Return what became of the trial, or None while it runs; never waits for it."""
        status, note = self._child.wait(0), ""
        if status is None:
            late_seconds = time.monotonic() - self._kill_at
            if late_seconds < 0:
                return None
            self._child.begin_to_kill()
            if late_seconds < processes.HOLD_OUT_SECONDS:
                return None
            status, note = ExitStatus(-signal.SIGKILL), f"; {self._child.holding_out()}"
        seconds = time.monotonic() - self._started
        if self._stop is not None and _report_in(self._folder)[0] is None:
            failure = Failure(self._stop.reason + note)
            result = unreported(self._folder, self._stop.outcome, failure, seconds)
        else:
            result = collect(self._folder, status, self._request, seconds)
        host_bytes = status.max_resident_bytes
        if self._request.device == "cpu":  # its meter starts the kernel's count anew, see CpuMeter
            host_bytes = max(host_bytes or 0, result.peaks.device_bytes or 0) or None
        return dataclasses.replace(result, host_peak_bytes=host_bytes)

    def stop(self, request: StopRequest, *, grace_seconds: float) -> None:
        """Ask the trial to end; kill its process group after the grace. The first request counts."""
        if self._stop is None:
            self._stop = request
            with contextlib.suppress(OSError):  # the disk is full: it is killed after the grace
                self._folder.ask_to_stop(request)
        self._kill_at = min(self._kill_at, time.monotonic() + grace_seconds)

    def kill(self) -> None:
        """Kill the trial's process group; of no effect after its end. One that holds out is left."""
        self._child.kill()


class _Standby:
    """A worker that has no trial yet."""

    def __init__(self, runs_dir: Path, environment: dict[str, str], in_advance: list[str]) -> None:
        runs_dir.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".standby-", suffix=".txt", dir=runs_dir)
        os.close(descriptor)
        self._log = Path(name)
        with contextlib.ExitStack() as failing:
            failing.callback(self._log.unlink, missing_ok=True)
            channel, self._assign = os.pipe()
            failing.callback(os.close, self._assign)
            try:
                self._child = Child(
                    [sys.executable, "-P", "-m", "tuner.execution.worker", str(channel), *in_advance],
                    log=self._log,
                    environment={**environment, "PYTHONUNBUFFERED": "1"},
                    channels=(channel,),
                )
            finally:
                os.close(channel)
            failing.pop_all()  # it did not fail

    def assign(self, folder: RunFolder) -> Child:
        """Give the worker its run folder; its log moves there.

        Raises:
            OSError: It cannot move; the worker has ended then.
        """
        try:
            self._log.replace(folder.log)
        except OSError:
            self.discard()
            raise
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
    report, problem = _report_in(folder)
    if report is not None:
        return dataclasses.replace(report, seconds=seconds)
    capped = request.device == "cpu" and request.reservation_bytes is not None
    outcome, failure = classify_exit(status, folder.log_tail(), capped=capped)
    if problem:
        failure = dataclasses.replace(failure, reason=f"{failure.reason}; {problem}")
    return unreported(folder, outcome, failure, seconds)


def _report_in(folder: RunFolder) -> tuple[TrialResult | None, str]:
    """Return the report, or None and what is wrong with it, "" where there is none."""
    try:
        return folder.read_report(), ""
    except (OSError, ValueError) as error:
        return None, f"its report cannot be read: {error}"


def unreported(folder: RunFolder, outcome: Outcome, failure: Failure, seconds: float) -> TrialResult:
    """Return a result for a process that wrote no report, with what its events tell."""
    events = folder.read_events()
    epochs = tuple(
        EpochMetrics(**{name: value for name, value in event.items() if name != "kind"})
        for event in events
        if event["kind"] == "epoch"
    )
    baseline = next((event for event in events if event["kind"] == "baseline"), {})
    timeline = timeline_from_events(events)
    known = [epoch.peak_bytes for epoch in epochs if epoch.peak_bytes is not None]
    if timeline is not None and baseline.get("baseline_bytes") is not None:  # else it lacks the context
        known += [size_bytes for _, size_bytes, _ in timeline["points"]]
    peaks = Peaks(
        device_bytes=max(known, default=None),
        source=baseline.get("source"),
        baseline_bytes=baseline.get("baseline_bytes"),
        used_before_bytes=baseline.get("used_before_bytes"),
    )
    return TrialResult(
        outcome=outcome, epochs=epochs, peaks=peaks, failure=failure, seconds=seconds, timeline=timeline
    )


def visible_threads() -> int:
    """Return how many threads a trial may use: the cores this process may run on."""
    return len(os.sched_getaffinity(0))
