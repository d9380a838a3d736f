"""What `tuner doctor` checks: each check is one line that says what is wrong and what to do.

A failure means that something this machine has cannot be used, or that predictions do not work; a
warning leaves predictions and CPU studies working.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tuner.cli.options import storage_url
from tuner.errors import StoreError, UsageError
from tuner.measure import nvml
from tuner.measure.contexts import ContextProbe, ContextStore, MeasurementError, context_key
from tuner.memory.targets import profile_of
from tuner.records import Record
from tuner.scheduling.devices import choose_places
from tuner.units import GIB, format_bytes

_LEAST_DISK_BYTES = 2 * GIB  # run folders hold checkpoints and logs
_LEAST_HOST_BYTES = 3 * GIB  # what one CUDA child takes of the host until its own use is known
_IMPORT_SECONDS = 120.0
_NVIDIA = "0x10de"
_PCI_DISPLAY = "0x03"

_HINTS = {
    "LibraryNotFound": "install the NVIDIA driver; in a container, start it with --gpus all",
    "DriverNotLoaded": "load it: modprobe nvidia; if that fails, install the driver again and reboot",
    "LibRmVersionMismatch": "it comes from an update without a reboot: reboot, or reload the module",
    "GpuIsLost": "reboot; if it comes back, look for Xid errors in dmesg and check power and cooling",
    "Uninitialized": "try again; if it stays, reboot",
    "NoneVisible": "unset CUDA_VISIBLE_DEVICES, or name what `nvidia-smi -L` lists",
    "NoPermission": "join the group that owns /dev/nvidia*; with MIG, set CUDA_VISIBLE_DEVICES to the slice",
}


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Check(Record):
    """One line of the doctor's report.

    Attributes:
        name: What was checked.
        status: How it ended.
        message: What was found, in one line.
        hint: What to do about it, or None.
        facts: The figures behind the message.
    """

    name: str
    status: Status
    message: str
    hint: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def check_torch(gpus: int) -> Check:
    """Import PyTorch in a process of its own, as predictions do.

    Args:
        gpus: How many GPUs this machine has; a build without CUDA cannot use them.
    """
    code = "import torch; print(torch.__version__, torch.version.cuda)"
    command = [sys.executable, "-P", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_IMPORT_SECONDS)
        reason = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        done, reason = None, f"it takes longer than {_IMPORT_SECONDS:.0f} s"
    if done is None or done.returncode != 0:
        return Check("torch", Status.FAILURE, f"PyTorch cannot be imported: {reason}", "install torch again")
    release, cuda = done.stdout.split()[-2:]
    facts = {"python": platform.python_version(), "torch": release, "cuda": None if cuda == "None" else cuda}
    message = f"PyTorch {release} on Python {facts['python']}, "
    if facts["cuda"] is not None:
        return Check("torch", Status.OK, f"{message}built for CUDA {cuda}", facts=facts)
    if not gpus:
        return Check(
            "torch", Status.OK, f"{message}without CUDA: enough for predictions and CPU studies", facts=facts
        )
    hint = "install a CUDA build: https://pytorch.org/get-started/locally"
    return Check("torch", Status.FAILURE, f"{message}without CUDA: the GPU cannot be used", hint, facts)


def check_pynvml() -> Check:
    """Look for the deprecated distribution that provides the same module as nvidia-ml-py."""
    maintained, deprecated = _version("nvidia-ml-py"), _version("pynvml")
    if deprecated is not None:
        return Check(
            "nvidia-ml-py",
            Status.WARNING,
            f"the deprecated distribution pynvml {deprecated} is installed: PyTorch warns at each start",
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        )
    if maintained is None:
        return Check(
            "nvidia-ml-py", Status.WARNING, "nvidia-ml-py is not installed", "pip install nvidia-ml-py"
        )
    return Check("nvidia-ml-py", Status.OK, f"nvidia-ml-py {maintained}")


def check_driver(devices: nvml.Devices, on_the_bus: int) -> Check:
    """Say whether NVML can be used, and why not.

    Args:
        devices: What NVML shows.
        on_the_bus: How many NVIDIA GPUs are on the PCI bus, whether or not a driver knows them.
    """
    facts = {"driver": devices.driver, "error": devices.error, "on_the_bus": on_the_bus}
    if devices.problem is None:
        return Check("driver", Status.OK, f"NVIDIA driver {devices.driver}", facts=facts)
    hint = _HINTS.get(devices.error or "", "nvidia-smi shows the same problem")
    if devices.error == "Hidden":  # as its user wants it
        return Check("driver", Status.OK, f"no GPU: {devices.problem}", facts=facts)
    # No library, and no module for it to talk to: usual on a host without a GPU.
    if devices.error in (None, "LibraryNotFound", "DriverNotLoaded") and not on_the_bus:
        return Check("driver", Status.OK, f"no GPU: {devices.problem}", facts=facts)
    seen = f"{on_the_bus} NVIDIA GPU(s) on the bus, but " if on_the_bus else ""
    return Check("driver", Status.FAILURE, seen + devices.problem, hint, facts)


def check_gpu(device: nvml.Device) -> Check:
    """Say what a GPU is, how much of it is used, and by how many others."""
    used_bytes = device.total_bytes - device.free_bytes
    processes = nvml.device_processes(device.uuid)
    told = [process.bytes for process in processes if process.bytes is not None]
    message = (
        f"{device.name}: {format_bytes(used_bytes)} of {format_bytes(device.total_bytes)} used, "
        f"{len(processes)} other process{'' if len(processes) == 1 else 'es'}"
    )
    if told:
        message += f" with {format_bytes(sum(told))}"
    elif processes:
        message += ", their memory is not reported"
    facts = {
        "uuid": device.uuid,
        "gpu": device.name,
        "profile": profile_of(device.name, device.total_bytes),
        "total_bytes": device.total_bytes,
        "used_bytes": used_bytes,
        "processes": [{"pid": process.pid, "bytes": process.bytes} for process in processes],
    }
    return Check(f"cuda:{device.index}", Status.OK, message, facts=facts)


def check_context(
    device: nvml.Device, driver: str | None, probe: ContextProbe, store: ContextStore, *, remeasure: bool
) -> Check:
    """Measure the context of a GPU, unless it was measured with this driver and PyTorch before."""
    name, key = f"cuda:{device.index} context", context_key(device, driver)
    measured = None if remeasure else store.get(key)
    when = "measured before"
    if measured is None:
        when = "measured now"
        try:
            measured = probe.measure(device)
        except MeasurementError as error:
            hint = "CUDA does not start on this GPU: see what PyTorch says above"
            return Check(name, Status.FAILURE, f"it cannot be measured: {error.message}", hint)
        try:
            store.put(key, measured)
        except OSError as error:
            hint = "set TUNER_STATE_DIR to a folder that can be written"
            return Check(name, Status.WARNING, f"it cannot be kept in {store.path}: {error.strerror}", hint)
    facts = {
        "context_bytes": measured.context_bytes,
        "total_bytes": measured.total_bytes,
        "source": measured.source,
        "file": str(store.path),
    }
    return Check(name, Status.OK, f"{format_bytes(measured.context_bytes)}, {when}", facts=facts)


def check_database(storage: str | None) -> Check:
    """Say whether the database can be reached and has this version's schema."""
    from tuner.store import migrations
    from tuner.store.engine import describe_url, open_engine, store_errors

    try:
        url = storage_url(storage)
        shown = describe_url(url)
        if url.drivername == "sqlite" and not Path(url.database or "").exists():
            return Check("database", Status.OK, f"{shown} is not there yet; the first study makes it")
        with store_errors(url):
            engine = open_engine(url, read_only=True)
            try:
                found = migrations.current_revision(engine)
            finally:
                engine.dispose()
    except (StoreError, UsageError) as error:
        return Check("database", Status.WARNING, error.message, error.hint)
    needed = migrations.head_revision()
    facts = {"database": shown, "schema": found, "needed": needed}
    if found == needed:
        return Check("database", Status.OK, f"{shown}, schema {found}", facts=facts)
    message = f"{shown} has schema {found or 'none'}, this version needs {needed}"
    return Check("database", Status.WARNING, message, "tuner db upgrade", facts)


def check_disk(runs_dir: Path) -> Check:
    """Say how much room there is for run folders."""
    folder = runs_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    message, facts = f"{format_bytes(free_bytes)} free for {runs_dir}", {"free_bytes": free_bytes}
    if free_bytes < _LEAST_DISK_BYTES:
        hint = "tuner clean removes run folders that are not needed; --runs-dir puts them elsewhere"
        return Check("disk", Status.WARNING, message, hint, facts)
    return Check("disk", Status.OK, message, facts=facts)


def check_host_memory() -> Check:
    """Say how much host memory is available."""
    place = choose_places("cpu")[0]
    message = f"{format_bytes(place.free_bytes)} of {format_bytes(place.capacity_bytes)} available"
    facts = {"available_bytes": place.free_bytes, "total_bytes": place.capacity_bytes}
    if place.free_bytes < _LEAST_HOST_BYTES:
        hint = f"a trial on a GPU takes about {format_bytes(_LEAST_HOST_BYTES)} of the host: close something"
        return Check("host memory", Status.WARNING, message, hint, facts)
    return Check("host memory", Status.OK, message, facts=facts)


def gpus_on_the_bus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """Return how many NVIDIA GPUs the kernel sees on the PCI bus; 0 where it does not say."""
    return sum(1 for folder in _folders(devices) if _is_nvidia_gpu(folder))


def _folders(parent: Path) -> Iterator[Path]:
    try:
        yield from parent.iterdir()
    except OSError:
        return


def _is_nvidia_gpu(folder: Path) -> bool:
    try:
        vendor, kind = ((folder / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _NVIDIA and kind.startswith(_PCI_DISPLAY)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
