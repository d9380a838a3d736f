"""Trials as rows, for the commands that list them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tuner.cli.output import Column, duration, emit, number, short_params, size
from tuner.store.rows import StudyRecord, TrialRecord

_HIDDEN = ("id", "study_id", "prediction", "timeline", "failure", "environment", "warnings", "phases")


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
