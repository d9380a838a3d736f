"""Opening the database: SQLite in WAL mode with real transactions, or PostgreSQL.

A URL may hold a password, so that no text of ours ever shows one: `describe_url` gives driver, host
and database, and messages of the driver are cleaned before they are passed on.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from sqlalchemy import URL as URL
from sqlalchemy import Engine as Engine
from sqlalchemy import create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from tuner.errors import StoreError, UsageError

DEFAULT_URL = "sqlite:///tuner.db"
BUSY_TIMEOUT_SECONDS = 30
READS_ONLY = "tuner_reads_only"  # execution option: the transaction takes no lock for writing
_URL_HINT = "a storage URL looks like sqlite:///tuner.db or postgresql://user:password@host/database"
SHORTEST_SECRET = 3  # a query value such as connect_timeout=1 occurs in every other text
# A server whose host vanishes answers nothing: after half a minute that is an error, not hours later.
_POSTGRESQL_LIMITS = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}


def parse_url(text: str) -> URL:
    """Return the database that a storage URL names.

    Raises:
        UsageError: It is not a URL of SQLite or PostgreSQL; the message does not repeat it.
    """  # noqa: DOC501 - _unencoded() makes a UsageError
    scheme, separator, rest = text.partition("://")
    driver = _DRIVERS.get(scheme.partition("+")[0])
    if not separator or driver is None:
        raise UsageError("the storage URL is not one of SQLite or PostgreSQL", hint=_URL_HINT)
    authority = rest.partition("?")[0]
    if driver != "sqlite" and (authority.count("@") > 1 or re.search(r":[^@/]*[/%?#][^@]*@", _encoded(rest))):
        raise _unencoded()
    try:
        url = make_url(text).set(drivername=driver)
    except (ArgumentError, ValueError) as error:
        raise UsageError("the storage URL cannot be parsed", hint=_URL_HINT) from error
    if driver == "sqlite" and url.database in (None, "", ":memory:"):
        raise UsageError("the storage URL names no file", hint=_URL_HINT)
    if driver != "sqlite" and "@" in (url.database or ""):
        raise _unencoded()
    return url


def _unencoded() -> UsageError:
    return UsageError(
        "the storage URL's user or password holds a character that a URL cannot hold as it is",
        hint="percent-encode it: @ is %40, / is %2F, : is %3A, ? is %3F, % is %25",
    )


def _encoded(rest: str) -> str:
    return re.sub(r"%[0-9A-Fa-f]{2}", "", rest)


def describe_url(url: URL) -> str:
    """Return what may be shown of a URL: kind, host and database, never user or password."""
    if url.drivername == "sqlite":
        return str(url.database)
    where = f"{url.host or 'localhost'}{f':{url.port}' if url.port else ''}"
    return f"postgresql://{where}/{url.database or ''}"


def open_engine(url: URL, *, read_only: bool = False, busy_timeout_seconds: float | None = None) -> Engine:
    """Return an engine on an existing or new database; nothing is connected yet.

    Args:
        url: As `parse_url` returns it.
        read_only: Never create a file, never write.
        busy_timeout_seconds: How long to wait for another program's lock on SQLite.
    """
    if url.drivername != "sqlite":
        return _postgresql(url, read_only=read_only)
    timeout_seconds = BUSY_TIMEOUT_SECONDS if busy_timeout_seconds is None else busy_timeout_seconds
    path = Path(url.database or "")
    target = f"file:{_quoted(path)}?mode={'ro' if read_only else 'rwc'}"
    engine = create_engine(
        URL.create("sqlite", database=target, query={"uri": "true"}),
        connect_args={"timeout": timeout_seconds, "check_same_thread": False},
        execution_options={READS_ONLY: read_only},
    )

    event.listen(engine, "connect", _prepare_reading if read_only else _prepare_writing)
    event.listen(engine, "connect", _enforce_foreign_keys)
    event.listen(engine, "begin", _begin)
    return engine


def connect_args(url: URL) -> dict[str, Any]:
    """Return what limits how long a connection waits; what the URL says itself stays as it is."""
    if url.drivername == "sqlite":
        return {"timeout": BUSY_TIMEOUT_SECONDS}
    return {name: value for name, value in _POSTGRESQL_LIMITS.items() if name not in url.query}


def prepare_sqlite(engine: Engine) -> None:
    """Let Optuna's SQLite engine share its file with other writers.

    Readers do not wait for a writer (WAL). A transaction takes the write lock at its first statement
    that writes, or that selects FOR UPDATE, which SQLite's dialect leaves out: else two processes
    take the same queued trial, and one that has read may be refused at once when it writes. Plain
    reads take no lock. Connections that are in the pool already are closed. Calling it twice is
    harmless; an engine on another database is left as it is.
    """
    if engine.dialect.name != "sqlite" or event.contains(engine, "before_cursor_execute", _begin_to_write):
        return
    event.listen(engine, "connect", _prepare_writing)
    event.listen(engine, "before_cursor_execute", _begin_to_write)
    engine.dispose()


def _prepare_reading(connection: Any, record: Any) -> None:
    connection.isolation_level = None
    connection.execute("PRAGMA query_only = ON")


def _prepare_writing(connection: Any, record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN: the driver's own leaves DDL outside
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")


def _enforce_foreign_keys(connection: Any, record: Any) -> None:
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: Any) -> None:
    reads_only = connection.get_execution_options().get(READS_ONLY)
    connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")


def _begin_to_write(
    connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, executemany: Any
) -> None:
    if cursor.connection.in_transaction or statement.startswith("BEGIN"):
        return
    compiled = getattr(context, "compiled", None)
    locks = getattr(getattr(compiled, "statement", None), "_for_update_arg", None) is not None
    if locks or not statement.lstrip().upper().startswith(("SELECT", "PRAGMA")):
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _postgresql(url: URL, *, read_only: bool) -> Engine:
    engine = create_engine(url, pool_pre_ping=True, connect_args=connect_args(url))
    if read_only:

        @event.listens_for(engine, "begin")
        def on_begin(connection: Any) -> None:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

    return engine


def sqlite_path(url: URL) -> Path:
    """Return the file of a SQLite URL, also of one that an engine of ours was made with."""
    database = url.database or ""
    if not database.startswith("file:"):
        return Path(database)
    return Path(unquote(database.removeprefix("file:").partition("?")[0]))


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


@contextlib.contextmanager
def store_errors(url: URL) -> Iterator[None]:
    """Turn what a driver raises into one line that holds no password.

    Raises:
        StoreError: The database cannot be reached, is locked, or is full.
    """
    try:
        yield
    except SQLAlchemyError as error:
        raise StoreError(_explained(error, url)) from None


def secrets_of(url: URL) -> Iterator[str]:
    """Yield what may be a secret of a URL, as it is and percent-encoded."""
    given = [str(url.password)] if url.password else []
    for value in url.query.values():
        texts = (value,) if isinstance(value, str) else value
        given.extend(text for text in texts if len(text) > SHORTEST_SECRET)
    for secret in given:
        yield from {secret, quote(secret, safe=""), quote_plus(secret)}


def _explained(error: SQLAlchemyError, url: URL) -> str:
    if isinstance(error, NoSuchModuleError):
        return f"no driver is installed for {url.drivername}"
    cause = error.orig if isinstance(error, DBAPIError) else error
    text = " ".join(str(cause).split())
    for secret in secrets_of(url):
        text = text.replace(secret, "***")
    place = describe_url(url)
    if "unable to open database file" in text:
        return f"{place} cannot be opened: is its folder there, and may it be written?"
    if "database is locked" in text or "due to lock timeout" in text:
        return f"{place} is locked by another program"
    if "disk is full" in text or "No space left" in text or "disk I/O error" in text:
        return f"{place} cannot be written: the disk is full, or its quota is used up ({text[:80]})"
    return f"{place} cannot be used: {text[:300]}"
