"""Opening an existing database to read it, or to change what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Engine

from tuner.errors import SchemaError
from tuner.store import migrations
from tuner.store.drivers import Drivers
from tuner.store.engine import describe_url, open_engine, store_errors
from tuner.store.reader import Reader
from tuner.store.writer import Writer


def open_existing(url: URL, *, busy_timeout_seconds: float | None = None) -> Engine:
    """Return a read-only engine on a database that exists and has this version's schema.

    Raises:
        SchemaError: There is no such database, or its schema is another.
        StoreError: It cannot be used.
    """
    if url.drivername == "sqlite" and not Path(url.database or "").exists():
        raise SchemaError(
            f"there is no database {describe_url(url)} yet",
            hint="start a study: tuner run studies/digits_cnn.py",
        )
    engine = open_engine(url, read_only=True, busy_timeout_seconds=busy_timeout_seconds)
    try:
        with store_errors(url):
            migrations.require_current(engine)
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def reading(url: URL) -> Iterator[Reader]:
    """Open an existing database for reading while the body runs.

    Raises:
        StoreError: It cannot be used.
    """
    with store_errors(url):
        engine = open_existing(url)
        try:
            yield Reader(engine)
        finally:
            engine.dispose()


@contextmanager
def writing(url: URL) -> Iterator[tuple[Reader, Writer, Drivers]]:
    """Open an existing database for reading and writing while the body runs.

    Raises:
        StoreError: It cannot be used.
    """
    with store_errors(url):
        open_existing(url).dispose()
        engine = open_engine(url)
        try:
            yield Reader(engine), Writer(engine), Drivers(engine)
        finally:
            engine.dispose()
