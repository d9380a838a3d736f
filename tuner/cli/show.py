"""`tuner show`: everything about one trial."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from tuner.cli.options import format_option, reading, storage_option


@click.command("show", short_help="Show everything about one trial.")
@click.argument("name")
@click.argument("number", type=int)
@storage_option
@format_option
def command(name: str, number: int, storage: str | None, form: str) -> None:
    """Show trial NUMBER of study NAME: params, prediction, measured peaks, metrics, failure.

    Also what it takes to run it again (`tuner rerun`): seed, device, threads, versions, git commit,
    host, command line, and settings with their origins. A study file that was edited while the
    study ran is pointed out.
    """
    from tuner.cli.output import emit_one
    from tuner.cli.trial_page import print_trial
    from tuner.cli.trial_rows import find_trial

    with reading(storage) as reader:
        study = reader.study(name)
        trial = find_trial(reader, study, number)
        metrics = reader.metrics(trial.id)
        driver = None if trial.driver_id is None else reader.driver(trial.driver_id)
    if form == "table":
        print_trial(study, trial, metrics, driver)
        return
    fields: dict[str, Any] = dataclasses.asdict(trial)
    fields["prediction"] = None if trial.prediction is None else trial.prediction.to_json()
    fields["epochs"] = [dataclasses.asdict(metric) for metric in metrics]
    fields["driver"] = None if driver is None else dataclasses.asdict(driver)
    fields["study"] = dataclasses.asdict(study)
    emit_one(fields, form)
