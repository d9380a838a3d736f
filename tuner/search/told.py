"""What Optuna and people are told of a trial's memory, and which trials count."""

from __future__ import annotations

from tuner.records import Failure, Outcome, Peaks, Prediction, TrialResult
from tuner.units import format_bytes


def told_bytes(
    outcome: Outcome,
    *,
    peaks: Peaks,
    failure: Failure | None,
    predicted_bytes: int | None,
    context_bytes: int | None,
    repeatable: bool,
) -> int | None:
    """Return the device bytes that Optuna is told for a trial, or None.

    Args:
        outcome: What became of the trial.
        peaks: What was measured.
        failure: The failed request of an out-of-memory trial.
        predicted_bytes: What was predicted.
        context_bytes: The study's context.
        repeatable: True for a seeded study: on a CPU the resident peak differs by a few pages from
            run to run, context + allocator's peak does not.
    """
    if outcome is Outcome.PRUNED_MEMORY:
        return predicted_bytes
    if outcome is Outcome.OUT_OF_MEMORY:
        if repeatable and predicted_bytes is not None:
            return predicted_bytes
        requested_bytes = failure.requested_bytes if failure is not None else None
        return (peaks.device_bytes or 0) + (requested_bytes or 0)
    if repeatable and peaks.allocated_bytes is not None and context_bytes is not None:
        return context_bytes + (peaks.reserved_bytes or peaks.allocated_bytes)
    return peaks.device_bytes


def why_pruned(prediction: Prediction, budget_bytes: int) -> str:
    """Return why a configuration is not launched, as a phrase."""
    required = prediction.required
    return (
        f"predicted to need {format_bytes(None if required is None else required.expected)}, "
        f"the budget is {format_bytes(budget_bytes)}"
    )


def pruned(prediction: Prediction, budget_bytes: int) -> TrialResult:
    """Return the result of a trial that is not launched, since it surely does not fit."""
    return TrialResult(Outcome.PRUNED_MEMORY, failure=Failure(why_pruned(prediction, budget_bytes)))


def counts_as_launch(outcome: str, *, audit: bool) -> bool:
    """Whether a trial counts against `--trials`."""
    if outcome == "running" or audit:
        return False
    known = Outcome(outcome)
    return known.launched and known.final


def is_failure(outcome: str) -> bool:
    """Whether a trial counts against `--max-failures`."""
    return outcome != "running" and Outcome(outcome).failed
