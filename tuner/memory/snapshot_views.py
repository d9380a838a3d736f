"""What a recorded history says by itself, without a model: its peaks, and the blocks alive at a moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tuner.memory.allocator_blocks import USED
from tuner.memory.snapshot import DeviceHistory, segments_before


@dataclass(frozen=True)
class Recorded:
    """What the snapshot itself says, by its events.

    Attributes:
        peak_allocated_bytes: The most that was live. Of blocks that came and went within the history
            only the rounded request is known, not what a block kept because it was not split.
        side_by_side_bytes: The most that was requested at once, rounded: what the blocks would take if
            nothing were lost between them.
        peak_reserved_bytes: The most that was held, exactly.
        out_of_memory: How often the allocator gave up.
    """

    peak_allocated_bytes: int
    side_by_side_bytes: int
    peak_reserved_bytes: int
    out_of_memory: int


@dataclass(frozen=True)
class LiveBlocks:
    """Blocks of one size that are live at some moment and came from one place.

    Attributes:
        count: How many.
        size: Of each, in bytes.
        frame: `file:line:function` of the code that asked for them; None where unknown.
        older: Whether they are older than the history.
    """

    count: int
    size: int
    frame: str | None
    older: bool


def recorded(history: DeviceHistory) -> Recorded:
    """Return what the snapshot itself says.

    Raises:
        ValueError: The events contradict the segments.
    """
    start = segments_before(history)
    rounded = history.settings.rounded
    old = [block for segment in start for block in segment.blocks if block.state == USED]
    live = {b.address: (b.size, min(b.size, rounded(b.requested_bytes))) for b in old}
    allocated_bytes = peak_allocated_bytes = sum(size for size, _ in live.values())
    requested_bytes = peak_requested_bytes = sum(size for _, size in live.values())
    reserved_bytes = peak_reserved_bytes = sum(segment.size for segment in start)
    failures = 0
    for action, address, size, _ in history.events:
        if action == "alloc":
            live[address] = rounded(size), rounded(size)
            allocated_bytes += live[address][0]
            requested_bytes += live[address][1]
            peak_allocated_bytes = max(peak_allocated_bytes, allocated_bytes)
            peak_requested_bytes = max(peak_requested_bytes, requested_bytes)
        elif action in ("free_requested", "free_completed"):
            whole, wanted = live.pop(address, (0, 0))
            allocated_bytes -= whole
            requested_bytes -= wanted
        elif action in ("segment_alloc", "segment_map"):
            reserved_bytes += size
            peak_reserved_bytes = max(peak_reserved_bytes, reserved_bytes)
        elif action in ("segment_free", "segment_unmap"):
            reserved_bytes -= size
        elif action == "oom":
            failures += 1
    return Recorded(peak_allocated_bytes, peak_requested_bytes, peak_reserved_bytes, failures)


def alive_at(history: DeviceHistory, position: int, most: int) -> list[LiveBlocks]:
    """Return the blocks that are live after the event at a position, the `most` largest kinds of them.

    Raises:
        ValueError: The events contradict the segments.
    """
    alive: dict[int, tuple[int, int | None]] = {}  # address → size, position of its event
    for segment in segments_before(history):
        alive.update({b.address: (b.size, None) for b in segment.blocks if b.state == USED})
    for at, (action, address, size, _) in enumerate(history.events[: position + 1]):
        if action == "alloc":
            alive[address] = history.settings.rounded(size), at
        elif action in ("free_requested", "free_completed"):
            alive.pop(address, None)
    # An old block's frame is known when it is still alive at the end, by its address.
    reused = {event.address for event in history.events if event.action == "alloc"}
    kinds: Counter[tuple[int, str | None, bool]] = Counter()
    for address, (size, made_at) in alive.items():
        if made_at is not None:
            frame = history.event_frame(made_at)
        else:
            frame = None if address in reused else history.block_frames.get(address)
        kinds[size, frame, made_at is None] += 1
    largest = sorted(kinds.items(), key=lambda item: -item[0][0])[:most]
    return [LiveBlocks(count, size, frame, older) for (size, frame, older), count in largest]
