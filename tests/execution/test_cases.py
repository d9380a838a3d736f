"""Cases D11 and D15 of real users: what becomes of a trial that a library or its data ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.execution.launching import finished
from tuner.execution.failures import classify
from tuner.execution.launcher import LocalLauncher
from tuner.execution.run_folder import Request, RunFolder
from tuner.memory.calibration import Calibration
from tuner.memory.prediction import estimate, predict
from tuner.memory.target_rules import rules_for
from tuner.memory.targets import resolve_target
from tuner.memory.trace import trace_workload
from tuner.records import Outcome, Prediction, TrialResult, Verdict
from tuner.search.learned import measured_from
from tuner.units import GIB, MIB
from tuner.workload import load_workload

LAST_BATCH = f"{ROOT / 'tests' / 'workloads' / 'last_batch.py'}:LastBatch"
WORKSPACE_TEXT = (
    "CUDA out of memory. Tried to allocate 48.01 GiB. GPU 0 has a total capacity of 15.78 GiB of which "
    "11.10 GiB is free. Of the allocated memory 4.00 GiB is allocated by PyTorch, and 0 bytes is reserved "
    "by PyTorch but unallocated."
)


def test_a_workspace_that_fails_is_stored_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case D11: 48.01 GiB requested (two decimals), 4.00 GiB allocated; the gap stays visible."""
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (11 * GIB, 16 * GIB))

    outcome, failure = classify(
        torch.OutOfMemoryError(WORKSPACE_TEXT), torch.device("cuda:0"), "train", capped=False
    )

    assert outcome is Outcome.OUT_OF_MEMORY
    assert failure.requested_bytes == pytest.approx(48.01 * GIB, abs=0.005 * GIB)
    assert failure.allocated_bytes == 4 * GIB


def predicted(batch_size: int) -> Prediction:
    target = resolve_target("cpu")
    workload = load_workload(LAST_BATCH).workload
    found = estimate(trace_workload(workload, {"batch_size": batch_size}, rules_for(target)), target)
    prior = Calibration.of_mix("cpu", found.mix)
    return predict(found, target, prior, context_bytes=300 * MIB, budget_bytes=2 * GIB)


def test_a_last_batch_of_one_is_an_error_of_data_never_of_memory(tmp_path: Path) -> None:
    """Case D15: 65 samples; 8, 16, 32 and 64 leave a single one and fail, 13 works.

    None is out of memory or predicted not to fit, and what failed teaches the memory model nothing.
    """
    with LocalLauncher(tmp_path, LAST_BATCH) as launcher:

        def launch(batch_size: int) -> TrialResult:
            request = Request(
                workload=LAST_BATCH,
                params={"batch_size": batch_size},
                device="cpu",
                reservation_bytes=2 * GIB,
                context_bytes=None,
                seed=1,
                threads=1,
                example_steps=(3, 0),
            )
            folder = RunFolder.create(tmp_path / str(batch_size))
            return finished(launcher.start(folder, request))

        sizes = (8, 13, 16, 32, 64)
        with ThreadPoolExecutor(len(sizes)) as threads:
            results = dict(zip(sizes, threads.map(launch, sizes), strict=True))

    assert all(predicted(batch_size).verdict is Verdict.LAUNCH for batch_size in sizes)
    assert results.pop(13).outcome is Outcome.COMPLETED
    for batch_size, result in results.items():
        assert result.outcome is Outcome.ERROR
        assert result.failure is not None
        assert "more than 1 value per channel" in result.failure.reason
        learned = measured_from(predicted(batch_size), result, context_bytes=300 * MIB, cap_bytes=2 * GIB)
        assert learned is None
