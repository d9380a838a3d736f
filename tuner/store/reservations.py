"""Reservations: what is set aside on each device, and who waits for how much.

Reservations of all studies in the database count, since they share its devices. A row without
`granted_at` waits; on one device, who waits longer comes first. Rows of drivers that have ended
count for nothing: they are taken away when their study is put in order.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, func, insert, select, text, update

from tuner.store import schema
from tuner.store.drivers import driver_of, is_lost, require_living, silence_limit
from tuner.store.transactions import Transactional, snapshot, transaction

Decided = TypeVar("Decided")
_ADVISORY_LOCK = 0x74756E6573  # one book per database


@dataclass(frozen=True)
class Held:
    """A reservation of a living driver.

    Attributes:
        id: Grows with time: who waits longer has the smaller one.
        trial_id: For which trial.
        device: A GPU's UUID, or `cpu@HOST`.
        device_bytes: Set aside there.
        host: Whose memory the trial's process takes.
        host_bytes: Set aside there; 0 where the device is the host.
        granted: False while it waits.
        pid: The trial's process, once it runs.
        study_id: The study of its driver.
        for_pool: Whether it waits for what its study may have together, not for the device.
    """

    id: int
    trial_id: int
    device: str
    device_bytes: int
    host: str
    host_bytes: int
    granted: bool
    pid: int | None = None
    study_id: int = 0
    for_pool: bool = False


class Book:
    """All reservations, held still for one decision."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.held = _held(connection)

    def put(
        self,
        trial_id: int,
        driver_id: int,
        *,
        device: str,
        device_bytes: int,
        host: str,
        host_bytes: int,
        granted: bool,
        for_pool: bool = False,
    ) -> None:
        """Enter a trial's reservation, or change the one that it has; its place in the queue stays.

        Nothing is written where nothing changes.

        Raises:
            LeaseLost: Others have given this driver up.
        """
        require_living(self._connection, driver_id)
        table = schema.reservation
        values = {
            "driver_id": driver_id,
            "device": device,
            "device_bytes": device_bytes,
            "host": host,
            "host_bytes": host_bytes,
            "for_pool": for_pool,
        }
        now = func.current_timestamp()
        granted_at = {"granted_at": now if granted else None}
        of_trial = table.c.trial_id == trial_id
        known = self._connection.execute(select(table).where(of_trial)).one_or_none()
        if known is None:
            new = {"trial_id": trial_id, "asked_at": now, **values, **granted_at}
            self._connection.execute(insert(table).values(**new))
        elif (known.granted_at is not None) != granted or any(
            getattr(known, name) != value for name, value in values.items()
        ):
            self._connection.execute(update(table).where(of_trial).values(**values, **granted_at))

    def study_of(self, driver_id: int) -> int:
        """Return the study that a driver works on.

        Raises:
            LeaseLost: Others have given this driver up.
        """
        require_living(self._connection, driver_id)
        driver = schema.driver.c
        return int(
            self._connection.execute(select(driver.study_id).where(driver.id == driver_id)).scalar_one()
        )


class Reservations(Transactional):
    """Opens the book; notes who runs."""

    @transaction
    def decide(self, connection: Connection, decision: Callable[[Book], Decided]) -> Decided:
        """Return what a decision says that is made with all reservations held still."""
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        return decision(Book(connection))

    @transaction
    def runs_as(self, connection: Connection, trial_id: int, pid: int) -> None:
        """Note a trial's process, so that its use is not taken for somebody else's."""
        table = schema.reservation
        connection.execute(update(table).where(table.c.trial_id == trial_id).values(pid=pid))

    @snapshot
    def pid_of(self, connection: Connection, trial_id: int) -> int | None:
        """Return the process of this host that a trial was noted to run as, or None."""
        row = schema.reservation.c
        here = (row.trial_id == trial_id) & (row.host == socket.gethostname())
        pid: int | None = connection.execute(select(row.pid).where(here)).scalar()
        return pid

    @snapshot
    def all(self, connection: Connection) -> list[Held]:
        """Return the reservations of living drivers, who waits longest first."""
        return _held(connection)


def _held(connection: Connection) -> list[Held]:
    limit = silence_limit(connection)
    rows = connection.execute(select(schema.reservation).order_by(schema.reservation.c.id)).all()
    owners = select(schema.driver).where(
        schema.driver.c.id.in_({row.driver_id for row in rows}), schema.driver.c.ended_at.is_(None)
    )
    drivers = [driver_of(row) for row in connection.execute(owners)]
    living = {driver.id: driver.study_id for driver in drivers if not is_lost(driver, limit)}
    return [
        Held(
            id=row.id,
            trial_id=row.trial_id,
            device=row.device,
            device_bytes=row.device_bytes,
            host=row.host,
            host_bytes=row.host_bytes,
            granted=row.granted_at is not None,
            pid=row.pid,
            study_id=living[row.driver_id],
            for_pool=row.for_pool,
        )
        for row in rows
        if row.driver_id in living
    ]
