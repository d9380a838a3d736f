"""What pictures of a whole study need: columns, counted, joined and thinned by the database.

A study of 100,000 trials is drawn from here: no record is made per trial, and what would not be
seen is not sent. The front is never thinned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Result,
    Select,
    Text,
    and_,
    case,
    cast,
    func,
    or_,
    select,
    text,
    tuple_,
)

from tuner.errors import UsageError
from tuner.store import schema
from tuner.store.reader import TRIAL_COLUMNS, trial_of
from tuner.store.rows import TrialRecord
from tuner.store.transactions import Transactional, snapshot
from tuner.store.views import front_query

MEMORY = {"peak": "peak_bytes", "allocated": "allocated_bytes", "reserved": "reserved_bytes"}
MOST_POINTS = 20_000  # in one picture; more cannot be told apart
_CELLS = 140  # along each axis, when there are more: 19,600 points per outcome at most
ORDERS = ("number", "value", "peak_bytes", "predicted_bytes", "seconds")

_trial = schema.trial.c
_OUTCOME = func.coalesce(_trial.outcome, "running")


@dataclass(frozen=True)
class Table:
    """Columns of the same length.

    Attributes:
        columns: Values by name.
        total: How many rows there were before thinning.
    """

    columns: Mapping[str, list[Any]]
    total: int

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))


@dataclass(frozen=True)
class TrialFilter:
    """Which trials are wanted; all of them by default.

    Attributes:
        outcomes: Any of these.
        search: A text that occurs in params, outcome or reason, in upper or lower case.
        only_front: Only those on the study's front.
        numbers: Only these.
    """

    outcomes: tuple[str, ...] = ()
    search: str = ""
    only_front: bool = False
    numbers: tuple[int, ...] | None = None


class Overview(Transactional):
    """Reads columns of a study's trials."""

    @snapshot
    def stamp(self, connection: Connection, study_id: int) -> str:
        """Return a text that changes whenever a trial of the study begins, is launched or ends."""
        query = select(
            func.count(),
            func.count(_trial.outcome),
            func.count(_trial.started_at),
            func.max(_trial.ended_at),
            func.max(_trial.number),
        ).where(_trial.study_id == study_id)
        return repr(tuple(connection.execute(query).one()))

    @snapshot
    def points(
        self,
        connection: Connection,
        study_id: int,
        *,
        memory: str = "peak",
        param: str | None = None,
        most: int = MOST_POINTS,
    ) -> Table:
        """Return number, outcome, value, memory, prediction with its band, and one param of each trial.

        Where there are more than `most`, one of those that lie together stands for all: memory and
        value are each cut into 140 parts of equally many trials.

        Args:
            connection: Of the transaction.
            study_id: The study.
            memory: One of MEMORY; where nothing was measured, it is None.
            param: A parameter whose values are wanted as `param`.
            most: How many points are drawn at most before they are thinned.
        """
        columns = [
            _trial.number,
            _OUTCOME.label("outcome"),
            _trial.value,
            _trial[MEMORY[memory]].label("memory_bytes"),
            _trial.predicted_bytes,
            _trial.predicted_low_bytes,
            _trial.predicted_high_bytes,
        ]
        if param is not None:
            columns.append(_trial.params[param].label("param"))
        whole = select(*columns).where(_trial.study_id == study_id)
        total = int(connection.execute(_count(study_id)).scalar_one())
        query = whole.order_by(_trial.number) if total <= most else _thinned(whole)
        return table_of(connection.execute(query), total)

    @snapshot
    def front(
        self, connection: Connection, study_id: int, *, memory: str = "peak", budget_bytes: int | None = None
    ) -> Table:
        """Return number, value and memory of the front under any budget, smallest memory first.

        Exact ties are all there, in the order of their numbers.
        """
        column = MEMORY[memory]
        limit = "" if budget_bytes is None else f" AND {column} <= :budget"
        found = front_query("tuner_trials", column, f"study_id = :study{limit}")
        query = (
            f"SELECT number, value, {column} AS memory_bytes FROM ({found}) front ORDER BY {column}, number"  # noqa: S608
        )
        return table_of(connection.execute(text(query), {"study": study_id, "budget": budget_bytes}))

    @snapshot
    def numbers(self, connection: Connection, study_id: int) -> list[int]:
        """Return the numbers of the study's trials, in order."""
        query = select(_trial.number).where(_trial.study_id == study_id).order_by(_trial.number)
        return list(connection.scalars(query))

    @snapshot
    def param_names(self, connection: Connection, study_id: int) -> list[str]:
        """Return the names of the study's params, as the first and the last 200 trials have them."""
        names: dict[str, None] = {}
        for order in (_trial.number, _trial.number.desc()):
            query = select(_trial.params).where(_trial.study_id == study_id).order_by(order).limit(200)
            for params in connection.scalars(query):
                names |= dict.fromkeys(params if isinstance(params, dict) else ())
        return list(names)

    @snapshot
    def trials(
        self,
        connection: Connection,
        study_id: int,
        wanted: TrialFilter,
        *,
        order: str = "number",
        descending: bool = False,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[TrialRecord]:
        """Return some of a study's trials; unknown values come last.

        Raises:
            UsageError: There is no such order.
        """
        if order not in ORDERS:
            raise UsageError(f"trials cannot be ordered by '{order}'", hint=f"orders: {', '.join(ORDERS)}")
        column = _trial[order]
        query = (
            select(*TRIAL_COLUMNS)
            .where(_matches(study_id, wanted))
            .order_by(
                case((column.is_(None), 1), else_=0), column.desc() if descending else column, _trial.number
            )
            .limit(limit)
            .offset(offset)
        )
        return [trial_of(row) for row in connection.execute(query)]

    @snapshot
    def count(self, connection: Connection, study_id: int, wanted: TrialFilter) -> int:
        """Return how many trials a filter leaves."""
        query = select(func.count()).where(_matches(study_id, wanted))
        return int(connection.execute(query).scalar_one())

    @snapshot
    def metrics_at(
        self, connection: Connection, study_id: int, numbers: tuple[int, ...], epoch: int | None
    ) -> dict[str, dict[int, float | None]]:
        """Return all metrics of some trials at an epoch, or at each one's last: by name, then by number."""
        metric = schema.metric.c
        ids = select(_trial.id).where(_trial.study_id == study_id, _trial.number.in_(numbers))
        at = metric.epoch == epoch
        if epoch is None:
            last = select(metric.trial_id, func.max(metric.epoch)).where(metric.trial_id.in_(ids))
            at = tuple_(metric.trial_id, metric.epoch).in_(last.group_by(metric.trial_id))
        query = (
            select(metric.name, _trial.number, metric.value)
            .join_from(schema.metric, schema.trial)
            .where(metric.trial_id.in_(ids), at)
            .order_by(metric.name, _trial.number)
        )
        found: dict[str, dict[int, float | None]] = {}
        for name, number, value in connection.execute(query):
            found.setdefault(name, {})[number] = value
        return found


def _count(study_id: int) -> Select[Any]:
    return select(func.count()).where(_trial.study_id == study_id)


def _thinned(whole: Select[Any]) -> Select[Any]:
    """Return a query for one row of each cell of a grid, and for all without a value or memory."""
    rows = whole.subquery()
    placed = select(
        rows,
        func.ntile(_CELLS).over(order_by=rows.c.memory_bytes).label("column"),
        func.ntile(_CELLS).over(order_by=rows.c.value).label("row"),
    ).subquery()
    counted = select(
        placed,
        func.row_number()
        .over(partition_by=[placed.c.outcome, placed.c.column, placed.c.row], order_by=placed.c.number)
        .label("place"),
    ).subquery()
    wanted = [counted.c[column.name] for column in rows.c]
    return select(*wanted).where(counted.c.place == 1).order_by(counted.c.number)


def _matches(study_id: int, wanted: TrialFilter) -> ColumnElement[bool]:
    conditions: list[ColumnElement[bool]] = [_trial.study_id == study_id]
    if wanted.outcomes:
        conditions.append(_OUTCOME.in_(wanted.outcomes))
    if wanted.numbers is not None:
        conditions.append(_trial.number.in_(wanted.numbers))
    if wanted.only_front:
        on_front = text("SELECT trial_id FROM tuner_pareto WHERE study_id = :front_of").bindparams(
            front_of=study_id
        )
        conditions.append(_trial.id.in_(on_front.columns(schema.trial.c.id)))
    if wanted.search:
        places = (cast(_trial.params, Text), _trial.reason, _OUTCOME)
        conditions.append(or_(*(place.icontains(wanted.search, autoescape=True) for place in places)))
    return and_(*conditions)


def table_of(found: Result[Any], total: int | None = None) -> Table:
    """Return a result as columns."""
    names, rows = list(found.keys()), found.all()
    columns = list(zip(*rows, strict=True)) or [()] * len(names)
    return Table(
        {name: list(column) for name, column in zip(names, columns, strict=True)},
        len(rows) if total is None else total,
    )
