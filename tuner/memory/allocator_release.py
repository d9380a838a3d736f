"""Which free segments the caching allocator releases before it gives up."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.memory.allocator_blocks import AllocatorBlock, FreeList


def oversize(pool: FreeList, size: int, max_split_bytes: int) -> tuple[list[AllocatorBlock], int]:
    """Return the oversize segments to release for a request, and how many bytes that must give.

    The smallest one that is large enough alone, else the largest ones until together they are
    (`release_available_cached_blocks`). They may fall short of it.
    """
    wanted_bytes = max(size, max_split_bytes)
    whole = [b for b in pool.blocks[pool.first(max_split_bytes) :] if b.space is None and not b.is_split]
    enough = [block for block in whole if block.size >= wanted_bytes]
    if enough:
        return enough[:1], wanted_bytes
    chosen: list[AllocatorBlock] = []
    for block in reversed(whole):
        if sum(one.size for one in chosen) >= wanted_bytes:
            break
        chosen.append(block)
    return chosen, wanted_bytes


def oldest(ages: Mapping[AllocatorBlock, int], wanted_bytes: int) -> list[AllocatorBlock]:
    """Return free segments to release until `wanted_bytes` are reached, those of average age or more first.

    A round takes all of them, even if fewer would do, so that it is not needed again soon
    (`garbage_collect_cached_blocks`).

    Args:
        ages: For each wholly free segment, how many searches of its pool ago it became free.
        wanted_bytes: At least this much should go; none goes when it is not positive.
    """
    left, chosen, released = dict(ages), list[AllocatorBlock](), 0
    while left and released < wanted_bytes:
        average = sum(left.values()) / len(left)
        for block in [block for block, age in left.items() if age >= average]:
            del left[block]
            released += block.size
            chosen.append(block)
    return chosen
