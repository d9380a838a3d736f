"""The CUDA caching allocator: blocks, pools, segments, and what it does at a limit.

A model of `c10/cuda/CUDACachingAllocator.cpp` (constants from `c10/core/AllocatorConfig.h`):

* a request is rounded up to 512 B; up to 1 MiB it comes from the small pool, in segments of 2 MiB;
  larger ones from the large pool: a request below 10 MiB takes a segment of 20 MiB, others one of
  their own size rounded up to 2 MiB;
* best fit by (size, address) within pool and stream; a block is split when the rest is at least
  512 B (small) or more than 1 MiB (large), else the whole block counts as allocated;
* a freed block joins its free neighbours at once, or when other streams that use it are done;
* at the limit, old segments are released where garbage collection is on, then oversize ones where
  `max_split_size_mb` is set, then every wholly free one; each time the request is tried again; then
  it is out of memory.

Not modelled: private pools (CUDA graphs, `MemPool`), the `cudaMallocAsync` backend, and other
processes that take the device's memory meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from tuner.memory.allocator_blocks import (
    ADDRESS_BITS,
    FREE,
    UNMAPPED,
    USED,
    WAITING,
    AllocatorBlock,
    FreeList,
)
from tuner.memory.allocator_expandable import ExpandableSegments
from tuner.memory.allocator_figures import Fragmentation, OutOfMemory
from tuner.memory.allocator_release import oldest, oversize
from tuner.memory.allocator_settings import DEFAULT_LARGE_SEGMENT, ROUNDING, AllocatorSettings
from tuner.units import MIB

__all__ = [
    "LARGE_SEGMENT",
    "LARGE_SEGMENT_BELOW",
    "ROUNDING",
    "SEGMENT_ROUNDING",
    "SMALL_LIMIT",
    "SMALL_SEGMENT",
    "AllocatorBlock",
    "AllocatorSettings",
    "CachingAllocator",
    "Fragmentation",
    "OutOfMemory",
    "round_up",
    "segment_size",
]

SMALL_LIMIT = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = DEFAULT_LARGE_SEGMENT
LARGE_SEGMENT_BELOW = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB

_NO_BOUND = 1 << 63
_DEFAULT = AllocatorSettings()


class CachingAllocator:
    """Replays requests; counts what is allocated and reserved, now and at the peak.

    Args:
        limit_bytes: The most that may be reserved (`set_per_process_memory_fraction`); None for no
            limit. Expandable segments may pass it by a part of a page, as in PyTorch.
        address_of_segment: Called with (size, stream) for each new segment's address, for replays
            of real traces; by default segments lie one after another.
        settings: What `PYTORCH_ALLOC_CONF` says.
        capacity_bytes: What the device has for the allocator: beyond it `cudaMalloc` fails. None for
            no bound.

    Attributes:
        allocated_bytes, reserved_bytes: Now.
        peak_allocated_bytes, peak_reserved_bytes: The most so far.
        reserved_at_peak_bytes: What was reserved when allocated bytes were at their peak.
        waiting_bytes: Freed blocks that other streams still use.
        retries: How often every free segment was released to serve a request.
        ordinary_segments: How many segments are held that are not expandable.
        expandable: The expandable ones.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        address_of_segment: Callable[[int, int], int] | None = None,
        *,
        settings: AllocatorSettings = _DEFAULT,
        capacity_bytes: int | None = None,
    ) -> None:
        if capacity_bytes is not None and settings.memory_fraction < 1:
            share_bytes = int(settings.memory_fraction * capacity_bytes)
            limit_bytes = share_bytes if limit_bytes is None else min(limit_bytes, share_bytes)
        self.limit_bytes = limit_bytes
        self.capacity_bytes = capacity_bytes
        self.settings = settings
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = self.reserved_at_peak_bytes = 0
        self.waiting_bytes = 0
        self.retries = 0
        self.new_address = address_of_segment or self._next_address
        self._next_free_address = 0
        self.ordinary_segments = 0
        self._small: dict[int, FreeList] = {}
        self._large: dict[int, FreeList] = {}
        self.expandable = ExpandableSegments(self)
        self._other_streams: dict[AllocatorBlock, set[int]] = {}
        self._waiting: dict[AllocatorBlock, set[int]] = {}
        self._rounds = bool(settings.power2_divisions)
        self._max_split_bytes = settings.max_split_bytes or _NO_BOUND
        self._split_below = _NO_BOUND if settings.expandable_segments else self._max_split_bytes
        self._collects = limit_bytes is not None and settings.garbage_collection_threshold > 0
        self._searches = 0  # in the large pool: the clock of garbage collection
        self._freed_at: dict[AllocatorBlock, int] = {}
        self._plain = not (settings.max_split_bytes or settings.expandable_segments or self._collects)

    @property
    def segments(self) -> int:
        """How many segments are held; of expandable ones, mapped ranges."""
        return self.ordinary_segments + self.expandable.mapped_ranges

    def allocate(self, requested_bytes: int, stream: int = 0) -> AllocatorBlock:
        """Serve a request of at least 1 byte.

        Raises:
            OutOfMemory: It does not fit under the limit, even with every free segment released.
        """
        if self._rounds:
            size = self.settings.rounded(requested_bytes)
        else:
            size = -(-requested_bytes // ROUNDING) * ROUNDING or ROUNDING
        small = size <= SMALL_LIMIT
        pool = (self._small if small else self._large).get(stream) or self.pool(small=small, stream=stream)
        keys = pool.keys
        index = bisect_left(keys, size << ADDRESS_BITS) if self._plain else self._search(pool, size)
        if index < len(keys):
            del keys[index]
            block = pool.blocks.pop(index)
        else:
            block = self._obtain(pool, size)
        if block.size - size >= pool.split_from and size < self._split_below:
            rest = block.split(size)
            pool.add(rest)
            if self._collects:
                self._freed_at[rest] = self._searches
        block.state = USED
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
            self.reserved_at_peak_bytes = self.reserved_bytes
        return block

    def free(self, block: AllocatorBlock) -> None:
        """Return a block to its pool, joined with its free neighbours.

        A block that other streams use (`record_stream`) counts as freed, and returns when their work
        is done.

        Raises:
            ValueError: The block is not in use.
        """
        streams = self._other_streams.pop(block, None) if self._other_streams else None
        if streams:
            self.free_later(block, streams)
            return
        if block.state != USED:
            raise ValueError("a block is freed that is not in use")
        self.allocated_bytes -= block.size
        joined = block.pool.join(block)
        block.state = FREE  # it may be gone by joining; freeing it again must be noticed
        if self._collects:
            self._freed_at[joined] = self._searches

    def free_later(self, block: AllocatorBlock, streams: set[int] | None = None) -> None:
        """Count a block as freed, and keep it until `complete`, or `synchronize`.

        Args:
            block: A block in use.
            streams: The streams whose work it waits for; None waits for `complete_free`.

        Raises:
            ValueError: The block is not in use.
        """
        if block.state != USED:
            raise ValueError("a block is freed that is not in use")
        block.state = WAITING
        self.allocated_bytes -= block.size
        self.waiting_bytes += block.size
        self._waiting[block] = set(streams or ())

    def record_stream(self, block: AllocatorBlock, stream: int) -> None:
        """Note that another stream uses a block; its own stream needs no note."""
        if stream != block.pool.stream:
            self._other_streams.setdefault(block, set()).add(stream)

    def complete(self, stream: int) -> None:
        """Finish a stream's work: blocks that waited for it alone return to their pools."""
        for block, streams in list(self._waiting.items()):
            if stream in streams:
                streams.remove(stream)
                if not streams:
                    self.complete_free(block)

    def complete_free(self, block: AllocatorBlock) -> None:
        """Return a waiting block to its pool; one that no longer waits is left alone."""
        if self._waiting.pop(block, None) is not None:
            self.waiting_bytes -= block.size
            self.allocated_bytes += block.size
            block.state = USED
            self.free(block)

    def synchronize(self) -> None:
        """Finish the work of every stream."""
        for block in list(self._waiting):
            self.complete_free(block)

    def empty_cache(self) -> None:
        """Finish every stream's work, release free segments and unmap free pages."""
        self.synchronize()
        for pool in self._pools():
            for block in list(pool.blocks):
                if block.space is not None:
                    self.reserved_bytes -= self.expandable.unmap(block)
                elif not block.is_split:
                    self.release(block)

    def release_at(self, address: int) -> None:
        """Give the segment at an address back to the device, if it is wholly free."""
        for pool in self._pools():
            for block in pool.blocks:
                if block.address == address and block.space is None and not block.is_split:
                    self.release(block)
                    return

    def release(self, block: AllocatorBlock) -> None:
        """Give a wholly free segment back to the device."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size
        self.ordinary_segments -= 1
        self._freed_at.pop(block, None)

    def reserve(self, size: int) -> bool:
        """Take memory from the device; False when it has no more."""
        if self.capacity_bytes is not None and self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        return True

    def fragmentation(self) -> Fragmentation:
        """Return the figures of fragmentation."""
        free = [block for pool in self._pools() for block in pool.blocks]
        return Fragmentation(
            unused_bytes=self.reserved_bytes - self.allocated_bytes,
            unused_at_peak_bytes=self.reserved_at_peak_bytes - self.peak_allocated_bytes,
            largest_free_bytes=max((block.size for block in free), default=0),
            inactive_split_bytes=sum(b.size for b in free if b.space is None and b.is_split),
            segments=self.segments,
            retries=self.retries,
        )

    def pool(self, *, small: bool, stream: int) -> FreeList:
        """Return the free list of a pool and stream."""
        pools = self._small if small else self._large
        if stream not in pools:
            splits_finely = small or self.settings.expandable_segments
            split_from = ROUNDING if splits_finely else SMALL_LIMIT + 1
            pools[stream] = FreeList(small=small, stream=stream, split_from=split_from)
        return pools[stream]

    def _pools(self) -> Iterator[FreeList]:
        yield from self._large.values()
        yield from self._small.values()

    def _search(self, pool: FreeList, size: int) -> int:
        """Return the position of the free block that serves a request, or past the end (`get_free_block`)."""
        if not pool.small:
            self._searches += 1
        index, blocks = pool.first(size), pool.blocks
        if index == len(blocks):
            return index
        if blocks[index].space is not None:
            index = self._among_expandable(blocks, index)
            if index == len(blocks):
                return index
        found = blocks[index].size
        if size < self._max_split_bytes <= found:
            return len(blocks)  # oversize blocks are kept for oversize requests
        if size >= self._max_split_bytes and found >= size + self.settings.max_non_split_rounding_bytes:
            return len(blocks)
        return index

    def _among_expandable(self, blocks: list[AllocatorBlock], index: int) -> int:
        """Return the best position from `index` on, where an expandable segment's block lies."""
        if not self.settings.expandable_segments:
            while index < len(blocks) and blocks[index].space is not None:
                index += 1
            return index
        # A block at the end of the mapped part counts with the space that it can grow into.
        while index + 1 < len(blocks) and blocks[index].space is not None:
            if _size_it_can_reach(blocks[index + 1]) >= _size_it_can_reach(blocks[index]):
                break
            index += 1
        return index

    def _obtain(self, pool: FreeList, size: int) -> AllocatorBlock:
        """Return a block from new memory, after releasing what can be where that is needed.

        Raises:
            OutOfMemory: There is no more.
        """
        if self._collects:
            self._collect_garbage()
        block = self._from_device(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._from_device(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._from_device(pool, size)
        if block is None:
            bounds = [bound for bound in (self.limit_bytes, self.capacity_bytes) if bound is not None]
            raise OutOfMemory(size, self.allocated_bytes, self.reserved_bytes, min(bounds))
        return block

    def _from_device(self, pool: FreeList, size: int) -> AllocatorBlock | None:
        segment_bytes = segment_size(size, self.settings.large_segment_bytes)
        if self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes:
            return None
        if self.settings.expandable_segments:
            return self.expandable.allocate(pool, size)
        if not self.reserve(segment_bytes):
            return None
        self.ordinary_segments += 1
        return AllocatorBlock(self.new_address(segment_bytes, pool.stream), segment_bytes, pool)

    def _release_oversize(self, pool: FreeList, size: int) -> bool:
        """Release oversize segments of a pool, enough for a request; whether that was possible."""
        if self.settings.max_split_bytes is None:
            return False
        blocks, wanted_bytes = oversize(pool, size, self.settings.max_split_bytes)
        for block in blocks:
            self.release(block)
        return sum(block.size for block in blocks) >= wanted_bytes

    def _collect_garbage(self) -> None:
        """Release old segments once more is reserved than the threshold's share of the limit."""
        assert self.limit_bytes is not None
        threshold_bytes = int(self.settings.garbage_collection_threshold * self.limit_bytes)
        free = [b for pool in self._large.values() for b in pool.blocks if b.space is None and not b.is_split]
        ages = {block: self._searches - self._freed_at.get(block, 0) for block in free}
        for block in oldest(ages, self.reserved_bytes - threshold_bytes):
            self.release(block)

    def _next_address(self, size: int, stream: int) -> int:
        address = self._next_free_address
        self._next_free_address += size + SEGMENT_ROUNDING  # never adjacent: segments do not join
        return address


def _size_it_can_reach(block: AllocatorBlock) -> int:
    behind = block.next
    return block.size + (behind.size if behind is not None and behind.state == UNMAPPED else 0)


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size` and not zero."""
    return max(1, -(-size // multiple)) * multiple


def segment_size(rounded_bytes: int, large_segment_bytes: int = LARGE_SEGMENT) -> int:
    """Return the size of the segment that a rounded request makes the allocator reserve."""
    if rounded_bytes <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if rounded_bytes < LARGE_SEGMENT_BELOW:
        return large_segment_bytes
    return round_up(rounded_bytes, SEGMENT_ROUNDING)
