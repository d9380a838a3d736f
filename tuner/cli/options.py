"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tuner.settings import resolve

if TYPE_CHECKING:
    from sqlalchemy import URL

    from tuner.store.reader import Reader

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def storage_option(function: Decorated) -> Decorated:
    """Add `--storage`."""
    return click.option(
        "--storage",
        metavar="URL",
        help="Database: sqlite:///FILE or postgresql://USER@HOST/NAME  [default: $TUNER_STORAGE, "
        "else sqlite:///tuner.db]",
    )(function)


def format_option(function: Decorated) -> Decorated:
    """Add `-f table|json|csv`."""
    return click.option(
        "-f",
        "--format",
        "form",
        type=click.Choice(["table", "json", "csv"]),
        default="table",
        show_default=True,
        help="How to print.",
    )(function)


def storage_url(storage: str | None) -> URL:
    """Return the database that the flag or the settings name."""
    from tuner.store.engine import parse_url

    return parse_url(resolve({"storage": storage}, ["storage"])["storage"].value)


@contextmanager
def reading(storage: str | None) -> Iterator[Reader]:
    """Open the database for reading while the body runs; errors become one line."""
    from tuner.search.session import open_reader
    from tuner.store.engine import store_errors

    url = storage_url(storage)
    with store_errors(url):
        reader, engine = open_reader(url)
        try:
            yield reader
        finally:
            engine.dispose()
