"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tuner.settings import resolve

if TYPE_CHECKING:
    from tuner.store.engine import URL
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


def joined(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the values of a repeated option as the settings take them; None where it was not given."""
    return ",".join(values) or None


def storage_url(storage: str | None) -> URL:
    """Return the database that the flag or the settings name."""
    from tuner.store.engine import parse_url

    return parse_url(resolve({"storage": storage}, ["storage"])["storage"].value)


def reading(storage: str | None) -> AbstractContextManager[Reader]:
    """Open the database that the flag or the settings name, for reading."""
    from tuner.store import opening

    return opening.reading(storage_url(storage))
