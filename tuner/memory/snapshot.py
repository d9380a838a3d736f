"""A recorded history of the caching allocator: the values that readers make and `replay` works on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tuner.memory.allocator_blocks import FREE, USED, WAITING
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.units import MIB

STATES = {
    "inactive": FREE,
    "active_allocated": USED,
    "active_awaiting_free": WAITING,
    "active_pending_free": WAITING,  # its name before torch 2.0
}


@dataclass(frozen=True)
class BlockState:
    """A block as a snapshot has it.

    Attributes:
        address, size: In bytes.
        state: FREE, USED or WAITING.
        requested_bytes: What was asked for.
    """

    address: int
    size: int
    state: int
    requested_bytes: int


@dataclass(frozen=True)
class SegmentState:
    """A segment (or a mapped range of an expandable one) as a snapshot has it.

    Attributes:
        address, size: In bytes.
        stream: The stream that owns it.
        small: Whether it belongs to the pool of requests up to 1 MiB.
        expandable: Whether it is part of an expandable segment.
        blocks: Its blocks in address order, without gaps.
    """

    address: int
    size: int
    stream: int
    small: bool
    expandable: bool
    blocks: tuple[BlockState, ...]


class Event(NamedTuple):
    """One action of the allocator: `alloc`, `free_requested`, `segment_alloc` and so on."""

    action: str
    address: int
    size: int
    stream: int


@dataclass(frozen=True)
class DeviceHistory:
    """What a snapshot says about one device.

    Attributes:
        device: Its number.
        segments: What was held when the snapshot was taken.
        events: What happened before, oldest first; empty where no history was recorded.
        settings: The allocator's settings.
        event_frame: Returns `file:line:function` of the code behind an event, by position; or None.
        block_frames: The same for blocks alive at the end, by address.
        private_segments: How many segments belong to private pools (CUDA graphs).
    """

    device: int
    segments: tuple[SegmentState, ...]
    events: list[Event]
    settings: AllocatorSettings
    event_frame: Callable[[int], str | None] = lambda _: None
    block_frames: dict[int, str] = field(default_factory=dict)
    private_segments: int = 0


def check_filled(segment: SegmentState) -> None:
    """Check that the blocks of a segment lie side by side and fill it.

    Raises:
        ValueError: They do not.
    """
    at = segment.address
    for block in segment.blocks:
        if block.address != at or block.size <= 0:
            raise ValueError(f"the segment at {segment.address:#x} has a gap or an overlap at {at:#x}")
        at += block.size
    if at != segment.address + segment.size:
        raise ValueError(f"the blocks of the segment at {segment.address:#x} do not fill it")


def segments_before(history: DeviceHistory) -> tuple[SegmentState, ...]:
    """Return what was held before the first event, by undoing the events from the last to the first.

    Raises:
        ValueError: The events contradict the segments.
    """
    live, ranges = _undo(history)
    starts = sorted(ranges)
    inside: dict[int, list[BlockState]] = {start: [] for start in starts}
    for block in sorted(live.values(), key=lambda one: one.address):
        at = bisect_right(starts, block.address) - 1
        if at < 0 or block.address + block.size > starts[at] + ranges[starts[at]].size:
            raise ValueError(f"the block at {block.address:#x} lies in no segment")
        inside[starts[at]].append(block)
    return tuple(_tiled(ranges[start], inside[start], history.settings) for start in starts)


def _undo(history: DeviceHistory) -> tuple[dict[int, BlockState], dict[int, SegmentState]]:
    """Return the blocks and the segments (without blocks) before the first event, by address."""
    live = {b.address: b for segment in history.segments for b in segment.blocks if b.state != FREE}
    ranges = {segment.address: _bare(segment) for segment in history.segments}
    rounded = history.settings.rounded
    for action, address, size, stream in reversed(history.events):
        if action == "alloc":
            live.pop(address, None)
        elif action in ("free_completed", "free_requested"):
            if address not in live or live[address].state == WAITING:
                old = live.get(address)
                live[address] = BlockState(address, old.size if old else rounded(size), USED, size)
        elif action == "segment_alloc":
            ranges.pop(address, None)
        elif action == "segment_free":
            ranges[address] = SegmentState(
                address, size, stream, size <= 2 * MIB, expandable=False, blocks=()
            )
        elif action == "segment_map":
            _unmap(ranges, address, size)
        elif action == "segment_unmap":
            _map(ranges, address, size, stream)
    return live, ranges


def _bare(segment: SegmentState, address: int | None = None, size: int | None = None) -> SegmentState:
    return SegmentState(
        segment.address if address is None else address,
        segment.size if size is None else size,
        segment.stream,
        segment.small,
        segment.expandable,
        (),
    )


def _unmap(ranges: dict[int, SegmentState], address: int, size: int) -> None:
    """Take [address, address + size) out of the mapped ranges."""
    end = address + size
    for old in [r for r in ranges.values() if r.address < end and address < r.address + r.size]:
        del ranges[old.address]
        if old.address < address:
            ranges[old.address] = _bare(old, size=address - old.address)
        if end < old.address + old.size:
            ranges[end] = _bare(old, end, old.address + old.size - end)


def _map(ranges: dict[int, SegmentState], address: int, size: int, stream: int) -> None:
    """Add [address, address + size) to the mapped ranges, joined with those it touches."""
    same = [r for r in ranges.values() if r.stream == stream and r.expandable]
    nearest = min(same, key=lambda r: abs(r.address - address), default=None)
    small = size % (20 * MIB) != 0 if nearest is None else nearest.small
    start, end = address, address + size
    for old in same:
        if old.small == small and old.address <= end and start <= old.address + old.size:
            del ranges[old.address]
            start, end = min(start, old.address), max(end, old.address + old.size)
    ranges[start] = SegmentState(start, end - start, stream, small, expandable=True, blocks=())


def _tiled(segment: SegmentState, live: list[BlockState], settings: AllocatorSettings) -> SegmentState:
    """Return the segment with its live blocks and free ones between them.

    A gap that is too small to have been split off belongs to the block before it.

    Raises:
        ValueError: The blocks overlap.
    """
    splits_finely = segment.small or segment.expandable
    if splits_finely:
        unsplit_bytes = 0
    else:
        unsplit_bytes = MIB if settings.max_split_bytes is None else settings.max_non_split_rounding_bytes
    end = segment.address + segment.size
    blocks: list[BlockState] = []
    at = segment.address
    for block, following in _with_next(live, end):
        if block.address < at:
            raise ValueError(f"the blocks at {block.address:#x} overlap")
        if block.address > at:
            blocks.append(BlockState(at, block.address - at, FREE, 0))
        size = block.size
        if following - (block.address + size) <= unsplit_bytes:
            size = following - block.address
        blocks.append(BlockState(block.address, size, block.state, block.requested_bytes))
        at = block.address + size
    if at < end:
        blocks.append(BlockState(at, end - at, FREE, 0))
    return SegmentState(
        segment.address, segment.size, segment.stream, segment.small, segment.expandable, tuple(blocks)
    )


def _with_next(live: list[BlockState], end: int) -> Iterator[tuple[BlockState, int]]:
    for position, block in enumerate(live):
        yield block, live[position + 1].address if position + 1 < len(live) else end
