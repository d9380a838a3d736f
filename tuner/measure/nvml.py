"""NVML: what is on this host's GPUs, without creating a CUDA context. The only user of pynvml.

Nothing here raises when NVML cannot be used: a host without a driver is an ordinary CPU host. The
reason is given as one sentence, so that a command that needs a GPU can say it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Device:
    """One GPU as NVML sees it."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Devices:
    """The GPUs of this host, and the reason where there are none.

    Attributes:
        found: In PCI order.
        problem: One sentence; None where there is a GPU.
        driver: The driver's version.
        error: NVML's name for the problem, such as `LibRmVersionMismatch`.
    """

    found: tuple[Device, ...]
    problem: str | None
    driver: str | None = None
    error: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU; bytes is None where NVML does not say (WSL, containers)."""

    pid: int
    bytes: int | None


@dataclass(frozen=True)
class Use:
    """Device bytes used, and where the figure comes from; bytes is None when unknown."""

    bytes: int | None
    source: str


DEVICE_WIDE = "nvml, device-wide"

_PROBLEMS = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver is installed (libnvidia-ml is missing)",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded",
    "NVMLError_LibRmVersionMismatch": (
        "the NVIDIA driver and its library are of different versions: reboot, or reload the driver"
    ),
    "NVMLError_GpuIsLost": "a GPU has fallen off the bus: reboot",
    "NVMLError_NoPermission": "no permission to ask the NVIDIA driver",
}


def devices() -> Devices:
    """Return the GPUs of this host."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Devices((), _problem(error), error=_error_name(error))
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        found = tuple(_device(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError as error:
        return Devices((), _problem(error), error=_error_name(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return Devices(found, None if found else "the NVIDIA driver shows no GPU", driver)


def process_use(visible: str, pid: int) -> Use:
    """Return the device bytes that a process uses on the device named by CUDA_VISIBLE_DEVICES.

    Falls back to all that is used on the device, which is right only when nobody else uses it.

    Args:
        visible: A UUID (`GPU-…`) or an index in PCI order.
        pid: The process, as this namespace knows it.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Use(None, _problem(error))
    try:
        first = visible.split(",")[0].strip()
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(first))
            if first.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(first)
        )
        for process in _processes(pynvml, handle):
            if process.pid == pid and process.usedGpuMemory is not None:
                return Use(int(process.usedGpuMemory), "nvml, this process")
        return Use(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used), DEVICE_WIDE)
    except pynvml.NVMLError as error:
        return Use(None, _problem(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _processes(pynvml: Any, handle: Any) -> list[Any]:
    try:
        return list(pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
        return []


def device_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Return the processes on a device, as far as NVML lists them; none where it does not."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        listed = [*_processes(pynvml, handle), *pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle)]
    except pynvml.NVMLError:
        listed = []
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    by_pid = {process.pid: process.usedGpuMemory for process in listed}  # some are on both lists
    return tuple(GpuProcess(pid, None if used is None else int(used)) for pid, used in by_pid.items())


def device_use(visible: str) -> Use:
    """Return all that is used on the device named by CUDA_VISIBLE_DEVICES, by anybody."""
    return process_use(visible, pid=-1)  # nobody's: always the device-wide figure


def grown_since(before_bytes: int | None, now: Use) -> Use:
    """Return what the use of a device has grown by; unknown where either figure is."""
    if before_bytes is None or now.bytes is None:
        return Use(None, now.source)
    return Use(max(0, now.bytes - before_bytes), "nvml, growth of the device's use")


def _device(pynvml: Any, index: int) -> Device:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(
        index=index,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=_compute_capability(pynvml, handle),
    )


def _compute_capability(pynvml: Any, handle: Any) -> tuple[int, int] | None:
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    return int(major), int(minor)


def _error_name(error: BaseException) -> str:
    return type(error).__name__.removeprefix("NVMLError_")


def _problem(error: BaseException) -> str:
    return _PROBLEMS.get(type(error).__name__, f"NVML cannot be used: {error}")
