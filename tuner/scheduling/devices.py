"""Choosing the device of a study and its default budget, without creating a CUDA context."""

from __future__ import annotations

import importlib.util
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tuner.errors import UsageError
from tuner.measure import nvml
from tuner.measure.contexts import ContextStore, context_key
from tuner.memory.targets import Target, host_memory_bytes, profile_of, resolve_target
from tuner.units import format_bytes

HEADROOM = 0.05  # of what is free: kept back, by the default budget and between trials


@dataclass(frozen=True)
class Place:
    """A device of this host that trials run on.

    Attributes:
        target: `cpu`, or `cuda:N` in PCI order.
        name: As the device names itself.
        visible_device: What a child sees as its only GPU (a UUID); None on a CPU.
        capacity_bytes: All its memory.
        free_bytes: What nobody uses now.
    """

    target: str
    name: str
    visible_device: str | None
    capacity_bytes: int
    free_bytes: int

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`."""
        return "cpu" if self.visible_device is None else "cuda"

    @property
    def key(self) -> str:
        """What the ledger knows the device by, the same for every driver: a UUID, or `cpu@HOST`."""
        return self.visible_device or cpu_key(socket.gethostname())

    @property
    def default_budget_bytes(self) -> int:
        """The budget when none is given: what is free less 5 %."""
        return int(self.free_bytes * (1 - HEADROOM))


def cpu_key(host: str) -> str:
    """Return what the ledger knows a host's own memory by."""
    return f"cpu@{host}"


def choose_places(target: str | None) -> tuple[Place, ...]:
    """Return the devices that trials run on, the freest first.

    `cuda` means every visible GPU of the freest one's model, and is the default where there is one;
    `cuda:0,1` names them. Devices of one study share a profile, so they are of one model.

    Raises:
        UsageError: The target is not a device of this host, or its GPUs differ.
    """
    if target is None:
        found = nvml.devices().found if torch_has_cuda() else ()
        return _of_one_model(found) if found else (_cpu(),)
    indices = _indices(target)
    if indices is None and resolve_target(target).kind == "cpu":
        return (_cpu(),)
    if indices is None:
        raise UsageError(
            f"'{target}' is a profile to predict for, not a device of this host",
            hint=f"predict with: tuner predict STUDY --target {target}; run with cpu, cuda or cuda:0,1",
        )
    devices = nvml.devices()
    if devices.problem is not None:
        raise UsageError(f"there is no GPU to run on: {devices.problem}", hint="run on the CPU: --target cpu")
    if not torch_has_cuda():
        raise UsageError(
            "this build of PyTorch has no CUDA", hint="install a CUDA build, or run with: --target cpu"
        )
    if not indices:
        return _of_one_model(devices.found)
    known = {device.index: device for device in devices.found}
    for index in indices:
        if index not in known:
            raise UsageError(
                f"there is no cuda:{index}", hint=f"this host has {len(known)} GPU(s), from cuda:0"
            )
    models = {known[index].name for index in indices}
    if len(models) > 1:
        raise UsageError(
            f"{target} names GPUs of different models: {', '.join(sorted(models))}",
            hint="one study has one profile: start one study per model",
        )
    return _freest_first(_gpu(known[index]) for index in sorted(set(indices)))


def joint_target(places: Sequence[Place]) -> str:
    """Return one name for devices: `cpu`, `cuda:0`, `cuda:0,1`."""
    indices = sorted(int(place.target.partition(":")[2]) for place in places if place.kind == "cuda")
    return f"cuda:{','.join(map(str, indices))}" if indices else "cpu"


def _indices(target: str) -> list[int] | None:
    """Return the GPUs that a target names; empty for `cuda`, None for anything else.

    Raises:
        UsageError: It begins as a list of GPUs does, and is none.
    """
    kind, separator, rest = target.strip().lower().partition(":")
    if kind != "cuda":
        return None
    if not separator:
        return []
    if not re.fullmatch(r"\d+(,\d+)*", rest):
        raise UsageError(f"'{target}' names no GPUs", hint="GPUs look like cuda, cuda:0 or cuda:0,1")
    return [int(text) for text in rest.split(",")]


def _of_one_model(found: Sequence[nvml.Device]) -> tuple[Place, ...]:
    freest = max(found, key=lambda device: device.free_bytes)
    return _freest_first(_gpu(device) for device in found if device.name == freest.name)


def _freest_first(places: Iterable[Place]) -> tuple[Place, ...]:
    return tuple(sorted(places, key=lambda place: -place.free_bytes))


def present_target(name: str) -> Target:
    """Return the target that a name means, with what is known of the device where it is present.

    For `cuda` and `cuda:N`, NVML tells which card it is: its profile gives capacity and compute
    capability, and the context is what `tuner doctor` measured on this host, if it did.

    Raises:
        UsageError: There is no such target.
    """
    target = resolve_target(name)
    if target.index is None:
        return target
    devices = nvml.devices()
    device = next((found for found in devices.found if found.index == target.index), None)
    return target if device is None else target_of(device, devices.driver, name=target.name)


def target_of(device: nvml.Device, driver: str | None, *, name: str) -> Target:
    """Return a device of this host as a target."""
    profile = profile_of(device.name, device.total_bytes)
    if profile is None and device.compute_capability is not None:
        profile = "sm_{}{}".format(*device.compute_capability)
    known = resolve_target(profile or "cuda")
    target = replace(known, name=name, index=device.index, gpu=device.name)
    if known.capacity_bytes is None:
        total = "NVML's total; PyTorch gets 1 to 3 % less"
        target = replace(target, capacity_bytes=device.total_bytes, capacity_source=total)
    measured = ContextStore().get(context_key(device, driver))
    if measured is None:
        return target
    return replace(
        target,
        capacity_bytes=measured.total_bytes,
        capacity_source="measured on this host",
        context_bytes=measured.context_bytes,
        context_spread_bytes=measured.spread_bytes,
        context_source=f"measured on this host ({measured.source})",
        context_range_bytes=None,
        context_measured=True,
    )


def check_budget(budget_bytes: int, place: Place) -> None:
    """Check that a budget is within the device.

    Raises:
        UsageError: The device has less memory than that.
    """
    if budget_bytes > place.capacity_bytes:
        raise UsageError(
            f"a budget of {format_bytes(budget_bytes)} is more than {place.name} has "
            f"({format_bytes(place.capacity_bytes)})"
        )


def torch_has_cuda() -> bool:
    """Whether the installed PyTorch was built for CUDA, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b[^=]*=\s*['\"]", text, re.MULTILINE) is not None


def _gpu(device: nvml.Device) -> Place:
    return Place(f"cuda:{device.index}", device.name, device.uuid, device.total_bytes, device.free_bytes)


def _cpu() -> Place:
    return Place("cpu", _cpu_name(), None, host_memory_bytes(), available_host_bytes())


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "CPU"
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else "CPU"


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return what of this host's memory can be had now: caches count as free, a cgroup's limit holds.

    Args:
        root: Where `proc` and `sys` are.
    """
    capacity = host_memory_bytes()
    try:
        text = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        text = ""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    available = min(capacity, int(match[1]) * 1024) if match else capacity
    rooms = [_room_in_cgroup(folder) for folder in _cgroups(root)]
    return min([available, *(room for room in rooms if room is not None)])


def _cgroups(root: Path) -> list[Path]:
    """Return this process's cgroup (version 2) and those above it, as far as they are visible."""
    top = root / "sys/fs/cgroup"
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^0::/(.*)$", text, re.MULTILINE)
    inner = top / match[1] if match else top
    return [inner, *(folder for folder in inner.parents if folder.is_relative_to(top))]


def _room_in_cgroup(folder: Path) -> int | None:
    """Return what a cgroup may still take, its reclaimable caches apart; None where it has no limit."""
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        current = int((folder / "memory.current").read_text(encoding="ascii"))
        stat = (folder / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    match = re.search(r"^inactive_file (\d+)$", stat, re.MULTILINE)
    taken = current - (int(match[1]) if match else 0)
    return max(0, int(limit) - taken) if limit.isdigit() else None
