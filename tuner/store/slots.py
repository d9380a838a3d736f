"""Slots: the right to ask for one trial, claimed before the ask.

So drivers launch together exactly as many trials as are wanted. A slot ends in the transaction that
records its trial's result: what counts against `--trials` is the final launches plus the open slots,
at every moment and over all drivers.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select

from tuner.records import Outcome
from tuner.store import schema
from tuner.store.drivers import living_drivers, require_living
from tuner.store.transactions import Transactional, snapshot, transaction

_FINAL = [outcome.value for outcome in Outcome if outcome.launched and outcome.final]


@dataclass(frozen=True)
class Slot:
    """The right to ask for one trial.

    Attributes:
        id: The row's id.
        repeats: Number of the interrupted trial whose params are run again, or None.
        rejection_id: The rejection that is audited, or None.
    """

    id: int
    repeats: int | None = None
    rejection_id: int | None = None

    @property
    def audit(self) -> bool:
        """Whether it is for a configuration that was turned away."""
        return self.rejection_id is not None


@dataclass(frozen=True)
class Claims:
    """How far a study is.

    Attributes:
        launched: Launched trials that are settled, audits left out.
        open: Slots of all drivers, audits left out.
    """

    launched: int
    open: int


class Slots(Transactional):
    """Gives out slots."""

    @transaction
    def claim(
        self, connection: Connection, study_id: int, driver_id: int, *, token: str, trials: int
    ) -> Slot | None:
        """Take a slot, or return None where the launched trials and the open slots are enough.

        An interrupted trial that nobody has run again comes first. The token is unique per slot: a
        claim that is repeated returns the same slot.

        Raises:
            LeaseLost: Others have given this driver up.
        """
        _lock(connection, study_id)
        require_living(connection, driver_id)
        known = connection.execute(select(schema.slot).where(schema.slot.c.token == token)).one_or_none()
        if known is not None:
            return Slot(known.id, known.repeats, known.rejection_id)
        claims = _claims(connection, study_id)
        if claims.launched + claims.open >= trials:
            return None
        repeats = _oldest_interrupted(connection, study_id)
        return _inserted(connection, study_id, driver_id, token=token, repeats=repeats)

    @transaction
    def claim_audit(
        self, connection: Connection, study_id: int, driver_id: int, *, token: str, rejection_id: int
    ) -> Slot | None:
        """Take the right to audit a rejection, or return None where another one has.

        Raises:
            LeaseLost: Others have given this driver up.
        """
        _lock(connection, study_id)
        require_living(connection, driver_id)
        slot, trial = schema.slot.c, schema.trial.c
        taken = connection.execute(select(slot.token).where(slot.rejection_id == rejection_id)).scalar()
        audited = connection.execute(
            select(func.count()).where(
                trial.rejection_id == rejection_id,
                func.coalesce(trial.outcome, "") != Outcome.INTERRUPTED.value,
            )
        ).scalar_one()
        if audited or taken not in (None, token):
            return None
        if taken == token:
            known = connection.execute(select(schema.slot).where(slot.token == token)).one()
            return Slot(known.id, known.repeats, known.rejection_id)
        return _inserted(connection, study_id, driver_id, token=token, rejection_id=rejection_id)

    @transaction
    def release(self, connection: Connection, slot_id: int, driver_id: int) -> None:
        """Give back a slot of this driver for which no trial was asked.

        After the driver was given up, the id may be that of another one's slot: SQLite uses ids again.
        """
        slot = schema.slot.c
        ours = (slot.id == slot_id) & (slot.driver_id == driver_id) & slot.trial_id.is_(None)
        connection.execute(delete(schema.slot).where(ours))

    @snapshot
    def claims(self, connection: Connection, study_id: int) -> Claims:
        """Return how far the study is."""
        return _claims(connection, study_id)

    @snapshot
    def asking(self, connection: Connection, study_id: int) -> bool:
        """Whether any living driver is between its claim and its trial's row."""
        slot = schema.slot.c
        query = select(slot.driver_id).where(slot.study_id == study_id, slot.trial_id.is_(None))
        living = {driver.id for driver in living_drivers(connection, study_id)}
        return not living.isdisjoint(connection.execute(query).scalars())


def _lock(connection: Connection, study_id: int) -> None:
    """Let one claim at a time go on; rows that refer to the study may still be added."""
    study = schema.study.c
    connection.execute(select(study.id).where(study.id == study_id).with_for_update(key_share=True))


def _claims(connection: Connection, study_id: int) -> Claims:
    """Count both in one statement, hence at one moment: results are recorded meanwhile."""
    trial, slot = schema.trial.c, schema.slot.c
    launched = select(func.count()).where(
        trial.study_id == study_id, trial.audit.is_(False), trial.outcome.in_(_FINAL)
    )
    taken = select(func.count()).where(slot.study_id == study_id, slot.audit.is_(False))
    row = connection.execute(select(launched.scalar_subquery(), taken.scalar_subquery())).one()
    return Claims(*row)


def _oldest_interrupted(connection: Connection, study_id: int) -> int | None:
    """Return the number of the first interrupted trial that nobody has run again."""
    trial, again, slot = schema.trial, schema.trial.alias(), schema.slot
    query = (
        select(func.min(trial.c.number))
        .where(
            trial.c.study_id == study_id,
            trial.c.outcome == Outcome.INTERRUPTED.value,
            trial.c.audit.is_(False),
        )
        .where(~select(1).where(again.c.study_id == study_id, again.c.repeats == trial.c.number).exists())
        .where(~select(1).where(slot.c.study_id == study_id, slot.c.repeats == trial.c.number).exists())
    )
    number: int | None = connection.execute(query).scalar()
    return number


def _inserted(
    connection: Connection,
    study_id: int,
    driver_id: int,
    *,
    token: str,
    repeats: int | None = None,
    rejection_id: int | None = None,
) -> Slot:
    values = {"study_id": study_id, "driver_id": driver_id, "token": token, "repeats": repeats}
    values |= {"rejection_id": rejection_id, "audit": rejection_id is not None}
    key = connection.execute(insert(schema.slot).values(**values)).inserted_primary_key
    assert key is not None
    return Slot(int(key[0]), repeats, rejection_id)
