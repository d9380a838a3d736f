"""Each option of the caching allocator, with values worked out by hand from its published rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.memory.allocator import AllocatorBlock, AllocatorSettings, CachingAllocator, OutOfMemory
from tuner.memory.allocator_blocks import FREE
from tuner.memory.allocator_release import oldest
from tuner.units import GIB, KIB, MIB

SPLIT_32 = AllocatorSettings(max_split_bytes=32 * MIB)
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def freed(allocator: CachingAllocator, *sizes: int) -> None:
    """Leave free segments of these sizes behind."""
    for block in [allocator.allocate(size) for size in sizes]:
        allocator.free(block)


def test_an_oversize_block_serves_no_smaller_request() -> None:
    allocator = CachingAllocator(settings=SPLIT_32)
    freed(allocator, 64 * MIB)
    allocator.allocate(16 * MIB)
    assert allocator.reserved_bytes == (64 + 16) * MIB


def test_an_oversize_block_is_never_split() -> None:
    allocator = CachingAllocator(settings=SPLIT_32)
    freed(allocator, 64 * MIB)
    assert allocator.allocate(50 * MIB).size == 64 * MIB
    assert allocator.reserved_bytes == 64 * MIB


def test_an_oversize_block_that_is_20_mib_larger_is_left_alone() -> None:
    allocator = CachingAllocator(settings=SPLIT_32)
    freed(allocator, 64 * MIB)
    assert allocator.allocate(44 * MIB).size == 44 * MIB
    assert allocator.reserved_bytes == (64 + 44) * MIB


def test_blocks_below_the_bound_are_split_as_ever() -> None:
    allocator = CachingAllocator(settings=SPLIT_32)
    freed(allocator, 30 * MIB)
    assert allocator.allocate(16 * MIB).size == 16 * MIB
    assert allocator.reserved_bytes == 30 * MIB


def test_oversize_segments_are_released_before_all_others() -> None:
    """84 MiB held; 44 more pass 100: the oversize one goes, the 20 MiB one stays, and it is no retry."""
    allocator = CachingAllocator(100 * MIB, settings=SPLIT_32)
    freed(allocator, 64 * MIB, 20 * MIB)
    allocator.allocate(44 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == ((20 + 44) * MIB, 0)


def test_several_oversize_segments_are_released_from_the_largest_down() -> None:
    """34 + 36 + 38 held, 70 wanted: 38 and 36 are enough."""
    allocator = CachingAllocator(110 * MIB, settings=SPLIT_32)
    freed(allocator, 34 * MIB, 36 * MIB, 38 * MIB)
    allocator.allocate(70 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == ((34 + 70) * MIB, 0)


def test_garbage_is_collected_above_the_threshold_not_at_the_limit() -> None:
    """52 MiB held are more than half of 100: the free 30 go, though 52 + 32 would fit."""
    allocator = CachingAllocator(100 * MIB, settings=AllocatorSettings(garbage_collection_threshold=0.5))
    old, _ = allocator.allocate(30 * MIB), allocator.allocate(22 * MIB)
    allocator.free(old)
    allocator.allocate(32 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == ((22 + 32) * MIB, 0)


def test_no_garbage_is_collected_below_the_threshold() -> None:
    allocator = CachingAllocator(200 * MIB, settings=AllocatorSettings(garbage_collection_threshold=0.5))
    old, _ = allocator.allocate(30 * MIB), allocator.allocate(22 * MIB)
    allocator.free(old)
    allocator.allocate(32 * MIB)
    assert allocator.reserved_bytes == (30 + 22 + 32) * MIB


def test_of_several_free_segments_the_old_ones_go_first() -> None:
    """Two free segments, one free for longer: releasing it is enough, so the young one stays."""
    allocator = CachingAllocator(100 * MIB, settings=AllocatorSettings(garbage_collection_threshold=0.5))
    old, young = allocator.allocate(30 * MIB), allocator.allocate(28 * MIB)
    allocator.free(old)
    allocator.free(young)
    for _ in range(3):  # the young one is used again and again: the old one grows old
        allocator.free(allocator.allocate(27 * MIB + 512 * KIB))
    allocator.allocate(36 * MIB)
    assert allocator.reserved_bytes == (28 + 36) * MIB


def test_rounds_of_collection_take_all_of_average_age_or_more() -> None:
    pool = CachingAllocator().pool(small=False, stream=0)
    ages = {
        AllocatorBlock(number, size, pool): age for number, (size, age) in enumerate([(5, 9), (4, 5), (3, 1)])
    }
    assert [block.size for block in oldest(ages, 1)] == [5, 4]  # the average age is 5
    assert [block.size for block in oldest(ages, 10)] == [5, 4, 3]
    assert oldest(ages, 0) == []


def test_powers_of_two_round_the_segment_up() -> None:
    allocator = CachingAllocator(settings=AllocatorSettings.parse("roundup_power2_divisions:4"))
    allocator.allocate(33 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (40 * MIB, 40 * MIB)


def test_expandable_segments_grow_by_pages() -> None:
    """Pages of 2 MiB for small requests and 20 MiB for large; a request uses the free end before it."""
    allocator = CachingAllocator(settings=EXPANDABLE)
    allocator.allocate(KIB)
    first = allocator.allocate(3 * MIB // 2)
    assert allocator.reserved_bytes == (2 + 20) * MIB
    second = allocator.allocate(30 * MIB)  # 18.5 MiB are free at the end; 11.5 more need one page
    assert second.address == first.address + first.size
    assert allocator.reserved_bytes == (2 + 40) * MIB
    assert allocator.segments == 2


def test_expandable_segments_split_down_to_512_bytes() -> None:
    """An ordinary segment keeps a rest of up to 1 MiB with its block."""
    ordinary, expandable = CachingAllocator(), CachingAllocator(settings=EXPANDABLE)
    for allocator in (ordinary, expandable):
        freed(allocator, 20 * MIB)
        allocator.allocate(20 * MIB - 512)
    assert ordinary.allocated_bytes == 20 * MIB
    assert expandable.allocated_bytes == 20 * MIB - 512


def test_streams_have_expandable_segments_of_their_own() -> None:
    allocator = CachingAllocator(settings=EXPANDABLE)
    allocator.free(allocator.allocate(20 * MIB, stream=0))
    allocator.allocate(20 * MIB, stream=1)
    assert (allocator.reserved_bytes, allocator.segments) == (40 * MIB, 2)


def test_pages_inside_free_blocks_are_unmapped_when_the_device_is_full() -> None:
    """100 MiB: 20 + 50 + 20 live, the 50 freed: of MiB 20 to 70, the whole pages 20 to 60 can go."""
    allocator = CachingAllocator(capacity_bytes=100 * MIB, settings=EXPANDABLE)
    blocks = [allocator.allocate(size * MIB) for size in (20, 50, 20)]
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(blocks[1])
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments) == (60 * MIB, 2)
    again = allocator.allocate(45 * MIB)  # back into the gap: its two pages, and the 10 MiB behind them
    assert (again.address, allocator.reserved_bytes) == (blocks[1].address, 100 * MIB)


def test_a_chopped_segment_fits_again_with_expandable_segments() -> None:
    """Case D13: what is out of memory with ordinary segments, for fragmentation, fits here."""

    def play(settings: AllocatorSettings) -> CachingAllocator:
        allocator = CachingAllocator(limit_bytes=16 * GIB, settings=settings)
        allocator.free(allocator.allocate(10 * GIB))
        for _ in range(30):
            allocator.allocate(16 * MIB)
        allocator.allocate(10 * GIB)
        return allocator

    with pytest.raises(OutOfMemory) as caught:
        play(AllocatorSettings())
    assert caught.value.is_fragmentation
    allocator = play(EXPANDABLE)
    assert allocator.allocated_bytes == 10 * GIB + 30 * 16 * MIB
    assert allocator.reserved_bytes == allocator.allocated_bytes  # 24 pages of 20 MiB, and 512


def test_what_is_too_large_is_no_fragmentation() -> None:
    allocator = CachingAllocator(limit_bytes=GIB)
    allocator.allocate(600 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(600 * MIB)
    assert not caught.value.is_fragmentation


def test_the_device_can_be_full_before_the_limit() -> None:
    allocator = CachingAllocator(limit_bytes=2 * GIB, capacity_bytes=GIB)
    freed(allocator, 800 * MIB)
    allocator.allocate(900 * MIB)
    assert (allocator.reserved_bytes, allocator.retries) == (900 * MIB, 1)
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(200 * MIB)
    assert caught.value.limit_bytes == GIB


def test_a_memory_fraction_is_a_limit() -> None:
    settings = AllocatorSettings.parse("per_process_memory_fraction:0.5")
    assert CachingAllocator(capacity_bytes=GIB, settings=settings).limit_bytes == GIB // 2


def test_a_block_that_another_stream_uses_returns_when_that_is_done() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(20 * MIB)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert (allocator.allocated_bytes, allocator.waiting_bytes) == (0, 20 * MIB)
    allocator.allocate(20 * MIB)
    assert allocator.reserved_bytes == 40 * MIB  # the first cannot be used yet
    allocator.complete(3)
    assert allocator.waiting_bytes == 20 * MIB
    allocator.complete(7)
    assert allocator.waiting_bytes == 0
    assert allocator.allocate(20 * MIB) is block


def test_use_on_its_own_stream_does_not_delay_a_block() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(20 * MIB, stream=7)
    allocator.record_stream(block, 7)
    allocator.free(block)
    assert allocator.waiting_bytes == 0


def test_a_retry_waits_for_all_streams() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    block = allocator.allocate(60 * MIB)
    allocator.record_stream(block, 7)
    allocator.free(block)
    allocator.allocate(80 * MIB)
    assert (allocator.reserved_bytes, allocator.waiting_bytes, allocator.retries) == (80 * MIB, 0, 1)


def test_a_block_is_freed_once() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(MIB)
    allocator.free(block)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(block)


def test_fragmentation_figures() -> None:
    """Ten blocks of 2 MiB fill a segment; every second one is freed: 10 MiB in pieces of 2."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(2 * MIB) for _ in range(10)]
    for block in blocks[::2]:
        allocator.free(block)
    figures = allocator.fragmentation()
    assert (figures.unused_bytes, figures.inactive_split_bytes) == (10 * MIB, 10 * MIB)
    assert (figures.largest_free_bytes, figures.unused_at_peak_bytes) == (2 * MIB, 0)
    assert (figures.segments, figures.retries) == (1, 0)


SETTINGS = st.builds(
    AllocatorSettings,
    max_split_bytes=st.sampled_from([None, 20 * MIB, 33 * MIB]),
    power2_divisions=st.sampled_from([(), (4,) * 16, (1,) * 16]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.8]),
    expandable_segments=st.booleans(),
)
STEPS = st.lists(
    st.tuples(
        st.integers(1, 64 * MIB), st.integers(0, 1), st.sampled_from(["keep", "free", "share", "complete"])
    ),
    max_size=50,
)


@given(SETTINGS, STEPS, st.sampled_from([None, 150 * MIB]), st.sampled_from([None, 120 * MIB]))
def test_invariants_hold_under_any_settings(
    settings: AllocatorSettings, steps: list[tuple[int, int, str]], limit: int | None, capacity: int | None
) -> None:
    """What is reserved is allocated, waiting or free, to the byte; nothing overlaps; all of it can go."""
    allocator = CachingAllocator(limit, settings=settings, capacity_bytes=capacity)
    live: list[AllocatorBlock] = []
    for size, stream, then in steps:
        try:
            block = allocator.allocate(size, stream)
        except OutOfMemory as failure:
            assert failure.allocated_bytes == allocator.allocated_bytes  # noqa: PT017
            continue
        live.append(block)
        assert block.size >= size
        if then in ("free", "share"):
            gone = live.pop(len(live) // 2)
            if then == "share":
                allocator.record_stream(gone, 2)
            allocator.free(gone)
        elif then == "complete":
            allocator.complete(2)
        check(allocator, live, settings, limit, capacity)
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.segments) == (0, 0, 0)


def check(
    allocator: CachingAllocator,
    live: list[AllocatorBlock],
    settings: AllocatorSettings,
    limit: int | None,
    capacity: int | None,
) -> None:
    free = [block for pool in allocator._pools() for block in pool.blocks]
    assert all(block.state == FREE for block in free)
    spans = sorted((block.address, block.address + block.size) for block in [*live, *free])
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert allocator.allocated_bytes == sum(block.size for block in live)
    held = allocator.allocated_bytes + allocator.waiting_bytes + sum(block.size for block in free)
    assert allocator.reserved_bytes == held
    if capacity is not None:
        assert allocator.reserved_bytes <= capacity
    if limit is not None:
        # The limit is checked against the request in 2 MiB, pages may be larger.
        assert allocator.reserved_bytes <= limit + (20 * MIB if settings.expandable_segments else 0)
