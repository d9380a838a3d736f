"""Bringing a database to this version's schema: real transactions, one at a time, views last.

One transaction holds all of it, from BEGIN to COMMIT: a process that is killed in between leaves
the database as it was. A view that stands on a table would break its change, so the views are
dropped first and created last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, inspect, text

from tuner.errors import SchemaError
from tuner.store.locks import exclusive
from tuner.store.older_drivers import refuse_older_drivers
from tuner.store.schema import VERSION_TABLE
from tuner.store.views import VIEWS

LOCK = "migration"


def upgrade(engine: Engine) -> bool:
    """Create or upgrade our tables and views; return whether anything was done.

    Raises:
        SchemaError: The database is of a newer version, or our version table is foreign.
        StudyBusy: A driver of an older version works on it.
    """
    with exclusive(engine, LOCK):
        if is_current(engine):
            return False
        with whole_transaction(engine) as connection:
            revision = current_revision_of(connection)
            refuse_foreign(revision)
            refuse_older_drivers(connection, revision)
            upgrade_connection(connection)
    return True


@contextlib.contextmanager
def whole_transaction(engine: Engine) -> Iterator[Connection]:
    """Begin a transaction in which a table can be made anew without its rows' children going with it.

    SQLite changes a table by copying it and dropping the old one, which deletes what refers to it;
    the switch that prevents this is deaf inside a transaction.

    Raises:
        SchemaError: The upgrade left rows without their parents.
    """
    if engine.dialect.name != "sqlite":
        with engine.begin() as connection:
            yield connection
        return
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        driver.execute("PRAGMA foreign_keys = OFF")
        try:
            with connection.begin():
                yield connection
                broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                if broken:
                    raise SchemaError(f"the upgrade would leave rows without their parents: {broken[:3]}")
        finally:
            driver.execute("PRAGMA foreign_keys = ON")


def upgrade_connection(connection: Connection) -> None:
    """Run every outstanding revision in the connection's transaction (alembic/env.py)."""
    config = alembic_config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


@contextlib.contextmanager
def views_aside(connection: Connection) -> Iterator[None]:
    """Drop our views while the body changes tables, and create them afterwards.

    They are this version's: a database that was taken back to an older revision has none.
    """
    for view in reversed(VIEWS):
        connection.execute(text(f"DROP VIEW IF EXISTS {view}"))
    yield
    if current_revision_of(connection) == head_revision():
        for statement in VIEWS.values():
            connection.execute(text(statement))


def current_revision(engine: Engine) -> str | None:
    """Return the revision a database is at; None before the first."""
    with engine.connect() as connection:
        return current_revision_of(connection)


def head_revision() -> str:
    """Return the revision this version works with."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert head is not None
    return head


def is_current(engine: Engine) -> bool:
    """Whether a database is at this version's revision."""
    return current_revision(engine) == head_revision()


def require_current(engine: Engine) -> None:
    """Check that a database can be read as it is.

    Raises:
        SchemaError: It is older, newer, or holds no tables of ours; the message says which.
    """
    revision = current_revision(engine)
    if revision == head_revision():
        return
    if revision is None:
        raise SchemaError(
            "the database holds no studies of tuner yet", hint="start one: tuner run studies/digits_cnn.py"
        )
    refuse_foreign(revision)
    raise SchemaError(
        f"the database is at schema {revision}, this version needs {head_revision()}",
        hint="run: tuner db upgrade",
    )


def refuse_foreign(revision: str | None) -> None:
    """Check that a revision is one of ours.

    Raises:
        SchemaError: A newer version, or another application, wrote it.
    """
    if revision is None:
        return
    try:
        known = ScriptDirectory.from_config(alembic_config()).get_revision(revision) is not None
    except CommandError:
        known = False
    if not known:
        raise SchemaError(
            f"the database's schema {revision} (table {VERSION_TABLE}) is unknown to this version",
            hint="a newer vram-tuner or another application wrote it: upgrade, or use another database",
        )


def current_revision_of(connection: Connection) -> str | None:
    """Return the revision a database is at, as the connection's transaction sees it."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    heads = context.get_current_heads()
    return heads[0] if heads else None


def alembic_config() -> Config:
    """Return what Alembic needs to know of our revisions."""
    config = Config()
    config.set_main_option("script_location", str(_scripts()).replace("%", "%%"))
    config.set_main_option("version_table", VERSION_TABLE)
    return config


def _scripts() -> Path:
    """Return the folder of revisions: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    bundled = package / "_bundled" / "alembic"
    return bundled if bundled.is_dir() else package.parent / "alembic"
