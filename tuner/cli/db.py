"""`tuner db`: create, upgrade or inspect the database."""

from __future__ import annotations

from pathlib import Path

import click

from tuner.cli.options import format_option, storage_option, storage_url


@click.group("db", short_help="Create, upgrade or inspect the database.")
def command() -> None:
    """Create, upgrade or inspect the database."""


@command.command("upgrade")
@storage_option
def upgrade(storage: str | None) -> None:
    """Create our tables, or bring them to this version's schema; safe to run again."""
    from tuner.store import migrations
    from tuner.store.engine import describe_url, open_engine, store_errors

    url = storage_url(storage)
    with store_errors(url):
        done = migrations.upgrade(open_engine(url))
    state = "is now" if done else "was already"
    click.echo(f"{describe_url(url)} {state} at schema {migrations.head_revision()}", err=True)


@command.command("current")
@storage_option
@format_option
def current(storage: str | None, form: str) -> None:
    """Show which schema the database has, and which this version needs."""
    from tuner.cli.output import emit_one
    from tuner.store import migrations
    from tuner.store.engine import describe_url, open_engine, store_errors

    url = storage_url(storage)
    revision = None
    exists = url.drivername != "sqlite" or Path(url.database or "").exists()
    if exists:
        with store_errors(url):
            revision = migrations.current_revision(open_engine(url, read_only=True))
    head = migrations.head_revision()
    if form != "table":
        emit_one({"database": describe_url(url), "schema": revision, "needed": head}, form)
        return
    click.echo(f"database  {describe_url(url)}{'' if exists else ' (not there yet)'}")
    click.echo(f"schema    {revision or 'none'}")
    click.echo(f"needed    {head}")
