"""Who is a driver, who is given up for lost, and what one that was can still do: nothing."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tuner.errors import LeaseLost
from tuner.processes import this_process
from tuner.records import EpochMetrics, Failure, Outcome, Owner, TrialResult
from tuner.store.drivers import SILENT_AFTER, Drivers, require_living

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.store.conftest import Store

EARLIER_BOOT = "an-earlier-boot" + this_process().boot_id[36:]
ELSEWHERE = Owner(host="another-host", boot_id="b", pid=7, started="1")
LIMIT_SECONDS = int(SILENT_AFTER.total_seconds())


def silent_for(store: Store, driver_id: int, seconds: int) -> None:
    """Move a driver's last sign of life into the past, by the database's own clock."""
    past = {"sqlite": f"datetime('now', '-{seconds} seconds')"}
    moment = past.get(store.engine.dialect.name, f"now() - interval '{seconds} seconds'")
    store.sql(f"UPDATE tuner_driver SET seen_at = {moment} WHERE id = :id", id=driver_id)


def lost(store: Store, study_id: int) -> list[int]:
    return [driver.id for driver in store.drivers.lost(study_id)]


def test_on_this_host_a_driver_lives_as_long_as_its_process(
    store: Store, living: tuple[Owner, subprocess.Popen[str]]
) -> None:
    owner, process = living
    study_id = store.study()
    driver_id = store.drivers.join(study_id, owner)
    silent_for(store, driver_id, 100 * LIMIT_SECONDS)  # silence proves nothing of what can be seen
    assert lost(store, study_id) == []
    assert [driver.owner for driver in store.reader.living_drivers(study_id)] == [owner]
    process.kill()
    process.wait()
    store.drivers.beat(driver_id)  # nor does a sign of life that came just before its end
    assert lost(store, study_id) == [driver_id]
    assert store.reader.living_drivers(study_id) == []


@pytest.mark.parametrize(
    "change",
    [{"started": "1"}, {"boot_id": EARLIER_BOOT}, {"pid": 2**22 + 1}],
)
def test_a_process_that_only_has_the_pid_is_not_the_driver(store: Store, change: dict[str, Any]) -> None:
    study_id = store.study()
    driver_id = store.drivers.join(study_id, dataclasses.replace(this_process(), **change))
    assert lost(store, study_id) == [driver_id]


def _elsewhere() -> Owner:
    return ELSEWHERE


def _in_a_container() -> Owner:
    """One that calls itself by this host's name: its pids mean nothing here."""
    me = this_process()
    boot, _, machine = me.boot_id.split("/")
    return dataclasses.replace(me, boot_id=f"{boot}/1/{machine}", started="1")


@pytest.mark.parametrize("owner", [_elsewhere, _in_a_container])
def test_a_driver_that_cannot_be_seen_lives_until_it_is_silent(
    store: Store, owner: Callable[[], Owner]
) -> None:
    study_id = store.study()
    driver_id = store.drivers.join(study_id, owner())
    for seconds, expected in ((LIMIT_SECONDS - 60, []), (LIMIT_SECONDS + 60, [driver_id])):
        silent_for(store, driver_id, seconds)
        assert lost(store, study_id) == expected
    store.drivers.beat(driver_id)  # slow, not dead: nobody had given it up
    assert lost(store, study_id) == []


def test_nobody_is_given_up_for_silence_right_after_the_database_was_away(store: Store) -> None:
    """Ten minutes without it: one driver is back first, and one elsewhere is about to be."""
    study_id = store.study()
    mine, other = store.driver(study_id), store.drivers.join(study_id, ELSEWHERE)
    for driver_id in (mine, other):
        silent_for(store, driver_id, 2 * LIMIT_SECONDS)
    for _ in range(2):
        store.drivers.beat(mine)
        assert lost(store, study_id) == []
    assert len(store.reader.living_drivers(study_id)) == 2
    moments = {"sqlite": f"datetime('now', '-{LIMIT_SECONDS + 60} seconds')"}
    moment = moments.get(store.engine.dialect.name, f"now() - interval '{LIMIT_SECONDS + 60} seconds'")
    store.sql(f"UPDATE tuner_driver SET back_at = {moment} WHERE back_at IS NOT NULL")
    assert lost(store, study_id) == [other]  # it has had its time


def test_a_join_whose_answer_was_lost_is_one_driver(store: Store) -> None:
    def twice(call: Callable[[], Any], /) -> Any:
        call()  # committed, and nobody heard of it
        return call()

    study_id = store.study()
    joined = [Drivers(store.engine, twice).join(study_id, this_process()) for _ in range(2)]
    assert [driver.id for driver in store.reader.living_drivers(study_id)] == joined


@pytest.mark.parametrize("storage", ["postgresql"], indirect=True)
def test_silence_is_the_same_in_every_time_zone_of_the_server(store: Store) -> None:
    study_id = store.study()
    driver_id = store.drivers.join(study_id, ELSEWHERE)
    store.sql(f"ALTER DATABASE {store.url.database} SET timezone TO 'Asia/Kathmandu'")
    store.engine.dispose()
    assert lost(store, study_id) == []
    silent_for(store, driver_id, LIMIT_SECONDS + 60)
    assert lost(store, study_id) == [driver_id]


def test_drivers_are_asked_to_stop_one_that_joins_later_is_not(store: Store) -> None:
    study_id, other_id = store.study(), store.study("other")
    first, second = (store.drivers.join(study_id, this_process()) for _ in range(2))
    assert store.drivers.beat(first) is None
    store.drivers.request_stop(study_id, "asked to")
    assert [store.drivers.beat(driver) for driver in (first, second, first)] == ["asked to"] * 3
    assert store.drivers.beat(store.drivers.join(study_id, this_process())) is None
    assert store.drivers.beat(store.driver(other_id)) is None


def test_who_leaves_lets_go_of_what_it_holds_and_of_nothing_else(store: Store) -> None:
    study_id = store.study()
    drivers = [store.drivers.join(study_id, this_process(), {"host": "h"}) for _ in range(2)]
    for driver_id in drivers:
        assert store.slots.claim(study_id, driver_id, token=f"t{driver_id}", trials=9) is not None
        trial_id = store.writer.add_trial(study_id, driver_id, {}, driver_id=driver_id)
        store.writer.record_result(trial_id, TrialResult(Outcome.COMPLETED))
        put(store, trial_id, driver_id)
    for reason in ("lost", "done"):  # the first reason counts
        store.drivers.leave(drivers[0], reason)
    assert store.sql("SELECT driver_id FROM tuner_slot") == [(drivers[1],)]
    assert store.sql("SELECT driver_id FROM tuner_reservation") == [(drivers[1],)]
    query = "SELECT end_reason, ended_at IS NULL FROM tuner_driver ORDER BY id"
    assert store.sql(query) == [("lost", False), (None, True)]
    assert [driver.id for driver in store.reader.living_drivers(study_id)] == [drivers[1]]
    assert store.reader.living_drivers(study_id)[0].environment == {"host": "h"}


def test_what_is_given_up_counts_until_it_is_settled(store: Store) -> None:
    """Else its slot would be claimed again while its finished trial is still to be recorded."""
    study_id = store.study()
    driver_id = store.driver(study_id)
    slot = store.slots.claim(study_id, driver_id, token="t", trials=9)
    assert slot is not None
    trial_id = store.writer.add_trial(study_id, 0, {}, driver_id=driver_id, slot_id=slot.id)
    put(store, trial_id, driver_id)
    for _ in range(2):
        store.drivers.give_up(driver_id)
        assert lost(store, study_id) == [driver_id]  # also for whoever comes after one that died over it
    assert store.slots.claims(study_id).open == 1
    assert store.reader.living_drivers(study_id) == []
    with pytest.raises(LeaseLost):
        store.drivers.beat(driver_id)
    store.writer.record_result(trial_id, TrialResult(Outcome.INTERRUPTED))
    store.drivers.leave(driver_id, "lost")
    assert lost(store, study_id) == []
    assert store.slots.claims(study_id).open == 0


def test_who_leaves_with_an_unsettled_trial_keeps_its_slot_until_others_settle_it(store: Store) -> None:
    """A driver whose last writes failed: its trial may have a report, which is recorded later."""
    study_id = store.study()
    driver_id, other_id = store.driver(study_id), store.drivers.join(study_id, this_process())
    slot = store.slots.claim(study_id, driver_id, token="t", trials=1)
    assert slot is not None
    trial_id = store.writer.add_trial(study_id, 0, {}, driver_id=driver_id, slot_id=slot.id)
    put(store, trial_id, driver_id)
    store.drivers.leave(driver_id, "failed")
    assert store.slots.claim(study_id, other_id, token="u", trials=1) is None
    assert lost(store, study_id) == [driver_id]
    store.writer.record_result(trial_id, TrialResult(Outcome.COMPLETED))
    store.drivers.leave(driver_id, "lost")
    assert lost(store, study_id) == []
    assert store.slots.claim(study_id, other_id, token="v", trials=1) is None
    assert store.sql("SELECT * FROM tuner_slot") == store.sql("SELECT * FROM tuner_reservation") == []
    assert store.sql("SELECT end_reason FROM tuner_driver WHERE ended_at IS NOT NULL") == [("failed",)]


def test_a_claim_that_was_under_way_holds_nothing_after_its_driver_left(store: Store) -> None:
    """The claim has checked its lease and is just before its COMMIT when the driver is given up."""
    study_id = store.study()
    driver_id = store.driver(study_id)
    with ThreadPoolExecutor() as pool:
        with store.engine.begin() as connection:
            require_living(connection, driver_id)
            leaving = pool.submit(store.drivers.leave, driver_id, "lost")
            deadline = time.monotonic() + 10
            while store.engine.dialect.name != "sqlite" and time.monotonic() < deadline:
                if connection.exec_driver_sql("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall():
                    break
                time.sleep(0.01)
            connection.exec_driver_sql(
                "INSERT INTO tuner_slot (token, study_id, driver_id, audit) "
                f"VALUES ('t', {study_id}, {driver_id}, false)"
            )
        leaving.result()
    assert store.sql("SELECT * FROM tuner_slot") == []


def put(store: Store, trial_id: int, driver_id: int) -> None:
    values: dict[str, Any] = {"device": "GPU-1", "device_bytes": 1, "host": "h", "host_bytes": 1}
    store.reservations.decide(lambda book: book.put(trial_id, driver_id, **values, granted=True))


def test_a_driver_that_was_given_up_can_do_nothing_more(store: Store) -> None:
    study_id = store.study()
    trial_id, driver_id = store.trial(study_id), store.driver(study_id)
    store.writer.record_result(trial_id, TrialResult(Outcome.INTERRUPTED))
    store.drivers.leave(driver_id, "lost")
    tables = ("tuner_study", "tuner_driver", "tuner_trial", "tuner_slot", "tuner_reservation")
    before = {table: store.sql(f"SELECT * FROM {table}") for table in tables}
    for refused in (
        lambda: store.drivers.beat(driver_id),
        lambda: store.slots.claim(study_id, driver_id, token="t", trials=9),
        lambda: store.slots.claim_audit(study_id, driver_id, token="t", rejection_id=0),
        lambda: store.writer.add_trial(study_id, 1, {}, driver_id=driver_id),
        lambda: put(store, trial_id, driver_id),
        lambda: store.writer.record_launch(trial_id, run_folder="f", reservation_bytes=1),
        lambda: store.writer.record_attempt(trial_id, {"attempt": 1}),
    ):
        with pytest.raises(LeaseLost, match="given up for lost"):
            refused()
    assert {table: store.sql(f"SELECT * FROM {table}") for table in tables} == before


def test_a_late_result_is_a_note_beside_the_one_that_counts(store: Store) -> None:
    study_id = store.study()
    trial_id = store.trial(study_id)
    given_up = TrialResult(Outcome.INTERRUPTED, failure=Failure("its driver ended before it did"))
    assert store.writer.record_result(trial_id, given_up)
    before = store.reader.trial(study_id, 0)
    epochs = (EpochMetrics(1, {"accuracy": 0.5}, 1.0),)
    late = TrialResult(Outcome.COMPLETED, 0.5, {"accuracy": 0.5}, epochs, seconds=9.0)
    assert not store.writer.record_result(trial_id, late)
    kept = store.reader.trial(study_id, 0)
    assert dataclasses.replace(kept, late_result=None) == before
    assert kept.late_result is not None
    assert TrialResult.from_json(kept.late_result) == late
    assert store.reader.metrics(trial_id) == []
    assert store.writer.record_result(trial_id, given_up)  # what counts, once more
