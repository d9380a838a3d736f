"""Children that cannot be started, cannot be killed, or leave a report that nobody can read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from tests.conftest import processes_with
from tests.execution.launching import finish, request_for
from tuner import processes
from tuner.execution.launcher import LocalLauncher, LocalTrial
from tuner.execution.run_folder import RunFolder, StopRequest
from tuner.processes import Child
from tuner.records import Outcome, TrialResult

REQUEST = request_for("study.py:Study", {})


def child_of(code: str, folder: RunFolder) -> Child:
    """Start some code in the place of a worker."""
    return Child([sys.executable, "-c", code], log=folder.log)


def test_a_report_that_cannot_be_read_is_none_and_said(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "0")
    (folder.path / "report.json").write_text('{"version": 1, "outco')
    folder.append_event("baseline", baseline_bytes=5)
    with (folder.path / "events.jsonl").open("a") as events:
        events.write("half a li\n")
    result = finish(LocalTrial(child_of("pass", folder), folder, REQUEST), 30)
    assert result.outcome is Outcome.CRASHED
    assert result.failure is not None
    assert "its report cannot be read: " in result.failure.reason
    assert result.peaks.baseline_bytes == 5


def test_polling_never_waits_for_a_child_that_cannot_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped supervisor stands for a process in an uninterruptible call."""
    monkeypatch.setattr(processes, "HOLD_OUT_SECONDS", 1.0)
    folder = RunFolder.create(tmp_path / "0")
    child = child_of("import time; time.sleep(60)", folder)
    trial = LocalTrial(child, folder, REQUEST)
    while trial.pid is None:
        assert trial.poll() is None
    supervisor = int(Path(f"/proc/{trial.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGSTOP)
    trial.stop(StopRequest(Outcome.TIMED_OUT, "ran too long"), grace_seconds=0)
    looks: list[float] = []
    result: TrialResult | None = None
    while result is None:
        started = time.monotonic()
        result = trial.poll()
        looks.append(time.monotonic() - started)
        time.sleep(0.05)
    os.kill(supervisor, signal.SIGCONT)
    assert child.wait(30) is not None
    assert max(looks) < 0.5
    assert len(looks) > 5  # it was looked at until it was given up
    assert result.outcome is Outcome.TIMED_OUT
    assert result.failure is not None
    assert result.failure.reason == f"ran too long; process {trial.pid} has not ended 1 s after it was killed"


def test_a_process_that_cannot_be_started_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: object, **options: object) -> NoReturn:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with LocalLauncher(tmp_path, "study.py:Study") as launcher:
        for _ in range(10):
            launcher.prepare()
        with pytest.raises(BlockingIOError):
            launcher.start(RunFolder.create(tmp_path / "0"), REQUEST)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list(tmp_path.glob(".standby-*")) == []


def test_a_worker_whose_log_cannot_move_is_ended(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "0")
    folder.log.mkdir()
    with LocalLauncher(tmp_path, f"{tmp_path}/study.py:Study") as launcher:
        with pytest.raises(OSError, match="directory"):
            launcher.start(folder, REQUEST)
        assert processes_with(str(tmp_path)) == []
    assert list(tmp_path.glob(".standby-*")) == []
