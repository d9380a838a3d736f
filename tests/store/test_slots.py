"""Over any number of drivers, launches never exceed what is wanted, and reach it in the end."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from tests.store.claimers import claim_to_the_end, settle_lost
from tuner.processes import this_process
from tuner.records import Outcome, Owner, TrialResult
from tuner.store.engine import open_engine
from tuner.store.rejections import Rejections
from tuner.store.rows import NewRejection
from tuner.store.slots import Claims, Slots
from tuner.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.store.conftest import Store

DEAD = Owner(host=this_process().host, boot_id=this_process().boot_id, pid=this_process().pid, started="1")


def end(store: Store, trial_id: int, outcome: Outcome = Outcome.COMPLETED) -> None:
    store.writer.record_result(trial_id, TrialResult(outcome))


def claimed(store: Store, study_id: int, number: int, *, trials: int = 9) -> int:
    """Claim, add the trial `number`, and return its id."""
    driver_id = store.driver(study_id)
    slot = store.slots.claim(study_id, driver_id, token=str(uuid.uuid4()), trials=trials)
    assert slot is not None
    return store.writer.add_trial(
        study_id, number, {}, driver_id=driver_id, slot_id=slot.id, repeats=slot.repeats
    )


def next_repeats(store: Store, study_id: int) -> int | None:
    """Return what the next slot would repeat."""
    driver_id = store.driver(study_id)
    slot = store.slots.claim(study_id, driver_id, token=str(uuid.uuid4()), trials=99)
    assert slot is not None
    store.slots.release(slot.id, driver_id)
    return slot.repeats


def test_there_are_as_many_slots_as_launches_are_wanted(store: Store) -> None:
    study_id, other_id = store.study(), store.study("other")
    trials = [claimed(store, study_id, number, trials=2) for number in range(2)]
    claim = lambda: store.slots.claim(study_id, store.driver(study_id), token="x", trials=2)  # noqa: E731
    assert claim() is None
    assert store.slots.claims(study_id) == Claims(launched=0, open=2)
    end(store, trials[0])
    assert claim() is None
    end(store, trials[1], Outcome.PRUNED_MEMORY)  # it was not launched: another one is wanted
    assert store.slots.claims(study_id) == Claims(launched=1, open=0)
    assert claim() is not None
    assert store.slots.claims(other_id) == Claims(0, 0)


def test_a_claim_that_is_repeated_is_one_slot(store: Store) -> None:
    study_id = store.study()
    slots = [store.slots.claim(study_id, store.driver(study_id), token="t", trials=9) for _ in range(3)]
    assert slots[0] == slots[1] == slots[2]
    assert store.slots.claims(study_id).open == 1


@pytest.mark.parametrize("storage", ["postgresql"], indirect=True)
@pytest.mark.parametrize("statement", range(5))
def test_a_result_that_comes_in_the_middle_of_a_claim_counts_once(store: Store, statement: int) -> None:
    """One launch is wanted; its trial ends after the n-th statement of another claim."""
    study_id = store.study()
    driver_id, trial_id = store.driver(study_id), claimed(store, study_id, 0, trials=1)
    other = open_engine(store.url)
    seen = [0]

    @event.listens_for(store.engine, "after_cursor_execute")
    def record_now(*args: Any) -> None:
        seen[0] += 1
        if seen[0] == statement + 1:
            Writer(other).record_result(trial_id, TrialResult(Outcome.COMPLETED))

    try:
        assert store.slots.claim(study_id, driver_id, token="t", trials=1) is None
    finally:
        other.dispose()
    assert seen[0] >= 3


def test_an_interrupted_trial_comes_again_once_and_its_repeat_too(store: Store) -> None:
    study_id = store.study()
    trials = [claimed(store, study_id, number) for number in range(3)]
    for trial_id in (trials[2], trials[1]):
        end(store, trial_id, Outcome.INTERRUPTED)
    assert next_repeats(store, study_id) == 1  # the oldest; a slot given back is no repeat
    repeat = claimed(store, study_id, 3)
    assert store.reader.trial(study_id, 3).repeats == 1
    assert claimed(store, study_id, 4)
    assert store.reader.trial(study_id, 4).repeats == 2
    assert next_repeats(store, study_id) is None
    end(store, repeat, Outcome.INTERRUPTED)
    assert next_repeats(store, study_id) == 3


@pytest.mark.parametrize("storage", ["sqlite"], indirect=True)
def test_a_claim_does_not_grow_with_the_square_of_what_was_interrupted(store: Store) -> None:
    """SQLite counts its own steps: without the indexes the second one takes 22 times as many."""
    study_id, steps = store.study(), []
    driver_id = store.driver(study_id)
    for count in (100, 400):
        store.sql(
            "INSERT INTO tuner_trial (study_id, number, audit, params, outcome, repeats, asked_at)"
            f"WITH RECURSIVE n (i) AS (SELECT {10 * count} UNION ALL SELECT i + 1 FROM n LIMIT {count})"
            f" SELECT {study_id}, i, 0, '{{}}', CASE WHEN i % 2 THEN 'completed' ELSE 'interrupted' END,"
            " CASE WHEN i % 2 THEN i - 1 END, '2026-01-01' FROM n"
        )
        seen = [0]

        def step(seen: list[int] = seen) -> None:
            seen[0] += 1

        with store.engine.connect() as connection:
            raw = connection.connection.driver_connection
            assert raw is not None
            raw.set_progress_handler(step, 10)
        slot = store.slots.claim(study_id, driver_id, token=str(count), trials=10**6)
        assert slot is not None
        assert slot.repeats is None
        steps.append(seen[0])
    assert steps[1] < 8 * steps[0]  # 5 times as many trials


def test_a_repeat_whose_driver_died_before_it_was_asked_comes_again(store: Store) -> None:
    study_id = store.study()
    end(store, claimed(store, study_id, 0), Outcome.INTERRUPTED)
    other = store.drivers.join(study_id, DEAD)
    slot = store.slots.claim(study_id, other, token="t", trials=9)
    assert slot is not None
    assert slot.repeats == 0
    assert next_repeats(store, study_id) is None
    store.drivers.leave(other, "lost")
    assert next_repeats(store, study_id) == 0


def turned_away(store: Store, study_id: int, count: int) -> list[int]:
    """Add a trial before which so many draws were turned away; return the rejections' ids."""
    rejections = [NewRejection({}, None, 10, "too large")] * count
    driver_id = store.driver(study_id)
    trial_id = store.writer.add_trial(study_id, 1_000_000, {}, driver_id=driver_id, rejections=rejections)
    end(store, trial_id, Outcome.PRUNED_MEMORY)
    return [one.id for one in Rejections(store.engine).all(study_id)]


def test_an_audit_is_made_once_and_counts_against_nothing(store: Store) -> None:
    study_id, tokens = store.study(), map(str, range(9))
    first, second = store.driver(study_id), store.drivers.join(study_id, this_process())
    (rejected,) = turned_away(store, study_id, 1)
    audit = lambda who, token: store.slots.claim_audit(  # noqa: E731
        study_id, who, token=token, rejection_id=rejected
    )
    slot = audit(first, "t")
    assert slot is not None
    assert (slot, slot.audit, slot.rejection_id) == (audit(first, "t"), True, rejected)
    assert audit(second, next(tokens)) is None
    trial_id = store.writer.add_trial(
        study_id, 1, {}, driver_id=first, slot_id=slot.id, rejection_id=rejected
    )
    assert audit(second, next(tokens)) is None
    assert store.slots.claims(study_id) == Claims(0, 0)
    end(store, trial_id, Outcome.INTERRUPTED)
    assert next_repeats(store, study_id) is None  # only an audit repeats it
    slot = audit(second, next(tokens))
    assert slot is not None
    again = store.writer.add_trial(study_id, 2, {}, driver_id=second, slot_id=slot.id, rejection_id=rejected)
    end(store, again, Outcome.OUT_OF_MEMORY)
    assert audit(first, next(tokens)) is None
    assert store.slots.claims(study_id) == Claims(0, 0)


def test_a_slot_is_given_back_by_its_own_driver_alone(store: Store) -> None:
    """SQLite gives the id of a deleted row to the next one: the first driver's is the second's now."""
    study_id = store.study()
    first, second = (store.drivers.join(study_id, this_process()) for _ in range(2))
    lost = store.slots.claim(study_id, first, token="a", trials=1)
    assert lost is not None
    store.drivers.leave(first, "lost")
    taken = store.slots.claim(study_id, second, token="b", trials=1)
    assert taken is not None
    store.slots.release(lost.id, first)
    assert store.slots.claims(study_id).open == 1
    store.slots.release(taken.id, second)
    assert store.slots.claims(study_id).open == 0


def test_only_a_living_driver_is_about_to_add_a_trial(store: Store) -> None:
    study_id = store.study()
    dead, alive = store.drivers.join(study_id, DEAD), store.driver(study_id)
    assert store.slots.claim(study_id, dead, token="a", trials=9) is not None
    assert not store.slots.asking(study_id)
    slot = store.slots.claim(study_id, alive, token="b", trials=9)
    assert slot is not None
    assert store.slots.asking(study_id)
    store.writer.add_trial(study_id, 0, {}, driver_id=alive, slot_id=slot.id)
    assert not store.slots.asking(study_id)


@pytest.fixture
def watched(store: Store) -> Iterator[list[int]]:
    """Launches and open slots together, counted all the time in one statement of plain SQL."""
    query = (
        "SELECT (SELECT count(*) FROM tuner_trial WHERE NOT audit AND outcome IN ('completed', 'error')) "
        "+ (SELECT count(*) FROM tuner_slot WHERE NOT audit)"
    )
    seen, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            seen.append(store.sql(query)[0][0])

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    ended.set()
    thread.join()


def check(store: Store, study_id: int, watched: list[int], trials: int, audits: list[int]) -> None:
    settle_lost(store.engine, study_id)
    rows = store.reader.trials(study_id)
    launched = [t for t in rows if not t.audit and t.outcome in ("completed", "error")]
    assert len(launched) == trials
    assert max(watched) <= trials
    assert store.sql("SELECT * FROM tuner_slot") == []
    assert all(not trial.is_running for trial in rows)
    repeats = sorted(t.repeats for t in rows if t.repeats is not None and not t.audit)
    assert repeats == [t.number for t in rows if t.outcome == "interrupted" and not t.audit]
    audited = [t.rejection_id for t in rows if t.audit and t.outcome != "interrupted"]
    assert sorted(rejection_id for rejection_id in audited if rejection_id is not None) == audits


def test_any_number_of_threads_reach_the_number_exactly(store: Store, watched: list[int]) -> None:
    """Six drivers in threads, 30 launches, with prunes, interruptions, deaths and repeated claims."""
    study_id, trials = store.study(), 30
    rejected = turned_away(store, study_id, 2)
    with ThreadPoolExecutor(6) as pool:
        runs = [
            pool.submit(claim_to_the_end, store.url, study_id, trials, seed, audits=rejected)
            for seed in range(6)
        ]
        for run in runs:
            run.result()
    check(store, study_id, watched, trials, rejected)


def test_processes_that_are_killed_and_replaced_reach_the_number_exactly(
    store: Store, watched: list[int]
) -> None:
    study_id, trials = store.study(), 12
    url = store.url.render_as_string(hide_password=False)
    start = lambda seed: subprocess.Popen(  # noqa: E731
        [sys.executable, "-P", "-m", "tests.store.claimers", url, str(study_id), str(trials), str(seed)]
    )
    running = [start(seed) for seed in range(3)]
    deaths = 0
    while running:
        process = running.pop(0)
        if process.wait(timeout=60) == 9:
            deaths += 1
            running.append(start(100 + deaths))
        else:
            assert process.returncode == 0
    check(store, study_id, watched, trials, [])
    assert deaths > 0
    ends = dict(store.sql("SELECT end_reason, count(*) FROM tuner_driver GROUP BY end_reason"))  # type: ignore[arg-type]
    assert ends["lost"] == deaths


def test_random_histories_agree_with_a_plain_count(store: Store) -> None:
    """One thread, 300 random moves of three drivers; baseline: a list and two counters."""
    draw = random.Random(4)
    study_id, trials, number = store.study(), 12, 0
    drivers = [store.drivers.join(study_id, this_process()) for _ in range(3)]
    open_slots: list[tuple[int, int]] = []  # (driver, trial)
    launched, waiting = 0, []
    for _ in range(300):
        who, move = draw.randrange(3), draw.random()
        if move < 0.5:
            slot = Slots(store.engine).claim(study_id, drivers[who], token=str(uuid.uuid4()), trials=trials)
            assert (slot is not None) == (launched + len(open_slots) < trials)
            if slot is not None:
                assert slot.repeats == (min(waiting) if waiting else None)
                waiting = [n for n in waiting if n != slot.repeats]
                trial_id = store.writer.add_trial(
                    study_id, number, {}, driver_id=drivers[who], slot_id=slot.id, repeats=slot.repeats
                )
                open_slots.append((drivers[who], trial_id))
                number += 1
        elif move < 0.9 and open_slots:
            _, trial_id = open_slots.pop(draw.randrange(len(open_slots)))
            outcome = draw.choice([Outcome.PRUNED_MEMORY, Outcome.INTERRUPTED, Outcome.COMPLETED])
            end(store, trial_id, outcome)
            launched += outcome is Outcome.COMPLETED
            if outcome is Outcome.INTERRUPTED:
                waiting.append(dict(store.sql("SELECT id, number FROM tuner_trial"))[trial_id])  # type: ignore[arg-type]
        elif move >= 0.9:
            numbers: dict[int, int] = dict(store.sql("SELECT id, number FROM tuner_trial"))  # type: ignore[arg-type]
            for _, trial_id in [held for held in open_slots if held[0] == drivers[who]]:
                end(store, trial_id, Outcome.INTERRUPTED)
                waiting.append(numbers[trial_id])
            store.drivers.leave(drivers[who], "lost")
            open_slots = [held for held in open_slots if held[0] != drivers[who]]
            drivers[who] = store.drivers.join(study_id, this_process())
        assert store.slots.claims(study_id) == Claims(launched, len(open_slots))
    assert launched == trials
