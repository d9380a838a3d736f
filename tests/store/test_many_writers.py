"""Many processes write at once while the app reads; nobody meets a lock (case D28)."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy import event

from tests.conftest import ROOT
from tuner.store import migrations
from tuner.store.engine import open_engine, parse_url, prepare_sqlite
from tuner.store.opening import reading

if TYPE_CHECKING:
    from pathlib import Path

    from tests.store.conftest import Store


def written(storage: str, report: Path, *, processes: int, trials: int) -> dict[str, Any]:
    """Let processes write trials; return what benchmarks/many_writers.py found."""
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / "many_writers.py"), "--storage", storage]
    sizes = ["--processes", str(processes), "--trials", str(trials), "--json", str(report)]
    done = subprocess.run(
        command + sizes,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_eight_processes_and_the_app_lose_no_trial_and_meet_no_lock(storage: str, tmp_path: Path) -> None:
    found = written(storage, tmp_path / "report.json", processes=8, trials=10)
    assert (found["finished"], found["told"], found["metrics"]) == (80, 80, 240)
    assert (found["running"], found["untold"], found["different"], found["failed_processes"]) == (0, 0, 0, 0)
    assert found["told_to_the_user"] == []
    assert found["reader"]["errors"] == []
    assert found["reader"]["readings"] > 0
    assert found["reader"]["trials"] == 80


def test_thirty_two_processes_start_on_one_empty_database(storage: str, tmp_path: Path) -> None:
    """Each brings the schema up to date, opens Optuna's storage, creates the study and adds rows."""
    found = written(storage, tmp_path / "report.json", processes=32, trials=1)
    assert (found["failed_processes"], found["finished"], found["told"], found["different"]) == (0, 32, 32, 0)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_queued_trial_is_taken_once(sqlite_url: str, prepared: bool) -> None:
    """Optuna selects FOR UPDATE, and then updates; SQLite's dialect leaves FOR UPDATE out."""
    storages = [optuna.storages.RDBStorage(sqlite_url) for _ in range(2)]
    study = optuna.create_study(storage=storages[0])
    study.enqueue_trial({"x": 1.0})
    ((trial_id,),) = [[trial._trial_id for trial in study.trials]]
    for theirs in storages:
        if prepared:
            prepare_sqlite(theirs.engine)
            prepare_sqlite(theirs.engine)
    taken: list[bool] = []

    def take(theirs: optuna.storages.RDBStorage) -> None:
        taken.append(theirs.set_trial_state_values(trial_id, TrialState.RUNNING))
        theirs.remove_session()

    other = threading.Thread(target=take, args=(storages[1],))

    def between(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith("UPDATE trials") and not other.ident:
            other.start()
            other.join(0.5)  # done by then, unless it waits for the first one's lock

    event.listen(storages[0].engine, "before_cursor_execute", between)
    take(storages[0])
    other.join()
    for theirs in storages:
        theirs.engine.dispose()
    assert sorted(taken) == ([False, True] if prepared else [True, True])


def test_optunas_plain_reads_take_no_lock(sqlite_url: str) -> None:
    theirs = optuna.storages.RDBStorage(sqlite_url, engine_kwargs={"connect_args": {"timeout": 0}})
    prepare_sqlite(theirs.engine)
    study = optuna.create_study(storage=theirs)
    with closing(sqlite3.connect(parse_url(sqlite_url).database or "", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert study.get_trials() == []
        with pytest.raises(optuna.exceptions.StorageInternalError):
            study.set_user_attr("a", 1)
    study.set_user_attr("a", 1)
    with theirs.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    theirs.remove_session()
    theirs.engine.dispose()


@pytest.mark.parametrize("storage", ["sqlite"], indirect=True)
def test_reading_neither_waits_for_a_writer_nor_keeps_one_waiting(store: Store) -> None:
    store.study("one")
    with closing(sqlite3.connect(store.url.database or "", isolation_level=None, timeout=0)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("DELETE FROM tuner_study")
        start = time.monotonic()
        with reading(store.url) as reader:
            assert [study.name for study in reader.studies()] == ["one"]  # as it was before
        assert time.monotonic() - start < 10  # the busy timeout is 30 s
        writer.execute("ROLLBACK")
        engine = open_engine(store.url, read_only=True)
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT * FROM tuner_study").all()
            writer.execute("BEGIN IMMEDIATE")  # at once, or it raises
            writer.execute("DELETE FROM tuner_study")
            writer.execute("COMMIT")
        engine.dispose()


def test_a_reader_opened_while_the_schema_is_made_says_that_there_is_none_yet(sqlite_url: str) -> None:
    engine = open_engine(parse_url(sqlite_url))
    with migrations.whole_transaction(engine) as connection:
        migrations.upgrade_connection(connection)
        with pytest.raises(migrations.SchemaError, match="holds no studies"):
            reading(parse_url(sqlite_url)).__enter__()
    with reading(parse_url(sqlite_url)) as reader:
        assert reader.studies() == []
    engine.dispose()
