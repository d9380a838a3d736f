"""The one place that reads our tables; returns records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Engine, Row, func, select, text

from tuner.errors import UsageError
from tuner.records import Prediction
from tuner.store import schema
from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord, from_storable
from tuner.store.writer import owner_of

_OF_ONE_TRIAL = ("prediction", "timeline")  # too large to be read for every trial of a study
_TRIAL_FIELDS = [f.name for f in dataclasses.fields(TrialRecord) if f.name not in _OF_ONE_TRIAL]
_METRIC_FIELDS = [f.name for f in dataclasses.fields(MetricRecord)]
_STUDY_FIELDS = [f.name for f in dataclasses.fields(StudyRecord) if f.name != "owner"]


class Reader:
    """Reads studies, trials and metrics."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def studies(self) -> list[StudyRecord]:
        """Return all studies, newest first."""
        with self._engine.connect() as connection:
            rows = connection.execute(select(schema.study).order_by(schema.study.c.id.desc()))
            return [_study(row) for row in rows]

    def find_study(self, name: str) -> StudyRecord | None:
        """Return the study of that name, or None."""
        with self._engine.connect() as connection:
            row = connection.execute(select(schema.study).where(schema.study.c.name == name)).one_or_none()
            return None if row is None else _study(row)

    def study(self, name: str) -> StudyRecord:
        """Return the study of that name.

        Raises:
            UsageError: There is none; the message lists those that exist.
        """
        found = self.find_study(name)
        if found is None:
            names = [study.name for study in self.studies()]
            known = ", ".join(names[:10]) + (" …" if len(names) > 10 else "")
            raise UsageError(f"there is no study '{name[:80]}'", hint=f"known studies: {known or 'none'}")
        return found

    def trials(self, study_id: int, outcomes: Sequence[str] = ()) -> list[TrialRecord]:
        """Return a study's trials by number, without their whole predictions and their timelines."""
        columns = [schema.trial.c[name] for name in _TRIAL_FIELDS]
        query = select(*columns).where(schema.trial.c.study_id == study_id).order_by(schema.trial.c.number)
        if outcomes:
            shown = func.coalesce(schema.trial.c.outcome, "running")
            query = query.where(shown.in_(outcomes))
        with self._engine.connect() as connection:
            return [_trial(row) for row in connection.execute(query)]

    def trial(self, study_id: int, number: int) -> TrialRecord:
        """Return one trial with its whole prediction and its timeline.

        Raises:
            UsageError: The study has no trial of that number.
        """
        query = select(schema.trial).where(
            schema.trial.c.study_id == study_id, schema.trial.c.number == number
        )
        with self._engine.connect() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise UsageError(f"the study has no trial {number}")
        prediction = None if row.prediction is None else Prediction.from_json(row.prediction)
        return dataclasses.replace(_trial(row), prediction=prediction, timeline=row.timeline)

    def metrics(self, trial_id: int) -> list[MetricRecord]:
        """Return a trial's metrics per epoch, in order."""
        query = (
            select(schema.metric)
            .where(schema.metric.c.trial_id == trial_id)
            .order_by(schema.metric.c.epoch, schema.metric.c.name)
        )
        with self._engine.connect() as connection:
            return [
                MetricRecord(**{name: getattr(row, name) for name in _METRIC_FIELDS})
                for row in connection.execute(query)
            ]

    def outcomes(self, study_id: int) -> dict[str, int]:
        """Return how many trials there are of each outcome, `running` included."""
        outcome = func.coalesce(schema.trial.c.outcome, "running")
        query = select(outcome, func.count()).where(schema.trial.c.study_id == study_id).group_by(outcome)
        with self._engine.connect() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def front(self, study_id: int, budget_bytes: int | None = None) -> list[TrialRecord]:
        """Return the Pareto front of metric against peak memory, smallest peak first.

        Exact ties are all kept, in the order of their numbers.

        Args:
            study_id: The study.
            budget_bytes: Only points within this budget; by default the study's own.
        """
        numbers = self._front_numbers(study_id, budget_bytes)
        known = {trial.number: trial for trial in self.trials(study_id, ["completed"])}
        return [known[number] for number in numbers if number in known]

    def _front_numbers(self, study_id: int, budget_bytes: int | None) -> list[int]:
        # A smaller budget only cuts the front: points below it are not dominated by larger ones.
        query = (
            "SELECT number, peak_bytes FROM tuner_pareto WHERE study_id = :study ORDER BY peak_bytes, number"
        )
        with self._engine.connect() as connection:
            rows = connection.execute(text(query), {"study": study_id})
            return [row.number for row in rows if budget_bytes is None or row.peak_bytes <= budget_bytes]


def _study(row: Row[Any]) -> StudyRecord:
    fields = {name: getattr(row, name) for name in _STUDY_FIELDS}
    fields["created_at"] = _aware(row.created_at)
    fields["owner_seen_at"] = _aware(row.owner_seen_at)
    return StudyRecord(**fields, owner=owner_of(row))


def _trial(row: Row[Any]) -> TrialRecord:
    fields = {name: getattr(row, name) for name in _TRIAL_FIELDS}
    fields["outcome"] = row.outcome or "running"
    for name in ("phases", "metrics", "environment"):
        fields[name] = from_storable(fields[name] or {})
    fields["warnings"] = fields["warnings"] or []
    for name in ("asked_at", "started_at", "ended_at"):
        fields[name] = _aware(fields[name])
    return TrialRecord(**fields)


def _aware(moment: datetime | None) -> Any:
    """Return a moment in UTC: SQLite gives it without its zone, PostgreSQL in the server's."""
    if moment is None:
        return None
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
