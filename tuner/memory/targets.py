"""The devices that a prediction is for: capacity, context and workspaces, each with its source."""

from __future__ import annotations

import os
import pathlib
import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files

from tuner.errors import UsageError
from tuner.units import MIB, parse_bytes


@dataclass(frozen=True)
class Target:
    """A device to predict for; it need not be present.

    Attributes:
        name: As the user writes it: `cpu`, `cuda`, `cuda:1`, `a100-40gb`.
        kind: `cpu` or `cuda`.
        index: Which CUDA device of this host, or None.
        capacity_bytes: All its memory; None when unknown.
        context_bytes: What a process takes before its first tensor; None when unknown.
        context_spread_bytes: How far the context may be off, either way.
        workspace_bytes: cuBLAS workspaces of a training process, in the allocator.
        context_source: Where the context's figure comes from.
    """

    name: str
    kind: str
    index: int | None
    capacity_bytes: int | None
    context_bytes: int | None
    context_spread_bytes: int
    workspace_bytes: int
    context_source: str


def _profiles() -> dict[str, dict[str, object]]:
    return tomllib.loads((files("tuner.memory") / "targets.toml").read_text())


def known_targets() -> list[str]:
    """Return the names that `resolve_target` accepts, besides `cuda:N`."""
    return ["cpu", "cuda", *_profiles()]


def resolve_target(name: str) -> Target:
    """Return the target that a name means.

    Raises:
        UsageError: There is no such target; the message lists the known ones.
    """
    lowered = name.lower()
    if lowered == "cpu":
        return Target("cpu", "cpu", None, host_memory_bytes(), None, 4 * MIB, 0, "measured per study")
    profiles = _profiles()
    if match := re.fullmatch(r"cuda(?::(\d+))?", lowered):
        profile, index = profiles["generic"], int(match[1] or 0)
    elif lowered in profiles:
        profile, index = profiles[lowered], None
    else:
        raise UsageError(f"there is no target '{name}'", hint=f"known targets: {', '.join(known_targets())}")
    return Target(
        name=lowered,
        kind="cuda",
        index=index,
        capacity_bytes=_size(profile.get("capacity")),
        context_bytes=_size(profile.get("context")),
        context_spread_bytes=_size(profile["context_spread"]) or 0,
        workspace_bytes=_size(profile["workspace"]) or 0,
        context_source=str(profile["context_source"]),
    )


def host_memory_bytes() -> int:
    """Return this host's memory: the physical size, or its cgroup's limit where that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with pathlib.Path("/sys/fs/cgroup/memory.max").open(encoding="ascii") as limit:
            text = limit.read().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def _size(text: object) -> int | None:
    return None if text is None else parse_bytes(str(text))
