"""A driver without trials: it claims slots and ends them at random, and may die at any step."""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Sequence

from sqlalchemy import URL, Engine

from tuner.errors import LeaseLost
from tuner.processes import this_process
from tuner.records import Outcome, TrialResult
from tuner.store.drivers import Drivers
from tuner.store.engine import open_engine, parse_url
from tuner.store.locks import exclusive
from tuner.store.reader import Reader
from tuner.store.slots import Slot, Slots
from tuner.store.writer import Writer

_OUTCOMES = [Outcome.COMPLETED, Outcome.ERROR, Outcome.PRUNED_MEMORY, Outcome.INTERRUPTED]


class Died(Exception):
    """Stands for the death of a driver that is a thread."""


def claim_to_the_end(
    url: URL,
    study_id: int,
    trials: int,
    seed: int,
    *,
    audits: Sequence[int] = (),
    die: Callable[[], None] | None = None,
) -> None:
    """Claim until the study has its launches, then audit; a driver that dies joins again."""
    engine, draw = open_engine(url), random.Random(seed)
    drivers, slots, writer = Drivers(engine), Slots(engine), Writer(engine)
    driver_id, count = drivers.join(study_id, this_process()), 0

    def one(slot: Slot) -> None:
        nonlocal count
        count += 1
        if draw.random() < 0.08:
            (die or _raise)()  # between its claim and its trial's row
        trial_id = writer.add_trial(
            study_id, driver_id * 1000 + count, {}, driver_id=driver_id, slot_id=slot.id,
            repeats=slot.repeats, rejection_id=slot.rejection_id,
        )  # fmt: skip
        time.sleep(draw.random() * 0.01)
        if draw.random() < 0.08:
            (die or _raise)()
        result = TrialResult(draw.choice(_OUTCOMES[:2] + _OUTCOMES[3:] if slot.audit else _OUTCOMES))
        for _ in range(draw.choice([1, 2])):  # a result that is recorded twice is one
            writer.record_result(trial_id, result)

    left = list(audits)
    try:
        while left or slots.claims(study_id).launched < trials:
            token = str(uuid.uuid4())
            for _ in range(draw.choice([1, 2])):  # a claim that is repeated is one
                if slots.claims(study_id).launched < trials:
                    slot = slots.claim(study_id, driver_id, token=token, trials=trials)
                else:
                    slot = left and slots.claim_audit(study_id, driver_id, token=token, rejection_id=left[0])
            if not slot:
                settle_lost(engine, study_id)
                left = _not_audited(engine, study_id, audits)
                time.sleep(0.01)
                continue
            try:
                one(slot)
            except Died:
                with exclusive(engine, "claimers"):
                    _settle(engine, study_id, driver_id)
                try:
                    drivers.beat(driver_id)
                except LeaseLost:
                    driver_id = drivers.join(study_id, this_process())
        drivers.leave(driver_id, "done")
    finally:
        engine.dispose()


def settle_lost(engine: Engine, study_id: int) -> None:
    """Settle what dead drivers left, as the search does."""
    with exclusive(engine, "claimers"):
        for driver in Drivers(engine).lost(study_id):
            _settle(engine, study_id, driver.id)


def _settle(engine: Engine, study_id: int, driver_id: int) -> None:
    for trial in Reader(engine).trials(study_id, ["running"]):
        if trial.driver_id == driver_id:
            Writer(engine).record_result(trial.id, TrialResult(Outcome.INTERRUPTED))
    Drivers(engine).leave(driver_id, "lost")


def _not_audited(engine: Engine, study_id: int, audits: Sequence[int]) -> list[int]:
    rows = Reader(engine).trials(study_id)
    done = {t.rejection_id for t in rows if t.audit and t.outcome not in ("interrupted", "running")}
    return [rejection_id for rejection_id in audits if rejection_id not in done]


def _raise() -> None:
    raise Died


if __name__ == "__main__":
    claim_to_the_end(parse_url(sys.argv[1]), *map(int, sys.argv[2:5]), die=lambda: os._exit(9))
