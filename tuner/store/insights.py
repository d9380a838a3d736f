"""What pages beside the front need: how good predictions are, who held a device, how the search went.

As in `overview`: counted and thinned by the database, a bounded number of statements for any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Boolean,
    Connection,
    Double,
    Select,
    case,
    cast,
    column,
    func,
    select,
    table,
)

from tuner.records import Record
from tuner.store import schema
from tuner.store.overview import Table, table_of
from tuner.store.transactions import Transactional, in_utc, snapshot

_trial = schema.trial.c
_STRETCHES = 50  # of an error over time
_ONE, _ZERO = cast(1.0, Double), cast(0.0, Double)  # PostgreSQL's literals would give decimals
MOST_BARS = 600  # launches on a device's timeline
MOST_ROWS = 4_000  # of anything else that is drawn row by row

_predictions = table(
    "tuner_predictions",
    *(
        column(name)
        for name in (
            "study_id",
            "number",
            "mix",
            "predicted_bytes",
            "predicted_low_bytes",
            "peak_bytes",
            "error",
        )
    ),
    column("predicted_high_bytes"),
    column("in_band", Boolean),
)
_devices = table(
    "tuner_devices",
    *(column(name) for name in ("device", "host", "study", "study_id", "number", "outcome")),
    *(column(name, _trial.started_at.type) for name in ("started_at", "ended_at")),
    *(column(name) for name in ("waiting_seconds", "reservation_bytes", "peak_bytes")),
)


@dataclass(frozen=True)
class Savings(Record):
    """What pruning saved.

    Attributes:
        pruned: Configurations that were not launched: turned away while drawing, or as trials.
        median_seconds: How long half of the study's launches took; None without one.
        audits: Pruned ones that were launched all the same.
        wrong_audits: Those of them that did fit.
        tries: Launches that were doubtful beforehand.
        fitting_tries: Those of them that did fit.
    """

    pruned: int
    median_seconds: float | None
    audits: int
    wrong_audits: int
    tries: int
    fitting_tries: int


@dataclass(frozen=True)
class ImportanceRecord(Record):
    """How much a parameter matters; the columns of `tuner_importance`."""

    objective: str
    name: str
    importance: float
    trials: int
    computed_at: datetime


class Insights(Transactional):
    """Reads what is known of a whole study."""

    @snapshot
    def errors(self, connection: Connection, study_id: int, most: int = MOST_ROWS) -> Table:
        """Return number, mix, predicted and measured device bytes, and error, every so many-th trial."""
        found = _predictions.c
        query = _measured(
            study_id,
            found.number,
            found.mix,
            found.predicted_bytes,
            found.predicted_low_bytes,
            found.predicted_high_bytes,
            found.peak_bytes,
            found.error,
        )
        return _every(connection, query, found.number, most)

    @snapshot
    def quality(self, connection: Connection, study_id: int) -> Table:
        """Return trials, mean absolute error, mean error, worst error and the band's coverage by mix."""
        found = _predictions.c
        query = _measured(
            study_id,
            func.coalesce(found.mix, "unknown").label("mix"),
            func.count().label("trials"),
            func.avg(func.abs(found.error)).label("mean_absolute_error"),
            func.avg(found.error).label("mean_error"),
            func.max(func.abs(found.error)).label("worst_error"),
            func.avg(case((found.in_band, _ONE), else_=_ZERO)).label("coverage"),
            func.avg(
                _ONE * (found.predicted_high_bytes - found.predicted_low_bytes) / found.predicted_bytes
            ).label("band_width"),
        )
        return table_of(connection.execute(query.group_by(found.mix).order_by(found.mix)))

    @snapshot
    def error_over_time(self, connection: Connection, study_id: int) -> Table:
        """Return first trial, mean absolute error and coverage of 50 stretches of the study."""
        found = _predictions.c
        placed = _measured(
            study_id,
            found.number,
            found.error,
            found.in_band,
            func.ntile(_STRETCHES).over(order_by=found.number).label("stretch"),
        ).subquery()
        query = (
            select(
                func.min(placed.c.number).label("number"),
                func.count().label("trials"),
                func.avg(func.abs(placed.c.error)).label("mean_absolute_error"),
                func.avg(case((placed.c.in_band, _ONE), else_=_ZERO)).label("coverage"),
            )
            .group_by(placed.c.stretch)
            .order_by(placed.c.stretch)
        )
        return table_of(connection.execute(query))

    @snapshot
    def savings(self, connection: Connection, study_id: int) -> Savings:
        """Return what pruning saved, and how often it was wrong."""
        fits = (_trial.outcome == "completed") & (_trial.peak_bytes <= schema.study.c.budget_bytes)
        launched = _trial.started_at.is_not(None) & _trial.outcome.is_not(None)
        tried = launched & (_trial.verdict == "try") & ~_trial.audit
        counts = connection.execute(
            select(
                _sum(_trial.outcome == "pruned_memory"),
                _sum(launched & _trial.audit),
                _sum(launched & _trial.audit & fits),
                _sum(tried),
                _sum(tried & fits),
            )
            .join_from(schema.trial, schema.study)
            .where(_trial.study_id == study_id)
        ).one()
        # A trial that was pruned is the last of the draws that were turned away for it.
        rejections = connection.execute(
            select(func.count()).where(schema.rejection.c.study_id == study_id)
        ).scalar_one()
        return Savings(
            pruned=max(int(rejections), counts[0]),
            median_seconds=_median_seconds(connection, study_id),
            audits=counts[1],
            wrong_audits=counts[2],
            tries=counts[3],
            fitting_tries=counts[4],
        )

    @snapshot
    def launches(self, connection: Connection, study_id: int, most: int = MOST_BARS) -> Table:
        """Return the latest launches, of any study, on the devices that this study used."""
        held = _devices.c
        used = select(_trial.device).where(_trial.study_id == study_id).distinct()
        query = (
            select(*(column for column in held if column.name != "study_id"))
            .where(held.device.in_(used))
            .order_by(held.started_at.desc())
            .limit(most)
        )
        found = table_of(connection.execute(query))
        for name in ("started_at", "ended_at"):
            found.columns[name][:] = [None if at is None else in_utc(at) for at in found.columns[name]]
        return found

    @snapshot
    def waiting(self, connection: Connection, study_id: int) -> Table:
        """Return launches and their waiting times by device."""
        waited = _trial.waiting_seconds
        query = (
            select(
                _trial.device,
                func.count().label("launches"),
                func.avg(waited).label("mean_waiting_seconds"),
                func.max(waited).label("longest_waiting_seconds"),
                func.max(_trial.reservation_bytes).label("largest_reservation_bytes"),
                func.max(_trial.peak_bytes).label("largest_peak_bytes"),
                func.avg(_ONE * _trial.peak_bytes / _trial.reservation_bytes).label("mean_share_used"),
            )
            .where(_trial.study_id == study_id, _trial.started_at.is_not(None))
            .group_by(_trial.device)
        )
        return table_of(connection.execute(query))

    @snapshot
    def progress(self, connection: Connection, study_id: int) -> Table:
        """Return number, value and memory of every launch that ended, in order of its end."""
        query = (
            select(
                _trial.number,
                case((_trial.outcome == "completed", _trial.value)).label("value"),
                _trial.peak_bytes.label("memory_bytes"),
            )
            .where(_trial.study_id == study_id, _trial.outcome.is_not(None), _trial.started_at.is_not(None))
            .order_by(_trial.ended_at, _trial.number)
        )
        return table_of(connection.execute(query))

    @snapshot
    def completed(self, connection: Connection, study_id: int, most: int = MOST_ROWS) -> Table:
        """Return number, value, memory and params of completed trials, every so many-th."""
        query = select(
            _trial.number,
            _trial.value,
            _trial.peak_bytes.label("memory_bytes"),
            _trial.params,
        ).where(_trial.study_id == study_id, _trial.outcome == "completed")
        return _every(connection, query, _trial.number, most)

    @snapshot
    def rejections(self, connection: Connection, study_id: int, most: int = MOST_ROWS) -> Table:
        """Return params and prediction of what was turned away, every so many-th."""
        rejection = schema.rejection.c
        query = select(
            rejection.number,
            rejection.params,
            rejection.predicted_bytes,
        ).where(rejection.study_id == study_id)
        return _every(connection, query, rejection.id, most)

    @snapshot
    def importance(self, connection: Connection, study_id: int) -> list[ImportanceRecord]:
        """Return how much each parameter matters, as it was computed last; most first."""
        found = schema.importance.c
        query = (
            select(found.objective, found.name, found.importance, found.trials, found.computed_at)
            .where(found.study_id == study_id)
            .order_by(found.objective, found.importance.desc(), found.name)
        )
        return [
            ImportanceRecord(row.objective, row.name, row.importance, row.trials, in_utc(row.computed_at))
            for row in connection.execute(query)
        ]


def _sum(condition: Any) -> Any:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def _median_seconds(connection: Connection, study_id: int) -> float | None:
    """Return the median, which SQLite has no function for: the launch in the middle."""
    launched = (_trial.study_id == study_id) & _trial.seconds.is_not(None)
    count = connection.execute(select(func.count()).where(launched)).scalar_one()
    if not count:
        return None
    middle = select(_trial.seconds).where(launched).order_by(_trial.seconds).limit(1).offset(count // 2)
    return float(connection.execute(middle).scalar_one())


def _measured(study_id: int, *columns: Any) -> Select[Any]:
    """Return a query for columns of the predictions that can be compared with a measurement."""
    return select(*columns).where(_predictions.c.study_id == study_id, _predictions.c.error.is_not(None))


def _every(connection: Connection, query: Select[Any], order: Any, most: int) -> Table:
    """Return at most `most` rows of a query, evenly spread along an order."""
    placed = query.add_columns(
        func.row_number().over(order_by=order).label("place"), func.count().over().label("total")
    ).subquery()
    step = (placed.c.total + most - 1) // most
    wanted = select(placed).where((placed.c.place - 1) % step.self_group() == 0).order_by(placed.c.place)
    found = table_of(connection.execute(wanted))
    columns = {name: values for name, values in found.columns.items() if name not in ("place", "total")}
    totals = found.columns["total"]
    return Table(columns, totals[0] if totals else 0)
