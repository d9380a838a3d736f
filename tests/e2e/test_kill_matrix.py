"""kill -9 of the driver at every step: no result lost, none repeated, nothing left running.

A study runs in a process that kills itself at a named step (killed_study.py), and is resumed in
another one. What is left is read with plain SQL. Processes are forked from one that has imported
what they need.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.e2e.killed_study import JOBS, STEPS, STEPS_OF_RECOVERY, TRIALS, Kill, run_study
from tests.warm import PROCESSES

MOMENTS = pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
TOLD = {"completed": "COMPLETE", "interrupted": "FAIL", "pruned_memory": "PRUNED", "out_of_memory": "PRUNED"}


def run(url: str, folder: Path, kill: Kill | None) -> int | None:
    """Run the study in a process of its own; return its exit code."""
    process = PROCESSES.Process(target=run_study, args=(url, str(folder), kill))
    process.start()
    process.join(60)
    return process.exitcode


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    if url.startswith("sqlite:///"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            return connection.execute(sql).fetchall()
    with psycopg.connect(url) as server:
        return server.execute(sql).fetchall()  # type: ignore[call-overload]


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with all tables and no study: making one takes longer than a study here."""
    folder = tmp_path_factory.mktemp("empty")
    path = folder / "tuner.db"
    url = f"sqlite:///{path}"
    assert run(url, folder, Kill("join", before=True)) == -signal.SIGKILL
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DELETE FROM tuner_study")
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> str:
    shutil.copy(empty_database, tmp_path / "tuner.db")
    return f"sqlite:///{tmp_path}/tuner.db"


@MOMENTS
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_a_step(database: str, tmp_path: Path, step: str, before: bool) -> None:
    assert run(database, tmp_path, Kill(step, before=before)) == -signal.SIGKILL, "the step was not reached"
    assert run(database, tmp_path, None) == 0
    check(database, tmp_path, kills=1)


@MOMENTS
@pytest.mark.parametrize("step", STEPS_OF_RECOVERY)
def test_killed_again_while_order_is_made(database: str, tmp_path: Path, step: str, before: bool) -> None:
    first = Kill("tell Optuna", before=True) if step == "tell Optuna again" else Kill("launch", before=False)
    assert run(database, tmp_path, first) == -signal.SIGKILL
    assert run(database, tmp_path, Kill(step, before=before)) == -signal.SIGKILL, "the step was not reached"
    assert run(database, tmp_path, None) == 0
    check(database, tmp_path, kills=2)


@pytest.mark.parametrize("commit", sorted(random.Random(4).sample(range(1, 120), 12)))
def test_killed_as_a_transaction_ends(database: str, tmp_path: Path, commit: int) -> None:
    """Ours or Optuna's: a sample, the whole range is a matter of minutes."""
    kill = Kill("commit", before=True, commit=commit)
    assert run(database, tmp_path, kill) == -signal.SIGKILL, "there are fewer transactions"
    assert run(database, tmp_path, None) == 0
    check(database, tmp_path, kills=1)


@pytest.mark.parametrize("step", ["ask", "launch", "record the result", "tell Optuna"])
def test_killed_at_a_step_on_postgresql(postgresql_url: str, tmp_path: Path, step: str) -> None:
    assert run(postgresql_url, tmp_path, Kill(step, before=False)) == -signal.SIGKILL
    assert run(postgresql_url, tmp_path, None) == 0
    check(postgresql_url, tmp_path, kills=1)


def check(url: str, folder: Path, *, kills: int) -> None:
    """Check what holds at the end of every study, however often it was killed."""
    trials = query(
        url, "SELECT number, outcome, value, attempts, run_folder, repeats, params FROM tuner_trial"
    )
    outcomes = Counter(row[1] for row in trials)
    assert outcomes["completed"] == TRIALS, "each trial that was wanted, once"
    assert set(outcomes) <= set(TOLD), "none is running"
    for table in ("tuner_slot", "tuner_reservation"):
        assert query(url, f"SELECT * FROM {table}") == [], f"{table} holds what nobody works on"
    assert query(url, "SELECT id FROM tuner_driver WHERE ended_at IS NULL") == []
    check_optuna_agrees(url, trials)
    interrupted = {row[0]: row for row in trials if row[1] == "interrupted"}
    repeated = [row[5] for row in trials if row[5] is not None]
    assert sorted(repeated) == sorted(interrupted), "what was interrupted is run again, once"
    assert len(interrupted) <= kills * JOBS
    for number, outcome, _, attempts, run_folder, _, _ in trials:
        launches = launches_of(folder, number)
        if outcome == "completed":
            assert launches == len(plain(attempts) or []) + 1, "launched once per attempt"
        elif outcome == "interrupted" and run_folder is not None:
            assert not has_result(Path(run_folder)), f"trial {number} had a result, and was run again"


def check_optuna_agrees(url: str, trials: list[tuple[Any, ...]]) -> None:
    """Check that Optuna has the same trials, params, values and states."""
    states = dict(query(url, "SELECT number, state FROM trials"))
    values = dict(
        query(
            url,
            "SELECT t.number, v.value FROM trials t JOIN trial_values v ON v.trial_id = t.trial_id "
            "WHERE v.objective = 0",
        )
    )
    widths = dict(
        query(
            url,
            "SELECT t.number, p.param_value FROM trials t JOIN trial_params p ON p.trial_id = t.trial_id "
            "WHERE p.param_name = 'width'",
        )
    )
    ours = {row[0]: row for row in trials}
    for number, (_, outcome, value, _, _, _, params) in ours.items():
        assert states[number] == TOLD[outcome]
        assert values.get(number) == value
        assert widths[number] == plain(params)["width"]
    # What was asked for and never came as far as our table was never launched.
    assert {states[number] for number in states.keys() - ours.keys()} <= {"FAIL"}


def has_result(run_folder: Path) -> bool:
    """Whether a final result is there: one out of memory under less than the budget is not."""
    for name in ("result.json", "report.json"):
        if (run_folder / name).exists():
            return json.loads((run_folder / name).read_text(encoding="utf-8"))["outcome"] == "completed"
    return False


def launches_of(folder: Path, number: int) -> int:
    log = folder / "launches.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return sum(json.loads(line)["number"] == number for line in lines)


def plain(value: Any) -> Any:
    """Return a JSON column's value: SQLite gives it as text."""
    return json.loads(value) if isinstance(value, str) else value
