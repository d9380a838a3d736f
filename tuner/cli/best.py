"""`tuner best`: the best trial that fits the budget."""

from __future__ import annotations

import click

from tuner.cli.options import format_option, reading, storage_option
from tuner.errors import NothingFeasible
from tuner.units import parse_bytes


@click.command("best", short_help="Show the best trial that fits the budget.")
@click.argument("name")
@storage_option
@click.option("--budget", metavar="SIZE", help="Only what fits this  [default: the study's budget]")
@format_option
def command(name: str, storage: str | None, budget: str | None, form: str) -> None:
    """Show the trial of study NAME with the best metric within the budget."""
    from tuner.cli.output import emit_one
    from tuner.cli.trial_page import print_trial
    from tuner.cli.trial_rows import row_of

    budget_bytes = None if budget is None else parse_bytes(budget)
    with reading(storage) as reader:
        study = reader.study(name)
        front = reader.front(study.id, budget_bytes)
        if not front:
            raise NothingFeasible(f"study '{name}' has no completed trial within the budget")
        # The front grows with memory, and its last point has the best metric.
        trial = reader.trial(study.id, front[-1].number)
        metrics = reader.metrics(trial.id)
        driver = None if trial.driver_id is None else reader.driver(trial.driver_id)
    if form == "table":
        print_trial(study, trial, metrics, driver)
    else:
        emit_one(row_of(trial), form)
