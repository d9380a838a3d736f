"""What kind of end a trial came to, from an exception inside or an exit status outside.

Only memory of the device may teach the memory model, so it is told apart with care: PyTorch's own
error, the CPU allocator's, and the disguises that a failed allocation takes in libraries. Evidence
is kept as text and numbers: an exception kept alive keeps every tensor of its frames alive.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import traceback
from typing import TYPE_CHECKING

from tuner.processes import ExitStatus
from tuner.records import Failure, Outcome
from tuner.units import GIB, KIB, MIB, format_bytes

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
    "CUDNN_STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_NOT_INITIALIZED",
    "CUFFT_ALLOC_FAILED",
)
_TOO_LITTLE_FREE_BYTES = 50 * MIB
# torch/utils/data/_utils/signal_handling.py and torch's DataLoader: how a loader worker's end is told.
_LOADER_KILLED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: (\w[\w ]*)|exited)"
)
_IN_LOADER_WORKER = re.compile(r"Caught \w+ in DataLoader worker process \d+")
# at::MapAllocator: a tensor that a loader worker sends takes a file there.
_NO_SHARED_MEMORY = re.compile(r"(?:</torch_|shared memory).*No space left on device", re.DOTALL)
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - not a choice: where the C library's shm_open puts it
LOADER_WORKER = "loader worker"


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

    text = _text_of(error)
    reason = _reason(error, text)
    trace = _cut("".join(traceback.format_exception(error)))
    if loader := _loader_failure(text, phase, trace):
        return loader
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
        return _host_failure(text, phase, trace, capped=capped)
    return Outcome.ERROR, Failure(reason=reason, phase=phase, traceback=trace)


def classify_exit(status: ExitStatus, log_tail: str, *, capped: bool) -> tuple[Outcome, Failure]:
    """Return the outcome for a child that ended without a report.

    The end of its log is kept as evidence.

    Args:
        status: How it ended.
        log_tail: The end of its log.
        capped: Whether host memory was capped for it (a CPU target).
    """
    evidence = _cut(log_tail) or None
    if capped and status.signal != signal.SIGKILL and any(sign in log_tail for sign in _HOST_SIGNS):
        reason = "out of memory: a library gave up (see the log)"
        return Outcome.OUT_OF_MEMORY, Failure(reason, traceback=evidence)
    if status.signal == signal.SIGKILL:
        found = status.oom_evidence
        reason = "killed by signal 9 from outside; the host's memory is suspected" + (
            f": {found}" if found else ", but no evidence of the kernel's out-of-memory killer was found"
        )
        return Outcome.KILLED, Failure(reason, traceback=evidence)
    if status.signal is not None:
        reason = f"crashed with signal {status.signal} ({_signal_name(status.signal)})"
        return Outcome.CRASHED, Failure(reason, traceback=evidence)
    reason = f"ended with exit code {status.code} and no report"
    return Outcome.CRASHED, Failure(reason, traceback=evidence)


def _text_of(error: BaseException) -> str:
    try:
        return _cut(str(error))
    except BaseException:  # user code: whatever it raises, there is no text
        return ""


def _reason(error: BaseException, text: str) -> str:
    """Return an error's type and first line."""
    name = type(error).__name__
    if isinstance(error, SystemExit):
        return f"the workload called sys.exit({text})"
    first = text.splitlines()[0] if text else ""
    first = first if len(first) <= 500 else first[:500] + " …"
    return f"{name}: {first}".rstrip(": ")


def _loader_failure(text: str, phase: str, trace: str) -> tuple[Outcome, Failure] | None:
    """Return what the end of a loader worker means, or None: its memory is the host's."""
    # The signal may be told in the error's cause alone, which the traceback shows before it.
    killed = _LOADER_KILLED.search(trace) if _LOADER_KILLED.search(text) else None
    by = (killed[1] or "") if killed else ""
    if _NO_SHARED_MEMORY.search(text) or by.startswith("Bus error"):
        reason = f"out of shared memory in a loader worker during {phase} ({_shared_memory()})"
        return Outcome.HOST_OUT_OF_MEMORY, Failure(reason, phase=LOADER_WORKER, traceback=trace)
    if by.startswith("Killed"):
        reason = f"a loader worker was killed by signal 9 during {phase}; the host's memory is suspected"
        return Outcome.KILLED, Failure(reason, phase=LOADER_WORKER, traceback=trace)
    if killed:
        reason = f"a loader worker crashed during {phase}: {by or 'see the log'}"
        return Outcome.CRASHED, Failure(reason, phase=LOADER_WORKER, traceback=trace)
    return None


def _shared_memory() -> str:
    try:
        held = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return f"there is no {_SHARED_MEMORY}"
    free, total = held.f_bavail * held.f_frsize, held.f_blocks * held.f_frsize
    return f"{_SHARED_MEMORY} has {format_bytes(free)} free of {format_bytes(total)}"


def _host_failure(text: str, phase: str, trace: str, *, capped: bool) -> tuple[Outcome, Failure]:
    match = _CPU_ALLOCATOR.search(text)
    in_worker = _IN_LOADER_WORKER.search(text) is not None
    what = "out of memory" if capped else "out of host memory"
    failure = Failure(
        reason=f"{what} {'in a loader worker ' if in_worker else ''}during {phase}",
        phase=LOADER_WORKER if in_worker else phase,
        requested_bytes=int(match[1]) if match else None,
        traceback=trace,
    )
    return (Outcome.OUT_OF_MEMORY if capped else Outcome.HOST_OUT_OF_MEMORY), failure


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "real-time" if number >= signal.SIGRTMIN else "unknown"


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
    """Return a text that every database takes, short enough to keep, with a mark where it was cut."""
    text = text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n… {len(text) - _LONGEST_TEXT} characters left out …\n{text[-half:]}"
