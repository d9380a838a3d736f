"""On a real GPU: a study runs, the cap holds, and the prediction is near what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY, Tuner
from tests.execution.launching import finished
from tuner.execution.launcher import LocalLauncher
from tuner.execution.run_folder import Request, RunFolder
from tuner.measure import nvml
from tuner.records import Outcome, TrialResult
from tuner.units import GIB, MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def launched(folder: Path, *, width: int, cap: int) -> TrialResult:
    """Train the tiny workload on the first GPU under a cap."""
    device = nvml.devices().found[0]
    request = Request(
        workload=f"{TINY}:Tiny",
        params={"width": width, "batch_size": 64, "mode": "fine"},
        device="cuda",
        reservation_bytes=cap,
        context_bytes=None,
        seed=1,
        threads=2,
        example_steps=(3, 2),
        visible_device=device.uuid,
    )
    with LocalLauncher(folder, f"{TINY}:Tiny", "cuda") as launcher:
        return finished(launcher.start(RunFolder.create(folder / "run"), request), timeout=120)


def test_a_study_runs_on_a_gpu(tuner: Tuner) -> None:
    done = tuner("run", TINY, "--target", "cuda:0", "--budget", "4GiB", "--trials", "3")
    assert done.returncode == 0, done.stderr
    trials = json.loads(tuner("trials", "tiny", "-f", "json").stdout)
    completed = [trial for trial in trials if trial["outcome"] == "completed"]
    assert len(completed) == 3
    for trial in completed:
        # No dropout, attention or convolution: what is not modelled yet does not occur here.
        assert trial["predicted_allocated_bytes"] == pytest.approx(trial["allocated_bytes"], rel=0.05)
        assert trial["peak_source"].startswith("nvml")


def test_a_gpu_trial_runs_out_of_memory_under_its_cap(tmp_path: Path) -> None:
    """Weights of 16,384² floats are 1 GiB, with gradients and two moments 4 GiB, capped at 2 GiB."""
    result = launched(tmp_path, width=16384, cap=2 * GIB)
    assert result.outcome is Outcome.OUT_OF_MEMORY
    assert result.failure is not None
    assert result.failure.requested_bytes
    assert (result.peaks.device_bytes or 0) <= 2 * GIB + 64 * MIB


def test_the_driver_holds_nothing_on_the_gpu(tmp_path: Path) -> None:
    before = nvml.devices().found[0].free_bytes
    launched(tmp_path, width=64, cap=2 * GIB)
    assert abs(nvml.devices().found[0].free_bytes - before) < 50 * MIB


def test_the_doctor_measures_the_context_and_predictions_use_it(tuner: Tuner, tmp_path: Path) -> None:
    """150 MiB to 1.5 GiB: the reported contexts of modern stacks, with room on both sides."""
    state = {"TUNER_STATE_DIR": str(tmp_path / "state")}
    done = tuner("doctor", "-f", "json", **state)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    measured = checks["cuda:0 context"]["facts"]
    assert 150 * MIB < measured["context_bytes"] < 1536 * MIB
    assert measured["total_bytes"] == torch.cuda.get_device_properties(0).total_memory
    again = tuner("doctor", "-f", "json", **state).stdout
    assert "measured before" in again
    predicted = json.loads(tuner("predict", TINY, "--target", "cuda:0", "-f", "json", **state).stdout)
    assert predicted["categories"]["context"] == measured["context_bytes"]
