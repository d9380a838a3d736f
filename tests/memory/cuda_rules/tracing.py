"""Steps traced for a GPU, and what tests ask of the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.memory.cuda_rules import CudaDevice, cuda_rules
from tuner.memory.trace import Trace, trace_build

AMPERE = CudaDevice(compute_capability=(8, 0), cublas_workspace_bytes=0)


def traced(make: Callable[[], Callable[[], Any]], device: CudaDevice = AMPERE, *, steps: int = 1) -> Trace:
    """Trace `steps` calls of the step that `make()` returns; cuBLAS workspaces are left out."""

    def build(_: torch.device) -> Callable[[], Any]:
        return make()

    return trace_build(build, cuda_rules(device), steps)


def observed(step: Callable[[], Any], device: CudaDevice = AMPERE) -> Any:
    """Return what `step()` returns when it is traced."""
    found: list[Any] = []
    traced(lambda: lambda: found.append(step()), device)
    return found[0]


def live_bytes(trace: Trace, *, when: Callable[[Any], bool]) -> int:
    """Return the bytes alive just before the first block of the last step for which `when` holds.

    Raises:
        ValueError: There is no such block.
    """
    last, live = max(block.step for block in trace.blocks), 0
    for event in trace.events:
        block = trace.blocks[max(event, ~event)]
        if event >= 0 and block.step == last and when(block):
            return live
        live += block.bytes if event >= 0 else -block.bytes
    raise ValueError("there is no such block")


def saved_bytes(trace: Trace) -> int:
    """Return the bytes alive when the last step's backward pass begins."""
    return live_bytes(trace, when=lambda block: block.phase == "backward")


def peak_bytes(trace: Trace) -> int:
    """Return the largest sum of bytes alive at once."""
    live = peak = 0
    for event in trace.events:
        live += trace.blocks[event].bytes if event >= 0 else -trace.blocks[~event].bytes
        peak = max(peak, live)
    return peak


def sizes_of(trace: Trace, operator: str) -> list[int]:
    """Return the sizes of the blocks that an operator made, in order."""
    return [block.bytes for block in trace.blocks if operator in block.operator]
