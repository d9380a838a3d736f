"""What the caching allocator reports: out of memory, and fragmentation."""

from __future__ import annotations

from dataclasses import dataclass


class OutOfMemory(Exception):
    """The allocator cannot serve a request under its limit.

    Attributes:
        requested_bytes: The request, rounded.
        allocated_bytes: Live blocks at that moment.
        reserved_bytes: Segments held after every free one was released.
        limit_bytes: The most that could be reserved; None where unknown.
    """

    def __init__(
        self,
        requested_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__(f"out of memory: {requested_bytes} B requested, {allocated_bytes} B allocated")
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.limit_bytes = limit_bytes

    @property
    def is_fragmentation(self) -> bool:
        """Whether the live blocks and the request would have fitted, had they lain side by side."""
        return (
            self.limit_bytes is not None and self.allocated_bytes + self.requested_bytes <= self.limit_bytes
        )


@dataclass(frozen=True)
class Fragmentation:
    """How much of what is reserved is of no use.

    Attributes:
        unused_bytes: Reserved and not allocated, now.
        unused_at_peak_bytes: The same at the peak of allocated bytes.
        largest_free_bytes: The largest free block.
        inactive_split_bytes: Free blocks that share their segment with others, so that it cannot be
            released; expandable segments are left out, as in PyTorch's statistics.
        segments: How many segments are held; of expandable ones, mapped ranges.
        retries: How often every free segment was released to serve a request.
    """

    unused_bytes: int
    unused_at_peak_bytes: int
    largest_free_bytes: int
    inactive_split_bytes: int
    segments: int
    retries: int
