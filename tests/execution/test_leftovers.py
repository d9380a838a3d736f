"""What a trial leaves to others: no process, whoever is killed (case D17), and no memory (case D19)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.execution.launching import finish, request_for
from tests.workloads.leftovers import KINDS
from tuner.execution.launcher import LocalLauncher, LocalTrial
from tuner.execution.run_folder import Request, RunFolder, StopRequest
from tuner.records import Outcome, TrialResult
from tuner.units import GIB, MIB

WORKLOAD = f"{ROOT / 'tests' / 'workloads' / 'leftovers.py'}:Leftovers"
LEAKY = f"{ROOT / 'tests' / 'workloads' / 'leaky.py'}:Leaky"
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


def leaky_trials(root: Path, requests: Iterable[Request]) -> list[TrialResult]:
    """Run trials one after the other in one launcher, each prepared while the last one runs."""
    with LocalLauncher(root, LEAKY) as launcher:
        results = []
        for number, request in enumerate(requests):
            trial = launcher.start(RunFolder.create(root / str(number)), request)
            launcher.prepare()
            results.append(finish(trial))
        return results


def spread(sizes: list[int | None]) -> int:
    known = [size for size in sizes if size is not None]
    assert len(known) == len(sizes)
    return max(known) - min(known)


def test_five_trials_that_leak_half_the_budget_end_alike(tmp_path: Path) -> None:
    """Each takes about 55 % of 1 GiB (206 MiB of it a layer with Adam), keeps it, and one asks for 4 TiB."""
    params = {"width": 3000, "leak_mib": 30, "hungry": False}
    requests = [
        request_for(LEAKY, {**params, "hungry": number == 2}, reservation_bytes=GIB, example_steps=(2, 0))
        for number in range(5)
    ]

    results = leaky_trials(tmp_path, requests)

    ends = [Outcome.COMPLETED] * 5
    ends[2] = Outcome.OUT_OF_MEMORY
    assert [result.outcome for result in results] == ends
    fine = [result.peaks for result in results if result.outcome is Outcome.COMPLETED]
    assert all(0.5 * GIB < (peaks.device_bytes or 0) < 0.6 * GIB for peaks in fine)
    assert spread([peaks.allocated_bytes for peaks in fine]) <= MIB
    assert spread([result.peaks.baseline_bytes for result in results]) <= 2 * MIB


def test_twenty_trials_that_leave_300_mib_behind_start_alike(tmp_path: Path) -> None:
    request = request_for(LEAKY, {"width": 16, "leak_mib": 300, "hungry": False})

    results = leaky_trials(tmp_path, [request] * 20)

    assert all(result.outcome is Outcome.COMPLETED for result in results)
    assert all(
        (result.peaks.device_bytes or 0) - (result.peaks.baseline_bytes or 0) > 300 * MIB
        for result in results
    )
    assert spread([result.peaks.baseline_bytes for result in results]) <= 2 * MIB
