"""Replays against real traces: PyTorch's own allocator on real GPUs, to the byte."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from tuner.memory.allocator import CachingAllocator
from tuner.memory.allocator_blocks import FREE, UNMAPPED, USED, AllocatorBlock
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.memory.allocator_state import restore
from tuner.memory.replay import replay
from tuner.memory.snapshot import BlockState, DeviceHistory, Event, SegmentState, segments_before
from tuner.memory.snapshot_files import read_snapshot
from tuner.memory.snapshot_views import alive_at, recorded
from tuner.units import GIB, MIB

COLD = ("linear3-grad", "linear3-nograd")
EXPANDABLE = ("expandable-a", "expandable-b")
WARM = (
    "lm3b-ctx128-step",
    "lm3b-ctx128-forward",
    "lm3b-ctx256-forward",
    "medium-ctx128-step",
    "medium-ctx256-step",
    "medium-ctx1024-step-amp",
    "medium-ctx128-inference",
    "medium-ctx256-inference",
    "medium-ctx1024-inference",
    "lm-step-b",
    "lm-step-windows",
    "xl-forward",
    "llama-finetune",
)


def opened(reference: Path, name: str) -> tuple[DeviceHistory, dict[str, str]]:
    rows = csv.DictReader((reference / "allocator" / "manifest.csv").read_text().splitlines())
    (history,) = read_snapshot(reference / "allocator" / f"{name}.json.gz")
    return history, next(row for row in rows if row["name"] == name)


def layout(allocator: CachingAllocator) -> set[tuple[int, int, bool]]:
    """Return (address, size, in use) of every block that has memory behind it."""
    found: set[tuple[int, int, bool]] = set()
    for pool in allocator._pools():
        for free in pool.blocks:
            first = free
            while first.previous is not None:
                first = first.previous
            block: AllocatorBlock | None = first
            while block is not None:
                if block.state != UNMAPPED:
                    found.add((block.address, block.size, block.state == USED))
                block = block.next
    return found


@pytest.mark.reference
@pytest.mark.parametrize("name", [*COLD, *EXPANDABLE, *WARM])
def test_every_trace_replays_exactly(reference: Path, name: str) -> None:
    """Baseline: snapshots of real CUDA processes. Tolerance: none.

    In all 17 traces, cold and warm, ordinary and expandable, every block lies where the real
    allocator put it, and at the end every segment is divided as the snapshot has it. The manifest
    leaves the peak of the expandable ones empty; there it is the most that the events map.
    """
    history, manifest = opened(reference, name)
    found = replay(history)
    assert found.allocations == int(manifest["allocs"])
    assert found.same_addresses == found.allocations
    said = recorded(history)
    assert found.allocator.peak_reserved_bytes == said.peak_reserved_bytes
    if manifest["peak_reserved_mib"]:
        assert said.peak_reserved_bytes == float(manifest["peak_reserved_mib"]) * MIB
    assert found.allocator.reserved_bytes == float(manifest["final_reserved_mib"]) * MIB
    assert found.allocator.segments == len(history.segments)
    blocks = [block for segment in history.segments for block in segment.blocks]
    assert found.allocator.allocated_bytes == sum(block.size for block in blocks if block.state == USED)
    # Segments that are used up have no free block to find them by.
    assert layout(found.allocator) <= {(block.address, block.size, block.state == USED) for block in blocks}
    # The manifest sums rounded requests, to 0.001 MiB; an unsplit block counts whole, up to 1 MiB more.
    assert found.allocator.peak_allocated_bytes >= (float(manifest["peak_allocated_mib"]) - 0.001) * MIB


@pytest.mark.reference
@pytest.mark.parametrize("name", [*COLD, *EXPANDABLE, *WARM])
def test_the_start_is_rebuilt_from_the_end(reference: Path, name: str) -> None:
    """Baseline: the manifest's figures of the start; reserved exactly, live up to unsplit rests (0.4 %)."""
    history, manifest = opened(reference, name)
    start = segments_before(history)
    if manifest["initial_reserved_mib"]:
        reserved = sum(segment.size for segment in start)
        assert reserved == float(manifest["initial_reserved_mib"]) * MIB
    live = sum(block.size for segment in start for block in segment.blocks if block.state == USED)
    assert live == pytest.approx(float(manifest["initial_live_mib"]) * MIB, rel=0.004)


@pytest.mark.reference
def test_the_real_peak_is_enough_as_a_limit_and_much_less_is_not(reference: Path) -> None:
    history, manifest = opened(reference, "lm3b-ctx128-step")
    peak = int(float(manifest["peak_reserved_mib"]) * MIB)
    assert replay(history, limit_bytes=peak).failure is None
    failed = replay(history, limit_bytes=40 * GIB)  # its blocks alone take 51 GiB
    assert failed.failure is not None
    assert failed.allocator.peak_reserved_bytes <= 40 * GIB


@pytest.mark.reference
def test_a_run_that_fragments_fits_with_expandable_segments(reference: Path) -> None:
    """Peak allocated 42.05 GiB: under 42.5 it fits side by side; ordinary segments waste 0.5 GiB."""
    history, _ = opened(reference, "xl-forward")
    limit = int(42.3 * GIB)
    ordinary = replay(history, limit_bytes=limit)
    assert ordinary.failure is None or ordinary.failure.is_fragmentation
    settings = replace(history.settings, expandable_segments=True)
    assert replay(history, settings=settings, limit_bytes=limit).failure is None
    tight = replay(history, limit_bytes=42 * GIB)
    assert tight.failure is not None
    assert tight.failure.is_fragmentation


def history_of(events: list[Event], *segments: SegmentState) -> DeviceHistory:
    return DeviceHistory(0, segments, events, AllocatorSettings())


def one_segment(*blocks: tuple[int, int]) -> SegmentState:
    """A 20 MiB segment at address 0 with (size in MiB, state) blocks."""
    at, states = 0, []
    for size, state in blocks:
        states.append(BlockState(at, size * MIB, state, size * MIB))
        at += size * MIB
    return SegmentState(0, 20 * MIB, 0, small=False, expandable=False, blocks=tuple(states))


def test_a_block_that_waited_for_a_stream_is_used_again_only_then() -> None:
    """The record shows a new segment while the freed block waited; without the wait there is none."""
    waits = [
        Event("segment_alloc", 0, 20 * MIB, 0),
        Event("alloc", 0, 20 * MIB, 0),
        Event("free_requested", 0, 20 * MIB, 0),
        Event("segment_alloc", 64 * MIB, 20 * MIB, 0),
        Event("alloc", 64 * MIB, 20 * MIB, 0),
        Event("free_completed", 0, 20 * MIB, 0),
    ]
    other = SegmentState(
        64 * MIB, 20 * MIB, 0, False, False, (BlockState(64 * MIB, 20 * MIB, USED, 20 * MIB),)
    )
    found = replay(history_of(waits, one_segment((20, FREE)), other))
    assert found.allocator.peak_reserved_bytes == 40 * MIB
    assert found.allocator.peak_allocated_bytes == 20 * MIB
    assert (found.same_addresses, found.allocator.waiting_bytes) == (2, 0)
    # Under a limit the allocator waits for the stream, and one segment is enough.
    assert replay(history_of(waits, one_segment((20, FREE)), other), limit_bytes=20 * MIB).failure is None


def test_without_events_the_segments_alone_are_replayed() -> None:
    history = history_of([], one_segment((4, USED), (12, FREE), (4, USED)))
    found = replay(history)
    assert (found.allocator.peak_allocated_bytes, found.allocator.peak_reserved_bytes) == (8 * MIB, 20 * MIB)
    assert [(b.count, b.size, b.older) for b in alive_at(history, found.peak_at, 10)] == [(2, 4 * MIB, True)]
    moved = replay(history, settings=AllocatorSettings(expandable_segments=True))
    assert moved.start_replaced


def test_a_start_above_the_limit_is_placed_anew() -> None:
    """Two segments of which a half is used: 40 MiB held, 20 would do."""
    first, second = one_segment((10, USED), (10, FREE)), one_segment((10, USED), (10, FREE))
    blocks = tuple(replace(block, address=block.address + 64 * MIB) for block in second.blocks)
    found = replay(
        history_of([], first, replace(second, address=64 * MIB, blocks=blocks)), limit_bytes=20 * MIB
    )
    assert found.start_replaced
    assert (found.failure, found.allocator.reserved_bytes) == (None, 20 * MIB)


def test_restored_expandable_ranges_keep_their_gaps() -> None:
    """Two mapped pages with an unmapped one between: 30 MiB go to the gap and the free page behind it."""
    pages = [
        SegmentState(at * MIB, 20 * MIB, 0, False, True, (BlockState(at * MIB, 20 * MIB, state, 20 * MIB),))
        for at, state in ((0, USED), (40, FREE))
    ]
    allocator = CachingAllocator(settings=AllocatorSettings(expandable_segments=True))
    assert list(restore(allocator, pages)) == [0]
    assert (allocator.reserved_bytes, allocator.segments) == (40 * MIB, 2)
    assert allocator.allocate(30 * MIB).address == 20 * MIB
    assert (allocator.reserved_bytes, allocator.segments) == (60 * MIB, 1)


@pytest.mark.parametrize(
    "blocks",
    [((0, 4),), ((0, 4), (5, 15)), ((0, 24),), ((0, 0), (0, 20))],
    ids=["short", "gap", "long", "empty"],
)
def test_blocks_that_do_not_fill_their_segment_are_refused(blocks: tuple[tuple[int, int], ...]) -> None:
    states = tuple(BlockState(at * MIB, size * MIB, FREE, 0) for at, size in blocks)
    with pytest.raises(ValueError, match="segment at 0x0"):
        restore(CachingAllocator(), [SegmentState(0, 20 * MIB, 0, False, False, states)])


def test_events_that_contradict_the_segments_are_refused() -> None:
    with pytest.raises(ValueError, match="lies in no segment"):
        replay(history_of([Event("free_completed", 1 << 40, 512, 0)], one_segment((20, FREE))))
