"""How our tables are written: a method is one transaction, repeated as a whole when it must be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection, Engine, func, select

from tuner.store.engine import READS_ONLY

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


class Patience(Protocol):
    """Runs a call, and repeats it as long as the database is away or locked."""

    def __call__(self, call: Callable[[], Value], /) -> Value:
        """Return what the call returns."""


def at_once(call: Callable[[], Value], /) -> Value:
    """Run a call once: no patience."""
    return call()


class Transactional:
    """Something whose methods are transactions.

    Args:
        engine: The database.
        patience: What repeats a transaction that fails for a moment's reason.
    """

    def __init__(self, engine: Engine, patience: Patience = at_once) -> None:
        self._engine, self._patience = engine, patience

    @property
    def engine(self) -> Engine:
        """The database, for another reader of it."""
        return self._engine


Self = TypeVar("Self", bound=Transactional)


def transaction(
    method: Callable[Concatenate[Self, Connection, Arguments], Value],
) -> Callable[Concatenate[Self, Arguments], Value]:
    """Make a method that takes a connection one that brings its own, in a transaction."""

    def run(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        def once() -> Value:
            with self._engine.begin() as connection:
                return method(self, connection, *args, **kwargs)

        return self._patience(once)

    functools.update_wrapper(run, method)
    return run


def snapshot(
    method: Callable[Concatenate[Self, Connection, Arguments], Value],
) -> Callable[Concatenate[Self, Arguments], Value]:
    """Make a method that takes a connection one that brings its own, to read without a lock.

    On SQLite it reads all as it is at one moment. On PostgreSQL (READ COMMITTED) each statement
    reads what is committed when it begins: what must agree belongs into one statement.
    """

    def run(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        def once() -> Value:
            with self._engine.connect().execution_options(**{READS_ONLY: True}) as connection:
                return method(self, connection, *args, **kwargs)

        return self._patience(once)

    functools.update_wrapper(run, method)
    return run


def database_now(connection: Connection) -> datetime:
    """Return the moment by the database's clock: the only one that all drivers share."""
    moment: Any = connection.execute(select(func.current_timestamp())).scalar_one()
    return in_utc(moment)


def in_utc(moment: datetime) -> datetime:
    """Return a moment in UTC: SQLite gives it without its zone, PostgreSQL in the server's."""
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
