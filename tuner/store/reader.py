"""The one place that reads our tables; returns records."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, func, select, text

from tuner.errors import UsageError
from tuner.records import Outcome, Prediction
from tuner.store import schema
from tuner.store.drivers import driver_of, living_drivers
from tuner.store.rows import (
    CurveRecord,
    DriverRecord,
    MetricRecord,
    StudyRecord,
    TrialRecord,
    from_storable,
    metric_name,
)
from tuner.store.transactions import Transactional, in_utc, snapshot

_OF_ONE_TRIAL = ("prediction", "timeline", "late_result")  # too large to be read for every trial of a study
_TRIAL_FIELDS = [f.name for f in dataclasses.fields(TrialRecord) if f.name not in _OF_ONE_TRIAL]
TRIAL_COLUMNS = [schema.trial.c[name] for name in _TRIAL_FIELDS]
_METRIC_FIELDS = [f.name for f in dataclasses.fields(MetricRecord)]
_TRIALS_AT_ONCE = 500  # in one query, well below the number of values that a statement may hold
_STUDY_FIELDS = [f.name for f in dataclasses.fields(StudyRecord)]


class Reader(Transactional):
    """Reads studies, trials and metrics."""

    @snapshot
    def studies(self, connection: Connection) -> list[StudyRecord]:
        """Return all studies, newest first."""
        rows = connection.execute(select(schema.study).order_by(schema.study.c.id.desc()))
        return [_study(row) for row in rows]

    @snapshot
    def find_study(self, connection: Connection, name: str) -> StudyRecord | None:
        """Return the study of that name, or None."""
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

    @snapshot
    def trials(
        self, connection: Connection, study_id: int, outcomes: Sequence[str] = ()
    ) -> list[TrialRecord]:
        """Return a study's trials by number, without their whole predictions and their timelines."""
        query = (
            select(*TRIAL_COLUMNS).where(schema.trial.c.study_id == study_id).order_by(schema.trial.c.number)
        )
        if outcomes:
            shown = func.coalesce(schema.trial.c.outcome, "running")
            query = query.where(shown.in_(outcomes))
        return [trial_of(row) for row in connection.execute(query)]

    @snapshot
    def trial(self, connection: Connection, study_id: int, number: int) -> TrialRecord:
        """Return one trial with its whole prediction, its timeline and a result that came too late.

        Raises:
            UsageError: The study has no trial of that number.
        """
        query = select(schema.trial).where(
            schema.trial.c.study_id == study_id, schema.trial.c.number == number
        )
        row = connection.execute(query).one_or_none()
        if row is None:
            raise UsageError(f"the study has no trial {number}")
        prediction = None if row.prediction is None else Prediction.from_json(row.prediction)
        return dataclasses.replace(
            trial_of(row), prediction=prediction, timeline=row.timeline, late_result=row.late_result
        )

    @snapshot
    def metrics(self, connection: Connection, trial_id: int) -> list[MetricRecord]:
        """Return a trial's metrics per epoch, in order."""
        query = (
            select(schema.metric)
            .where(schema.metric.c.trial_id == trial_id)
            .order_by(schema.metric.c.epoch, schema.metric.c.name)
        )
        return [
            MetricRecord(**{name: getattr(row, name) for name in _METRIC_FIELDS})
            for row in connection.execute(query)
        ]

    @snapshot
    def curves(
        self, connection: Connection, study_id: int, metric: str, known: Collection[int] = ()
    ) -> list[CurveRecord]:
        """Return the learning curves of the trials that were trained to their end or stopped early.

        Those whose ids are `known` are left out.
        """
        trial, of_metric = schema.trial.c, schema.metric.c
        ended = trial.outcome.in_([Outcome.COMPLETED, Outcome.PRUNED_METRIC])
        ids = connection.scalars(select(trial.id).where(trial.study_id == study_id, ended))
        wanted = sorted(set(ids) - set(known))
        curves = []
        for start in range(0, len(wanted), _TRIALS_AT_ONCE):
            query = (
                select(trial.id, trial.outcome, trial.predicted_bytes, trial.peak_bytes, of_metric.value)
                .join_from(schema.trial, schema.metric)
                .where(trial.id.in_(wanted[start : start + _TRIALS_AT_ONCE]))
                .where(of_metric.name == metric_name(metric))
                .order_by(trial.id, of_metric.epoch)
            )
            for trial_id, rows in itertools.groupby(connection.execute(query), key=lambda row: row.id):
                epochs = list(rows)
                curves.append(
                    CurveRecord(
                        trial_id=trial_id,
                        outcome=epochs[0].outcome,
                        predicted_bytes=epochs[0].predicted_bytes,
                        peak_bytes=epochs[0].peak_bytes,
                        values=tuple(math.nan if row.value is None else row.value for row in epochs),
                    )
                )
        return curves

    @snapshot
    def driver(self, connection: Connection, driver_id: int) -> DriverRecord | None:
        """Return the driver of that id, or None."""
        row = connection.execute(select(schema.driver).where(schema.driver.c.id == driver_id)).one_or_none()
        return None if row is None else driver_of(row)

    @snapshot
    def living_drivers(self, connection: Connection, study_id: int) -> list[DriverRecord]:
        """Return the study's drivers that are at work."""
        return living_drivers(connection, study_id)

    @snapshot
    def outcomes(self, connection: Connection, study_id: int, *, audits: bool = True) -> dict[str, int]:
        """Return how many trials there are of each outcome, `running` included, audits too if wanted."""
        outcome = func.coalesce(schema.trial.c.outcome, "running")
        query = select(outcome, func.count()).where(schema.trial.c.study_id == study_id).group_by(outcome)
        if not audits:
            query = query.where(schema.trial.c.audit.is_(False))
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

    @snapshot
    def _front_numbers(self, connection: Connection, study_id: int, budget_bytes: int | None) -> list[int]:
        # A smaller budget only cuts the front: points below it are not dominated by larger ones.
        query = (
            "SELECT number, peak_bytes FROM tuner_pareto WHERE study_id = :study ORDER BY peak_bytes, number"
        )
        rows = connection.execute(text(query), {"study": study_id})
        return [row.number for row in rows if budget_bytes is None or row.peak_bytes <= budget_bytes]


def _study(row: Row[Any]) -> StudyRecord:
    fields = {name: getattr(row, name) for name in _STUDY_FIELDS}
    fields["created_at"] = _aware(row.created_at)
    return StudyRecord(**fields)


def trial_of(row: Row[Any]) -> TrialRecord:
    """Return a row of TRIAL_COLUMNS as a record."""
    fields = {name: getattr(row, name) for name in _TRIAL_FIELDS}
    fields["outcome"] = row.outcome or "running"
    for name in ("phases", "metrics", "environment"):
        fields[name] = from_storable(fields[name] or {})
    for name in ("warnings", "attempts"):
        fields[name] = fields[name] or []
    for name in ("asked_at", "started_at", "ended_at"):
        fields[name] = _aware(fields[name])
    return TrialRecord(**fields)


def _aware(moment: datetime | None) -> Any:
    return None if moment is None else in_utc(moment)
