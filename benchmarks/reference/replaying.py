"""Peaks of one step of a trace, as `max_memory_allocated` gives them after a reset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tuner.memory.allocator import ROUNDING, CachingAllocator, round_up
from tuner.memory.cuda_rules import CudaDevice, cuda_rules
from tuner.memory.trace import Trace, trace_build

Build = Callable[[torch.device], Callable[[], Any]]
A100 = CudaDevice(compute_capability=(8, 0))
H100 = CudaDevice(compute_capability=(9, 0), cublas_workspace_bytes=32 * 2**20)


def peaks_of_last_step(trace: Trace, cached_bytes: Sequence[int] = ()) -> tuple[int, int]:
    """Return the (allocated, reserved) peaks in bytes from the start of the trace's last step on.

    `cached_bytes` are requested and released in turn beforehand, so that the allocator is warm.
    """
    allocator, held = CachingAllocator(), {}
    for size_bytes in cached_bytes:
        allocator.free(allocator.allocate(size_bytes))
    last = max(block.step for block in trace.blocks)
    begun = False
    for event in trace.events:
        if event >= 0:
            if not begun and trace.blocks[event].step == last:
                begun = True
                allocator.peak_allocated_bytes = allocator.allocated_bytes
            held[event] = allocator.allocate(trace.blocks[event].bytes)
        else:
            allocator.free(held.pop(~event))
    return allocator.peak_allocated_bytes, allocator.peak_reserved_bytes


def allocated_of_last_step(
    build: Build, device: CudaDevice, *, steps: int = 3, cached_bytes: Sequence[int] = ()
) -> int:
    """Trace `steps` calls on `device` and return the peak of the last, in bytes."""
    return peaks_of_last_step(trace_build(build, cuda_rules(device), steps), cached_bytes)[0]


def live_before_backward(trace: Trace) -> int:
    """Return the bytes allocated when the last step's backward pass begins.

    Raises:
        ValueError: There is no backward pass.
    """
    last = max(block.step for block in trace.blocks)
    live = 0
    for event in trace.events:
        block = trace.blocks[max(event, ~event)]
        if event >= 0 and block.step == last and block.phase == "backward":
            return live
        live += round_up(block.bytes, ROUNDING) if event >= 0 else -round_up(block.bytes, ROUNDING)
    raise ValueError("the trace has no backward pass")
