"""Several trials at once, of one driver or of several: limits hold, nothing is lost or done twice."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from optuna.trial import TrialState
from sqlalchemy import text

from tests.search.driving import drive
from tests.search.stand_ins import (
    BUDGET,
    FunctionLauncher,
    ToldLauncher,
    ToldTrial,
    Watcher,
    Widths,
    completed,
    fits,
    flying,
    run_loop,
    session_on,
    wait_until,
)
from tests.search.test_loop import optuna_trials
from tuner.errors import Interrupted, TooManyFailures
from tuner.processes import this_process
from tuner.records import Failure, Outcome, Peaks, TrialResult
from tuner.scheduling import ledger
from tuner.search import loop
from tuner.search.events import Goal, Stopper
from tuner.search.optuna_study import REPEATS
from tuner.search.recover import recover
from tuner.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tuner.execution.run_folder import Request, RunFolder
    from tuner.search.session import Session

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.search.driving"])
AGREED = {
    "completed": TrialState.COMPLETE,
    "interrupted": TrialState.FAIL,
    "error": TrialState.FAIL,
    "pruned_memory": TrialState.PRUNED,
    "out_of_memory": TrialState.PRUNED,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often; and a host whose memory others do not use meanwhile."""
    monkeypatch.setattr(loop, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(loop, "_REST_SECONDS", 0.02)
    monkeypatch.setattr(ledger, "available_host_bytes", lambda: 32 * GIB)


class Sized(Widths):
    """Trial n gets the n-th size, a repeat that of its trial; the last one for ever."""

    def __init__(self, *sizes_mib: int) -> None:
        self._sizes = sizes_mib

    def suggest(self, trial: Any) -> dict[str, Any]:
        number = trial.user_attrs.get(REPEATS, trial.number)
        size = self._sizes[min(number, len(self._sizes) - 1)]
        return {"mib": trial.suggest_int("mib", size, size), "rate": trial.suggest_float("rate", 0, 1)}


def needs(params: dict[str, Any]) -> int:
    return int(params["mib"]) * MIB


def good(params: dict[str, Any]) -> TrialResult:
    return TrialResult(Outcome.COMPLETED, value=0.5, peaks=Peaks(500 * MIB, "VmHWM", MIB), seconds=1.0)


def sql(session: Session, statement: str) -> list[tuple[Any, ...]]:
    with session.engine.begin() as connection:
        result = connection.execute(text(statement))
        return [tuple(row) for row in result] if result.returns_rows else []


def one_waits(session: Session) -> bool:
    return any(not held.granted for held in session.reservations.all())


def finish(launcher: ToldLauncher, *runs: Future[None], when: Callable[[], bool] = lambda: True) -> None:
    """End trials, the oldest first, as long as something holds, until the loops have ended."""

    def ended() -> bool:
        if launcher.running and when():
            launcher.end(launcher.running[0])
        return all(run.done() for run in runs)

    wait_until(ended)
    for run in runs:
        run.result()


def check_order(session: Session, url: str) -> None:
    """Check what holds at the end of every study."""
    trials = session.reader.trials(session.study.id)
    told = {trial.number: trial.state for trial in optuna_trials(url)}
    for trial in trials:
        assert told.pop(trial.number) is AGREED[trial.outcome]
    assert set(told.values()) <= {TrialState.FAIL}  # asked for, and never added
    for table in ("tuner_slot", "tuner_reservation"):
        assert sql(session, f"SELECT * FROM {table}") == []
    interrupted = [t.number for t in trials if t.outcome == "interrupted" and not t.audit]
    assert sorted(t.repeats for t in trials if t.repeats is not None and not t.audit) == interrupted


def test_no_more_run_at_once_than_jobs(sqlite_url: str, tmp_path: Path) -> None:
    launcher = ToldLauncher(completed)
    with session_on(sqlite_url, tmp_path, allocated=lambda p: MIB, jobs=3) as session:
        with flying(session, Goal(trials=10), launcher) as (run, _):
            for ended in range(8):
                wait_until(lambda: len(launcher.running) == 3)
                assert len(launcher.trials) == 3 + ended
                launcher.end(launcher.running[0])
            finish(launcher, run)
        check_order(session, sqlite_url)
    assert (len(launcher.trials), launcher.most[0]) == (10, 3)


def test_the_pool_is_never_exceeded(storage: str, tmp_path: Path) -> None:
    """Trials of 430 to 1024 MiB, jobs for ten, a pool for two or more."""
    launcher, pool = ToldLauncher(completed), 2 * GIB
    with session_on(storage, tmp_path, allocated=fits, jobs=10, pool_bytes=pool, seed=3) as session:
        with flying(session, Goal(trials=15), launcher) as (run, watcher):
            finish(launcher, run, when=lambda: len(launcher.trials) == 15 or one_waits(session))
        check_order(session, storage)
    assert len(launcher.trials) == 15
    assert launcher.most[1] <= pool
    assert launcher.most[0] >= 2
    assert any("trials there hold" in reason for _, reason in watcher.waits)


def test_two_of_40_percent_run_together_and_one_of_70_alone(sqlite_url: str, tmp_path: Path) -> None:
    launcher, pool = ToldLauncher(good), GIB
    session_ = session_on(
        sqlite_url, tmp_path, allocated=needs, workload=Sized(1, 1, 290, 1), jobs=8, pool_bytes=pool
    )
    with session_ as session, flying(session, Goal(trials=4), launcher) as (run, watcher):
        wait_until(lambda: len(launcher.running) == 2 and watcher.waits)
        shares = [(trial.request.reservation_bytes or 0) / pool for trial in launcher.running]
        assert shares == pytest.approx([0.4, 0.4], abs=0.04)
        number, reason = watcher.waits[-1]
        assert number == 2
        assert "on cpu: 2 trials there hold" in reason
        launcher.end(launcher.trials[0])
        wait_until(lambda: len(watcher.waits) == 2)  # another reason: one trial there
        assert [trial.params["mib"] for trial in launcher.running] == [1]
        launcher.end(launcher.trials[1])
        wait_until(lambda: len(launcher.trials) == 3)
        assert launcher.trials[2].request.reservation_bytes == pytest.approx(0.7 * pool, rel=0.05)
        launcher.end(launcher.trials[2])
        wait_until(lambda: len(launcher.trials) == 4)
        assert launcher.trials[2].running is False  # the last one had to wait for it
        launcher.end(launcher.trials[3])
        run.result(10)
    assert launcher.most[1] <= pool


def test_a_large_one_is_not_passed_by_small_ones_of_another_driver(sqlite_url: str, tmp_path: Path) -> None:
    launcher = ToldLauncher(good)
    options: Any = {"allocated": needs, "workload": Sized(1, 290, 1), "pool_bytes": GIB}
    goal = Goal(trials=4)
    with (
        session_on(sqlite_url, tmp_path, jobs=2, **options) as first,
        flying(first, goal, launcher) as (one, waits),
    ):
        wait_until(lambda: len(launcher.running) == 1 and waits.waits)  # 40 % run, 70 % wait
        with (
            session_on(sqlite_url, tmp_path, jobs=2, **options) as second,
            flying(second, goal, launcher) as (two, others),
        ):
            wait_until(lambda: others.waits)  # 40 % would fit beside the first
            assert others.waits[0][1].startswith("its turn on cpu, behind one that needs")
            launcher.end(launcher.trials[0])
            wait_until(lambda: len(launcher.trials) == 2)
            assert launcher.trials[1].params["mib"] == 290
            finish(launcher, one, two)
    assert len(launcher.trials) == 4


class Tight(FunctionLauncher):
    """Out of memory under less than `enough` bytes."""

    def __init__(self, enough: int) -> None:
        super().__init__(completed)
        self._enough = enough
        self.requests: list[Request] = []

    def start(self, folder: RunFolder, request: Request) -> Any:
        self.requests.append(request)
        super().start(folder, request)
        result = completed(request.params)
        if (request.reservation_bytes or 0) < self._enough:
            failure = Failure("out of memory", requested_bytes=MIB)
            result = TrialResult(Outcome.OUT_OF_MEMORY, peaks=Peaks(450 * MIB), failure=failure, seconds=2.0)
        trial = ToldTrial(request.params, request)
        trial.ends(result)
        return trial


@pytest.mark.parametrize(("enough", "outcome"), [(BUDGET, "completed"), (2 * BUDGET, "out_of_memory")])
def test_out_of_memory_under_less_than_the_budget_gets_the_whole_of_it_once(
    storage: str, tmp_path: Path, enough: int, outcome: str
) -> None:
    launcher = Tight(enough)
    with session_on(storage, tmp_path, allocated=lambda p: MIB, seed=1) as session:
        with flying(session, Goal(trials=2), launcher) as (run, watcher):
            run.result(20)
        trials = session.reader.trials(session.study.id)
        check_order(session, storage)
    reservations = [request.reservation_bytes or 0 for request in launcher.requests]
    assert [request.attempt for request in launcher.requests] == [1, 2, 1, 2]
    assert reservations[1::2] == [BUDGET, BUDGET] > reservations[::2]
    assert [trial.outcome for trial in trials] == [outcome] * 2
    assert len(watcher.repeated) == len(watcher.trials) == 2
    for trial, first in zip(trials, reservations[::2], strict=True):
        assert (trial.attempt, trial.reservation_bytes) == (2, BUDGET)
        (kept,) = trial.attempts
        assert (kept["attempt"], kept["reservation_bytes"], kept["outcome"]) == (1, first, "out_of_memory")
        assert kept["failure"]["requested_bytes"] == MIB
        assert kept["run_folder"] != trial.run_folder


def two_run_and_one_waits(launcher: ToldLauncher, watcher: Watcher) -> None:
    wait_until(lambda: len(launcher.running) == 2 and watcher.waits)


CROWDED: dict[str, Any] = {
    "allocated": needs, "workload": Sized(1, 2, 290, 3), "jobs": 8, "pool_bytes": GIB
}  # fmt: skip


def test_a_first_stop_lets_running_trials_end_and_waiting_ones_come_again(
    sqlite_url: str, tmp_path: Path
) -> None:
    launcher, stopper = ToldLauncher(good), Stopper()
    with session_on(sqlite_url, tmp_path, **CROWDED) as session:
        with flying(session, Goal(trials=4), launcher, stopper) as (run, watcher):
            two_run_and_one_waits(launcher, watcher)
            stopper.stop(1, "asked to stop")
            wait_until(lambda: watcher.trials)
            assert [(t.number, t.result.outcome) for t in watcher.trials] == [(2, "interrupted")]
            assert all(trial.stopped is None and trial.running for trial in launcher.trials)
            for trial in launcher.running:
                launcher.end(trial)
            with pytest.raises(Interrupted, match="asked to stop; 2 of 4 trials are done"):
                run.result(10)
        assert session.reader.outcomes(session.study.id) == {"completed": 2, "interrupted": 1}
    with session_on(sqlite_url, tmp_path, **CROWDED) as session:
        again, _ = run_loop(session, Goal(trials=4), good)
        check_order(session, sqlite_url)
    assert [params["mib"] for params in again.launched] == [290, 3]


def test_a_second_stop_ends_them(sqlite_url: str, tmp_path: Path) -> None:
    launcher, stopper = ToldLauncher(good), Stopper()
    with session_on(sqlite_url, tmp_path, **CROWDED) as session:
        with flying(session, Goal(trials=4), launcher, stopper) as (run, watcher):
            two_run_and_one_waits(launcher, watcher)
            stopper.stop(2, "terminated")
            with pytest.raises(Interrupted, match="terminated; 0 of 4"):
                run.result(10)
        assert [trial.stopped.outcome for trial in launcher.trials if trial.stopped] == ["interrupted"] * 2
        assert session.reader.outcomes(session.study.id) == {"interrupted": 3}
        for table in ("tuner_slot", "tuner_reservation"):
            assert sql(session, f"SELECT * FROM {table}") == []
    assert {trial.state for trial in optuna_trials(sqlite_url)} == {TrialState.FAIL}


def test_after_the_timeout_nothing_starts_and_what_runs_may_end(sqlite_url: str, tmp_path: Path) -> None:
    launcher = ToldLauncher(good)
    with session_on(sqlite_url, tmp_path, **CROWDED) as session:
        with flying(session, Goal(trials=9, timeout_seconds=3.0), launcher) as (run, watcher):
            two_run_and_one_waits(launcher, watcher)
            wait_until(lambda: watcher.trials)  # the waiting one is given up
            for trial in launcher.running:
                assert trial.stopped is None
                launcher.end(trial)
            run.result(10)
        assert session.reader.outcomes(session.study.id) == {"completed": 2, "interrupted": 1}


def test_a_trial_that_takes_too_long_is_stopped_its_neighbour_is_not(sqlite_url: str, tmp_path: Path) -> None:
    launcher = ToldLauncher(completed)
    with session_on(sqlite_url, tmp_path, allocated=lambda p: MIB, jobs=2) as session:
        with flying(session, Goal(trials=2, trial_timeout_seconds=0.5), launcher) as (run, _):
            wait_until(lambda: len(launcher.trials) == 2)
            launcher.end(launcher.trials[1])
            run.result(10)
        assert session.reader.outcomes(session.study.id) == {"completed": 1, "timed_out": 1}
    assert launcher.trials[0].stopped is not None
    assert launcher.trials[1].stopped is None


def test_too_many_failures_let_the_others_end_first(sqlite_url: str, tmp_path: Path) -> None:
    launcher = ToldLauncher(completed)
    with session_on(sqlite_url, tmp_path, allocated=lambda p: MIB, jobs=4) as session:
        with flying(session, Goal(trials=20, max_failures=1), launcher) as (run, watcher):
            wait_until(lambda: len(launcher.running) == 4)
            for trial in launcher.trials[:2]:
                launcher.end(trial, TrialResult(Outcome.ERROR, failure=Failure("no")))
            wait_until(lambda: len(watcher.trials) == 2)
            assert not run.done()
            for trial in launcher.running:
                assert trial.stopped is None
                launcher.end(trial)
            with pytest.raises(TooManyFailures):
                run.result(10)
        outcomes = session.reader.outcomes(session.study.id)
        check_order(session, sqlite_url)
    assert outcomes["error"] == 2
    assert outcomes["completed"] == len(launcher.trials) - 2 >= 2


def test_drivers_in_threads_launch_together_as_many_as_are_wanted(storage: str, tmp_path: Path) -> None:
    launcher, started = ToldLauncher(completed, 0.02), threading.Barrier(3)

    def one() -> None:
        with session_on(storage, tmp_path, allocated=fits, jobs=2, pool_bytes=4 * GIB) as session:
            started.wait(30)
            with flying(session, Goal(trials=17), launcher) as (run, _):
                run.result(60)

    with ThreadPoolExecutor(3) as pool:
        for run in [pool.submit(one) for _ in range(3)]:
            run.result()
    with session_on(storage, tmp_path) as session:
        trials = session.reader.trials(session.study.id, ["completed"])
        check_order(session, storage)
    assert len(launcher.trials) == len(trials) == 17
    assert launcher.most[1] <= 4 * GIB
    assert len({trial.driver_id for trial in trials}) >= 2


def running_in(url: str) -> int:
    """Count running trials from outside, once there are tables."""
    import sqlite3

    query = "SELECT count(*) FROM tuner_trial WHERE outcome IS NULL AND started_at IS NOT NULL"
    try:
        if url.startswith("sqlite:///"):
            connection: Any = sqlite3.connect(url.removeprefix("sqlite:///"))
        else:
            connection = psycopg.connect(url)
        try:
            return int(connection.execute(query).fetchone()[0])
        finally:
            connection.close()
    except (sqlite3.Error, psycopg.Error):
        return 0


def test_eight_trials_of_a_killed_driver_are_settled_and_come_again(storage: str, tmp_path: Path) -> None:
    """Case D25: 8 trials at once, SIGKILL of the controller, restart on the same store."""
    process = PROCESSES.Process(target=drive, args=(storage, str(tmp_path), 9, 8, None))
    process.start()
    wait_until(lambda: running_in(storage) == 8, seconds=60)
    process.kill()
    process.join()
    with session_on(storage, tmp_path, allocated=lambda p: MIB, jobs=3) as session:
        left = session.reader.trials(session.study.id)
        assert [(t.number, t.outcome, t.reason) for t in left] == [
            (number, "interrupted", "its driver ended before it did") for number in range(8)
        ]
        assert {trial.state for trial in optuna_trials(storage)} == {TrialState.FAIL}
        launcher, _ = run_loop(session, Goal(trials=9))
        trials = session.reader.trials(session.study.id)
        check_order(session, storage)
    assert [trial.number for trial in trials] == list(range(8 + 9))
    assert launcher.launched[:8] == [trial.params for trial in left]


def test_processes_share_a_study_and_one_is_killed(storage: str, tmp_path: Path) -> None:
    """Its two trials would never end; the others see that it is dead, and finish the study."""

    def start(seconds: float | None) -> Any:
        process = PROCESSES.Process(target=drive, args=(storage, str(tmp_path), 12, 2, seconds))
        process.start()
        return process

    endless = start(None)
    wait_until(lambda: running_in(storage) == 2, seconds=60)
    others = [start(0.1) for _ in range(2)]
    wait_until(lambda: running_in(storage) > 2, seconds=60)
    endless.kill()
    for process in (endless, *others):
        process.join(60)
    assert [process.exitcode for process in (endless, *others)] == [-9, 0, 0]
    with session_on(storage, tmp_path) as session:
        assert session.reader.outcomes(session.study.id) == {"completed": 12, "interrupted": 2}
        check_order(session, storage)


def test_a_driver_that_is_slow_but_alive_keeps_its_trial(storage: str, tmp_path: Path) -> None:
    """Case D25: silent for longer than any grace, and then it reports; another one looks meanwhile."""
    launcher = ToldLauncher(completed)
    with session_on(storage, tmp_path, allocated=lambda p: MIB) as session:
        with flying(session, Goal(trials=1), launcher) as (run, watcher):
            wait_until(lambda: launcher.running)
            sql(session, "UPDATE tuner_driver SET seen_at = '2020-01-01 00:00:00'")
            with session_on(storage, tmp_path):
                pass
            launcher.end(launcher.trials[0])
            run.result(10)
        check_order(session, storage)
        assert session.reader.outcomes(session.study.id) == {"completed": 1}
    assert watcher.notes == []


def given_up(session: Session, url: str, folder: Path) -> None:
    """Have another driver give this one up: to it, it is on another host, and silent."""
    sql(session, "UPDATE tuner_driver SET seen_at = '2020-01-01 00:00:00', host = 'elsewhere'")
    with session_on(url, folder):
        pass


def ended_in_the_books(session: Session, url: str, folder: Path) -> None:
    """The row alone: whoever gave it up has died over it."""
    sql(session, "UPDATE tuner_driver SET ended_at = seen_at, end_reason = 'lost'")


@pytest.mark.parametrize("give_up", [given_up, ended_in_the_books])
def test_a_driver_that_was_given_up_goes_on_as_a_new_one(storage: str, tmp_path: Path, give_up: Any) -> None:
    """One trial is finished before, one ends afterwards, one still runs."""
    launcher = ToldLauncher(completed)
    with session_on(storage, tmp_path, allocated=lambda p: MIB, jobs=2) as session:
        first_id = session.driver_id
        with flying(session, Goal(trials=5), launcher) as (run, watcher):
            wait_until(lambda: len(launcher.running) == 2)
            launcher.end(launcher.trials[0])
            wait_until(lambda: len(launcher.trials) == 3)
            give_up(session, storage, tmp_path)
            launcher.end(launcher.trials[1])
            wait_until(lambda: session.driver_id != first_id)
            assert launcher.trials[2].killed
            finish(launcher, run)
        trials = session.reader.trials(session.study.id)
        check_order(session, storage)
        late = sql(session, "SELECT number, CAST(late_result AS TEXT) FROM tuner_trial")
    by_number = {trial.number: trial for trial in trials}
    assert by_number[0].outcome == "completed"
    assert by_number[2].outcome == "interrupted"
    notes = {number: json.loads(text)["outcome"] for number, text in late if text not in (None, "null")}
    if give_up is given_up:
        assert by_number[1].outcome == "interrupted"
        assert notes == {1: "completed"}
        assert any("trial 1 had been given up" in note for note in watcher.notes)
    else:
        assert by_number[1].outcome == "completed"
        assert notes == {}
    outcomes = Counter(trial.outcome for trial in trials)
    assert outcomes["completed"] == 5
    assert len(launcher.trials) == 5 + outcomes["interrupted"]  # nothing twice but what was given up
    assert any("goes on as a new one" in note for note in watcher.notes)


def test_a_late_result_is_not_told_as_the_trials(sqlite_url: str, tmp_path: Path) -> None:
    """Another driver has recorded it as interrupted, and is about to tell Optuna so."""
    launcher = ToldLauncher(completed)
    with session_on(sqlite_url, tmp_path, allocated=lambda p: MIB) as session:
        with flying(session, Goal(trials=1), launcher) as (run, _):
            wait_until(lambda: launcher.running)
            trial = session.reader.trial(session.study.id, 0)
            session.writer.record_result(trial.id, TrialResult(Outcome.INTERRUPTED))
            launcher.end(launcher.trials[0])
            wait_until(lambda: len(launcher.trials) == 2)
            launcher.end(launcher.trials[1])
            run.result(10)
        recover(session)
        check_order(session, sqlite_url)


def test_a_driver_that_joins_while_order_is_made_is_not_taken_for_a_lost_one(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins, and adds a trial, just after the living drivers were read."""
    with session_on(sqlite_url, tmp_path) as session:
        read = session.reader.living_drivers
        added: list[int] = []

        def read_and_join(study_id: int) -> Any:
            found = read(study_id)
            driver_id = session.drivers.join(study_id, this_process())
            added.append(session.writer.add_trial(study_id, 77, {}, driver_id=driver_id))
            return found

        monkeypatch.setattr(session.reader, "living_drivers", read_and_join)
        assert recover(session) == 0
        assert len(added) == 1
        assert session.reader.trial(session.study.id, 77).is_running
