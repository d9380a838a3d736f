"""How trials end (case D22): a real child process for each way, and what each may teach."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.execution.launching import request_for, run_together
from tests.workloads.endings import ENDINGS
from tuner.execution.failures import classify
from tuner.records import Band, Outcome, Prediction, TrialResult
from tuner.search.learned import measured_from
from tuner.units import GIB, MIB

WORKLOAD = f"{ROOT / 'tests' / 'workloads' / 'endings.py'}:Endings"
IN_LOADER = "a loader worker "

# What each ending is, and what its reason says.
EXPECTED = {
    "completes": (Outcome.COMPLETED, ""),
    "the allocator has no memory": (Outcome.OUT_OF_MEMORY, "out of memory during train"),
    # A CPU target is capped: memory of the host is memory of its device.
    "MemoryError": (Outcome.OUT_OF_MEMORY, "out of memory during train"),
    "torch.OutOfMemoryError by hand": (Outcome.ERROR, "OutOfMemoryError: CUDA out of memory."),
    "cuBLAS": (Outcome.ERROR, "CUBLAS_STATUS_NOT_INITIALIZED"),
    "invalid configuration": (Outcome.ERROR, "invalid configuration argument"),
    "SIGKILL": (Outcome.KILLED, "no evidence of the kernel's out-of-memory killer was found"),
    "segmentation fault": (Outcome.CRASHED, "crashed with signal 11 (SIGSEGV)"),
    "exit 1": (Outcome.CRASHED, "ended with exit code 1 and no report"),
    "exit 0": (Outcome.CRASHED, "ended with exit code 0 and no report"),
    "sys.exit": (Outcome.ERROR, "the workload called sys.exit()"),
    "sys.exit with text": (Outcome.ERROR, "the workload called sys.exit(no data today)"),
    "KeyboardInterrupt": (Outcome.ERROR, "KeyboardInterrupt"),
    "unprintable": (Outcome.ERROR, "Unprintable"),
    "10 MB of text": (Outcome.ERROR, "ValueError: xxx"),
    "text no database takes": (Outcome.ERROR, r"ValueError: nul \x00 and half a pair \ud800"),
    "endless recursion": (Outcome.ERROR, "RecursionError: maximum recursion depth exceeded"),
    "a thread raises": (Outcome.COMPLETED, ""),  # its traceback is in the log, as in any program
    "output closed": (Outcome.COMPLETED, ""),
    "100 MB of output": (Outcome.COMPLETED, ""),
    f"{IN_LOADER}is killed": (Outcome.KILLED, "a loader worker was killed by signal 9 during train"),
    f"{IN_LOADER}has a bus error": (Outcome.HOST_OUT_OF_MEMORY, "out of shared memory in a loader worker"),
    f"{IN_LOADER}crashes": (Outcome.CRASHED, "a loader worker crashed during train: Segmentation fault"),
    f"{IN_LOADER}raises": (Outcome.ERROR, "ValueError: Caught ValueError in DataLoader worker process 0."),
    f"{IN_LOADER}has no memory": (Outcome.OUT_OF_MEMORY, "out of memory in a loader worker during train"),
}
# Under the cap of a CPU target these say how much the trial itself needed.
TEACHING = {"completes", "a thread raises", "output closed", "100 MB of output"} | {
    "the allocator has no memory",
    "MemoryError",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endings")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, TrialResult]:
    """Every ending, two children at a time."""
    requests = {how: request_for(WORKLOAD, {"ending": how}, reservation_bytes=GIB) for how in EXPECTED}
    return run_together(folder, requests, at_once=2)


def test_every_ending_is_expected() -> None:
    assert set(ENDINGS) < set(EXPECTED)


@pytest.mark.parametrize("how", EXPECTED)
def test_each_ending_has_its_outcome_and_a_reason(how: str, results: dict[str, TrialResult]) -> None:
    outcome, reason = EXPECTED[how]
    result = results[how]

    assert result.outcome is outcome, result.failure
    if outcome is Outcome.COMPLETED:
        assert result.failure is None
        assert result.value is not None
    else:
        assert result.failure is not None
        assert reason in result.failure.reason
        assert len(result.failure.reason) < 1000
        assert len(result.failure.traceback or "") < 25_000
        assert "\0" not in json.dumps(result.failure.to_json(), ensure_ascii=False)
        json.dumps(result.failure.to_json(), ensure_ascii=False).encode()  # no half of a pair


@pytest.mark.parametrize("how", EXPECTED)
def test_only_the_trials_own_memory_teaches_the_memory_model(
    how: str, results: dict[str, TrialResult]
) -> None:
    band = Band(300 * MIB, 320 * MIB, 340 * MIB)
    prediction = Prediction(20 * MIB, 20 * MIB, band, band, None, None)

    learned = measured_from(prediction, results[how], context_bytes=300 * MIB, cap_bytes=GIB)

    assert (learned is not None) == (how in TEACHING)


def test_what_was_asked_for_in_vain_is_kept_in_bytes(results: dict[str, TrialResult]) -> None:
    hoard, loader = (
        results[how].failure for how in ("the allocator has no memory", f"{IN_LOADER}has no memory")
    )

    assert hoard is not None
    assert loader is not None
    assert (hoard.requested_bytes, loader.requested_bytes) == (16 * MIB, 4 << 40)
    assert loader.phase == "loader worker"


def test_a_shared_memory_that_is_full_is_named_with_its_size(results: dict[str, TrialResult]) -> None:
    failure = results[f"{IN_LOADER}has a bus error"].failure

    assert failure is not None
    assert "/dev/shm has " in failure.reason


def test_a_log_of_100_megabytes_is_cut_with_a_mark(folder: Path, results: dict[str, TrialResult]) -> None:
    log = folder / "100 MB of output" / "log.txt"

    assert log.stat().st_size <= 8 * MIB
    assert "bytes left out: the log has a limit" in log.read_text()


def test_a_threads_error_is_in_the_log(folder: Path, results: dict[str, TrialResult]) -> None:
    assert "ValueError: in a thread" in (folder / "a thread raises" / "log.txt").read_text()


def test_no_traceback_keeps_a_tensor_alive() -> None:
    """The frames of a caught error hold every local; once it is told as text they are free."""
    tensors: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.ones(1000)
        tensors.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    gc.disable()  # or a collection might hide a cycle
    try:
        try:
            step()
        except torch.OutOfMemoryError as error:
            kept = classify(error, torch.device("cpu"), "train", capped=True)
            assert tensors[0]() is not None
        assert tensors[0]() is None
    finally:
        gc.enable()
    assert "step" in (kept[1].traceback or "")
