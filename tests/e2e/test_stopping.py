"""Every way to stop a study (case D26): what it says, what it leaves, and that it goes on afterwards.

Real drivers with two trials at a time. What must not be left is looked for in the database with
plain SQL and in /proc by a mark in the environment, which children, supervisors and data-loading
processes inherit.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, clean_environment

WAITS = ROOT / "tests" / "workloads" / "waits.py"
GRACE_SECONDS = 5  # between asking a trial to end and killing it
DYING_SECONDS = 3
GOES_ON = "the same command continues the study"


class Driver:
    """A running `tuner run` in a folder, and what it leaves there."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.folder, self.arguments = folder, arguments
        self._process = self._start(**environment)

    def _start(self, **environment: str) -> subprocess.Popen[str]:
        common = ("--jobs", "2", "--threads", "1")
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tuner", "run", str(WAITS), *common, *self.arguments],
            cwd=self.folder,
            env=clean_environment(WAITS_MARK=str(self.folder), **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Return the exit code and what was said."""
        try:
            _, stderr = self._process.communicate(timeout=120)
        finally:
            self._process.kill()
        return self._process.returncode, stderr

    def goes_on(self, trials: int) -> None:
        """Check that the same command finishes the study."""
        self._process = self._start(WAITS="nowhere")
        code, stderr = self.wait()
        assert code == 0, stderr
        assert self.outcomes()["completed"] == trials

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "tuner.db")) as connection:
            return connection.execute(sql).fetchall()

    def outcomes(self) -> Counter[str]:
        return Counter(row[0] for row in self.query("SELECT outcome FROM tuner_trials"))

    def processes(self) -> list[int]:
        """Return the processes that carry this folder's mark, the driver included."""
        mark = f"WAITS_MARK={self.folder}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes() + b"\0":
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def wait_until(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
            time.sleep(0.1)

    def train(self, count: int) -> None:
        """Wait until so many trials have begun to train."""
        self.wait_until(
            lambda: len(list(self.folder.glob("tuner-runs/*/*/events.jsonl"))) >= count, f"{count} trials run"
        )

    def trace(self) -> None:
        """Wait until a configuration is being traced."""
        database = self.folder / "tuner.db"
        there = "SELECT count(*) FROM sqlite_master WHERE name = 'trials'"  # Optuna's: ours has no row yet
        self.wait_until(
            lambda: (
                database.exists()
                and self.query(there)[0][0] == 1
                and self.query("SELECT count(*) FROM trials")[0][0] == 1
            ),
            "the first trace",
        )

    def check_nothing_is_left(self) -> None:
        assert "running" not in self.outcomes()
        states = {row[0] for row in self.query("SELECT state FROM trials")}  # Optuna's
        assert states <= {"COMPLETE", "FAIL", "PRUNED"}
        for table in ("tuner_slot", "tuner_reservation"):
            assert self.query(f"SELECT * FROM {table}") == [], f"{table} holds what nobody works on"
        assert self.query("SELECT id FROM tuner_driver WHERE ended_at IS NULL") == []
        deadline = time.monotonic() + DYING_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == [], "a process survived its driver"


def test_ctrl_c_once_finishes_what_runs(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "--trials", "6", WAITS="train", WAITS_SECONDS="1")
    driver.train(2)
    driver.signal(signal.SIGINT)
    code, said = driver.wait()
    assert code == 130, said
    assert "finishing the running trials; Ctrl-C again stops them" in said
    assert "stopping the running trials" not in said
    assert GOES_ON in said
    assert driver.outcomes()["completed"] == 2
    driver.check_nothing_is_left()


def test_ctrl_c_twice_stops_what_runs_with_its_data_loading_processes(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "--trials", "3", WAITS="train", WAITS_SECONDS="600", WAITS_WORKERS="2")
    driver.train(2)
    # The driver, the tracer and two trials, each but the first below a supervisor, and the loaders.
    driver.wait_until(lambda: len(driver.processes()) >= 1 + 2 + 4 + 4, "data-loading processes")
    driver.signal(signal.SIGINT)
    time.sleep(0.5)
    start = time.monotonic()
    driver.signal(signal.SIGINT)
    code, said = driver.wait()
    assert code == 130, said
    assert "stopping the running trials" in said
    assert time.monotonic() - start < 2 * GRACE_SECONDS + DYING_SECONDS
    assert driver.outcomes() == {"interrupted": 2}
    driver.check_nothing_is_left()
    driver.goes_on(3)
    driver.check_nothing_is_left()
    repeated = [row[0] for row in driver.query("SELECT repeats FROM tuner_trial WHERE repeats IS NOT NULL")]
    assert sorted(repeated) == [0, 1], "what was interrupted comes again, once"


# A trace is waited for by a thread of its own; the driver must not wait for it as well.
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_a_configuration_is_traced(tmp_path: Path, presses: int) -> None:
    driver = Driver(tmp_path, "--trials", "2", WAITS="trace")
    driver.trace()
    start = time.monotonic()
    for _ in range(presses):
        driver.signal(signal.SIGINT)
        time.sleep(0.2)
    code, said = driver.wait()
    assert code == 130, said
    assert "finishing the running trials" in said
    assert time.monotonic() - start < DYING_SECONDS + 5, "a trace is not worth waiting for"
    assert driver.outcomes() == {}, "what was never launched is no trial of ours"
    driver.check_nothing_is_left()


def test_sigterm_stops_what_runs(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "--trials", "3", WAITS="train", WAITS_SECONDS="0.5")
    driver.train(2)
    driver.signal(signal.SIGTERM)
    code, said = driver.wait()
    assert code == 130, said
    assert "terminated; 0 of 3 trials are done" in said
    assert driver.outcomes()["interrupted"] == 2
    driver.check_nothing_is_left()
    driver.goes_on(3)


def test_a_time_out_of_the_study_starts_no_further_trial(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "--trials", "50", "--timeout", "20s", WAITS="train", WAITS_SECONDS="1")
    code, said = driver.wait()
    assert code == 0, said
    done = driver.outcomes()["completed"]
    assert 0 < done < 50
    driver.check_nothing_is_left()
    # What it has found so far can be read.
    shown = subprocess.run(
        [sys.executable, "-P", "-m", "tuner", "trials", "waits", "-f", "json"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert sum(trial["outcome"] == "completed" for trial in json.loads(shown.stdout)) == done


def test_a_trial_that_hangs_is_killed_at_its_time_out(tmp_path: Path) -> None:
    """It sees no request to stop; two of two failed launches are no reason to end this study."""
    arguments = ("--trials", "2", "--trial-timeout", "4s", "--max-failures", "9")
    driver = Driver(tmp_path, *arguments, WAITS="hang", WAITS_WORKERS="2")
    code, said = driver.wait()
    assert code == 0, said
    assert driver.outcomes() == {"timed_out": 2}
    for reason, seconds in driver.query("SELECT reason, seconds FROM tuner_trials"):
        assert reason.startswith("ran longer than 4")
        assert 4 <= seconds < 4 + GRACE_SECONDS + DYING_SECONDS + 5, "time-out, grace, kill"
    driver.check_nothing_is_left()


def test_tuner_stop_finishes_what_runs(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "--trials", "9", WAITS="train", WAITS_SECONDS="1")
    driver.train(2)
    stop = [sys.executable, "-P", "-m", "tuner", "stop", "waits"]
    subprocess.run(stop, cwd=tmp_path, env=clean_environment(), check=True, capture_output=True)
    code, said = driver.wait()
    assert code == 130, said
    assert "asked to stop by: tuner stop" in said
    assert GOES_ON in said
    outcomes = driver.outcomes()
    assert 2 <= outcomes["completed"] < 9
    assert set(outcomes) <= {"completed", "interrupted"}
    driver.check_nothing_is_left()


def test_a_driver_that_is_killed_takes_everything_with_it(tmp_path: Path) -> None:
    driver = Driver(tmp_path, "--trials", "2", WAITS="train", WAITS_WORKERS="2")
    driver.train(2)
    driver.wait_until(lambda: len(driver.processes()) >= 1 + 2 + 4 + 4, "data-loading processes")
    os.kill(driver._process.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + DYING_SECONDS
    while driver.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert driver.processes() == []
    driver.goes_on(2)
    driver.check_nothing_is_left()
    assert driver.outcomes()["interrupted"] == 2
