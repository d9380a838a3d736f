"""Alembic's entry: limits it to our tables, in a connection that is given or made here."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from tuner.store.engine import DEFAULT_URL, open_engine, parse_url
from tuner.store.migrations import views_aside
from tuner.store.schema import VERSION_TABLE, metadata
from tuner.store.views import VIEWS


def include_name(name: str | None, kind: str, parents: object) -> bool:
    """Whether Alembic may look at a table: only at ours, never at Optuna's, never at views."""
    return kind != "table" or (name is not None and name.startswith("tuner_") and name not in VIEWS)


def run(connection: Connection) -> None:
    """Run the revisions in the transaction of `connection`."""
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        include_name=include_name,
        render_as_batch=True,
        transactional_ddl=False,  # the caller's transaction holds all of it, views included
    )
    with views_aside(connection):
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    engine = open_engine(parse_url(os.environ.get("TUNER_STORAGE", DEFAULT_URL)))
    with engine.begin() as connection:
        run(connection)
