"""Which GPU a trial fits, from the profiles of targets."""

from __future__ import annotations

from functools import cache

from tuner.memory.targets import Target, profile_names, resolve_target
from tuner.store.rows import StudyRecord
from tuner.units import format_bytes


def smallest_gpu(study: StudyRecord, memory: str, size_bytes: int) -> str:
    """Return a sentence about the smallest known GPU that holds a trial.

    What its tensors take is what was measured without the context of the device it ran on; the
    other GPU's context comes to it. Workspaces may differ, so that it is an estimate.

    Args:
        study: The study.
        memory: What was measured: `peak`, `allocated` or `reserved`.
        size_bytes: How much of it.
    """
    tensors = size_bytes - (study.context_bytes or 0) if memory == "peak" else size_bytes
    for gpu in _by_capacity():
        needed = max(tensors, 0) + (gpu.context_bytes or 0)
        if needed <= (gpu.capacity_bytes or 0):
            room = f"{format_bytes(needed)} of {format_bytes(gpu.capacity_bytes)}"
            return f"The smallest GPU that holds it is likely {gpu.name} ({room})."
    return "No GPU in the profiles holds it."


@cache
def _by_capacity() -> list[Target]:
    return sorted((resolve_target(name) for name in profile_names()), key=lambda gpu: gpu.capacity_bytes or 0)
