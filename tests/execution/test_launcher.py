"""Real child processes: training, real out-of-memory errors, crashes, time-outs, leftovers."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TINY, processes_with
from tests.execution.launching import finished
from tuner.execution.launcher import LocalLauncher
from tuner.execution.run_folder import Request, RunFolder
from tuner.records import Outcome, TrialResult
from tuner.units import GIB, MIB

Launch = Callable[..., TrialResult]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Launch the tiny workload in one mode; returns its result."""
    with LocalLauncher(tmp_path, f"{TINY}:Tiny") as launcher:

        def run(
            mode: str = "fine",
            *,
            width: int = 16,
            cap: int | None = 2 * GIB,
            timeout: float = 300.0,
            grace: float = 0.0,
            should_stop: Callable[[], bool] = lambda: False,
            seed: int = 1,
        ) -> TrialResult:
            request = Request(
                workload=f"{TINY}:Tiny",
                params={"width": width, "batch_size": 16, "mode": mode},
                device="cpu",
                reservation_bytes=cap,
                context_bytes=None,
                seed=seed,
                threads=1,
                example_steps=(3, 2),
            )
            folder = RunFolder.create(tmp_path / f"{mode}-{width}-{seed}")
            trial = launcher.start(folder, request)
            return finished(trial, timeout=timeout, should_stop=should_stop, grace=grace)

        yield run


def test_a_trial_trains_and_is_measured(launch: Launch, tmp_path: Path) -> None:
    result = launch(width=1024)
    assert result.outcome is Outcome.COMPLETED
    assert result.value is not None
    assert 0 < result.value <= 1
    assert [epoch.epoch for epoch in result.epochs] == [1, 2]
    assert result.environment["torch"] == torch.__version__
    peaks = result.peaks
    # Weights of 1024² and gradients, two moments and Adam's temporaries: five to six of them.
    assert peaks.allocated_bytes is not None
    assert 5 * 1024**2 * 4 < peaks.allocated_bytes < 8 * 1024**2 * 4
    assert peaks.device_bytes is not None
    assert peaks.baseline_bytes is not None
    assert peaks.device_bytes - peaks.baseline_bytes == pytest.approx(peaks.allocated_bytes, abs=30 * MIB)
    assert set(peaks.phases) == {"data", "setup", "train", "eval"}
    weights = torch.load(tmp_path / "fine-1024-1" / "best.pt", weights_only=True)
    assert weights[0]["0.weight"].shape == (1024, 64)


def test_a_real_out_of_memory_error_is_told_as_such(launch: Launch) -> None:
    """A request of 2⁴⁰ floats (4 TiB) under a cap of 2 GiB: PyTorch's own CPU allocator refuses."""
    result = launch("hungry")
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.failure is not None
    assert result.failure.requested_bytes == 4 * (1 << 40)
    assert result.failure.phase == "train"
    assert result.failure.reason == "out of memory during train"


def test_a_model_too_large_for_its_cap_runs_out_of_memory_under_it(launch: Launch) -> None:
    """8192² floats are 256 MiB, with gradients and two moments over 1 GiB, capped at 700 MiB."""
    result = launch(width=8192, cap=700 * MIB)
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.peaks.device_bytes is not None
    assert result.peaks.device_bytes < 710 * MIB


def test_a_cap_below_the_baseline_is_out_of_memory_too(launch: Launch) -> None:
    result = launch(cap=50 * MIB)
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.failure is not None
    assert "resident before training" in (result.failure.traceback or "")


@pytest.mark.parametrize(
    ("mode", "outcome", "reason"),
    [
        ("raises", Outcome.ERROR, "ValueError: this mode raises"),
        ("nan", Outcome.ERROR, "objective was NaN"),
        ("segfault", Outcome.CRASHED, "signal 11"),
        ("exits", Outcome.CRASHED, "exit code 3"),
    ],
)
def test_every_other_end_has_its_own_outcome(
    launch: Launch, mode: str, outcome: Outcome, reason: str
) -> None:
    result = launch(mode)
    assert result.outcome is outcome
    assert result.failure is not None
    assert reason in result.failure.reason


def test_a_trial_that_hangs_is_killed_at_its_time_out(launch: Launch, tmp_path: Path) -> None:
    started = time.monotonic()
    result = launch("slow", timeout=5.0)
    assert result.outcome is Outcome.TIMED_OUT
    assert time.monotonic() - started < 30  # the step itself sleeps for 60 s
    assert processes_with(str(tmp_path)) == []


def test_an_interrupted_trial_leaves_no_process(launch: Launch, tmp_path: Path) -> None:
    asked = time.monotonic()
    result = launch("slow", should_stop=lambda: time.monotonic() - asked > 4)
    assert result.outcome is Outcome.INTERRUPTED
    assert processes_with(str(tmp_path)) == []


def test_a_child_killed_from_outside_is_killed(launch: Launch, tmp_path: Path) -> None:
    def kill_it() -> bool:
        events = RunFolder(tmp_path / "slow-16-1").read_events()
        if any(event["kind"] == "baseline" for event in events):
            for pid in processes_with("tuner.execution.worker"):
                if _parent_is_below(pid, os.getpid()):
                    os.kill(pid, 9)
        return False

    result = launch("slow", timeout=40, should_stop=kill_it)
    assert result.outcome is Outcome.KILLED


def test_the_same_seed_gives_the_same_metrics_and_allocated_peak(launch: Launch) -> None:
    first, second, other = launch(width=64), launch(width=64), launch(width=64, seed=2)
    assert first.metrics == second.metrics
    assert first.peaks.allocated_bytes == second.peaks.allocated_bytes
    assert first.metrics != other.metrics


def test_baselines_do_not_climb_from_trial_to_trial(launch: Launch) -> None:
    """Each trial has a process of its own: three baselines within 2 MiB (case D19)."""
    baselines = [launch(width=2048, seed=seed).peaks.baseline_bytes or 0 for seed in range(3)]
    assert max(baselines) - min(baselines) < 2 * MIB


def _parent_is_below(pid: int, ancestor: int) -> bool:
    """Whether `ancestor` started `pid` (through its supervisor)."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
        if pid == ancestor:
            return True
    return False


def test_the_parent_never_creates_a_cuda_context(tmp_path: Path) -> None:
    """The driver's modules import neither PyTorch nor anything that touches a GPU by itself."""
    import subprocess

    code = (
        "import sys, tuner.search.loop, tuner.execution.launcher, tuner.scheduling.devices, tuner.cli.run;"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
