"""`tuner delete`: delete a study."""

from __future__ import annotations

from contextlib import ExitStack

import click

from tuner.cli.options import storage_option, storage_url


@click.command("delete", short_help="Delete a study.")
@click.argument("name")
@storage_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(name: str, storage: str | None, yes: bool) -> None:
    """Delete study NAME with its trials, here and on Optuna's side. Run folders stay (tuner clean)."""
    from tuner.search.optuna_storage import delete_study
    from tuner.store.engine import open_engine
    from tuner.store.locks import exclusive
    from tuner.store.opening import writing

    url = storage_url(storage)
    with writing(url) as (reader, writer, drivers):
        study = reader.study(name)
        drivers.require_none(study.id)
        count = sum(reader.outcomes(study.id).values())
        if not yes:
            click.confirm(f"delete study '{name}' with {count} trials?", abort=True, err=True)
        # Who creates a study of this name meanwhile waits for the lock before it uses Optuna's side.
        with ExitStack() as closing:
            engine = open_engine(url)
            closing.callback(engine.dispose)
            closing.enter_context(exclusive(engine, "optuna"))
            writer.delete_study(study.id)  # looks for drivers again: first of all, then
            delete_study(url, name)
    click.echo(f"deleted study '{name}' with {count} trials", err=True)
