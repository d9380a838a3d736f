"""Which GPUs `CUDA_VISIBLE_DEVICES` leaves visible, by CUDA's own rules.

An entry is an index in PCI order, the beginning of a UUID (`GPU-…`), or that of a MIG slice
(`MIG-…`); the first entry decides which of the three the whole list is read as. What follows an
invalid entry is not visible, and a repeated entry hides everything (PyTorch reads it so too, see
`torch.cuda._parse_visible_devices`). A GPU in MIG mode stands for its first slice, since CUDA never
shows the whole of it (NVIDIA's MIG user guide, "CUDA device enumeration").

CUDA shows one process no more than one slice. Each trial sees one device only, so all slices that
are named count here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Listed:
    """A GPU as NVML lists it, in PCI order.

    Attributes:
        uuid: `GPU-…`.
        slices: The UUIDs of its MIG slices (`MIG-…`); None outside MIG mode.
    """

    uuid: str
    slices: tuple[str, ...] | None = None


def visible_uuids(value: str | None, listed: Sequence[Listed]) -> list[str]:
    """Return the UUIDs of what CUDA may use, in CUDA's order.

    Args:
        value: `CUDA_VISIBLE_DEVICES`; None where it is not set: everything is visible.
        listed: The GPUs of this host in PCI order.
    """
    if value is None:
        return [uuid for gpu in listed for uuid in _shown(gpu)]
    entries = value.split(",")
    if entries[0].startswith("MIG-"):
        slices = [uuid for gpu in listed for uuid in gpu.slices or ()]
        return [slices[number] for number in _numbers(entries, "MIG-", slices)]
    if entries[0].startswith("GPU-"):
        numbers = _numbers(entries, "GPU-", [gpu.uuid for gpu in listed])
    else:
        numbers = _indices(entries, len(listed))
    return [uuid for number in numbers for uuid in _shown(listed[number])]


def _shown(gpu: Listed) -> tuple[str, ...]:
    return (gpu.uuid,) if gpu.slices is None else gpu.slices[:1]


def _indices(entries: Sequence[str], count: int) -> list[int]:
    """Return what a list of indices names; like `strtoul`, CUDA reads no further than the digits."""
    found: list[int] = []
    for entry in entries:
        match = re.match(r"\+?(\d+)", entry.strip(), re.ASCII)
        if match is None:
            break
        if int(match[1]) in found:
            return []
        found.append(int(match[1]))
    valid = next((place for place, index in enumerate(found) if index >= count), len(found))
    return found[:valid]


def _numbers(entries: Sequence[str], prefix: str, uuids: Sequence[str]) -> list[int]:
    """Return the places of the UUIDs that begin as the entries do; an ambiguous entry is invalid."""
    named = next((place for place, entry in enumerate(entries) if not entry.startswith(prefix)), None)
    entries = entries[:named]
    if len(set(entries)) < len(entries):
        return []
    found: list[int] = []
    for entry in entries:
        matching = [place for place, uuid in enumerate(uuids) if uuid.startswith(entry)]
        if len(matching) != 1:
            break
        if matching[0] in found:
            return []
        found.append(matching[0])
    return found
