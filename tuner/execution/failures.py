"""What kind of end a trial came to, from an exception inside or an exit status outside.

Only memory of the device may teach the memory model, so it is told apart with care: PyTorch's own
error, the CPU allocator's, and the disguises that a failed allocation takes in libraries. Evidence
is kept as text and numbers.
"""

from __future__ import annotations

import errno
import re
import traceback
from typing import TYPE_CHECKING

from tuner.processes import ExitStatus
from tuner.records import Failure, Outcome
from tuner.units import GIB, KIB, MIB

if TYPE_CHECKING:
    import torch

_LONGEST_TEXT = 20_000
_CPU_ALLOCATOR = re.compile(r"DefaultCPUAllocator.*?tried to allocate (\d+) bytes", re.DOTALL)
_CUDA_REQUEST = re.compile(r"Tried to allocate (\d+(?:\.\d+)?) (GiB|MiB|KiB|bytes)")
_UNITS = {"GiB": GIB, "MiB": MIB, "KiB": KIB, "bytes": 1}
# How a failed allocation looks inside libraries, once PyTorch itself is warm.
_HOST_SIGNS = (
    "std::bad_alloc",
    "Cannot allocate memory",
    "Thread creation failed",
    "could not create a memory",
)
_CUDA_LIBRARY_SIGNS = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_TOO_LITTLE_FREE_BYTES = 50 * MIB


def classify(
    error: BaseException, device: torch.device, phase: str, *, capped: bool
) -> tuple[Outcome, Failure]:
    """Return the outcome and its evidence for an exception that ended the workload.

    Args:
        error: What was raised.
        device: Where the trial ran.
        phase: What it was doing.
        capped: Whether host memory is capped for this trial (a CPU target).
    """
    import torch

    try:
        text = _cut(str(error))
    except Exception:
        text = ""
    first = text.splitlines()[0] if text else ""
    first = first if len(first) <= 500 else first[:500] + " …"
    reason = f"{type(error).__name__}: {first}".rstrip(": ")
    trace = _cut("".join(traceback.format_exception(error)))
    if isinstance(error, torch.OutOfMemoryError) and device.type == "cuda":
        return Outcome.OUT_OF_MEMORY, _cuda_failure(
            f"out of memory during {phase}", text, phase, device, trace
        )
    if device.type == "cuda" and any(sign in text for sign in _CUDA_LIBRARY_SIGNS):
        failure = _cuda_failure(
            f"out of memory suspected during {phase}: {reason}", text, phase, device, trace
        )
        if failure.free_bytes is not None and failure.free_bytes < _TOO_LITTLE_FREE_BYTES:
            return Outcome.OUT_OF_MEMORY, failure
    if _is_host_memory(error, text):
        match = _CPU_ALLOCATOR.search(text)
        failure = Failure(
            reason=f"out of memory during {phase}" if capped else f"out of host memory during {phase}",
            phase=phase,
            requested_bytes=int(match[1]) if match else None,
            traceback=trace,
        )
        return (Outcome.OUT_OF_MEMORY if capped else Outcome.HOST_OUT_OF_MEMORY), failure
    return Outcome.ERROR, Failure(reason=reason, phase=phase, traceback=trace)


def classify_exit(status: ExitStatus, log_tail: str, *, capped: bool) -> tuple[Outcome, Failure]:
    """Return the outcome for a child that ended without a report.

    Args:
        status: How it ended.
        log_tail: The end of its log.
        capped: Whether host memory was capped for it (a CPU target).
    """
    if capped and any(sign in log_tail for sign in _HOST_SIGNS):
        return Outcome.OUT_OF_MEMORY, Failure("out of memory: a library gave up (see the log)")
    if status.signal == 9:
        return Outcome.KILLED, Failure("killed by signal 9 from outside; the host's memory is suspected")
    if status.signal is not None:
        return Outcome.CRASHED, Failure(f"crashed with signal {status.signal}")
    return Outcome.CRASHED, Failure(f"ended with exit code {status.code} and no report")


def _is_host_memory(error: BaseException, text: str) -> bool:
    if isinstance(error, MemoryError) or _CPU_ALLOCATOR.search(text):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return any(sign in text for sign in _HOST_SIGNS)


def _cuda_failure(reason: str, text: str, phase: str, device: torch.device, trace: str) -> Failure:
    import torch

    match = _CUDA_REQUEST.search(text)
    try:
        free_bytes: int | None = torch.cuda.mem_get_info(device)[0]
    except RuntimeError:
        free_bytes = None
    return Failure(
        reason=reason,
        phase=phase,
        requested_bytes=round(float(match[1]) * _UNITS[match[2]]) if match else None,
        allocated_bytes=torch.cuda.memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        free_bytes=free_bytes,
        traceback=trace,
    )


def _cut(text: str) -> str:
    """Return a text short enough to keep, with a mark where something was left out."""
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n… {len(text) - _LONGEST_TEXT} characters left out …\n{text[-half:]}"
