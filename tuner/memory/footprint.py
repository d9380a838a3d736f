"""What a trace takes of the caching allocator: the free footprint, and the smallest cap it runs under.

The two differ: with room, freed segments that fit no later request stay reserved; at a limit the
allocator releases them and tries again. So the free footprint sizes a reservation, and what a cap
must hold decides whether a configuration fits.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tuner.errors import Untraceable, UsageError
from tuner.memory.allocator import (
    SEGMENT_ROUNDING,
    AllocatorSettings,
    CachingAllocator,
    OutOfMemory,
    round_up,
)

_COARSE_STEPS = 8  # between the allocated and the reserved peak
_TOLERANCE = 0.002  # of the reserved bytes, in the search for the smallest limit


class Footprint(NamedTuple):
    """Peaks of a program on the allocator, in bytes.

    Attributes:
        allocated_bytes: Of live blocks.
        reserved_bytes: Of segments, on the device as it is.
        required_bytes: The smallest limit on reserved bytes under which the program runs.
    """

    allocated_bytes: int
    reserved_bytes: int
    required_bytes: int


def cuda_footprint(
    sizes: Sequence[int],
    events: Sequence[int],
    room_bytes: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Footprint:
    """Replay a trace.

    Args:
        sizes: Requested bytes of each block.
        events: `i` allocates block i, `~i` releases it.
        room_bytes: What the device has for the allocator; a program that does not fit there is
            replayed without a limit.
        environment: `PYTORCH_ALLOC_CONF` in it sets the allocator's options, as in PyTorch.

    Raises:
        Untraceable: The options are not those of the allocator that is modelled.
    """
    settings = _settings(environment)
    free = _replayed(sizes, events, settings, limit_bytes=None)
    on_device = free
    if room_bytes is not None and room_bytes < free.peak_reserved_bytes:
        with contextlib.suppress(OutOfMemory):
            on_device = _replayed(sizes, events, settings, limit_bytes=room_bytes)
    low_bytes, high_bytes = free.peak_allocated_bytes, on_device.peak_reserved_bytes
    return Footprint(
        free.peak_allocated_bytes,
        on_device.peak_reserved_bytes,
        _smallest_limit(sizes, events, settings, low_bytes=low_bytes, high_bytes=high_bytes),
    )


def _settings(environment: Mapping[str, str]) -> AllocatorSettings:
    text = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    try:
        return AllocatorSettings.parse(text)
    except UsageError as error:  # another backend, say: nothing is known of its memory
        raise Untraceable(f"PYTORCH_ALLOC_CONF: {error.message}") from error


def _replayed(
    sizes: Sequence[int], events: Sequence[int], settings: AllocatorSettings, *, limit_bytes: int | None
) -> CachingAllocator:
    """Return the allocator after a trace.

    Raises:
        OutOfMemory: The trace does not run under the limit.
    """
    allocator = CachingAllocator(limit_bytes, settings=settings)
    allocate, free, held = allocator.allocate, allocator.free, {}
    for event in events:
        if event >= 0:
            held[event] = allocate(sizes[event])
        else:
            free(held.pop(~event))
    return allocator


def _smallest_limit(
    sizes: Sequence[int],
    events: Sequence[int],
    settings: AllocatorSettings,
    *,
    low_bytes: int,
    high_bytes: int,
) -> int:
    """Return the smallest limit under which the trace replays.

    Not every larger one works too: with more room, segments may be cut so that a later request finds
    no place (case D07). So limits are tried from below in coarse steps, and the first that works is
    refined by bisection.
    """

    def replays(limit_bytes: int) -> bool:
        try:
            _replayed(sizes, events, settings, limit_bytes=limit_bytes)
        except OutOfMemory:
            return False
        return True

    low_bytes = round_up(low_bytes, SEGMENT_ROUNDING) - SEGMENT_ROUNDING
    coarse_bytes = round_up((high_bytes - low_bytes) // _COARSE_STEPS, SEGMENT_ROUNDING)
    for limit_bytes in range(low_bytes + coarse_bytes, high_bytes, coarse_bytes):
        if replays(limit_bytes):
            high_bytes = limit_bytes
            break
        low_bytes = limit_bytes
    while high_bytes - low_bytes > max(SEGMENT_ROUNDING, _TOLERANCE * high_bytes):
        middle_bytes = round_up((low_bytes + high_bytes) // 2, SEGMENT_ROUNDING)
        if middle_bytes >= high_bytes:
            break
        if replays(middle_bytes):
            high_bytes = middle_bytes
        else:
            low_bytes = middle_bytes
    return high_bytes
