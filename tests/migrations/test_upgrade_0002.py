"""From the first revision to this one with rows in every table: there and back, killed, refused."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import inspect
from sqlalchemy.exc import DBAPIError

from tests.conftest import ROOT
from tests.migrations.databases import contents, fill_0001, move, opened, own_0001, sql, upgraded
from tuner.errors import StudyBusy
from tuner.processes import this_process
from tuner.records import Owner
from tuner.store import migrations
from tuner.store.engine import parse_url
from tuner.store.opening import reading
from tuner.store.views import VIEWS

ELSEWHERE = Owner(host="another-host", boot_id="b", pid=7, started="1")
OWNERS = {"owner_host", "owner_boot_id", "owner_pid", "owner_started", "owner_seen_at", "stop_reason"}
NEWER = {
    "device", "attempt", "attempts", "waiting_seconds", "used_before_bytes", "device_wide_bytes",
    "host_peak_bytes", "growth_bytes", "timeline", "driver_id", "late_result", "epoch_peak_bytes",
    "epoch_allocated_bytes", "epoch_reserved_bytes", "draws", "rehearsal_seconds", "rejection_id",
    "mix",
}  # fmt: skip
TABLES = ("tuner_study", "tuner_trial", "tuner_metric")


def kept(storage: str) -> dict[str, list[tuple[Any, ...]]]:
    """All rows, by the columns that both revisions have."""
    found = {}
    for table in TABLES:
        with opened(storage) as engine:
            names = {column["name"] for column in inspect(engine).get_columns(table)}
        texts = [f"CAST({name} AS TEXT)" for name in sorted(names - OWNERS - NEWER)]
        found[table] = sorted(sql(storage, f"SELECT {', '.join(texts)} FROM {table}"), key=str)
    return found


def test_rows_survive_the_way_there_back_and_there_again(storage: str) -> None:
    fill_0001(storage)
    first, before = contents(storage), kept(storage)
    assert [len(rows) for rows in before.values()] == [2, 6, 24]
    assert upgraded(storage)
    assert kept(storage) == before
    second = contents(storage)
    assert set(VIEWS) <= set(second)
    assert sql(storage, "SELECT count(*), min(attempt) FROM tuner_trial") == [(6, 1)]
    assert len(sql(storage, "SELECT * FROM tuner_pareto")) == 6
    move(storage, "0001")
    back = contents(storage)
    assert kept(storage) == before
    assert {name: sorted(map(str, value[0])) for name, value in back.items()} == {
        name: sorted(map(str, value[0])) for name, value in first.items()
    }
    assert upgraded(storage)
    assert contents(storage).keys() == second.keys()
    assert kept(storage) == before


def test_the_mix_of_earlier_predictions_is_found(storage: str) -> None:
    fill_0001(storage)
    sql(
        storage,
        """UPDATE tuner_trial SET prediction = '{"mix": "compiled"}', predicted_bytes = 1 WHERE number = 1""",
    )
    upgraded(storage)
    assert sql(storage, "SELECT DISTINCT number FROM tuner_trial WHERE mix = 'compiled'") == [(1,)]


def test_the_reader_reads_what_the_first_revision_wrote(storage: str) -> None:
    fill_0001(storage)
    upgraded(storage)
    with reading(parse_url(storage)) as reader:
        study = reader.study("study 1 é🙂")
        trials = reader.trials(study.id)
        metrics = {metric.name: metric.value for metric in reader.metrics(trials[0].id)}
    assert [(trial.number, trial.outcome, trial.value) for trial in trials] == [
        (number, "completed", 5e-324) for number in range(3)
    ]
    assert trials[0].params == {"lr": 0.1, "name": "é 🙂", "limit": "inf"}
    assert trials[0].metrics == {"loss": float("-inf")}
    assert metrics == {"loss": 1e308, "nan": None, "inf": float("inf"), "low": float("-inf")}


def test_an_upgrade_that_is_killed_leaves_all_or_nothing(storage: str) -> None:
    fill_0001(storage, studies=1)
    moments = 30 if storage.startswith("sqlite") else 5
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.migrations.kill_upgrades", storage, str(moments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, "")
    assert len(found) >= moments
    assert {one["ended"] for one in found} == {-9}  # every one was killed
    assert {one["then"] for one in found} == {"new"}  # and the next start brings it up to date
    assert {one["left"] for one in found} == {"old", "new"}  # never something in between
    at = {one["kill_at"]: one["left"] for one in found}
    assert (at[1], at["commit"], at["exit"]) == ("old", "old", "new")


def test_an_upgrade_waits_for_drivers_of_the_older_version_to_end(storage: str) -> None:
    fill_0001(storage)
    now, long_ago = datetime.now(UTC), datetime.now(UTC) - timedelta(hours=1)
    own_0001(storage, 2, this_process(), str(long_ago))  # its silence proves nothing: it is seen to live
    before = contents(storage)
    with pytest.raises(StudyBusy, match=rf"'study 2 é🙂' \(process {os.getpid()} on {this_process().host}\)"):
        upgraded(storage)
    assert contents(storage) == before
    own_0001(storage, 2, ELSEWHERE, str(now))
    with pytest.raises(StudyBusy, match="process 7 on another-host"):
        upgraded(storage)
    own_0001(storage, 2, ELSEWHERE, str(long_ago))
    own_0001(storage, 1, dataclasses.replace(this_process(), started="1"), str(now))  # a pid used again
    assert upgraded(storage)


@pytest.mark.parametrize("storage", ["postgresql"], indirect=True)
def test_a_driver_that_starts_during_the_upgrade_stays_out(storage: str) -> None:
    """The older version claims a study with an UPDATE; it waits, and then finds its columns gone."""
    fill_0001(storage)
    claim = "UPDATE tuner_study SET owner_pid = 1 WHERE id = 1"
    with opened(storage) as engine, opened(storage) as other:
        with migrations.whole_transaction(engine) as connection:
            migrations.refuse_older_drivers(connection, "0001")
            with other.begin() as late:
                late.exec_driver_sql("SET LOCAL lock_timeout = '100ms'")
                with pytest.raises(DBAPIError, match="lock timeout"):
                    late.exec_driver_sql(claim)
            migrations.upgrade_connection(connection)
        with other.begin() as late, pytest.raises(DBAPIError, match='column "owner_pid"'):
            late.exec_driver_sql(claim)
