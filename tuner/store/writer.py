"""The one place that writes our tables.

Every method is one transaction, and each may be repeated without harm: a result that is recorded
twice is recorded once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Row, Table, delete, insert, null, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from tuner.errors import StoreError, StudyBusy
from tuner.processes import is_alive
from tuner.records import Owner, Prediction, TrialResult
from tuner.store import schema
from tuner.store.rows import NewStudy, storable_text, to_storable

_METRIC_NAME_LIMIT = 255
_OWNER_SILENT_AFTER = timedelta(seconds=300)  # for an owner on another host, whose process we cannot see


class Writer:
    """Writes studies, trials and metrics."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def create_study(self, new: NewStudy) -> int:
        """Add a study and return its id; an existing one of that name is returned as it is."""
        values = {**dataclasses.asdict(new), "settings": to_storable(new.settings), "created_at": _now()}
        return self._find_or_insert(schema.study, values, schema.study.c.name == new.name)

    def claim_study(self, study_id: int, owner: Owner) -> None:
        """Become the study's driver, and clear an earlier request to stop.

        Raises:
            StudyBusy: Another driver that is alive holds it.
        """
        with self._engine.begin() as connection:
            row = connection.execute(
                select(schema.study).where(schema.study.c.id == study_id).with_for_update()
            ).one()
            holder = owner_of(row)
            if holder is not None and holder != owner and still_holds(holder, row.owner_seen_at):
                raise StudyBusy(
                    f"another driver works on study '{row.name}' (process {holder.pid} on {holder.host})",
                    hint="wait for it, stop it with: tuner stop NAME, or choose another --study-name",
                )
            connection.execute(
                update(schema.study)
                .where(schema.study.c.id == study_id)
                .values(**_owner_values(owner), owner_seen_at=_now(), stop_reason=None)
            )

    def beat(self, study_id: int, owner: Owner) -> str | None:
        """Give a sign of life; return the reason to stop, if there is one.

        A database that is away for a moment is no reason: the next sign of life will do.
        """
        with contextlib.suppress(DBAPIError):
            return self._beat(study_id, owner)
        return None

    def _beat(self, study_id: int, owner: Owner) -> str | None:
        with self._engine.begin() as connection:
            held = connection.execute(
                update(schema.study)
                .where(schema.study.c.id == study_id, *_held_by(owner))
                .values(owner_seen_at=_now())
            )
            if not held.rowcount:
                return "another driver has taken the study over"
            reason: str | None = connection.execute(
                select(schema.study.c.stop_reason).where(schema.study.c.id == study_id)
            ).scalar()
            return reason

    def release_study(self, study_id: int, owner: Owner) -> None:
        """Stop being the study's driver; if another one has taken it over, it stays its."""
        with self._engine.begin() as connection:
            connection.execute(
                update(schema.study)
                .where(schema.study.c.id == study_id, *_held_by(owner))
                .values(**_owner_values(None))
            )

    def request_stop(self, study_id: int, reason: str) -> None:
        """Ask the study's driver to end after the running trial."""
        with self._engine.begin() as connection:
            connection.execute(
                update(schema.study).where(schema.study.c.id == study_id).values(stop_reason=reason)
            )

    def delete_study(self, study_id: int) -> None:
        """Delete a study, its trials and their metrics."""
        with self._engine.begin() as connection:
            connection.execute(delete(schema.study).where(schema.study.c.id == study_id))

    def add_trial(
        self,
        study_id: int,
        number: int,
        params: dict[str, Any],
        *,
        owner: Owner,
        seed: int | None = None,
        audit: bool = False,
        repeats: int | None = None,
    ) -> int:
        """Add a trial that was asked for; return its id. A known number is returned as it is."""
        values = {
            "study_id": study_id,
            "number": number,
            "params": to_storable(params),
            "seed": seed,
            "audit": audit,
            "repeats": repeats,
            "asked_at": _now(),
            **_owner_values(owner),
        }
        columns = schema.trial.c
        return self._find_or_insert(
            schema.trial, values, columns.study_id == study_id, columns.number == number
        )

    def record_prediction(self, trial_id: int, prediction: Prediction) -> None:
        """Store what was predicted for a trial."""
        device = prediction.device
        self._update_trial(
            trial_id,
            verdict=prediction.verdict,
            fits_probability=prediction.fits_probability,
            predicted_bytes=None if device is None else device.expected,
            predicted_low_bytes=None if device is None else device.low,
            predicted_high_bytes=None if device is None else device.high,
            predicted_allocated_bytes=prediction.allocated_bytes,
            prediction=to_storable(prediction.to_json()),
            prediction_seconds=prediction.seconds,
        )

    def record_launch(self, trial_id: int, *, run_folder: str, reservation_bytes: int | None) -> None:
        """Note that a trial is about to be launched: the write-ahead of its result."""
        self._update_trial(
            trial_id, run_folder=run_folder, reservation_bytes=reservation_bytes, started_at=_now()
        )

    def record_result(self, trial_id: int, result: TrialResult) -> None:
        """Store what became of a trial. A trial that is settled already stays as it is."""
        failure, peaks = result.failure, result.peaks
        with self._engine.begin() as connection:
            changed = connection.execute(
                update(schema.trial)
                .where(schema.trial.c.id == trial_id, schema.trial.c.outcome.is_(None))
                .values(
                    outcome=result.outcome,
                    value=None if result.value is None or math.isnan(result.value) else result.value,
                    peak_bytes=peaks.device_bytes,
                    peak_source=peaks.source,
                    allocated_bytes=peaks.allocated_bytes,
                    reserved_bytes=peaks.reserved_bytes,
                    baseline_bytes=peaks.baseline_bytes,
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
                    **_owner_values(None),
                )
            )
            if changed.rowcount:
                _add_metrics(connection, trial_id, result)

    def forget_checkpoint(self, trial_id: int) -> None:
        """Note that a trial's kept weights are gone."""
        self._update_trial(trial_id, checkpoint=None)

    def _find_or_insert(self, table: Table, values: dict[str, Any], *where: ColumnElement[bool]) -> int:
        """Return the id of the row that is there, or of a new one."""
        query = select(table.c.id).where(*where)
        try:
            with self._engine.begin() as connection:
                known = connection.execute(query).scalar()
                return _inserted(connection, table, values) if known is None else int(known)
        except IntegrityError:  # another process inserted it in between
            with self._engine.begin() as connection:
                return int(connection.execute(query).scalar_one())

    def _update_trial(self, trial_id: int, **values: Any) -> None:
        with self._engine.begin() as connection:
            connection.execute(update(schema.trial).where(schema.trial.c.id == trial_id).values(**values))


def owner_of(row: Row[Any]) -> Owner | None:
    """Return who holds a row, or None."""
    if row.owner_pid is None:
        return None
    return Owner(row.owner_host, row.owner_boot_id, row.owner_pid, row.owner_started)


def still_holds(holder: Owner, seen_at: datetime | None) -> bool:
    """Whether an owner lives: by its process on this host, by its last sign of life elsewhere."""
    alive = is_alive(holder)
    if alive is not None:
        return alive
    if seen_at is None:
        return False
    seen = seen_at if seen_at.tzinfo else seen_at.replace(tzinfo=UTC)
    return datetime.now(UTC) - seen < _OWNER_SILENT_AFTER


def _held_by(owner: Owner) -> tuple[ColumnElement[bool], ...]:
    columns = schema.study.c
    return tuple(columns[name] == value for name, value in _owner_values(owner).items())


def _owner_values(owner: Owner | None) -> dict[str, Any]:
    return {
        "owner_host": None if owner is None else owner.host,
        "owner_boot_id": None if owner is None else owner.boot_id,
        "owner_pid": None if owner is None else owner.pid,
        "owner_started": None if owner is None else owner.started,
    }


def _add_metrics(connection: Connection, trial_id: int, result: TrialResult) -> None:
    rows = [
        {
            "trial_id": trial_id,
            "epoch": epoch.epoch,
            "name": _metric_name(name),
            "value": None if math.isnan(value) else value,
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


def _metric_name(name: str) -> str:
    """Return a name that fits its column: a long one is cut, and stays unique."""
    name = storable_text(name)
    if len(name) <= _METRIC_NAME_LIMIT:
        return name
    return f"{name[: _METRIC_NAME_LIMIT - 9]}…{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _inserted(connection: Connection, table: Any, values: dict[str, Any]) -> int:
    key = connection.execute(insert(table).values(**values)).inserted_primary_key
    if key is None:
        raise StoreError(f"the database gave no id for a new row of {table.name}")
    return int(key[0])


def _now() -> datetime:
    return datetime.now(UTC)
