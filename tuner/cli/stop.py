"""`tuner stop`: ask a study's drivers to end."""

from __future__ import annotations

import click

from tuner.cli.options import storage_option, storage_url


@click.command("stop", short_help="Ask a study's drivers to end after its running trials.")
@click.argument("name")
@storage_option
def command(name: str, storage: str | None) -> None:
    """Ask every driver of study NAME to end after the trials that run now."""
    from tuner.store.opening import writing

    with writing(storage_url(storage)) as (reader, _, drivers):
        study = reader.study(name)
        driving = reader.living_drivers(study.id)
        if not driving:
            click.echo(f"nobody works on study '{name}'", err=True)
            return
        drivers.request_stop(study.id, "asked to stop by: tuner stop")
        for driver in driving:
            owner = driver.owner
            click.echo(f"process {owner.pid} on {owner.host} will end after its running trials", err=True)
