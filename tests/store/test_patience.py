"""What is waited out and what is not: real errors of both databases, real outages."""

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
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from tests.conftest import ROOT
from tests.store.servers import PASSWORD_ROLE, Server, own_server
from tuner.errors import LeaseLost, StoreError, UsageError
from tuner.store.engine import open_engine, parse_url, store_errors
from tuner.store.patience import patient, why_transient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.store.conftest import Store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with own_server(tmp_path_factory.mktemp("runtime")) as running:
        yield running


def never() -> bool:
    return False


def caught(call: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as found:
        call()
    return found.value


def connecting(url: str) -> BaseException:
    engine = open_engine(parse_url(url))
    try:
        return caught(engine.connect)
    finally:
        engine.dispose()


def busy(path: Path) -> BaseException:
    engine = open_engine(parse_url(f"sqlite:///{path}"), busy_timeout_seconds=0)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        engine.connect().close()
        other.execute("BEGIN IMMEDIATE")
        error = caught(lambda: engine.begin().__enter__())
    engine.dispose()
    return error


def stale_snapshot(path: Path) -> BaseException:
    """What a transaction gets that has read, and writes after somebody else did."""
    engine = open_engine(parse_url(f"sqlite:///{path}"))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE t (n INTEGER)")
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as reader,
        closing(sqlite3.connect(path, isolation_level=None)) as writer,
    ):
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM t").fetchall()
        writer.execute("INSERT INTO t VALUES (1)")
        error = caught(lambda: reader.execute("INSERT INTO t VALUES (2)"))
    engine.dispose()
    return error


def test_locks_of_sqlite_pass_by_themselves(tmp_path: Path) -> None:
    assert why_transient(busy(tmp_path / "a.db")) == "locked by another program"
    error = stale_snapshot(tmp_path / "b.db")
    assert getattr(error, "sqlite_errorname", "") == "SQLITE_BUSY_SNAPSHOT"
    assert why_transient(error) == "locked by another program"


def test_optunas_wrapping_is_seen_through(sqlite_url: str) -> None:
    theirs = optuna.storages.RDBStorage(sqlite_url, engine_kwargs={"connect_args": {"timeout": 0}})
    with closing(sqlite3.connect(parse_url(sqlite_url).database or "", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        error = caught(lambda: optuna.create_study(storage=theirs))
    theirs.remove_session()
    theirs.engine.dispose()
    assert type(error) is optuna.exceptions.StorageInternalError
    assert why_transient(error) == "locked by another program"


def test_our_own_sentence_is_seen_through_too(tmp_path: Path) -> None:
    locked = busy(tmp_path / "a.db")

    def told() -> None:
        with store_errors(parse_url("sqlite:///a.db")):
            raise locked

    error = caught(told)
    assert isinstance(error, StoreError)
    assert why_transient(error) == "locked by another program"


def test_a_server_that_is_away_starting_or_stopping_passes(server: Server) -> None:
    engine = open_engine(parse_url(server.url))
    with engine.connect() as connection:
        server.stop("fast")
        ended = caught(lambda: connection.exec_driver_sql("SELECT 1"))
    refused = connecting(server.url)
    server.start()
    with engine.connect() as connection:
        server.stop("immediate")
        crashed = caught(lambda: connection.exec_driver_sql("SELECT 1"))
    server.start()
    engine.dispose()
    assert why_transient(ended) == "it is shutting down"
    assert why_transient(refused) == "connection refused"
    assert why_transient(crashed) in ("it closed the connection", "it crashed")


@pytest.mark.parametrize(
    ("sqlstate", "why"),
    [("57P03", "it is starting up"), ("40001", "a conflict"), ("40P01", "a deadlock"), ("08006", "it closed"),
     ("53300", "too many connections"), ("55P03", "locked")],
)  # fmt: skip
def test_states_of_postgresql_that_pass(sqlstate: str, why: str) -> None:
    orig = psycopg.errors.lookup(sqlstate)("text of the server")
    assert why in (why_transient(OperationalError("SELECT 1", {}, orig)) or "")


@pytest.mark.parametrize(
    "text",
    ['connection to server at "h", port 1 failed: FATAL:  the database system is starting up',
     'connection to server at "h", port 1 failed: FATAL:  the database system is shutting down',
     "connection failed: FATAL:  the database system is not yet accepting connections",
     'connection to server at "h", port 1 failed: FATAL:  sorry, too many clients already',
     "connection timeout expired"],
)  # fmt: skip
def test_refusals_without_a_state_that_pass(text: str) -> None:
    """Texts of PostgreSQL 14 to 18 (src/backend/tcop/postgres.c, utils/init/postinit.c) and psycopg."""
    assert why_transient(OperationalError("", {}, psycopg.OperationalError(text)))


def test_what_will_not_pass_is_not_repeated(server: Server, store: Store, tmp_path: Path) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {PASSWORD_ROLE}")
        connection.execute(f"CREATE ROLE {PASSWORD_ROLE} LOGIN PASSWORD 'right'")
    wrong_password = connecting(server.url_of(user=f"{PASSWORD_ROLE}:wrong"))
    assert "password authentication failed" in str(wrong_password)
    study_id = store.study()
    errors = [
        wrong_password,
        connecting(server.url_of("not_there")),
        connecting(server.url_of(user="nobody")),
        connecting(f"{server.url}?sslmode=nonsense"),
        connecting(f"sqlite:///{tmp_path}/missing/tuner.db"),
        caught(lambda: store.sql("SELECT * FROM not_there")),
        caught(lambda: store.sql("INSERT INTO tuner_study (id) VALUES (:id)", id=study_id)),
        UsageError("no"), LeaseLost("given up"), KeyError("k"), KeyboardInterrupt(),
    ]  # fmt: skip
    assert isinstance(errors[6], IntegrityError)
    assert [why_transient(error) for error in errors] == [None] * len(errors)
    for error in errors:
        calls: list[int] = []
        with pytest.raises(type(error)):
            patient(lambda c=calls, e=error: failing(c, e), on_wait=calls.append, should_give_up=never)  # type: ignore[misc,arg-type]
        assert calls == [1]


def failing(calls: list[int], error: BaseException) -> None:
    calls.append(1)
    raise error


def test_the_user_is_told_once_of_an_outage_and_once_of_its_end(tmp_path: Path) -> None:
    error, told, calls = busy(tmp_path / "a.db"), list[str](), 0

    def call() -> int:
        nonlocal calls
        calls += 1
        if calls < 5:
            raise error
        return calls

    assert patient(call, on_wait=told.append, should_give_up=never) == 5
    assert told[0] == "the database is away (locked by another program), retrying"
    assert told[1].startswith("the database is back after ")
    assert len(told) == 2


def test_a_conflict_that_the_first_repetition_mends_is_not_worth_a_word() -> None:
    deadlock = OperationalError("", {}, psycopg.errors.DeadlockDetected("deadlock detected"))
    outcomes, told = [deadlock, 7], list[str]()

    def call() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert patient(call, on_wait=told.append, should_give_up=never) == 7
    assert told == []


@pytest.mark.parametrize("wish", ["stop", "time"])
def test_waiting_ends_soon_with_the_last_error(tmp_path: Path, wish: str) -> None:
    locked = busy(tmp_path / "a.db")
    stop = threading.Event()
    calls: list[int] = []
    timer = threading.Timer(0.8, stop.set)
    start = time.monotonic()
    if wish == "stop":
        timer.start()
    with pytest.raises(DBAPIError) as found:
        patient(
            lambda: failing(calls, locked),
            on_wait=lambda text: None,
            should_give_up=stop.is_set,
            seconds=0.8 if wish == "time" else 600,
        )
    timer.cancel()
    assert found.value is locked
    assert len(calls) > 2
    assert time.monotonic() - start < 8  # 0.8 s, and at most one more wait of 5 s where time decides


def test_a_server_that_restarts_twice_under_writers_costs_no_trial(server: Server, tmp_path: Path) -> None:
    """One stop ends the sessions, the other is a crash; 2 processes write 40 trials each meanwhile."""
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS restarted WITH (FORCE)")
        connection.execute("CREATE DATABASE restarted")
    url, report = server.url_of("restarted"), tmp_path / "report.json"
    script = str(ROOT / "benchmarks" / "many_writers.py")
    command = [sys.executable, "-P", script, "--processes", "2", "--trials", "40"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--storage", url, "--json", str(report)], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    ) as process:
        for mode, after in (("fast", 8), ("immediate", 40)):
            wait_for_trials(url, after)
            server.stop(mode)
            time.sleep(1)
            server.start()
        process.communicate(timeout=120)
    found = json.loads(report.read_text())
    assert (found["failed_processes"], found["finished"], found["told"], found["metrics"]) == (0, 80, 80, 240)
    assert (found["running"], found["different"]) == (0, 0)
    assert found["untold"] <= 4  # asked for, and the answer was lost: 2 processes, 2 outages
    assert any(line.startswith("the database is away") for line in found["told_to_the_user"])
    assert any(line.startswith("the database is back") for line in found["told_to_the_user"])


def wait_for_trials(url: str, count: int) -> None:
    engine = create_engine(parse_url(url))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("SELECT to_regclass('tuner_trial') IS NOT NULL").scalar()
            if found:
                query = "SELECT count(*) FROM tuner_trial WHERE outcome IS NOT NULL"
                if connection.exec_driver_sql(query).scalar_one() >= count:
                    break
        time.sleep(0.02)
    else:
        pytest.fail("the writers did not get that far")
    engine.dispose()
