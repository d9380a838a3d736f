"""Opening the database for the commands that change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import URL

from tuner.search.session import open_reader
from tuner.store.engine import open_engine, store_errors
from tuner.store.reader import Reader
from tuner.store.writer import Writer


@contextmanager
def writing(url: URL) -> Iterator[tuple[Reader, Writer]]:
    """Open an existing, current database for reading and writing while the body runs."""
    with store_errors(url):
        _, reader_engine = open_reader(url)
        reader_engine.dispose()
        engine = open_engine(url)
        try:
            yield Reader(engine), Writer(engine)
        finally:
            engine.dispose()
