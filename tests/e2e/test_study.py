"""Whole studies through the command line: real children, real signals, a real database."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DIGITS, TINY, Tuner, clean_environment

ROWS = "SELECT number, outcome, value, peak_bytes, predicted_bytes, verdict, params FROM tuner_trials"


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    """Return rows of the folder's database."""
    connection = sqlite3.connect(folder / "tuner.db")
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `tuner run` on the tiny workload without waiting for it."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tuner", "run", str(TINY), *arguments],
        cwd=folder,
        env=clean_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_launch(folder: Path, count: int, seconds: float = 60) -> None:
    """Wait until `count` trials were launched and the last one reached its baseline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        baselines = list(folder.glob("tuner-runs/*/*/events.jsonl"))
        if len(baselines) >= count:
            return
        time.sleep(0.1)
    pytest.fail(f"{count} trials were not launched within {seconds} s")


def test_a_study_on_real_data_from_end_to_end(tuner: Tuner, tmp_path: Path) -> None:
    done = tuner("run", DIGITS, "--budget", "700MiB", "--trials", "3", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    rows = query(tmp_path, ROWS)
    assert len(rows) == 3
    rejected = query(tmp_path, "SELECT predicted_bytes, budget_bytes FROM tuner_rejections")
    assert rejected, "seed 1 draws configurations that are too big"
    assert all(predicted > budget for predicted, budget in rejected)
    assert f"turned away: {len(rejected)} configurations predicted not to fit" in done.stderr
    completed = [row for row in rows if row[1] == "completed"]
    assert len(completed) >= 2
    # Predicted against measured device bytes: the target is 10 % in the median, asked of each here.
    assert all(row[4] == pytest.approx(row[3], rel=0.1) for row in completed)
    allocated = query(
        tmp_path,
        "SELECT predicted_allocated_bytes, allocated_bytes FROM tuner_trials WHERE outcome = 'completed'",
    )
    assert all(predicted == pytest.approx(measured, rel=0.05) for predicted, measured in allocated)
    front = json.loads(tuner("pareto", "digits_cnn", "-f", "json").stdout)
    beaten = [
        row
        for row in completed
        if any(o[2] >= row[2] and o[3] <= row[3] and (o[2], o[3]) != (row[2], row[3]) for o in completed)
    ]
    assert sorted(t["number"] for t in front) == sorted(r[0] for r in completed if r not in beaten)


def test_every_way_of_looking_at_a_study(tuner: Tuner, tmp_path: Path) -> None:
    assert tuner("run", TINY, "--trials", "3", "--seed", "1").returncode == 0
    studies = json.loads(tuner("studies", "-f", "json").stdout)
    assert [(s["name"], s["trials"], s["completed"]) for s in studies] == [("tiny", 3, 3)]
    trials = json.loads(tuner("trials", "tiny", "--sort", "-peak_bytes", "-f", "json").stdout)
    peaks = [trial["peak_bytes"] for trial in trials]
    assert peaks == sorted(peaks, reverse=True)
    assert tuner("trials", "tiny", "-f", "csv").stdout.splitlines()[0].startswith("number,outcome,value")
    best = json.loads(tuner("best", "tiny", "-f", "json").stdout)
    assert best["value"] == max(trial["value"] for trial in trials)
    shown = tuner("show", "tiny", "0").stdout
    assert "predicted" in shown
    assert "measured" in shown
    assert json.loads(tuner("show", "tiny", "0", "-f", "json").stdout)["prediction"]["verdict"] == "launch"
    checkpoints = sorted(path.parent.name for path in tmp_path.glob("tuner-runs/tiny/*/best.pt"))
    front = json.loads(tuner("pareto", "tiny", "-f", "json").stdout)
    assert checkpoints == [f"{number:05d}" for number in sorted(trial["number"] for trial in front)]
    assert tuner("clean", "--keep-checkpoints", "none").returncode == 0
    assert list(tmp_path.glob("tuner-runs/tiny/*/best.pt")) == []
    assert tuner("delete", "tiny", "--yes").returncode == 0
    assert json.loads(tuner("studies", "-f", "json").stdout) == []
    assert tuner("clean").returncode == 0
    assert list(tmp_path.glob("tuner-runs/tiny/*")) == []


def test_a_seed_makes_a_study_repeatable(tuner: Tuner, tmp_path: Path) -> None:
    """Same params, verdicts and metrics in two folders, with a random phase that is cut short."""
    command = ["run", TINY, "--trials", "4", "--seed", "5", "--sampler", "tpe"]
    command += ["--sampler-option", "n_startup_trials=2"]
    seen = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        done = tuner(*command, cwd=folder)
        assert done.returncode == 0, done.stderr
        seen.append(
            query(folder, "SELECT number, outcome, value, verdict, params, metrics FROM tuner_trials")
        )
    assert seen[0] == seen[1]


def test_drivers_share_a_study_to_its_exact_total(tuner: Tuner, tmp_path: Path) -> None:
    drivers = [
        start(tmp_path, "--trials", "5", "--jobs", "1", TINY_MODES="slow", TINY_SLEEP="0.1") for _ in range(2)
    ]
    for driver in drivers:
        _, stderr = driver.communicate(timeout=120)
        assert driver.returncode == 0, stderr
    rows = query(tmp_path, "SELECT outcome, driver_id FROM tuner_trial")
    assert [outcome for outcome, _ in rows] == ["completed"] * 5
    assert {driver for _, driver in rows} == {1, 2}
    assert query(tmp_path, "SELECT end_reason FROM tuner_driver") == [("done",), ("done",)]


def test_stop_ends_a_driver_and_a_study_at_work_is_not_deleted(tuner: Tuner, tmp_path: Path) -> None:
    driver = start(tmp_path, "--trials", "9", TINY_MODES="slow", TINY_SLEEP="0.25")
    wait_for_launch(tmp_path, 1)
    refused = tuner("delete", "tiny", "--yes")
    assert refused.returncode == 5
    assert "a driver works on study 'tiny'" in refused.stderr
    assert tuner("stop", "tiny").returncode == 0
    driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert "completed" in {row[1] for row in query(tmp_path, ROWS)} <= {"completed", "interrupted"}


def test_resuming_as_something_else_is_refused(tuner: Tuner, tmp_path: Path) -> None:
    assert tuner("run", TINY, "--trials", "1", "--budget", "2GiB").returncode == 0
    before = query(tmp_path, ROWS)
    for arguments, words in (
        (["--budget", "1GiB"], "has the budget 2.00 GiB, not 1.00 GiB"),
        (["--seed", "4"], "has the seed none, not 4"),
        (["--single"], "has the objective maximize score, not maximize score alone"),
    ):
        done = tuner("run", TINY, "--trials", "1", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
    done = tuner("run", DIGITS, "--study-name", "tiny", "--trials", "1")
    assert done.returncode == 2
    assert "has the workload tiny:Tiny, not digits_cnn:DigitsCNN" in done.stderr
    assert query(tmp_path, ROWS) == before


def test_json_lines_for_scripts(tuner: Tuner) -> None:
    done = tuner("run", TINY, "--trials", "2", "--seed", "1", "--json")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["study", "launched", "ended", "launched", "ended", "end"]
    assert events[-1]["outcomes"] == {"completed": 2}


def test_failures_stop_a_study_with_their_own_code(tuner: Tuner, tmp_path: Path) -> None:
    done = tuner("run", TINY, "--trials", "9", TINY_MODES="raises")
    assert done.returncode == 4
    assert "3 of 3 launched trials failed (3 error)" in done.stderr
    assert {row[1] for row in query(tmp_path, ROWS)} == {"error"}


def test_a_space_in_which_nothing_fits_has_its_own_code(tuner: Tuner) -> None:
    done = tuner("run", TINY, "--trials", "1", "--budget", "100MiB")
    assert done.returncode == 3
    assert "the smallest prediction is" in done.stderr


def test_a_newer_database_is_refused_and_left_alone(tuner: Tuner, tmp_path: Path) -> None:
    assert tuner("db", "upgrade").returncode == 0
    connection = sqlite3.connect(tmp_path / "tuner.db")
    connection.execute("UPDATE tuner_alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    for arguments in (("run", TINY, "--trials", "1"), ("studies",), ("db", "upgrade")):
        done = tuner(*arguments)
        assert done.returncode == 5
        assert "schema 9999" in done.stderr
    assert query(tmp_path, "SELECT version_num FROM tuner_alembic_version") == [("9999",)]


def test_postgresql_works_like_sqlite(tuner: Tuner, postgresql_url: str) -> None:
    done = tuner("run", TINY, "--trials", "2", "--storage", postgresql_url)
    assert done.returncode == 0, done.stderr
    rows = json.loads(tuner("trials", "tiny", "--storage", postgresql_url, "-f", "json").stdout)
    assert [row["outcome"] for row in rows] == ["completed", "completed"]
    environment = os.environ.get("TUNER_STORAGE")
    assert environment is None
    assert tuner("best", "tiny", TUNER_STORAGE=postgresql_url).returncode == 0


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    """A limit of 40 KiB on any file stands for a full disk: SQLite's own writes fail for real."""
    command = f"ulimit -f 40; exec {sys.executable} -P -m tuner run {TINY} --trials 1"
    done = subprocess.run(
        ["/bin/bash", "-c", command],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: tuner.db cannot be written: the disk is full")
    assert done.stdout == ""
