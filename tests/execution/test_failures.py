"""What a trial died of (case D22), from errors that PyTorch and the kernel really raise."""

from __future__ import annotations

import mmap
import signal
from typing import TYPE_CHECKING

import pytest
import torch

from tuner.execution.failures import classify, classify_exit
from tuner.processes import ExitStatus
from tuner.records import Failure, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
GIB, MIB = 1 << 30, 1 << 20
# The text of PyTorch 2.x, c10/cuda/CUDACachingAllocator.cpp.
CUDA_TEXT = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 39.39 GiB of which "
    "512.00 MiB is free. Of the allocated memory 36.00 GiB is allocated by PyTorch, and 1.20 GiB is reserved "
    "by PyTorch but unallocated."
)
CUBLAS_TEXT = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


def caught(action: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as info:
        action()
    return info.value


def huge_tensor() -> object:
    return torch.empty(1 << 50)  # 2^52 bytes are beyond the address space of any CPU


def host_errors() -> dict[str, Exception]:
    return {
        "the CPU allocator": caught(huge_tensor),
        "MemoryError": caught(lambda: bytearray(1 << 60)),
        "ENOMEM": caught(lambda: mmap.mmap(-1, 1 << 60)),
        "bad_alloc": RuntimeError("std::bad_alloc"),
        "ENOMEM in German": OSError(12, "Nicht genügend Hauptspeicher verfügbar"),
        "oneDNN": RuntimeError("could not create a memory object"),
    }


def test_the_errors_below_are_what_this_pytorch_and_this_kernel_raise() -> None:
    errors = host_errors()

    assert type(errors["the CPU allocator"]) is RuntimeError
    assert "DefaultCPUAllocator" in str(errors["the CPU allocator"])
    assert type(errors["MemoryError"]) is MemoryError
    assert isinstance(errors["ENOMEM"], OSError)


@pytest.mark.parametrize("kind", list(host_errors()))
def test_host_memory_is_device_memory_only_under_a_cap(kind: str) -> None:
    error = host_errors()[kind]

    capped, evidence = classify(error, CPU, "train", capped=True)
    free, free_evidence = classify(error, CPU, "train", capped=False)
    on_gpu, gpu_evidence = classify(error, CUDA, "train", capped=False)

    assert (capped, free, on_gpu) == (
        Outcome.OUT_OF_MEMORY,
        Outcome.HOST_OUT_OF_MEMORY,
        Outcome.HOST_OUT_OF_MEMORY,  # never taught to the GPU's memory model
    )
    assert evidence.reason == "out of memory during train"
    assert free_evidence.reason == gpu_evidence.reason == "out of host memory during train"
    assert evidence.phase == "train"
    assert type(error).__name__ in (evidence.traceback or "")
    asked_bytes = 4 * (1 << 50) if kind == "the CPU allocator" else None  # float32: exact
    assert evidence.requested_bytes == free_evidence.requested_bytes == asked_bytes


@pytest.mark.parametrize("capped", [True, False])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_TEXT),  # raised by hand, or by a GPU that is not the target
        ValueError("expected a batch of 4"),
        KeyError("width"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError(CUBLAS_TEXT),
        AssertionError(),
        OSError(2, "No such file or directory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_ordinary_error_on_a_cpu_is_an_error(error: Exception, capped: bool) -> None:
    outcome, failure = classify(error, CPU, "setup", capped=capped)

    assert outcome is Outcome.ERROR
    assert failure.reason.startswith(type(error).__name__)
    assert failure.phase == "setup"
    assert (failure.requested_bytes, failure.allocated_bytes, failure.free_bytes) == (None, None, None)


def on_gpu(error: Exception, free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, Failure]:
    """Classify on a GPU of 40 GiB, of which some is free, and of which we have allocated some."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 36 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 37 * GIB)
    return classify(error, CUDA, "backward", capped=False)


def test_pytorchs_own_error_on_a_gpu_is_out_of_memory_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome, failure = on_gpu(torch.OutOfMemoryError(CUDA_TEXT), 512 * MIB, monkeypatch)

    assert outcome is Outcome.OUT_OF_MEMORY
    assert failure.reason == "out of memory during backward"
    # The text has two decimals of a GiB, and 2.50 is exact.
    assert failure.requested_bytes == 5 * GIB // 2
    assert failure.free_bytes == 512 * MIB
    assert (failure.allocated_bytes, failure.reserved_bytes) == (36 * GIB, 37 * GIB)


@pytest.mark.parametrize(
    "text", [CUBLAS_TEXT, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"]
)
def test_a_library_without_memory_for_its_handle_is_suspected_only_when_little_is_free(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspected, evidence = on_gpu(RuntimeError(text), 20 * MIB, monkeypatch)
    cleared, _ = on_gpu(RuntimeError(text), 20 * GIB, monkeypatch)

    assert suspected is Outcome.OUT_OF_MEMORY
    assert "suspected" in evidence.reason
    assert evidence.free_bytes == 20 * MIB
    assert cleared is Outcome.ERROR


def test_a_batch_that_a_kernel_rejects_is_an_error_however_full_the_gpu_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcome, failure = on_gpu(RuntimeError("CUDA error: invalid configuration argument"), MIB, monkeypatch)

    assert outcome is Outcome.ERROR
    assert "invalid configuration argument" in failure.reason


@pytest.mark.parametrize(
    ("code", "log", "capped", "outcome", "said"),
    [
        (-signal.SIGKILL, "", True, Outcome.KILLED, "signal 9"),
        (-signal.SIGKILL, "", False, Outcome.KILLED, "host's memory is suspected"),
        (-signal.SIGSEGV, "", True, Outcome.CRASHED, "signal 11"),
        (-signal.SIGABRT, "some assertion", True, Outcome.CRASHED, "signal 6"),
        (1, "", True, Outcome.CRASHED, "exit code 1"),
        (1, "", False, Outcome.CRASHED, "exit code 1"),
        (0, "", False, Outcome.CRASHED, "no report"),
        (
            1,
            "libgomp: Thread creation failed: Resource temporarily unavailable",
            True,
            Outcome.OUT_OF_MEMORY,
            "library",
        ),
        (
            1,
            "libgomp: Thread creation failed: Resource temporarily unavailable",
            False,
            Outcome.CRASHED,
            "exit code 1",
        ),
        (
            -signal.SIGABRT,
            "terminate called\n  what():  std::bad_alloc\n",
            True,
            Outcome.OUT_OF_MEMORY,
            "library",
        ),
        (
            -signal.SIGABRT,
            "terminate called\n  what():  std::bad_alloc\n",
            False,
            Outcome.CRASHED,
            "signal 6",
        ),
    ],
)
def test_a_child_without_a_report(code: int, log: str, capped: bool, outcome: Outcome, said: str) -> None:
    found, failure = classify_exit(ExitStatus(code), log, capped=capped)

    assert found is outcome
    assert said in failure.reason


def raised(error: Exception) -> Exception:
    def fail() -> None:
        raise error

    return caught(fail)


@pytest.mark.parametrize(
    "text", ["x" * 1_000_000, "line of words\n" * 70_000], ids=["one line", "many lines"]
)
def test_an_error_text_of_a_megabyte_is_cut_with_a_mark(text: str) -> None:
    outcome, failure = classify(raised(ValueError(text)), CPU, "train", capped=False)

    assert outcome is Outcome.ERROR
    assert failure.traceback is not None
    assert failure.traceback.startswith("Traceback")
    assert "characters left out" in failure.traceback
    assert len(failure.traceback) < 25_000


@pytest.mark.parametrize(
    ("text", "whole"), [("x" * 1_000_000, False), ("short\n" * 100_000, True)], ids=["one line", "many lines"]
)
def test_the_reason_is_the_first_line_and_marked_where_it_is_cut(text: str, whole: bool) -> None:
    reason = classify(raised(ValueError(text)), CPU, "train", capped=False)[1].reason

    assert reason.startswith("ValueError: ")
    assert (reason == "ValueError: short") == whole
    assert ("…" in reason) == (not whole), "cut without a mark"


def test_an_error_that_cannot_be_printed_is_still_an_error() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    outcome, failure = classify(Unprintable(), CPU, "train", capped=False)

    assert outcome is Outcome.ERROR
    assert "Unprintable" in failure.reason
