"""Who drives a study: several processes, on several hosts, each with a row of its own.

A driver's id is the fencing token of all that it holds: its trials, slots and reservations. One
that is given up for lost has its row closed, and whatever it writes afterwards is refused with
`LeaseLost`. On this host a driver lives as long as its process; one elsewhere as long as its last
sign of life is recent by the database's clock. While the database is away nobody can give one, and
that clock goes on: after such a gap all have their time anew.
"""

from __future__ import annotations

import dataclasses
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, insert, or_, select, update

from tuner.errors import LeaseLost, StudyBusy
from tuner.processes import is_alive
from tuner.records import Owner
from tuner.store import schema
from tuner.store.rows import DriverRecord, to_storable
from tuner.store.transactions import Transactional, database_now, in_utc, snapshot, transaction

SILENT_AFTER = timedelta(seconds=300)
GAP = timedelta(seconds=60)  # between two signs of life of one that lives: the database was away
_OWNER = ("host", "boot_id", "pid", "started")
_NOW = func.current_timestamp()
_HELD = (schema.slot.c, schema.reservation.c)


class Drivers(Transactional):
    """Lets drivers join, show that they live, and leave."""

    def join(self, study_id: int, owner: Owner, environment: dict[str, Any] | None = None) -> int:
        """Become a driver of the study; return the driver's id."""
        return self._join(study_id, owner, environment, token=str(uuid.uuid4()))

    @transaction
    def _join(
        self,
        connection: Connection,
        study_id: int,
        owner: Owner,
        environment: dict[str, Any] | None,
        *,
        token: str,
    ) -> int:
        """Add a driver; one that is there already, since an answer was lost on its way, is it."""
        known = connection.execute(select(schema.driver.c.id).where(schema.driver.c.token == token)).scalar()
        if known is not None:
            return int(known)
        values = {
            **dataclasses.asdict(owner),
            "token": token,
            "study_id": study_id,
            "joined_at": _NOW,
            "seen_at": _NOW,
            "environment": to_storable(environment),
        }
        key = connection.execute(insert(schema.driver).values(**values)).inserted_primary_key
        assert key is not None
        return int(key[0])

    @transaction
    def beat(self, connection: Connection, driver_id: int) -> str | None:
        """Give a sign of life; return the reason to stop, if there is one.

        Raises:
            LeaseLost: Others have given this driver up.
        """
        require_living(connection, driver_id)
        table = schema.driver.c
        row = connection.execute(select(table.seen_at, table.stop_reason).where(table.id == driver_id)).one()
        signs = {"seen_at": _NOW}
        if database_now(connection) - in_utc(row.seen_at) > GAP:
            signs["back_at"] = _NOW
        connection.execute(update(schema.driver).where(table.id == driver_id).values(signs))
        reason: str | None = row.stop_reason
        return reason

    @transaction
    def leave(self, connection: Connection, driver_id: int, reason: str) -> None:
        """Stop being a driver, and let go of what is held.

        What belongs to a trial without an outcome stays until that is settled (the driver is `lost`
        until then): were its slot free, another trial would be launched for it. The first reason counts.
        """
        # First of all: a claim that is under way is waited for, so that it leaves nothing behind.
        connection.execute(_locked(driver_id))
        trial = schema.trial.c
        for table in (schema.slot, schema.reservation):
            unsettled = select(trial.id).where(trial.id == table.c.trial_id, trial.outcome.is_(None)).exists()
            connection.execute(delete(table).where(table.c.driver_id == driver_id, ~unsettled))
        _end(connection, driver_id, reason)

    @transaction
    def give_up(self, connection: Connection, driver_id: int) -> None:
        """Close the row of a driver that is lost: from now on it can add nothing.

        What it holds counts until its trials are settled and `leave` is called for it.
        """
        _end(connection, driver_id, "lost")

    @snapshot
    def lost(self, connection: Connection, study_id: int) -> list[DriverRecord]:
        """Return the study's drivers that have ended without leaving, given up or not."""
        limit, table = silence_limit(connection), schema.driver.c
        holds = or_(*(select(held.driver_id).where(held.driver_id == table.id).exists() for held in _HELD))
        query = select(schema.driver).where(table.study_id == study_id, table.ended_at.is_not(None), holds)
        given_up = [driver_of(row) for row in connection.execute(query)]
        return [*given_up, *(one for one in _open_drivers(connection, study_id) if is_lost(one, limit))]

    @snapshot
    def require_none(self, connection: Connection, study_id: int) -> None:
        """Check that nobody drives the study.

        Raises:
            StudyBusy: A driver does.
        """
        require_idle(connection, study_id)

    @transaction
    def request_stop(self, connection: Connection, study_id: int, reason: str) -> None:
        """Ask every driver of the study to end after its running trials."""
        connection.execute(
            update(schema.driver)
            .where(schema.driver.c.study_id == study_id, schema.driver.c.ended_at.is_(None))
            .values(stop_reason=reason)
        )


def living_drivers(connection: Connection, study_id: int) -> list[DriverRecord]:
    """Return the study's drivers that are at work."""
    limit = silence_limit(connection)
    return [driver for driver in _open_drivers(connection, study_id) if not is_lost(driver, limit)]


def require_idle(connection: Connection, study_id: int) -> None:
    """Check that nobody drives a study.

    Raises:
        StudyBusy: A driver does.
    """
    if living_drivers(connection, study_id):
        name = connection.execute(select(schema.study.c.name).where(schema.study.c.id == study_id)).scalar()
        raise StudyBusy(f"a driver works on study '{name}'", hint=f"stop it first: tuner stop {name}")


def require_living(connection: Connection, driver_id: int) -> None:
    """Check that a driver still is one.

    Raises:
        LeaseLost: Others have given it up.
    """
    row = connection.execute(_locked(driver_id)).one_or_none()
    if row is None or row.ended_at is not None:
        raise LeaseLost("this driver was given up for lost by another one")


def _locked(driver_id: int) -> Select[Any]:
    """Select when a driver ended, and hold its row; rows that refer to it may still be added."""
    ended_at = select(schema.driver.c.ended_at).where(schema.driver.c.id == driver_id)
    return ended_at.with_for_update(key_share=True)


def silence_limit(connection: Connection) -> datetime:
    """Return since when every driver has given a sign of life, if it lives.

    That is the beginning of time as long as a driver of any study was kept from giving one not long
    ago: the others may have been, too.
    """
    table = schema.driver.c
    latest = connection.execute(select(func.max(table.back_at)).where(table.ended_at.is_(None))).scalar()
    limit = database_now(connection) - SILENT_AFTER
    return datetime.min.replace(tzinfo=UTC) if latest is not None and in_utc(latest) > limit else limit


def is_lost(driver: DriverRecord, limit: datetime) -> bool:
    """Whether an open driver has ended: by its process on this host, by its silence elsewhere.

    Args:
        driver: A driver whose row is open.
        limit: What `silence_limit` returns.
    """
    alive = is_alive(driver.owner)
    return driver.seen_at < limit if alive is None else not alive


def driver_of(row: Row[Any]) -> DriverRecord:
    """Return a row of `tuner_driver` as a record."""
    return DriverRecord(
        id=row.id,
        study_id=row.study_id,
        owner=Owner(**{name: getattr(row, name) for name in _OWNER}),
        joined_at=in_utc(row.joined_at),
        seen_at=in_utc(row.seen_at),
        ended_at=None if row.ended_at is None else in_utc(row.ended_at),
        end_reason=row.end_reason,
        stop_reason=row.stop_reason,
        environment=row.environment or {},
    )


def _end(connection: Connection, driver_id: int, reason: str) -> None:
    connection.execute(
        update(schema.driver)
        .where(schema.driver.c.id == driver_id, schema.driver.c.ended_at.is_(None))
        .values(ended_at=_NOW, end_reason=reason)
    )


def _open_drivers(connection: Connection, study_id: int) -> list[DriverRecord]:
    table = schema.driver
    query = select(table).where(table.c.study_id == study_id, table.c.ended_at.is_(None)).order_by(table.c.id)
    return [driver_of(row) for row in connection.execute(query)]
