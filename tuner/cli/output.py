"""Printing rows as a table for people, JSON or CSV for scripts. Data goes to standard output."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import click

from tuner.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Column:
    """A column: its title, what it shows of a row in a table, and in data."""

    title: str
    key: str
    show: Callable[[Any], str] = lambda value: "–" if value is None else str(value)
    right: bool = False


def size(title: str, key: str) -> Column:
    """Return a column of bytes."""
    return Column(title, key, format_bytes, right=True)


def number(title: str, key: str, digits: int = 4) -> Column:
    """Return a column of numbers."""
    return Column(title, key, lambda value: "–" if value is None else f"{value:.{digits}g}", right=True)


def duration(title: str, key: str) -> Column:
    """Return a column of seconds."""
    return Column(title, key, format_seconds, right=True)


def emit(rows: Sequence[dict[str, Any]], columns: Sequence[Column], form: str, *, empty: str) -> None:
    """Print rows: the columns in a table, all keys in JSON and CSV."""
    if form == "json":
        click.echo(json.dumps([jsonable(row) for row in rows], indent=2))
    elif form == "csv":
        _csv(rows, [column.key for column in columns])
    elif not rows:
        click.echo(empty)
    else:
        _table(rows, columns)


def emit_one(fields: dict[str, Any], form: str) -> None:
    """Print one record as JSON or CSV."""
    if form == "json":
        click.echo(json.dumps(jsonable(fields), indent=2))
    else:
        _csv([fields], list(fields))


def short_params(params: dict[str, Any]) -> str:
    """Return params on one line: `width=64 depth=2`."""
    return " ".join(f"{name}={_short(value)}" for name, value in params.items())


def jsonable(value: Any) -> Any:
    """Return a value as JSON has it; non-finite numbers become text, since JSON has none."""
    if isinstance(value, dict):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _csv(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    keys = list(columns) + [key for row in rows for key in row if key not in columns]
    writer = csv.DictWriter(sys.stdout, list(dict.fromkeys(keys)), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _cell(value) for key, value in row.items()})


def _cell(value: Any) -> Any:
    return json.dumps(jsonable(value)) if isinstance(value, (dict, list, tuple)) else jsonable(value)


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=column.right,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*(Text(column.show(row.get(column.key))) for column in columns))
    Console(highlight=False).print(table)
