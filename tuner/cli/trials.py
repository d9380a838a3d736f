"""`tuner trials`: list a study's trials."""

from __future__ import annotations

import click

from tuner.cli.options import format_option, reading, storage_option
from tuner.errors import UsageError
from tuner.records import Outcome

_SORTABLE = ("number", "value", "peak_bytes", "predicted_bytes", "allocated_bytes", "seconds", "outcome")


@click.command("trials", short_help="List a study's trials.")
@click.argument("name")
@storage_option
@click.option("--outcome", "outcomes", metavar="OUTCOME", multiple=True, help="Only these; repeat for more.")
@click.option(
    "--sort", default="number", show_default=True, metavar="COLUMN", help="Order; -COLUMN for largest first."
)
@format_option
def command(name: str, storage: str | None, outcomes: tuple[str, ...], sort: str, form: str) -> None:
    """List the trials of study NAME.

    \b
    Outcomes: completed, pruned_memory, out_of_memory, pruned_metric, timed_out,
    host_out_of_memory, killed, crashed, error, lost, interrupted, running.
    Columns to sort by: number, value, peak_bytes, predicted_bytes, allocated_bytes, seconds, outcome.
    """
    from tuner.cli.trial_rows import emit_trials

    known = [outcome.value for outcome in Outcome] + ["running"]
    for outcome in outcomes:
        if outcome not in known:
            raise UsageError(f"there is no outcome '{outcome}'", hint=f"known: {', '.join(known)}")
    column, descending = sort.removeprefix("-"), sort.startswith("-")
    if column not in _SORTABLE:
        raise UsageError(f"trials cannot be sorted by '{column}'", hint=f"known: {', '.join(_SORTABLE)}")
    with reading(storage) as reader:
        study = reader.study(name)
        trials = reader.trials(study.id, outcomes)
    with_value = [trial for trial in trials if getattr(trial, column) is not None]
    without = [trial for trial in trials if getattr(trial, column) is None]
    with_value.sort(key=lambda trial: getattr(trial, column), reverse=descending)
    emit_trials(study, with_value + without, form)
