"""The checks at the end of a soak see what is wrong: each is shown a study in which it is."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.soak_checks import check
from tests.search.stand_ins import run_loop, session_on
from tuner.search.events import Goal

TRIALS = 4


@pytest.fixture
def study(sqlite_url: str, tmp_path: Path) -> str:
    with session_on(sqlite_url, tmp_path, allocated=lambda params: 1 << 20) as session:
        run_loop(session, Goal(trials=TRIALS))
    return sqlite_url


def wrong(url: str, folder: Path, *statements: str) -> set[str]:
    """Return which checks fail after some statements."""
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return {name for name, problems in check(url, folder / "runs", TRIALS).items() if problems}


def test_a_study_that_ended_well_passes(study: str, tmp_path: Path) -> None:
    assert wrong(study, tmp_path) == set()


def test_what_is_lost_twice_or_left_over_is_seen(study: str, tmp_path: Path) -> None:
    backup = tmp_path / "backup.db"
    shutil.copy(tmp_path / "tuner.db", backup)
    seen = {}
    for name, statement in {
        "lost": "DELETE FROM tuner_trial WHERE number = 1",
        "running": "UPDATE tuner_trial SET outcome = NULL WHERE number = 1",
        "running for Optuna": "UPDATE trials SET state = 'RUNNING' WHERE number = 1",
        "another value": "UPDATE tuner_trial SET value = 0.123 WHERE number = 1",
        "repeated": "UPDATE tuner_trial SET repeats = 1 WHERE number = 2",
        "held": "INSERT INTO tuner_slot (study_id, driver_id, token, audit) VALUES (1, 1, 'x', 0)",
    }.items():
        shutil.copy(backup, tmp_path / "tuner.db")
        seen[name] = wrong(study, tmp_path, statement)
    launches = f"{TRIALS} final launches"
    assert seen == {
        "lost": {launches, "Optuna has the same", "no result is lost"},
        "running": {launches, "none is running", "Optuna has the same", "no result is lost"},
        "running for Optuna": {"none is running", "Optuna has the same"},
        "another value": {"Optuna has the same", "no result is lost"},
        "repeated": {"no trial is repeated that had ended"},
        "held": {"nothing is held"},
    }
