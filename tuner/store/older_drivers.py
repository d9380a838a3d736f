"""Drivers of older versions, which an upgrade would pull the tables away from.

Each revision that drivers may still work at has a query here for who they are. From 0002 on a
driver is a row of `tuner_driver`; before, a study named its one driver.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, DateTime, text

from tuner.errors import StudyBusy
from tuner.processes import is_alive
from tuner.records import Owner
from tuner.store.transactions import in_utc

_SILENT_AFTER = timedelta(seconds=300)  # for a process on another host, which cannot be seen from here
_LOCK_WAIT = "30s"  # as long as SQLite waits for a lock
# Revision → the table that a driver writes when it starts, and who the drivers are.
_OWNERS = {
    "0001": (
        "tuner_study",
        "SELECT name, owner_host AS host, owner_boot_id AS boot_id, owner_pid AS pid,"
        " owner_started AS started, owner_seen_at AS seen_at"
        " FROM tuner_study WHERE owner_pid IS NOT NULL ORDER BY id",
    )
}


def refuse_older_drivers(connection: Connection, revision: str | None) -> None:
    """Check that nobody works on the database by the schema it still has.

    On PostgreSQL it also waits for others' open transactions, at most half a minute, and keeps new
    drivers out until the upgrade's transaction ends; on SQLite that transaction does.

    Raises:
        StudyBusy: A driver does; the message names the first one's study and process.
    """
    if revision not in _OWNERS:
        return
    table, query = _OWNERS[revision]
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{_LOCK_WAIT}'")
        connection.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
    for row in connection.execute(text(query).columns(seen_at=DateTime(timezone=True))):
        owner = Owner(row.host, row.boot_id, row.pid, row.started)
        if _lives(owner, row.seen_at):
            raise StudyBusy(
                f"the database cannot be upgraded: a driver of an older version works on study"
                f" '{row.name[:80]}' (process {owner.pid} on {owner.host})",
                hint="wait until it has ended, or stop it with Ctrl-C",
            )


def _lives(owner: Owner, seen_at: datetime | None) -> bool:
    """Whether a process lives: seen on this host, by its last sign of life elsewhere."""
    alive = is_alive(owner)
    if alive is not None:
        return alive
    return seen_at is not None and datetime.now(UTC) - in_utc(seen_at) < _SILENT_AFTER
