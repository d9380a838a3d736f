"""Whether a study left its GPUs as it found them, and who holds what it did not leave."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tuner.measure import nvml
from tuner.scheduling.devices import Place
from tuner.store.reservations import Held
from tuner.units import MIB, format_bytes

_TOLERANCE_BYTES = 50 * MIB
_PATIENCE_SECONDS = 3.0  # a driver needs a moment to take back what a killed process held


def memory_now(places: Sequence[Place]) -> dict[str, nvml.DeviceMemory]:
    """Return what is used on each GPU, by its key; nothing for a CPU."""
    return {place.key: nvml.memory_of(place.key) for place in places if place.kind == "cuda"}


def left_behind(
    places: Sequence[Place], before: Mapping[str, nvml.DeviceMemory], held: Sequence[Held]
) -> list[str]:
    """Return a sentence for each GPU that holds more than before, once our trials have ended.

    Args:
        places: The devices of the study.
        before: What `memory_now` gave before its first trial.
        held: Reservations that are left: other drivers' trials.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (found := _found(places, before, held)) and time.monotonic() < deadline:
        time.sleep(0.25)
    return found


def _found(
    places: Sequence[Place], before: Mapping[str, nvml.DeviceMemory], held: Sequence[Held]
) -> list[str]:
    now = memory_now(places)
    sentences = []
    for place in places:
        was, memory = before.get(place.key), now.get(place.key)
        if was is None or memory is None or was.used_bytes is None or memory.used_bytes is None:
            continue
        running = sum(row.device_bytes for row in held if row.device == place.key and row.granted)
        more_bytes = memory.used_bytes - was.used_bytes - running
        if more_bytes > _TOLERANCE_BYTES:
            sentences.append(
                f"{place.target} holds {format_bytes(more_bytes)} more than before the study: "
                f"{_holders(was, memory)}"
            )
    return sentences


def _holders(was: nvml.DeviceMemory, memory: nvml.DeviceMemory) -> str:
    if was.by_pid is None or memory.by_pid is None:
        return "the NVIDIA driver does not say whose it is"
    grown = {pid: size - was.by_pid.get(pid, 0) for pid, size in memory.by_pid.items()}
    largest = sorted(((size, pid) for pid, size in grown.items() if size > 0), reverse=True)[:3]
    if not largest:
        return "no process of it is known"
    return ", ".join(f"process {pid} ({_command(pid)}) {format_bytes(size)}" for size, pid in largest)


def _command(pid: int) -> str:
    try:
        words = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except OSError:
        return "not of this host's /proc"
    return words if len(words) <= 60 else f"{words[:57]}…"
