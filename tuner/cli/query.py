"""`tuner query`: one SELECT on the database, read-only."""

from __future__ import annotations

import sys

import click

from tuner.cli.options import format_option, storage_option, storage_url

_MOST_ROWS = 1000
_SECONDS = 30.0


@click.command("query", short_help="Run a SELECT on the database, read-only.")
@click.argument("sql")
@storage_option
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_MOST_ROWS,
    show_default=True,
    help="Most rows to print; 0 for all.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.001),
    default=_SECONDS,
    show_default=True,
    help="Seconds the query may take.",
)
@format_option
def command(sql: str, storage: str | None, limit: int, timeout: float, form: str) -> None:
    """Run one SELECT and print what it gives; - reads it from standard input.

    Nothing can be written, whatever the statement says. The views tuner_trials, tuner_pareto,
    tuner_predictions, tuner_memory, tuner_metrics, tuner_devices and tuner_rejections are described
    in docs/database.md. In the data, sizes are bytes, durations seconds and moments UTC.
    """
    from tuner.cli.output import Column, emit
    from tuner.store.read_only import run_query

    statement = sys.stdin.read() if sql == "-" else sql
    answer = run_query(storage_url(storage), statement, most_rows=limit or None, seconds=timeout)
    names = _distinct(answer.columns)
    rows = [dict(zip(names, row, strict=True)) for row in answer.rows]
    columns = [
        Column(name, name, _shown, right=any(isinstance(row[name], int | float) for row in rows))
        for name in names
    ]
    emit(rows, columns, form, empty="no rows")
    if answer.truncated:
        click.echo(f"only the first {limit} rows are shown; all of them: --limit 0", err=True)


def _shown(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _distinct(names: tuple[str, ...]) -> list[str]:
    """Return names such that none is there twice: `count`, `count 2`."""
    found: list[str] = []
    for name in names:
        count = 2
        unique = name
        while unique in found:
            unique, count = f"{name} {count}", count + 1
        found.append(unique)
    return found
