"""What launched trials say to the calibration: measurements, and bounds on what is required."""

from __future__ import annotations

from tuner.execution.failures import LOADER_WORKER
from tuner.memory.calibration import Measured, Says
from tuner.memory.targets import Target
from tuner.records import Failure, Outcome, Peaks, Prediction, TrialResult
from tuner.store.reader import Reader
from tuner.store.rows import StudyRecord, TrialRecord

_CAP_BINDS = 0.97  # of the cap: above this the allocator may have released and retried


def measured_in(reader: Reader, study: StudyRecord, target: Target) -> list[Measured]:
    """Return what a study's ended trials say, by number."""
    found = []
    for trial in reader.trials(study.id, [Outcome.COMPLETED, Outcome.OUT_OF_MEMORY]):
        prediction = reader.trial(study.id, trial.number).prediction
        if prediction is not None:
            measured = measured_from(
                prediction,
                _result(trial),
                context_bytes=study.context_bytes or target.context_bytes,
                cap_bytes=trial.reservation_bytes,
            )
            if measured is not None:
                found.append(measured)
    return found


def measured_from(
    prediction: Prediction, result: TrialResult, *, context_bytes: int | None, cap_bytes: int | None
) -> Measured | None:
    """Return what one trial says, or None where it says nothing.

    A trial that completed gives its device bytes; where its cap may have bound, only that no more
    than these are required. One that ran out of memory requires more than it held and asked for.
    Left aside: trials with warnings (a batch larger than the example, say), with growing memory, or
    without a trace.

    Args:
        prediction: What was predicted for it.
        result: What became of it.
        context_bytes: The context that predictions assume.
        cap_bytes: What the trial was allowed to take.
    """
    device, required = prediction.device, prediction.required
    if result.warnings or prediction.growth_bytes or context_bytes is None:
        return None
    if result.failure is not None and result.failure.phase == LOADER_WORKER:
        return None  # under the trial's cap, but in a process that no prediction is about
    if device is None or required is None or prediction.reserved_bytes is None:
        return None
    # Both centres have the same context and offset, and factors are close to 1.
    saved_bytes = device.expected - required.expected
    required_bytes = prediction.reserved_bytes - saved_bytes
    mix = prediction.mix
    if result.outcome is Outcome.OUT_OF_MEMORY:
        held_bytes = _held_bytes(result, context_bytes, cap_bytes)
        if held_bytes is None:
            return None
        return Measured(context_bytes, required_bytes, held_bytes, Says.REQUIRED_MORE, mix)
    taken_bytes = result.peaks.device_bytes
    if result.outcome is not Outcome.COMPLETED or taken_bytes is None:
        return None
    free_bytes = max(device.expected, taken_bytes)
    if cap_bytes is not None and saved_bytes > 0 and free_bytes > _CAP_BINDS * cap_bytes:
        return Measured(context_bytes, required_bytes, taken_bytes, Says.REQUIRED_AT_MOST, mix)
    return Measured(context_bytes, prediction.reserved_bytes, taken_bytes, Says.DEVICE, mix)


def _held_bytes(result: TrialResult, context_bytes: int, cap_bytes: int | None) -> int | None:
    """Return device bytes that a trial which ran out of memory needed at least, or None."""
    failure = result.failure
    requested_bytes = (failure.requested_bytes if failure is not None else None) or 0
    if failure is not None and failure.allocated_bytes is not None:
        return context_bytes + failure.allocated_bytes + requested_bytes
    peak_bytes = result.peaks.device_bytes
    if peak_bytes is None:
        return cap_bytes
    # The peak may lie before the request that failed: together they may exceed what is required,
    # but what is required exceeds the cap.
    held_bytes = peak_bytes + requested_bytes
    return held_bytes if cap_bytes is None else max(peak_bytes, min(held_bytes, cap_bytes))


def _result(trial: TrialRecord) -> TrialResult:
    return TrialResult(
        Outcome(trial.outcome),
        peaks=Peaks(device_bytes=trial.peak_bytes),
        failure=None if trial.failure is None else Failure(**trial.failure),
        warnings=tuple(trial.warnings),
    )
