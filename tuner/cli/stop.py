"""`tuner stop`: ask a study's driver to end."""

from __future__ import annotations

import click

from tuner.cli.options import storage_option, storage_url


@click.command("stop", short_help="Ask a study's driver to end after the running trial.")
@click.argument("name")
@storage_option
def command(name: str, storage: str | None) -> None:
    """Ask the driver of study NAME to end after the trial that runs now."""
    from tuner.store.opening import writing

    with writing(storage_url(storage)) as (reader, writer):
        study = reader.study(name)
        if study.owner is None:
            click.echo(f"nobody works on study '{name}'", err=True)
            return
        writer.request_stop(study.id, "asked to stop by: tuner stop")
        click.echo(
            f"process {study.owner.pid} on {study.owner.host} will end after its running trial", err=True
        )
