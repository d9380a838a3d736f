"""`tuner pareto`: the front of metric against peak memory."""

from __future__ import annotations

import click

from tuner.cli.options import format_option, reading, storage_option
from tuner.units import parse_bytes


@click.command("pareto", short_help="Show the front of metric against peak memory.")
@click.argument("name")
@storage_option
@click.option("--budget", metavar="SIZE", help="Only what fits this  [default: the study's budget]")
@format_option
def command(name: str, storage: str | None, budget: str | None, form: str) -> None:
    """Show the trials of study NAME that no other beats in both metric and peak memory.

    Smallest peak first; exact ties are all shown.
    """
    from tuner.cli.trial_rows import emit_front

    budget_bytes = None if budget is None else parse_bytes(budget)
    with reading(storage) as reader:
        study = reader.study(name)
        front = reader.front(study.id, budget_bytes)
    emit_front(study, front, form)
