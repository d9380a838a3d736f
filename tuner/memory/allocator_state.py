"""Warm starts: an allocator that already holds what a snapshot says."""

from __future__ import annotations

from collections.abc import Iterable

from tuner.memory.allocator import CachingAllocator
from tuner.memory.allocator_blocks import FREE, UNMAPPED, USED, WAITING, AllocatorBlock
from tuner.memory.snapshot import SegmentState, check_filled


def restore(allocator: CachingAllocator, segments: Iterable[SegmentState]) -> dict[int, AllocatorBlock]:
    """Give an empty allocator the segments of a snapshot; return the blocks in use by address.

    Limit and capacity are not checked: the segments were there. The ranges of an expandable segment
    share an address space that begins at the lowest one of their pool and stream.

    Raises:
        ValueError: The blocks of a segment leave gaps or overlap.
    """
    held: dict[int, AllocatorBlock] = {}
    spaces: dict[tuple[bool, int], AllocatorBlock] = {}  # the unmapped end of each
    for segment in sorted(segments, key=lambda one: one.address):
        check_filled(segment)
        pool = allocator.pool(small=segment.small, stream=segment.stream)
        if segment.expandable:
            block = _mapped_at(allocator, spaces, segment)
        else:
            block = AllocatorBlock(segment.address, segment.size, pool)
            allocator.ordinary_segments += 1
        for state in segment.blocks:
            following = block.split(state.size) if state.size < block.size else None
            block.state = FREE if state.state == FREE else USED
            if block.state == FREE:
                pool.add(block)
            else:
                held[block.address] = block
                allocator.allocated_bytes += block.size
            if state.state == WAITING:
                allocator.free_later(block)
            block = following or block
        allocator.reserved_bytes += segment.size
    allocator.peak_allocated_bytes = allocator.allocated_bytes
    allocator.peak_reserved_bytes = allocator.reserved_at_peak_bytes = allocator.reserved_bytes
    return held


def _mapped_at(
    allocator: CachingAllocator, spaces: dict[tuple[bool, int], AllocatorBlock], segment: SegmentState
) -> AllocatorBlock:
    """Return the block of address space under a mapped range, cut to its size."""
    pool = allocator.pool(small=segment.small, stream=segment.stream)
    end = spaces.get((segment.small, segment.stream))
    if end is None or end.address + end.size < segment.address + segment.size:
        end = allocator.expandable.new_space(pool, segment.address)
    block = end
    if block.address < segment.address:
        block = end.split(segment.address - end.address)
    else:
        pool.unmapped.remove(block)
    if segment.size < block.size:
        rest = block.split(segment.size)
        pool.add_unmapped(rest)
        spaces[segment.small, segment.stream] = rest
    else:
        spaces.pop((segment.small, segment.stream), None)
    assert block.state == UNMAPPED
    return block
