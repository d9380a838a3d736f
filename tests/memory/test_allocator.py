"""The caching allocator against a published table and its own invariants; real traces: test_replay.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.memory.allocator import CachingAllocator, OutOfMemory, segment_size
from tuner.units import GIB, MIB

# Ten growing requests of 4,000,000·i bytes, by the published rules (case D05). Reserved in MiB.
KEEP_OLD_UNTIL_NEW = [20, 20, 32, 32, 52, 76, 104, 136, 172, 212]
DROP_OLD_FIRST = [20, 20, 20, 20, 20, 44, 72, 104, 140, 180]


def test_growing_requests_with_the_old_block_alive() -> None:
    allocator, reserved, block = CachingAllocator(), [], None
    for i in range(1, 11):
        new = allocator.allocate(4_000_000 * i)
        if block is not None:
            allocator.free(block)
        block = new
        reserved.append(allocator.reserved_bytes // MIB)
    assert reserved == KEEP_OLD_UNTIL_NEW
    assert allocator.peak_allocated_bytes / MIB == pytest.approx(72.48, abs=0.01)


def test_growing_requests_with_the_old_block_dropped_first() -> None:
    allocator, reserved, peaks = CachingAllocator(), [], []
    for i in range(1, 11):
        block = allocator.allocate(4_000_000 * i)
        peaks.append(allocator.allocated_bytes / MIB)
        allocator.free(block)
        reserved.append(allocator.reserved_bytes // MIB)
    assert peaks[4] == 20.0  # the rest of the segment is too small to split off
    assert allocator.peak_allocated_bytes / MIB == pytest.approx(38.15, abs=0.01)
    assert reserved == DROP_OLD_FIRST


def test_a_chopped_segment_cannot_be_used_again() -> None:
    """Case D13: 10 GiB once, 30 blocks of 16 MiB from it, 10 GiB again under 16 GiB."""
    allocator = CachingAllocator(limit_bytes=16 * GIB)
    allocator.free(allocator.allocate(10 * GIB))
    for _ in range(30):
        allocator.allocate(16 * MIB)
    assert allocator.reserved_bytes == 10 * GIB
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(10 * GIB)
    assert caught.value.allocated_bytes == 30 * 16 * MIB
    assert caught.value.reserved_bytes == 10 * GIB


def test_at_the_limit_free_segments_are_released_first() -> None:
    allocator = CachingAllocator(limit_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.retries == 1
    assert allocator.reserved_bytes == 80 * MIB


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [(512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB)],
)
def test_segment_sizes_at_the_borders(request_bytes: int, segment: int) -> None:
    assert segment_size(request_bytes) == segment


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans(), st.integers(0, 1)), max_size=60))
def test_invariants_hold_under_any_requests(requests: list[tuple[int, bool, int]]) -> None:
    """Live blocks never overlap, allocated is their sum, and all freed leaves nothing allocated."""
    allocator, live = CachingAllocator(), []
    for size, release, stream in requests:
        block = allocator.allocate(size, stream)
        assert block.size >= size
        live.append(block)
        if release:
            allocator.free(live.pop(len(live) // 2))
        spans = sorted((block.address, block.address + block.size) for block in live)
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
        assert allocator.allocated_bytes == sum(block.size for block in live)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.segments) == (0, 0, 0)
