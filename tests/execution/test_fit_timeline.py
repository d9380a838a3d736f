"""Peaks per epoch and the timeline, of real children: those that report, and those that are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.execution.launching import finish, request_for, run_one
from tuner.execution.launcher import LocalLauncher
from tuner.execution.run_folder import RunFolder
from tuner.measure.timeline import MOST_POINTS
from tuner.records import EpochMetrics, Outcome
from tuner.units import MIB

WAVES = f"{ROOT / 'tests' / 'workloads' / 'waves.py'}:Waves"


def test_each_epoch_has_its_own_peak(tmp_path: Path) -> None:
    """Steps touch 8, 64 and 16 MiB: the peaks differ by that, within 4 MiB of first uses."""
    result = run_one(tmp_path, "waves", request_for(WAVES, {"mib": [8, 64, 16], "pause": 0.0}))

    within = [epoch.epoch_peak_bytes or 0 for epoch in result.epochs]
    assert [(size - within[0]) / MIB for size in within] == pytest.approx([0, 56, 8], abs=4)
    so_far = [epoch.peak_bytes for epoch in result.epochs]
    assert so_far == [within[0], within[1], within[1]]
    assert result.peaks.device_bytes == within[1] == result.peaks.phases["train"]
    assert result.host_peak_bytes == within[1]  # the kernel's own figure starts anew at each reading
    assert [epoch.epoch_allocated_bytes for epoch in result.epochs] == [None] * 3


def test_the_timeline_holds_the_peak_in_its_phase_and_no_more_than_512_points(tmp_path: Path) -> None:
    result = run_one(tmp_path, "waves", request_for(WAVES, {"mib": [8, 64, 16], "pause": 0.06}))

    assert result.timeline is not None
    seconds, sizes, phases = zip(*result.timeline["points"], strict=True)
    assert 12 < len(seconds) <= MOST_POINTS  # a sample every 50 ms at most: each of the 12 steps
    assert list(seconds) == sorted(seconds)
    assert seconds[-1] < result.seconds
    assert max(sizes) == result.peaks.device_bytes
    assert result.timeline["phases"][phases[sizes.index(max(sizes))]] == "train"
    assert result.timeline["phases"] == ["start", "data", "setup", "train"]


def test_a_killed_trial_leaves_its_epochs_and_its_timeline(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "killed")
    with LocalLauncher(tmp_path, WAVES) as launcher:
        trial = launcher.start(folder, request_for(WAVES, {"mib": [8, 64, 16], "pause": 0.5}))
        while sum(event["kind"] == "epoch" for event in folder.read_events()) < 2:
            assert trial.poll() is None
            time.sleep(0.02)
        assert trial.pid is not None
        os.kill(trial.pid, signal.SIGKILL)
        result = finish(trial)

    assert result.outcome is Outcome.KILLED
    assert len(result.epochs) == 2
    assert result.peaks.device_bytes == result.epochs[1].epoch_peak_bytes
    assert result.timeline is not None
    assert max(size for _, size, _ in result.timeline["points"]) == result.peaks.device_bytes
    assert result.peaks.used_before_bytes is not None


def test_epochs_of_older_run_folders_still_read() -> None:
    old = {"epoch": 1, "metrics": {"score": 1.0}, "seconds": 2.0, "peak_bytes": 3}
    assert EpochMetrics(**old).epoch_peak_bytes is None
