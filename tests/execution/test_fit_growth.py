"""Case D18: memory that each step leaves behind, in real children."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, clean_environment
from tests.execution.launching import request_for, run_one
from tuner.execution.launcher import _CPU_ENVIRONMENT
from tuner.memory.calibration import Calibration, Measured
from tuner.memory.prediction import estimate, predict
from tuner.memory.target_rules import rules_for
from tuner.memory.targets import resolve_target
from tuner.memory.trace import trace_workload
from tuner.records import Outcome, TrialResult
from tuner.search.learned import measured_from
from tuner.units import GIB, KIB, MIB, format_bytes
from tuner.workload import load_workload

GROWING = f"{ROOT / 'tests' / 'workloads' / 'growing.py'}:Growing"
STEPS = 1000

# What malloc has handed out, by glibc itself, before and after 400 steps of the same training.
COUNT = """
import ctypes, torch
from tests.workloads.growing import BATCH, make_state, train

class Mallinfo(ctypes.Structure):
    _fields_ = [(n, ctypes.c_size_t) for n in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks "
                "fordblks keepcost".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
held = lambda: libc.mallinfo2().uordblks + libc.mallinfo2().hblkhd
torch.set_num_threads(1)
state = make_state(torch.device("cpu"))
batch = torch.randn(BATCH, 64), torch.zeros(BATCH).long()
for step in range(600):
    if step == 200:
        before = held()
    state.total += train(state, batch)
print((held() - before) // 400)
"""


def trained(folder: Path, keeps: str, *, kept_bytes: int = 0, cap: int | None = None) -> TrialResult:
    params = {"keeps": keeps, "steps": STEPS, "kept_bytes": kept_bytes}
    changes = {} if cap is None else {"reservation_bytes": cap}
    return run_one(folder, keeps, request_for(GROWING, params, **changes))


def learned_from(result: TrialResult) -> Measured | None:
    """Return what the calibration is told of a trial whose prediction saw no growth."""
    target, params = resolve_target("cpu"), {"keeps": "value", "steps": STEPS, "kept_bytes": 0}
    found = estimate(trace_workload(load_workload(GROWING).workload, params, rules_for(target)), target)
    prior = Calibration.of_mix("cpu", found.mix)
    prediction = predict(found, target, prior, context_bytes=300 * MIB, budget_bytes=2 * GIB)
    return measured_from(prediction, result, context_bytes=300 * MIB, cap_bytes=2 * GIB)


def bytes_per_step_by_malloc() -> int:
    done = subprocess.run(
        [sys.executable, "-c", COUNT],
        env=clean_environment(**_CPU_ENVIRONMENT),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_a_running_total_that_keeps_graphs_is_growth_of_the_right_size(tmp_path: Path) -> None:
    """Against glibc's own count of bytes in use; pages are not filled: 0.8 to 1.5 of it (measured: 1.2)."""
    result = trained(tmp_path, "loss")

    assert result.outcome is Outcome.COMPLETED
    assert result.growth_bytes is not None
    assert result.growth_bytes / bytes_per_step_by_malloc() == pytest.approx(1.15, abs=0.35)
    assert result.warnings == (f"memory grows by {format_bytes(result.growth_bytes)} per training step",)
    assert learned_from(result) is None  # it says nothing of what a step needs


def test_a_running_total_of_values_is_flat(tmp_path: Path) -> None:
    result = trained(tmp_path, "value")

    assert (result.outcome, result.growth_bytes, result.warnings) == (Outcome.COMPLETED, 0, ())
    assert learned_from(result) is not None


def test_tensors_of_known_size_that_stay_are_growth_of_that_size(tmp_path: Path) -> None:
    """64 KiB a step, within 25 %: malloc leaves holes between them (measured: 0 to 12 % more)."""
    result = trained(tmp_path, "tensors", kept_bytes=64 * KIB)

    assert result.growth_bytes == pytest.approx(64 * KIB, rel=0.25)


def test_a_trial_that_grew_until_it_ran_out_says_so(tmp_path: Path) -> None:
    """Half a MiB a step under a cap of 96 MiB above the baseline: some 150 steps."""
    flat = trained(tmp_path / "flat", "value")
    assert flat.peaks.device_bytes is not None

    result = trained(tmp_path, "tensors", kept_bytes=MIB // 2, cap=flat.peaks.device_bytes + 96 * MIB)

    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.failure is not None
    assert result.growth_bytes == pytest.approx(MIB // 2, rel=0.1)
    grew = f"memory grew by {format_bytes(result.growth_bytes)} per training step"
    assert result.failure.reason == f"out of memory during train: {grew}"
