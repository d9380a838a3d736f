"""Case D17: a trial with stubborn loader workers leaves no process, whoever is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.execution.launching import finish, request_for
from tests.workloads.leftovers import KINDS
from tuner.execution.launcher import LocalLauncher, LocalTrial
from tuner.execution.run_folder import RunFolder, StopRequest
from tuner.records import Outcome, TrialResult

WORKLOAD = f"{ROOT / 'tests' / 'workloads' / 'leftovers.py'}:Leftovers"
GONE_SECONDS = 3.0
MARK = "LEFTOVERS_TEST"
DRIVER = """
import pathlib, sys
from tests.execution import test_leftovers
test_leftovers.drive(pathlib.Path(sys.argv[1]))
"""


def launch(launcher: LocalLauncher, root: Path) -> LocalTrial:
    return launcher.start(RunFolder.create(root / "trial"), request_for(WORKLOAD, {"folder": str(root)}))


def drive(root: Path) -> TrialResult:
    with LocalLauncher(root, WORKLOAD) as launcher:
        return finish(launch(launcher, root))


class Trial:
    """A running trial, everything below this process that carries a mark of the test."""

    def __init__(self, root: Path, mark: str) -> None:
        self.root, self._mark = root, f"{MARK}={mark}\0".encode()

    def pids(self) -> dict[int, int]:
        """Return the living processes of the trial, and the parent of each."""
        found = {}
        for name in (path.name for path in Path("/proc").iterdir()):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    environment = Path(f"/proc/{name}/environ").read_bytes()
                    state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
                except OSError:
                    continue
                if self._mark in environment + b"\0" and state not in "ZX":
                    found[int(name)] = int(parent)
        return found

    def child(self) -> int:
        """Wait until all stubborn workers are there; return the trial's own process."""
        roles = (*KINDS, "grandchild")
        deadline = time.monotonic() + 60
        while not all((self.root / role).exists() for role in roles):
            assert time.monotonic() < deadline, "the loader workers did not start"
            time.sleep(0.05)
        pids = {role: int((self.root / role).read_text()) for role in roles}
        alive = self.pids()
        assert set(pids.values()) <= set(alive)
        parents = {alive[pids[kind]] for kind in KINDS}
        assert len(parents) == 1
        assert os.getsid(pids["grandchild"]) != os.getsid(pids["waits"])
        return parents.pop()

    def supervisor(self) -> int:
        child = self.child()
        return self.pids()[child]

    def assert_gone(self) -> None:
        deadline = time.monotonic() + GONE_SECONDS
        while left := self.pids():
            assert time.monotonic() < deadline, f"{len(left)} processes live {GONE_SECONDS} s later"
            time.sleep(0.02)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    trial = Trial(tmp_path, mark)
    yield trial
    for pid in trial.pids():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def running(trial: Trial) -> Iterator[LocalTrial]:
    """The trial, launched from here, with its workers there."""
    with LocalLauncher(trial.root, WORKLOAD) as launcher:
        running = launch(launcher, trial.root)
        trial.child()
        assert running.poll() is None
        yield running
        running.kill()


def test_a_trial_that_runs_too_long_leaves_no_loader_worker(trial: Trial, running: LocalTrial) -> None:
    """It hangs in its data, so that it does not see that it is asked to end: killed after the grace."""
    running.stop(StopRequest(Outcome.TIMED_OUT, "ran longer than 1 s"), grace_seconds=0.5)

    assert finish(running, 0.5 + GONE_SECONDS).outcome is Outcome.TIMED_OUT
    trial.assert_gone()


def test_a_trial_killed_from_outside_leaves_no_loader_worker(trial: Trial, running: LocalTrial) -> None:
    os.kill(trial.child(), signal.SIGKILL)

    assert finish(running, GONE_SECONDS).outcome is Outcome.KILLED
    trial.assert_gone()


def test_a_killed_supervisor_leaves_no_loader_worker(trial: Trial, running: LocalTrial) -> None:
    assert running.pid == trial.child()
    os.kill(trial.supervisor(), signal.SIGKILL)

    assert finish(running, GONE_SECONDS).outcome is Outcome.KILLED
    trial.assert_gone()


def test_a_killed_driver_leaves_no_loader_worker(trial: Trial) -> None:
    command = [sys.executable, "-P", "-c", DRIVER, str(trial.root)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as driver:
        trial.child()
        driver.kill()

    trial.assert_gone()
