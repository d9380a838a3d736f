"""NVML: what is on this host's GPUs, without creating a CUDA context. The only user of pynvml.

Nothing here raises when NVML cannot be used: a host without a driver is an ordinary CPU host. The
reason is given as one sentence, so that a command that needs a GPU can say it.

A process is known by its number, and NVML may count in another PID namespace than this process does
(a container): then a listed number is somebody else's, or nobody's. What can be told is told where
it matters, in `before_use` and `memory_of`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.measure.pids import in_initial_namespace, runs_here
from tuner.measure.visible import Listed, visible_uuids
from tuner.units import MIB, format_bytes


@dataclass(frozen=True)
class Device:
    """One GPU as NVML sees it, or one slice of a GPU in MIG mode."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Devices:
    """The GPUs that this host shows, and the reason where there are none.

    Attributes:
        found: In CUDA's order: that of `CUDA_VISIBLE_DEVICES`, else of the PCI bus.
        problem: One sentence; None where there is a GPU.
        driver: The driver's version.
        error: NVML's name for the problem, such as `LibRmVersionMismatch`; `Hidden` and
            `NoneVisible` are what CUDA_VISIBLE_DEVICES causes.
    """

    found: tuple[Device, ...]
    problem: str | None
    driver: str | None = None
    error: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device now.

    Attributes:
        total_bytes: All of it; None when unknown.
        used_bytes: What anybody uses, the driver's own reserve included; None when unknown.
        by_pid: What each process uses, by its number in this PID namespace; None where NVML does
            not say so of every one.
        problem: What is not known and why, in one sentence, or None.
    """

    total_bytes: int | None = None
    used_bytes: int | None = None
    by_pid: dict[int, int] | None = None
    problem: str | None = None


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


@dataclass(frozen=True)
class Before:
    """What is on a device before a process touches it.

    Attributes:
        used_bytes: What anybody uses; None when unknown.
        shared: Whether others hold memory there; also true when that is not known.
        listed: Whether the process's number is on the device's list all the same: then NVML counts
            in another PID namespace, and the number is another's.
    """

    used_bytes: int | None = None
    shared: bool = True
    listed: bool = False


THIS_PROCESS = "nvml, this process"
DEVICE_WIDE = "nvml, device-wide"

# An idle card shows 0 to 15 MiB beside the driver's reserve (nvidia-smi in public reports).
_IDLE_BYTES = 64 * MIB
_PROBLEMS = {
    "NVMLError_LibraryNotFound": "no NVIDIA driver is installed (libnvidia-ml is missing)",
    "NVMLError_DriverNotLoaded": "the NVIDIA driver is not loaded",
    "NVMLError_LibRmVersionMismatch": (
        "the NVIDIA driver and its library are of different versions: reboot, or reload the driver"
    ),
    "NVMLError_Uninitialized": "the NVIDIA driver went away while it was asked: it is being reloaded",
    "NVMLError_GpuIsLost": "a GPU has fallen off the bus: reboot",
    "NVMLError_NoPermission": "no permission to ask the NVIDIA driver",
    "NVMLError_NotFound": "the NVIDIA driver knows no such device",
    "NVMLError_FunctionNotFound": "the NVIDIA driver is too old: it lacks a function that is needed",
}


def devices() -> Devices:
    """Return the GPUs of this host that `CUDA_VISIBLE_DEVICES` leaves visible."""
    import pynvml

    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        with _opened():
            driver = str(pynvml.nvmlSystemGetDriverVersion())
            listed = _listed(pynvml)
            uuids = visible_uuids(value, [gpu for gpu, _ in listed])
            if not uuids:
                return _nothing_visible(value, len(listed), driver)
            return _described(pynvml, uuids, driver)
    except pynvml.NVMLError as error:
        return Devices((), _problem(error), error=_error_name(error))


def process_use(visible: str, pid: int) -> Use:
    """Return the device bytes that a process uses on the device named by CUDA_VISIBLE_DEVICES.

    Falls back to all that is used on the device, which is right only when nobody else uses it.

    Args:
        visible: A UUID (`GPU-…`, `MIG-…`) or an index in PCI order; of a list, the first counts.
        pid: The process, as NVML counts.
    """
    import pynvml

    try:
        with _opened():
            handle = _first_visible(pynvml, visible)
            for process in _processes(pynvml, handle) or ():
                if process.pid == pid and process.usedGpuMemory is not None:
                    return Use(int(process.usedGpuMemory), THIS_PROCESS)
            return Use(int(pynvml.nvmlDeviceGetMemoryInfo(handle).used), DEVICE_WIDE)
    except pynvml.NVMLError as error:
        return Use(None, _problem(error))


def device_use(visible: str) -> Use:
    """Return all that is used on the device named by CUDA_VISIBLE_DEVICES, by anybody."""
    return process_use(visible, pid=-1)  # nobody's: always the device-wide figure


def before_use(visible: str, pid: int) -> Before:
    """Return what is on a device before process `pid` has touched it.

    A process that holds nothing there is on no list of NVML's. If its number is, the list counts in
    another PID namespace, and a figure of that number must never be taken for the process's own.
    What cannot be known: a process of another namespace that takes this number later.
    """
    import pynvml

    try:
        with _opened():
            handle = _first_visible(pynvml, visible)
            used_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            pids = [process.pid for process in _processes(pynvml, handle) or ()]
            shared = bool(pids) or _tenants_bytes(pynvml, handle) > _IDLE_BYTES
            return Before(used_bytes, shared, pid in pids)
    except pynvml.NVMLError:
        return Before()


def grown_since(before_bytes: int | None, now: Use) -> Use:
    """Return what the use of a device has grown by; unknown where either figure is."""
    if before_bytes is None or now.bytes is None:
        return Use(None, now.source)
    return Use(max(0, now.bytes - before_bytes), "nvml, growth of the device's use")


def device_processes(uuid: str) -> tuple[GpuProcess, ...]:
    """Return the processes on a device, as far as NVML lists them; none where it does not."""
    import pynvml

    try:
        with _opened():
            listed = _processes(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)) or []
    except pynvml.NVMLError:
        return ()
    by_pid = {process.pid: process.usedGpuMemory for process in listed}  # some are on both lists
    return tuple(GpuProcess(pid, None if used is None else int(used)) for pid, used in by_pid.items())


def memory_of(uuid: str) -> DeviceMemory:
    """Return the memory of a device, and of each process on it where that can be known.

    `by_pid` is None where NVML lists no processes, or one without its bytes, or none although memory
    is in use (a container), or one that does not run in this PID namespace: all its numbers are then
    of another one. What cannot be known: a process of another namespace under a number that runs
    here as well.

    Args:
        uuid: `GPU-…` or `MIG-…`, in full.
    """
    import pynvml

    total_bytes = used_bytes = None
    try:
        with _opened():
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            total_bytes, used_bytes = int(memory.total), int(memory.used)
            by_pid, problem = _by_pid(_processes(pynvml, handle), _tenants_bytes(pynvml, handle))
            return DeviceMemory(total_bytes, used_bytes, by_pid, problem)
    except pynvml.NVMLError as error:
        return DeviceMemory(total_bytes, used_bytes, None, _problem(error))


def _by_pid(processes: list[Any] | None, tenants_bytes: int) -> tuple[dict[int, int] | None, str | None]:
    """Return bytes by process, or None and the reason."""
    if processes is None:
        return None, "this driver does not list the processes of a GPU"
    if any(process.usedGpuMemory is None for process in processes):
        return None, "NVML does not say what each process uses"
    if not processes and tenants_bytes > _IDLE_BYTES:
        return None, f"NVML lists no process, yet {format_bytes(tenants_bytes)} are in use"
    if not in_initial_namespace() and not all(runs_here(process.pid) for process in processes):
        return None, "NVML counts processes outside this container"
    return {process.pid: int(process.usedGpuMemory) for process in processes}, None


@contextlib.contextmanager
def _opened() -> Iterator[None]:
    """Initialise NVML for a while; whatever pynvml raises is the caller's."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _listed(pynvml: Any) -> list[tuple[Listed, Any]]:
    """Return the GPUs in PCI order with their handles, less those that this user may not use."""
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except pynvml.NVMLError_NoPermission:
            continue  # CUDA does not count it either
        slices = _slices(pynvml, handle)
        names = None if slices is None else tuple(str(pynvml.nvmlDeviceGetUUID(part)) for part in slices)
        found.append((Listed(str(pynvml.nvmlDeviceGetUUID(handle)), names), handle))
    return found


def _slices(pynvml: Any, handle: Any) -> list[Any] | None:
    """Return the handles of a GPU's MIG slices; None outside MIG mode."""
    try:
        if not pynvml.nvmlDeviceGetMigMode(handle)[0]:
            return None
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None
    found = []
    for number in range(most):
        with contextlib.suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_NoPermission):
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
    return found


def _first_visible(pynvml: Any, value: str) -> Any:
    """Return the handle of the first device that a value of CUDA_VISIBLE_DEVICES names."""
    uuids = visible_uuids(value, [gpu for gpu, _ in _listed(pynvml)])
    if not uuids:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return pynvml.nvmlDeviceGetHandleByUUID(uuids[0])


def _nothing_visible(value: str | None, count: int, driver: str) -> Devices:
    if value is None or not count:
        return Devices((), "the NVIDIA driver shows no GPU", driver)
    if value.strip() in ("", "-1"):
        return Devices((), f"CUDA_VISIBLE_DEVICES='{value}' hides every GPU", driver, "Hidden")
    problem = f"CUDA_VISIBLE_DEVICES='{value[:80]}' names no GPU of this host"
    return Devices((), problem, driver, "NoneVisible")


def _described(pynvml: Any, uuids: Sequence[str], driver: str) -> Devices:
    """Describe devices; one that may not be read is left out, since CUDA may not use it either."""
    found: list[Device] = []
    unread: list[tuple[str, BaseException]] = []
    for uuid in uuids:
        try:
            found.append(_device(pynvml, uuid, len(found)))
        except pynvml.NVMLError_NoPermission as error:
            unread.append((uuid, error))
    if found:
        return Devices(tuple(found), None, driver)
    uuid, refused = unread[0]
    # Never the whole GPU's figures for a slice: they are not what a trial can get.
    what = f"the MIG slice {uuid}" if uuid.startswith("MIG-") else uuid
    return Devices((), f"{what} cannot be read: {_problem(refused)}", driver, _error_name(refused))


def _device(pynvml: Any, uuid: str, index: int) -> Device:
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Device(
        index=index,
        uuid=uuid,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=_compute_capability(pynvml, handle),
    )


def _compute_capability(pynvml: Any, handle: Any) -> tuple[int, int] | None:
    """Return the compute capability; that of a slice is its GPU's."""
    with contextlib.suppress(pynvml.NVMLError):
        try:
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        except pynvml.NVMLError:
            gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(gpu)
        return int(major), int(minor)
    return None


def _processes(pynvml: Any, handle: Any) -> list[Any] | None:
    """Return the processes on a device, those that draw included; None where it does not list them."""
    unable = (
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_NoPermission,
    )
    try:
        try:  # named by version: without one, pynvml raises what is no NVMLError on drivers before 510
            listed = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
        except pynvml.NVMLError_FunctionNotFound:
            listed = pynvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
    except unable:
        return None
    drawing: list[Any] = []
    with contextlib.suppress(*unable):
        drawing = pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle)
    return [*listed, *drawing]


def _tenants_bytes(pynvml: Any, handle: Any) -> int:
    """Return what is used on a device beside the driver's own reserve.

    Only the second version of the figure tells the two apart; drivers that lack it (before 510)
    do not count the reserve as used.
    """
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def _error_name(error: BaseException) -> str:
    return type(error).__name__.removeprefix("NVMLError_")


def _problem(error: BaseException) -> str:
    return _PROBLEMS.get(type(error).__name__, f"NVML cannot be used: {error}")
