"""Replaying a recorded history of allocations, as it was or under other settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from tuner.memory.allocator import CachingAllocator
from tuner.memory.allocator_blocks import USED, AllocatorBlock
from tuner.memory.allocator_figures import OutOfMemory
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.memory.allocator_state import restore
from tuner.memory.snapshot import DeviceHistory, Event, SegmentState, segments_before

_OWN_ADDRESSES = 1 << 62  # above any that a driver gives


@dataclass(frozen=True)
class Replay:
    """The end of a replay.

    Attributes:
        allocator: As the events left it, or the request that did not fit.
        peak_at: The position of the event that made the peak of allocated bytes; -1 for the start.
        failure: The request that did not fit; None when all did.
        failed_at: Its position; -1 when not even the start fitted.
        start_replaced: Whether the blocks alive at the start were placed anew.
        same_addresses, allocations: How many blocks lie where the real allocator put them, of how many.
    """

    allocator: CachingAllocator
    peak_at: int
    failure: OutOfMemory | None
    failed_at: int
    start_replaced: bool
    same_addresses: int
    allocations: int


@dataclass
class _Addresses:
    """Gives new segments the addresses that the driver gave the real ones: best fit breaks ties by them."""

    announced: list[tuple[int, int]] = field(default_factory=list)  # (size, address)
    next_own: int = _OWN_ADDRESSES

    def __call__(self, size: int, stream: int) -> int:
        for position, (announced_size, address) in enumerate(self.announced):
            if announced_size <= size:  # less when it is the first page of an address space
                del self.announced[position]
                return address
        self.next_own += size + (2 << 20)
        return self.next_own - size


def replay(
    history: DeviceHistory, *, settings: AllocatorSettings | None = None, limit_bytes: int | None = None
) -> Replay:
    """Replay a history, by default under its own settings and without a limit.

    Under other settings, or a limit below what was held at the start, the blocks alive at the start
    are placed anew, in address order, since nobody knows where they would have been. Where the record
    shows that free memory was released (`empty_cache`, a retry), all free memory is released.

    Raises:
        ValueError: The events contradict the segments.
    """
    return _Replayer(history, settings or history.settings, limit_bytes).run()


class _Replayer:
    def __init__(self, history: DeviceHistory, settings: AllocatorSettings, limit_bytes: int | None) -> None:
        self.history = history
        self.settings = settings
        self.limit_bytes = limit_bytes
        self.addresses = _Addresses()
        self.as_recorded = settings == history.settings and limit_bytes is None
        self.allocator = CachingAllocator(limit_bytes, self.addresses, settings=settings)
        self.held: dict[int, AllocatorBlock] = {}
        self.late: set[int] = set()  # freed, and waiting for other streams
        self.position = self.peak_at = -1
        self.peak_bytes = self.same = self.allocations = 0
        self.start_replaced = self.releasing = False

    def run(self) -> Replay:
        failure = None
        try:
            self._start()
            for event in self.history.events:
                self.position += 1
                self._apply(event)
        except OutOfMemory as caught:
            failure = caught
        return Replay(
            allocator=self.allocator,
            peak_at=self.peak_at,
            failure=failure,
            failed_at=self.position,
            start_replaced=self.start_replaced,
            same_addresses=self.same,
            allocations=self.allocations,
        )

    def _start(self) -> None:
        """Fill the allocator with what was held before the first event.

        Raises:
            OutOfMemory: Not even that fits.
        """
        segments = segments_before(self.history)
        if self.settings == self.history.settings:
            self.held = restore(self.allocator, segments)
            if self.limit_bytes is not None and self.allocator.reserved_bytes > self.limit_bytes:
                self.allocator.empty_cache()
                self.allocator.peak_reserved_bytes = self.allocator.reserved_bytes
                self.allocator.reserved_at_peak_bytes = self.allocator.reserved_bytes
        if self.settings != self.history.settings or (
            self.limit_bytes is not None and self.allocator.reserved_bytes > self.limit_bytes
        ):
            self._place_anew(segments)
        self.peak_bytes = self.allocator.peak_allocated_bytes

    def _place_anew(self, segments: tuple[SegmentState, ...]) -> None:
        self.allocator = CachingAllocator(self.limit_bytes, self.addresses, settings=self.settings)
        self.held = {}
        for segment in segments:
            for block in segment.blocks:
                if block.state == USED:
                    size = block.requested_bytes or block.size
                    self.held[block.address] = self.allocator.allocate(size, segment.stream)
                    self.start_replaced = True

    def _apply(self, event: Event) -> None:
        action, address, size, _ = event
        releases = action in ("segment_free", "segment_unmap")
        if action == "alloc":
            self._allocate(event)
        elif action == "free_requested":
            self._free(address)
        elif action == "free_completed":
            self._complete(address)
        elif action in ("segment_alloc", "segment_map"):
            if self.as_recorded:
                self.addresses.announced.append((size, address))
        elif releases:
            self._release(address)
        self.releasing = releases

    def _allocate(self, event: Event) -> None:
        allocator, retries = self.allocator, self.allocator.retries
        block = allocator.allocate(event.size, event.stream)
        if allocator.retries != retries:
            self._forget_late()
        self.held[event.address] = block
        self.allocations += 1
        self.same += block.address == event.address
        self.addresses.announced.clear()
        if allocator.peak_allocated_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_at = allocator.peak_allocated_bytes, self.position

    def _free(self, address: int) -> None:
        """Free a block now, or later where the record shows that it waited for another stream."""
        following = self.history.events[self.position + 1 : self.position + 2]
        if following and following[0].action == "free_completed" and following[0].address == address:
            return  # that event frees it
        block = self.held.get(address)
        if block is not None and block.state == USED:
            self.allocator.free_later(block)
            self.late.add(address)

    def _complete(self, address: int) -> None:
        block = self.held.pop(address, None)
        if block is None:
            return
        if address in self.late:
            self.late.remove(address)
            self.allocator.complete_free(block)
        else:
            self.allocator.free(block)

    def _release(self, address: int) -> None:
        """Release what the record shows as released: all at once, or one by one where only some were."""
        settings = self.settings
        if self.as_recorded and (settings.garbage_collection_threshold or settings.max_split_bytes):
            self.allocator.release_at(address)
        elif not self.releasing:
            self.allocator.empty_cache()
            self._forget_late()

    def _forget_late(self) -> None:
        """Drop the blocks that a synchronization gave back early: their completion has no effect."""
        for address in self.late:
            del self.held[address]
        self.late.clear()
