"""Expandable segments: one address space per stream and pool, with memory mapped page by page.

As in `CUDACachingAllocator.cpp` (Note [Expandable Segments]): pages of 2 MiB in the small pool and 20 MiB
in the large one; new memory goes to the lowest address where the request fits, counting the free block
before it; at the limit, pages that lie wholly in free blocks are unmapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.memory.allocator_blocks import FREE, UNMAPPED, AddressSpace, AllocatorBlock, FreeList
from tuner.units import MIB

if TYPE_CHECKING:
    from tuner.memory.allocator import CachingAllocator

_SMALL_PAGE = 2 * MIB
_UNBOUNDED_SPACE = 1 << 42  # where the device's size is unknown: more than any device holds


class ExpandableSegments:
    """Maps and unmaps memory for an allocator."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self._allocator = allocator
        self._firsts: list[AllocatorBlock] = []  # the first block of each: joins keep it, splits too

    def allocate(self, pool: FreeList, size: int) -> AllocatorBlock | None:
        """Return a block of at least `size` bytes, taken out of its list; None when memory is short.

        What was mapped before memory ran out stays mapped, as in PyTorch.
        """
        block = self._candidate(pool, size)
        if block.state == UNMAPPED:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.next is not None
            mapped = self._map(block.next, min(size - block.size, block.next.size))
            if mapped is None:
                return None
            block = mapped
        pool.remove(block)
        return block

    def unmap(self, block: AllocatorBlock) -> int:
        """Unmap the whole pages inside a free block; return how many bytes that gave back."""
        space = block.space
        assert space is not None
        begin = space.address + space.pages(block.address - space.address)
        end = block.address + block.size - (block.address + block.size - space.address) % space.page_bytes
        if begin >= end:
            return 0
        pool = block.pool
        pool.remove(block)
        if end < block.address + block.size:
            pool.add(block.split(end - block.address))
        if begin > block.address:
            pool.add(block)
            block = block.split(begin - block.address)
        block.state = UNMAPPED
        unmapped_bytes = block.size
        if block.next is not None and block.next.state == UNMAPPED:
            pool.unmapped.remove(block.next)
            block.absorb_next()
        if block.previous is not None and block.previous.state == UNMAPPED:
            block = block.previous
            pool.unmapped.remove(block)
            block.absorb_next()
        if block.is_split:
            pool.add_unmapped(block)
        else:
            self._firsts.remove(block)  # nothing is left of the segment
        return unmapped_bytes

    def new_space(self, pool: FreeList, address: int | None = None) -> AllocatorBlock:
        """Reserve address space for a pool; return it as one unmapped block.

        It is 1 1/8 times the device's memory, as in PyTorch.
        """
        allocator = self._allocator
        page_bytes = _SMALL_PAGE if pool.small else allocator.settings.large_segment_bytes
        capacity_bytes = allocator.capacity_bytes
        size = _UNBOUNDED_SPACE if capacity_bytes is None else capacity_bytes + capacity_bytes // 8
        size = -(-size // page_bytes) * page_bytes
        if address is None:
            address = allocator.new_address(size, pool.stream)
        block = AllocatorBlock(
            address, size, pool, space=AddressSpace(address, size, page_bytes), state=UNMAPPED
        )
        pool.add_unmapped(block)
        self._firsts.append(block)
        return block

    @property
    def mapped_ranges(self) -> int:
        """How many contiguous mapped ranges there are: what a snapshot lists as segments."""
        ranges = 0
        for first in self._firsts:
            block: AllocatorBlock | None = first
            behind_a_gap = True
            while block is not None:
                mapped = block.state != UNMAPPED
                ranges += mapped and behind_a_gap
                behind_a_gap = not mapped
                block = block.next
        return ranges

    def _candidate(self, pool: FreeList, size: int) -> AllocatorBlock:
        """Return where the lowest run of free and unmapped blocks of `size` bytes begins."""
        for block in pool.unmapped:
            before = block.previous
            start = before if before is not None and before.state == FREE else block
            if _run_from(start, size) >= size:
                return start
        return self.new_space(pool)

    def _map(self, block: AllocatorBlock, size: int) -> AllocatorBlock | None:
        """Back the start of an unmapped block with memory; return the free block it became part of."""
        space = block.space
        assert space is not None
        mapped_bytes = space.pages(size)
        if not self._allocator.reserve(mapped_bytes):
            return None
        pool = block.pool
        pool.unmapped.remove(block)
        if mapped_bytes < block.size:
            pool.add_unmapped(block.split(mapped_bytes))
        return pool.join(block)


def _run_from(block: AllocatorBlock | None, size: int) -> int:
    found = 0
    while found < size and block is not None and block.state in (FREE, UNMAPPED):
        found += block.size
        block = block.next
    return found
