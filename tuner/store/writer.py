"""The one place that writes our tables.

Every method is one transaction, and each may be repeated without harm: a result that is recorded
twice is recorded once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, null, select, update
from sqlalchemy.exc import IntegrityError

from tuner.errors import LeaseLost, StoreError
from tuner.records import Prediction, TrialResult
from tuner.store import schema
from tuner.store.drivers import require_idle, require_living
from tuner.store.rejections import add_rejections
from tuner.store.rows import NewRejection, NewStudy, metric_name, storable_text, to_storable
from tuner.store.transactions import Transactional, transaction


class Writer(Transactional):
    """Writes studies, trials and metrics."""

    def create_study(self, new: NewStudy) -> int:
        """Add a study and return its id; an existing one of that name is returned as it is."""
        try:
            return self._create_study(new)
        except IntegrityError:  # another process inserted it in between
            return self._create_study(new)

    @transaction
    def _create_study(self, connection: Connection, new: NewStudy) -> int:
        known = connection.execute(select(schema.study.c.id).where(schema.study.c.name == new.name)).scalar()
        if known is not None:
            return int(known)
        values = {**dataclasses.asdict(new), "settings": to_storable(new.settings), "created_at": _now()}
        return _inserted(connection, schema.study, values)

    @transaction
    def delete_study(self, connection: Connection, study_id: int) -> None:
        """Delete a study, its trials and their metrics.

        Raises:
            StudyBusy: A driver works on it.
        """
        study = schema.study.c
        # Nobody can join from here on; on SQLite the transaction itself sees to that.
        connection.execute(select(study.id).where(study.id == study_id).with_for_update())
        require_idle(connection, study_id)
        connection.execute(delete(schema.study).where(schema.study.c.id == study_id))

    @transaction
    def add_trial(
        self,
        connection: Connection,
        study_id: int,
        number: int,
        params: dict[str, Any],
        *,
        driver_id: int,
        slot_id: int | None = None,
        seed: int | None = None,
        repeats: int | None = None,
        rejection_id: int | None = None,
        draws: int | None = None,
        rehearsal_seconds: float | None = None,
        rejections: Sequence[NewRejection] = (),
    ) -> int:
        """Add a trial that was asked for, in its slot, and what was turned away before it; return its id.

        A known number stays as it is.

        Raises:
            LeaseLost: Others have given the driver up.
        """
        require_living(connection, driver_id)
        columns = schema.trial.c
        query = select(columns.id).where(columns.study_id == study_id, columns.number == number)
        trial_id = connection.execute(query).scalar()
        if trial_id is None:
            values = {"study_id": study_id, "number": number, "params": to_storable(params), "seed": seed}
            values |= {"audit": rejection_id is not None, "rejection_id": rejection_id, "repeats": repeats}
            values |= {"asked_at": _now(), "driver_id": driver_id}
            values |= {"draws": draws, "rehearsal_seconds": rehearsal_seconds}
            trial_id = _inserted(connection, schema.trial, values)
            add_rejections(connection, study_id, number, rejections)
        connection.execute(update(schema.slot).where(schema.slot.c.id == slot_id).values(trial_id=trial_id))
        return int(trial_id)

    @transaction
    def record_prediction(self, connection: Connection, trial_id: int, prediction: Prediction) -> None:
        """Store what was predicted for a trial.

        Raises:
            LeaseLost: The trial is settled: others gave its driver up.
        """
        device = prediction.device
        _update_running(
            connection,
            trial_id,
            verdict=prediction.verdict,
            fits_probability=prediction.fits_probability,
            predicted_bytes=None if device is None else device.expected,
            predicted_low_bytes=None if device is None else device.low,
            predicted_high_bytes=None if device is None else device.high,
            predicted_allocated_bytes=prediction.allocated_bytes,
            mix=prediction.mix,
            prediction=to_storable(prediction.to_json()),
            prediction_seconds=prediction.seconds,
        )

    @transaction
    def record_launch(
        self,
        connection: Connection,
        trial_id: int,
        *,
        run_folder: str,
        reservation_bytes: int | None,
        device: str | None = None,
        attempt: int = 1,
        waiting_seconds: float | None = None,
    ) -> None:
        """Note that a trial is about to be launched: the write-ahead of its result.

        Raises:
            LeaseLost: The trial is settled: others gave its driver up.
        """
        _update_running(
            connection,
            trial_id,
            run_folder=run_folder,
            reservation_bytes=reservation_bytes,
            device=device,
            attempt=attempt,
            waiting_seconds=waiting_seconds,
            started_at=_now(),
        )

    @transaction
    def record_attempt(self, connection: Connection, trial_id: int, attempt: dict[str, Any]) -> None:
        """Keep what became of an attempt that is to be repeated, and let its reservation go.

        Raises:
            LeaseLost: The trial is settled: others gave its driver up.
        """
        query = select(schema.trial.c.attempts).where(schema.trial.c.id == trial_id).with_for_update()
        earlier = connection.execute(query).scalar() or []
        if all(known["attempt"] != attempt["attempt"] for known in earlier):
            _update_running(connection, trial_id, attempts=[*earlier, to_storable(attempt)])
        _let_go(connection, trial_id, schema.reservation)

    @transaction
    def record_result(self, connection: Connection, trial_id: int, result: TrialResult) -> bool:
        """Store what became of a trial, and let its slot and reservation go.

        A trial that is settled already stays as it is; what comes late is kept beside it.

        Returns:
            Whether this is the trial's result now, or was before.
        """
        failure, peaks = result.failure, result.peaks
        changed = connection.execute(
            update(schema.trial)
            .where(schema.trial.c.id == trial_id, schema.trial.c.outcome.is_(None))
            .values(
                outcome=result.outcome,
                value=_value(result),
                peak_bytes=peaks.device_bytes,
                peak_source=peaks.source,
                allocated_bytes=peaks.allocated_bytes,
                reserved_bytes=peaks.reserved_bytes,
                baseline_bytes=peaks.baseline_bytes,
                host_peak_bytes=result.host_peak_bytes,
                used_before_bytes=peaks.used_before_bytes,
                device_wide_bytes=peaks.device_wide_bytes,
                growth_bytes=result.growth_bytes,
                phases=to_storable(peaks.phases),
                timeline=null() if result.timeline is None else result.timeline,
                metrics=to_storable(result.metrics),
                reason=None if failure is None else storable_text(failure.reason),
                failure=None if failure is None else to_storable(failure.to_json()),
                environment=to_storable(result.environment),
                warnings=to_storable(result.warnings),
                checkpoint=result.checkpoint,
                ended_at=_now(),
                seconds=result.seconds if result.outcome.launched else None,
            )
        )
        if not changed.rowcount:
            return _keep_late(connection, trial_id, result)
        _add_metrics(connection, trial_id, result)
        for table in (schema.slot, schema.reservation):
            _let_go(connection, trial_id, table)
        return True

    @transaction
    def forget_checkpoint(self, connection: Connection, trial_id: int) -> None:
        """Note that a trial's kept weights are gone."""
        connection.execute(update(schema.trial).where(schema.trial.c.id == trial_id).values(checkpoint=None))

    @transaction
    def record_importance(
        self,
        connection: Connection,
        study_id: int,
        found: Mapping[str, Mapping[str, float]],
        trials: int,
    ) -> None:
        """Replace what is known of how much a study's parameters matter.

        Args:
            connection: Of the transaction.
            study_id: The study.
            found: Importance by objective and parameter.
            trials: Completed trials that it was computed from.
        """
        connection.execute(delete(schema.importance).where(schema.importance.c.study_id == study_id))
        rows = [
            {
                "study_id": study_id,
                "objective": objective,
                "name": name,
                "importance": importance,
                "trials": trials,
                "computed_at": _now(),
            }
            for objective, by_name in found.items()
            for name, importance in by_name.items()
        ]
        if rows:
            connection.execute(insert(schema.importance), rows)


def _update_running(connection: Connection, trial_id: int, **values: Any) -> None:
    changed = connection.execute(
        update(schema.trial)
        .where(schema.trial.c.id == trial_id, schema.trial.c.outcome.is_(None))
        .values(**values)
    )
    if not changed.rowcount:
        raise LeaseLost("the trial was given up for lost by another driver")


def _let_go(connection: Connection, trial_id: int, table: Table) -> None:
    connection.execute(delete(table).where(table.c.trial_id == trial_id))


def _value(result: TrialResult) -> float | None:
    """Return the objective's value as its column holds it: no NaN, a plain number."""
    value = None if result.value is None else float(result.value)
    return None if value is None or math.isnan(value) else value


def _keep_late(connection: Connection, trial_id: int, result: TrialResult) -> bool:
    """Keep a result beside the one that is there, unless it is the same."""
    row = connection.execute(
        select(schema.trial.c.outcome, schema.trial.c.value).where(schema.trial.c.id == trial_id)
    ).one_or_none()
    if row is None or (row.outcome, row.value) == (result.outcome.value, _value(result)):
        return row is not None
    connection.execute(
        update(schema.trial)
        .where(schema.trial.c.id == trial_id)
        .values(late_result=to_storable(result.to_json()))
    )
    return False


def _add_metrics(connection: Connection, trial_id: int, result: TrialResult) -> None:
    rows = [
        {
            "trial_id": trial_id,
            "epoch": epoch.epoch,
            "name": metric_name(name),
            "value": None if math.isnan(value) else float(value),
            "seconds": epoch.seconds,
            "peak_bytes": epoch.peak_bytes,
            "epoch_peak_bytes": epoch.epoch_peak_bytes,
            "epoch_allocated_bytes": epoch.epoch_allocated_bytes,
            "epoch_reserved_bytes": epoch.epoch_reserved_bytes,
        }
        for epoch in result.epochs
        for name, value in epoch.metrics.items()
    ]
    if rows:
        connection.execute(insert(schema.metric), rows)


def _inserted(connection: Connection, table: Any, values: dict[str, Any]) -> int:
    key = connection.execute(insert(table).values(**values)).inserted_primary_key
    if key is None:
        raise StoreError(f"the database gave no id for a new row of {table.name}")
    return int(key[0])


def _now() -> datetime:
    return datetime.now(UTC)
