"""The book of reservations: held still for each decision, never over the pool, first come first served."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from tests.store.reservers import POOL, reserve_at_random
from tuner.processes import this_process
from tuner.records import Outcome, Owner, TrialResult
from tuner.store.reservations import Held

if TYPE_CHECKING:
    from pathlib import Path

    from tests.store.conftest import Store

UNSEEN = Owner(host="another-host", boot_id="b", pid=7, started="1")


def put(store: Store, trial_id: int, driver_id: int, **changes: Any) -> None:
    values = {"device": "GPU-1", "device_bytes": 2**40, "host": "h", "host_bytes": 2**33, "granted": False}
    store.reservations.decide(lambda book: book.put(trial_id, driver_id, **{**values, **changes}))


def test_a_place_in_the_queue_is_kept_until_the_trial_ends(store: Store) -> None:
    study_id = store.study()
    driver_id = store.driver(study_id)
    first, second = (store.trial(study_id, number) for number in range(2))
    put(store, first, driver_id)
    put(store, second, driver_id)
    put(store, first, driver_id, device="GPU-2", device_bytes=5, granted=True)
    store.reservations.runs_as(first, 77)
    held = store.reservations.all()
    assert held == [
        Held(held[0].id, first, "GPU-2", 5, "h", 2**33, granted=True, pid=77, study_id=study_id),
        Held(held[1].id, second, "GPU-1", 2**40, "h", 2**33, granted=False, study_id=study_id),
    ]
    assert held[0].id < held[1].id
    assert store.reservations.pid_of(first) is None  # a process of the host h: nothing to look for here
    put(store, first, driver_id, host=this_process().host)
    assert (store.reservations.pid_of(first), store.reservations.pid_of(second)) == (77, None)
    store.writer.record_result(first, TrialResult(Outcome.COMPLETED))
    assert [row.trial_id for row in store.reservations.all()] == [second]


def test_nothing_is_written_where_nothing_changes(store: Store) -> None:
    study_id = store.study()
    driver_id, trial_id = store.driver(study_id), store.trial(study_id)
    written: list[str] = []

    @event.listens_for(store.engine, "before_cursor_execute")
    def note(connection: Any, cursor: Any, statement: str, *args: Any) -> None:
        written.extend([statement] if statement.startswith(("INSERT", "UPDATE")) else [])

    changes: list[dict[str, Any]] = [{}, {}, {"device_bytes": 7}, {"device_bytes": 7}]
    changes += [{"device_bytes": 7, "granted": True}] * 2
    counts = [put(store, trial_id, driver_id, **change) or len(written) for change in changes]
    assert counts == [1, 1, 2, 2, 3, 3]


def test_a_second_attempt_queues_anew_at_the_end(store: Store) -> None:
    study_id = store.study()
    driver_id = store.driver(study_id)
    first, second = (store.trial(study_id, number) for number in range(2))
    put(store, first, driver_id, granted=True)
    put(store, second, driver_id)
    for _ in range(2):  # kept once, however often it is written
        store.writer.record_attempt(first, {"attempt": 1, "outcome": "out_of_memory"})
    assert store.reader.trial(study_id, 0).attempts == [{"attempt": 1, "outcome": "out_of_memory"}]
    put(store, first, driver_id)
    assert [row.trial_id for row in store.reservations.all()] == [second, first]


def test_rows_of_other_studies_count_those_of_dead_drivers_do_not(store: Store) -> None:
    me = this_process()
    owners = {
        "alive": me,
        "dead": dataclasses.replace(me, started="1"),
        "unseen": UNSEEN,
        "silent": UNSEEN,
        "ended": me,
    }
    trials = {}
    for name, owner in owners.items():
        study_id = store.study(name)
        driver_id = store.drivers.join(study_id, owner)
        trials[name] = store.trial(study_id)
        put(store, trials[name], driver_id, granted=True)
        if name == "silent":
            store.sql("UPDATE tuner_driver SET seen_at = '2020-01-01 00:00:00' WHERE id = :id", id=driver_id)
        if name == "ended":
            store.sql("UPDATE tuner_driver SET ended_at = seen_at WHERE id = :id", id=driver_id)
    assert [row.trial_id for row in store.reservations.all()] == [trials["alive"], trials["unseen"]]


def replayed(log: Path) -> tuple[list[str], list[str], int]:
    """Return the trials in the order of their asks and of their grants, and the most held at once."""
    asks, grants, held, most = [], [], {}, 0
    gone = set()
    for line in log.read_text().splitlines():
        what, trial, size = line.split()
        if what == "ask":
            asks.append(trial)
        elif what == "grant":
            grants.append(trial)
            held[trial] = int(size)
            most = max(most, sum(held.values()))
        elif held.pop(trial, None) is None:
            gone.add(trial)  # its driver died while it waited
    return [trial for trial in asks if trial not in gone], grants, most


def test_threads_share_a_pool_first_come_first_served(store: Store, tmp_path: Path) -> None:
    study_id, log = store.study(), tmp_path / "log"
    with ThreadPoolExecutor(6) as pool:
        runs = [pool.submit(reserve_at_random, store.url, study_id, seed, log, 8) for seed in range(6)]
        for run in runs:
            run.result()
    asks, grants, most = replayed(log)
    assert len(grants) == 6 * 8
    assert grants == asks  # nobody is passed, so nobody starves
    assert POOL * 0.8 <= most <= POOL


def test_processes_that_die_with_memory_or_waiting_for_it_stand_in_nobodys_way(
    store: Store, tmp_path: Path
) -> None:
    study_id, log = store.study(), tmp_path / "log"
    url = store.url.render_as_string(hide_password=False)
    command = [sys.executable, "-P", "-m", "tests.store.reservers", url, str(study_id)]
    processes = [
        subprocess.Popen([*command, str(seed), log, "10", *death])
        for seed, death in enumerate([[], ["waiting"], [], ["holding"]])
    ]
    codes = [process.wait(timeout=120) for process in processes]
    assert codes[::2] == [0, 0]
    assert codes[3] == 9
    assert codes[1] in (0, 9)  # 0: it never had to wait
    asks, grants, most = replayed(log)
    assert grants == asks
    assert most <= POOL
    assert len(store.drivers.lost(study_id)) == codes.count(9)
    assert store.reservations.all() == []
