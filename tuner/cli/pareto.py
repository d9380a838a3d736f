"""`tuner pareto`: the front of metric against peak memory."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.cli.options import format_option, reading, storage_option
from tuner.units import parse_bytes


@click.command("pareto", short_help="Show the front of metric against peak memory.")
@click.argument("name")
@storage_option
@click.option("--budget", metavar="SIZE", help="Only what fits this  [default: the study's budget]")
@click.option(
    "--plot", metavar="FILE", type=click.Path(path_type=Path), help="Also draw it: FILE.svg, .png or .pdf."
)
@format_option
def command(name: str, storage: str | None, budget: str | None, plot: Path | None, form: str) -> None:
    """Show the trials of study NAME that no other beats in both metric and peak memory.

    Smallest peak first; exact ties are all shown.
    """
    from tuner.cli.front_plot import check_path, draw_front
    from tuner.cli.trial_rows import emit_front
    from tuner.store.overview import Overview

    budget_bytes = None if budget is None else parse_bytes(budget)
    if plot is not None:
        check_path(plot)
    with reading(storage) as reader:
        study = reader.study(name)
        front = reader.front(study.id, budget_bytes)
        if plot is not None:
            points = Overview(reader.engine).points(study.id)
    emit_front(study, front, form)
    if plot is not None:
        draw_front(study, points, front, budget_bytes or study.budget_bytes, plot)
        click.echo(f"drawn: {plot}", err=True)
