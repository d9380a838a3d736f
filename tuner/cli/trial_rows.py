"""Trials as rows, for the commands that list them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner.cli.output import Column, duration, emit, number, short_params, size
from tuner.errors import UsageError
from tuner.store.rows import StudyRecord, TrialRecord

if TYPE_CHECKING:
    from tuner.store.reader import Reader

_HIDDEN = ("id", "study_id", "prediction", "timeline", "failure", "environment", "warnings", "phases")


def find_trial(reader: Reader, study: StudyRecord, wanted: int) -> TrialRecord:
    """Return one trial with its whole prediction.

    Raises:
        UsageError: The study has none of that number; the hint says which it has.
    """
    try:
        return reader.trial(study.id, wanted)
    except UsageError as error:
        numbers = [trial.number for trial in reader.trials(study.id)]
        known = f"it has trials {min(numbers)} to {max(numbers)}" if numbers else "it has no trials yet"
        raise UsageError(f"study '{study.name}' has no trial {wanted}", hint=known) from error


def row_of(trial: TrialRecord) -> dict[str, Any]:
    """Return a trial as a flat row."""
    return {name: value for name, value in vars(trial).items() if name not in _HIDDEN}


def emit_trials(study: StudyRecord, trials: Sequence[TrialRecord], form: str) -> None:
    """Print trials."""
    columns = [
        number("#", "number", digits=12),
        Column("outcome", "outcome"),
        number(study.metric, "value"),
        size("peak", "peak_bytes"),
        size("predicted", "predicted_bytes"),
        duration("time", "seconds"),
        Column("params", "params", short_params),
    ]
    emit([row_of(trial) for trial in trials], columns, form, empty=f"study '{study.name}' has no such trials")


def emit_front(study: StudyRecord, front: Sequence[TrialRecord], form: str) -> None:
    """Print the Pareto front, smallest peak first."""
    columns = [
        number("#", "number", digits=12),
        number(study.metric, "value"),
        size("peak", "peak_bytes"),
        size("predicted", "predicted_bytes"),
        Column("params", "params", short_params),
    ]
    empty = f"study '{study.name}' has no completed trial within its budget: the front is empty"
    emit([row_of(trial) for trial in front], columns, form, empty=empty)
