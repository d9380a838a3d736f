"""A lock that one process in the world holds, for one database; it goes when its holder dies.

SQLite: a locked file beside the database. PostgreSQL: an advisory lock of a session, on a
connection of its own. A proxy that shares sessions among clients (PgBouncer in transaction mode)
breaks it: connect to the server itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator

from filelock import FileLock
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from tuner.errors import StoreError
from tuner.store.engine import sqlite_path

_PLAIN = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
# The server's administrator may end sessions that do nothing, or statements that wait: this one
# does both on purpose. And a host that vanished must not hold a lock for hours.
_SESSION = {
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_session_timeout": "0",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
}


@contextlib.contextmanager
def exclusive(engine: Engine, name: str) -> Iterator[None]:
    """Hold a lock of this database while the body runs; wait for whoever holds it.

    It is not reentrant. A connection that is lost (the server restarted) loses the lock: the body's
    own transactions fail then, too.

    Args:
        engine: The database, opened for writing.
        name: Any text; different names are different locks.

    Raises:
        StoreError: The database's folder is not there, or may not be written.
    """
    if engine.dialect.name == "sqlite":
        path = sqlite_path(engine.url)
        if not path.absolute().parent.is_dir():  # the lock would make it
            raise StoreError(f"{path} cannot be opened: is its folder there, and may it be written?")
        lock = FileLock(f"{path}.{_file_name(name)}.lock")
        try:
            lock.acquire()
        except OSError as error:
            raise StoreError(f"{path} cannot be locked: {error.strerror or error}") from None
        try:
            yield
        finally:
            lock.release()
        return
    with _session(engine) as connection:
        key = {"key": advisory_key(name)}
        connection.execute(text("SELECT pg_advisory_lock(:key)"), key)
        try:
            yield
        finally:
            with contextlib.suppress(DBAPIError):  # a lost session holds nothing
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), key)


@contextlib.contextmanager
def _session(engine: Engine) -> Iterator[Connection]:
    """Connect past the pool, without a transaction that would stay open; disconnect afterwards."""
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    try:
        connection.detach()
        set_config = "SELECT set_config(name, :value, false) FROM pg_settings WHERE name = :name"
        for name, value in _SESSION.items():  # a server that does not know one has no row of it
            connection.execute(text(set_config), {"name": name, "value": value})
        yield connection
    finally:
        with contextlib.suppress(DBAPIError):
            connection.close()


def advisory_key(name: str) -> int:
    """Return the number of a PostgreSQL advisory lock: 63 bits of a hash, the same everywhere."""
    digest = hashlib.sha256(f"vram-tuner {name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _file_name(name: str) -> str:
    """Return a part of a file's name: short, and different on file systems that fold cases too."""
    if _PLAIN.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{re.sub(r'[^a-z0-9-]', '_', name.lower())[:23]}+{digest}"
