"""One statement of a user's, truly read-only.

* SQLite: the file is opened with `mode=ro`, and an authorizer allows SELECT, READ and FUNCTION alone,
  since `mode=ro` would let `ATTACH` write another file.
* PostgreSQL: a read-only transaction, and a cursor that is DECLAREd, which takes a query and nothing
  else, since `COPY … TO PROGRAM` runs in a read-only transaction too.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import URL

from tuner.errors import StoreError, UsageError
from tuner.store.engine import store_errors
from tuner.store.opening import open_existing

_ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
_REFUSED_FUNCTIONS = {"load_extension", "readfile", "writefile", "edit"}
_STEPS_BETWEEN_LOOKS = 10_000  # of SQLite's virtual machine: under a millisecond
_CANCELLED = "57014"  # SQLSTATE: statement_timeout
_READ_ONLY = "25006"


@dataclass(frozen=True)
class Answer:
    """What a query gave.

    Attributes:
        columns: Their names, in order.
        rows: Values in the same order.
        truncated: Whether there were more rows than were wanted.
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool


def run_query(url: URL, statement: str, *, most_rows: int | None, seconds: float) -> Answer:
    """Run one SELECT.

    Args:
        url: The database.
        statement: One statement, in the database's own SQL.
        most_rows: How many rows are wanted; None for all.
        seconds: How long it may take.

    Raises:
        UsageError: It is no SELECT, cannot be parsed, or took too long.
        StoreError: The database cannot be used.
    """
    if not statement.strip():
        raise UsageError("the query is empty", hint='try: tuner query "SELECT * FROM tuner_trials"')
    with store_errors(url):
        engine = open_existing(url)
        try:
            with engine.connect() as connection:
                driver: Any = connection.connection.driver_connection
                ask = _ask_sqlite if url.drivername == "sqlite" else _ask_postgresql
                return ask(driver, statement, most_rows, seconds)
        finally:
            engine.dispose()


def _ask_sqlite(
    connection: sqlite3.Connection, statement: str, most_rows: int | None, seconds: float
) -> Answer:
    deadline = time.monotonic() + seconds
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline), _STEPS_BETWEEN_LOOKS)
    connection.set_authorizer(_authorize)
    try:
        cursor = connection.execute(statement)
        return _answer(cursor, most_rows)
    except sqlite3.Error as error:
        raise _explained_sqlite(error, seconds) from None
    finally:
        connection.set_authorizer(None)
        connection.set_progress_handler(None, 0)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action not in _ALLOWED or (action == sqlite3.SQLITE_FUNCTION and second in _REFUSED_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _explained_sqlite(error: sqlite3.Error, seconds: float) -> UsageError | StoreError:
    text = str(error)
    if text == "interrupted":
        return _too_slow(seconds)
    if "not authorized" in text or "prohibited" in text:
        return _not_a_query()
    if "one statement at a time" in text:
        return _several()
    if isinstance(error, sqlite3.OperationalError) and ("locked" in text or "disk I/O" in text):
        return StoreError(f"the database cannot be read: {text}")
    return UsageError(f"the query cannot be run: {text}")


def _ask_postgresql(
    connection: psycopg.Connection[Any], statement: str, most_rows: int | None, seconds: float
) -> Answer:
    try:
        connection.execute("SET TRANSACTION READ ONLY")
        connection.execute(f"SET LOCAL statement_timeout = {max(1, int(seconds * 1000))}".encode())
        # A trailing semicolon would end the DECLARE that a named cursor makes of it.
        with connection.cursor(name="tuner_query") as cursor:
            cursor.execute(statement.strip().rstrip(";").encode())
            return _answer(cursor, most_rows)
    except psycopg.Error as error:
        raise _explained_postgresql(error, statement, seconds) from None
    finally:
        connection.rollback()


def _explained_postgresql(error: psycopg.Error, statement: str, seconds: float) -> Exception:
    if error.sqlstate == _CANCELLED:
        return _too_slow(seconds)
    if error.sqlstate == _READ_ONLY:
        return _not_a_query()
    if error.sqlstate is None:
        return StoreError(f"the database cannot be read: {' '.join(str(error).split())}")
    said = error.diag.message_primary or str(error)
    if "multiple commands" in said:
        return _several()
    first = statement.split(maxsplit=1)[0].upper()
    if error.sqlstate == "42601" and first not in ("SELECT", "WITH", "VALUES", "TABLE", "(SELECT"):
        return _not_a_query()
    return UsageError(f"the query cannot be run: {' '.join(said.split())}")


def _answer(cursor: Any, most_rows: int | None) -> Answer:
    if cursor.description is None:
        raise _not_a_query()
    columns = tuple(column[0] for column in cursor.description)
    rows = cursor.fetchall() if most_rows is None else cursor.fetchmany(most_rows + 1)
    truncated = most_rows is not None and len(rows) > most_rows
    return Answer(columns, [tuple(row) for row in rows[:most_rows]], truncated)


def _not_a_query() -> UsageError:
    return UsageError("only a SELECT can be run here: nothing is written", hint="views: see docs/database.md")


def _several() -> UsageError:
    return UsageError("one statement at a time can be run")


def _too_slow(seconds: float) -> UsageError:
    return UsageError(f"the query took longer than {seconds:g} s", hint="give it more: --timeout SECONDS")
