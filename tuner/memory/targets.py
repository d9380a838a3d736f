"""The devices that a prediction is for: capacity, context and workspaces, each with its source."""

from __future__ import annotations

import math
import os
import pathlib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from tuner.errors import UsageError
from tuner.memory.workspaces import cublas_workspace_bytes, cublaslt_workspace_bytes
from tuner.units import MIB, parse_bytes

_THREADS = 2  # of a training process that use cuBLAS: forward, and autograd's
_SAME_CARD = 0.10  # cards of one name and different memory differ by more than that


@dataclass(frozen=True)
class Target:
    """A device to predict for; it need not be present.

    Attributes:
        name: `cpu`, `cuda`, `cuda:1`, `sm_90`, or a profile's name such as `a100-40gb`.
        kind: `cpu` or `cuda`.
        index: Which CUDA device of this host, or None.
        capacity_bytes: All its memory that PyTorch can get; None when unknown.
        context_bytes: What a process takes before its first tensor; None when unknown.
        context_spread_bytes: One standard deviation of the context.
        workspace_bytes: cuBLAS workspaces of a training process, in the allocator.
        context_source: Where the context's figure comes from.
        profile: A name that resolves to the same workspaces on any host.
        gpu: The card as NVML names it; empty when unknown.
        compute_capability: Such as (8, 6); None when unknown.
        capacity_source: Where the capacity's figure comes from.
        context_range_bytes: Lowest and highest context reported, where it is a range and not a
            reading; the context is then its middle, the spread that of a uniform distribution.
        context_measured: Whether somebody measured the context of such a card.
        cublaslt_workspace_bytes: What one cuBLASLt product allocates for itself meanwhile.
    """

    name: str
    kind: str
    index: int | None
    capacity_bytes: int | None
    context_bytes: int | None
    context_spread_bytes: int
    workspace_bytes: int
    context_source: str
    profile: str = ""
    gpu: str = ""
    compute_capability: tuple[int, int] | None = None
    capacity_source: str = ""
    context_range_bytes: tuple[int, int] | None = None
    context_measured: bool = False
    cublaslt_workspace_bytes: int = 0

    @property
    def cublas_workspace_bytes(self) -> int:
        """The cuBLAS workspace of one thread."""
        return self.workspace_bytes // _THREADS


def profile_names() -> list[str]:
    """Return the names of the GPUs that have a profile."""
    return [name for name in _profiles() if name != "generic"]


def known_targets() -> list[str]:
    """Return the names that `resolve_target` accepts, besides `cuda:N`, `sm_NN` and aliases."""
    return ["cpu", "cuda", *profile_names()]


def resolve_target(name: str) -> Target:
    """Return the target that a name means; nothing is asked of this host's GPUs.

    `sm_NN` stands for any GPU of that compute capability: its workspaces are known, not more.

    Raises:
        UsageError: There is no such target; the message lists the known ones.
    """
    lowered = name.strip().lower()
    if lowered == "cpu":
        return Target(
            "cpu", "cpu", None, host_memory_bytes(), None, 4 * MIB, 0, "measured per study", profile="cpu"
        )
    if match := re.fullmatch(r"cuda(?::(\d+))?", lowered):
        return _target(lowered, "cuda", {}, index=int(match[1] or 0))
    if match := re.fullmatch(r"sm_?(\d{1,2})(\d)a?", lowered):
        canonical = f"sm_{match[1]}{match[2]}"
        return _target(canonical, canonical, {"compute_capability": f"{match[1]}.{match[2]}"})
    profile = _names().get(_key(lowered))
    if profile is None:
        raise UsageError(f"there is no target '{name}'", hint=f"known targets: {', '.join(known_targets())}")
    return _target(profile, profile, _profiles()[profile])


def profile_of(nvml_name: str, total_bytes: int) -> str | None:
    """Return the profile of a card as NVML names it, or None.

    Args:
        nvml_name: Such as `NVIDIA GeForce RTX 3080`.
        total_bytes: Its memory: cards of one name are sold with 10 and with 12 GB.
    """
    for name in profile_names():
        fields = _profiles()[name]
        same_name = _key(nvml_name) in map(_key, [fields["gpu"], *fields.get("also", ())])
        if same_name and abs(total_bytes / parse_bytes(fields["capacity"]) - 1) < _SAME_CARD:
            return name
    return None


def host_memory_bytes() -> int:
    """Return this host's memory: the physical size, or its cgroup's limit where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with pathlib.Path("/sys/fs/cgroup/memory.max").open(encoding="ascii") as limit:
            text = limit.read().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def _target(name: str, profile: str, fields: dict[str, Any], *, index: int | None = None) -> Target:
    measured = "context_source" in fields
    context = fields if measured else _profiles()["generic"]
    low_high = _range(context)
    if low_high is None:
        context_bytes, spread_bytes = parse_bytes(context["context"]), parse_bytes(context["context_spread"])
    else:
        # The middle of a uniform distribution, and its standard deviation.
        context_bytes = sum(low_high) // 2
        spread_bytes = round((low_high[1] - low_high[0]) / 2 / math.sqrt(3))
    capability = _capability(fields.get("compute_capability"))
    workspace_bytes = cublas_workspace_bytes(capability)
    return Target(
        name=name,
        kind="cuda",
        index=index,
        capacity_bytes=parse_bytes(fields["capacity"]) if "capacity" in fields else None,
        context_bytes=context_bytes,
        context_spread_bytes=spread_bytes,
        workspace_bytes=_THREADS * workspace_bytes,
        context_source=context["context_source"]
        if measured
        else f"not measured; {context['context_source']}",
        profile=profile,
        gpu=fields.get("gpu", ""),
        compute_capability=capability,
        capacity_source=fields.get("capacity_source", ""),
        context_range_bytes=low_high,
        context_measured=measured,
        cublaslt_workspace_bytes=cublaslt_workspace_bytes(),
    )


@cache
def _profiles() -> dict[str, dict[str, Any]]:
    return tomllib.loads((files("tuner.memory") / "targets.toml").read_text(encoding="utf-8"))


@cache
def _names() -> dict[str, str]:
    """Return every name's key with its profile; of two cards with one name the first."""
    names: dict[str, str] = {}
    for profile in profile_names():
        fields = _profiles()[profile]
        for name in (profile, *fields.get("aliases", ()), fields["gpu"], *fields.get("also", ())):
            names.setdefault(_key(name), profile)
    return names


def _key(name: str) -> str:
    """Return a name without what does not distinguish cards: `NVIDIA GeForce RTX 3090` is `3090`."""
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())


def _range(fields: dict[str, Any]) -> tuple[int, int] | None:
    if "context_range" not in fields:
        return None
    low, high = map(parse_bytes, fields["context_range"])
    return low, high


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, minor = text.split(".")
    return int(major), int(minor)
