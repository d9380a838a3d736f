"""`tuner delete`: delete a study."""

from __future__ import annotations

import click

from tuner.cli.options import storage_option, storage_url
from tuner.errors import StudyBusy


@click.command("delete", short_help="Delete a study.")
@click.argument("name")
@storage_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(name: str, storage: str | None, yes: bool) -> None:
    """Delete study NAME with its trials, here and on Optuna's side. Run folders stay (tuner clean)."""
    from tuner.search.optuna_study import delete_study
    from tuner.store.opening import writing

    url = storage_url(storage)
    with writing(url) as (reader, writer, _):
        study = reader.study(name)
        if reader.living_drivers(study.id):
            raise StudyBusy(f"a driver works on study '{name}'", hint=f"stop it first: tuner stop {name}")
        count = sum(reader.outcomes(study.id).values())
        if not yes:
            click.confirm(f"delete study '{name}' with {count} trials?", abort=True, err=True)
        delete_study(url, name)
        writer.delete_study(study.id)
    click.echo(f"deleted study '{name}' with {count} trials", err=True)
