"""The CUDA caching allocator: blocks, pools, segments, and what it does at a limit.

A model of `c10/cuda/CUDACachingAllocator.cpp` (constants from `c10/core/AllocatorConfig.h`):

* a request is rounded up to 512 B; up to 1 MiB it comes from the small pool, in segments of 2 MiB;
  larger ones from the large pool: a request below 10 MiB takes a segment of 20 MiB, others one of
  their own size rounded up to 2 MiB;
* best fit by (size, address) within pool and stream; a block is split when the rest is at least
  512 B (small) or more than 1 MiB (large), else the whole block counts as allocated;
* a freed block joins its free neighbours at once;
* at the limit, every wholly free segment is released and the request tried again; then it is out
  of memory.

Not modelled: expandable segments, `record_stream`, `PYTORCH_ALLOC_CONF` options, graphs' pools.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from tuner.units import MIB

ROUNDING = 512
SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_SEGMENT_BELOW = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB


class OutOfMemory(Exception):
    """The allocator cannot serve a request under its limit.

    Attributes:
        requested_bytes: The request, rounded.
        allocated_bytes: Live blocks at that moment.
        reserved_bytes: Segments held after every free one was released.
    """

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(f"out of memory: {requested_bytes} B requested, {allocated_bytes} B allocated")
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(eq=False)
class AllocatorBlock:
    """A piece of a segment, in use or free, linked to its neighbours in address order."""

    address: int
    size: int
    pool: _Pool
    stream: int
    used: bool = False
    previous: AllocatorBlock | None = None
    next: AllocatorBlock | None = None

    @property
    def is_whole_segment(self) -> bool:
        """Whether nothing else is left of the block's segment."""
        return self.previous is None and self.next is None


@dataclass(eq=False)
class _Pool:
    """Free blocks of one kind, sorted by (stream, size, address)."""

    small: bool
    keys: list[tuple[int, int, int]] = field(default_factory=list)
    free: dict[tuple[int, int, int], AllocatorBlock] = field(default_factory=dict)

    def add(self, block: AllocatorBlock) -> None:
        key = (block.stream, block.size, block.address)
        bisect.insort(self.keys, key)
        self.free[key] = block

    def remove(self, block: AllocatorBlock) -> None:
        key = (block.stream, block.size, block.address)
        del self.keys[bisect.bisect_left(self.keys, key)]
        del self.free[key]

    def best_fit(self, size: int, stream: int) -> AllocatorBlock | None:
        index = bisect.bisect_left(self.keys, (stream, size, 0))
        if index == len(self.keys) or self.keys[index][0] != stream:
            return None
        return self.free[self.keys[index]]


class CachingAllocator:
    """Replays requests; counts what is allocated and reserved, now and at the peak.

    Args:
        limit_bytes: The most that may be reserved; None for no limit.
        address_of_segment: Called with (size, stream) for each new segment's address, for replays
            of real traces; by default segments lie one after another.

    Attributes:
        allocated_bytes, reserved_bytes: Now.
        peak_allocated_bytes, peak_reserved_bytes: The most so far.
        segments: How many segments are held.
        retries: How often free segments were released to stay under the limit.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        address_of_segment: Callable[[int, int], int] | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.segments = 0
        self.retries = 0
        self._pools = {True: _Pool(small=True), False: _Pool(small=False)}
        self._address_of_segment = address_of_segment or self._next_address
        self._next_free_address = 0

    def allocate(self, requested_bytes: int, stream: int = 0) -> AllocatorBlock:
        """Serve a request of at least 1 byte.

        Raises:
            OutOfMemory: It does not fit under the limit, even with every free segment released.
        """
        size = round_up(requested_bytes, ROUNDING)
        pool = self._pools[size <= SMALL_LIMIT]
        block = pool.best_fit(size, stream)
        if block is not None:
            pool.remove(block)
        else:
            block = self._new_segment(size, pool, stream)
        self._split(block, size)
        block.used = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: AllocatorBlock) -> None:
        """Return a block to its pool, joined with its free neighbours."""
        self.allocated_bytes -= block.size
        block.used = False
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.used:
                block.pool.remove(neighbour)
                block = _joined(block, neighbour)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Release every segment that is wholly free."""
        for pool in self._pools.values():
            for block in [block for block in pool.free.values() if block.is_whole_segment]:
                pool.remove(block)
                self.reserved_bytes -= block.size
                self.segments -= 1

    def _new_segment(self, size: int, pool: _Pool, stream: int) -> AllocatorBlock:
        segment_bytes = segment_size(size)
        if self._exceeds(segment_bytes):
            self.retries += 1
            self.empty_cache()
            if self._exceeds(segment_bytes):
                raise OutOfMemory(size, self.allocated_bytes, self.reserved_bytes)
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.segments += 1
        return AllocatorBlock(self._address_of_segment(segment_bytes, stream), segment_bytes, pool, stream)

    def _exceeds(self, more_bytes: int) -> bool:
        return self.limit_bytes is not None and self.reserved_bytes + more_bytes > self.limit_bytes

    def _split(self, block: AllocatorBlock, size: int) -> None:
        rest = block.size - size
        if rest >= ROUNDING if block.pool.small else rest > SMALL_LIMIT:
            remainder = AllocatorBlock(
                block.address + size, rest, block.pool, block.stream, previous=block, next=block.next
            )
            if block.next is not None:
                block.next.previous = remainder
            block.next = remainder
            block.size = size
            block.pool.add(remainder)

    def _next_address(self, size: int, stream: int) -> int:
        address = self._next_free_address
        self._next_free_address += size + SEGMENT_ROUNDING  # never adjacent: segments do not join
        return address


def _joined(block: AllocatorBlock, neighbour: AllocatorBlock) -> AllocatorBlock:
    """Return one block for two free neighbours of one segment."""
    first, second = (block, neighbour) if block.address < neighbour.address else (neighbour, block)
    first.size += second.size
    first.next = second.next
    if second.next is not None:
        second.next.previous = first
    return first


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size` and not zero."""
    return max(1, -(-size // multiple)) * multiple


def segment_size(rounded_bytes: int) -> int:
    """Return the size of the segment that a rounded request makes the allocator reserve."""
    if rounded_bytes <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if rounded_bytes < LARGE_SEGMENT_BELOW:
        return LARGE_SEGMENT
    return round_up(rounded_bytes, SEGMENT_ROUNDING)
