"""Blocks and free lists: what the caching allocator is made of."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

FREE: Final = 0  # in its pool's free list
USED: Final = 1
WAITING: Final = 2  # freed, while another stream still works with it
UNMAPPED: Final = 3  # address space of an expandable segment without memory behind it

# Free blocks sort by (size, address), packed into one number: comparing numbers is twice as fast as
# comparing tuples. Addresses have fewer than 64 bits.
ADDRESS_BITS: Final = 64


class AddressSpace:
    """The address range that an expandable segment grows in, `page_bytes` at a time."""

    __slots__ = ("address", "page_bytes", "size")

    def __init__(self, address: int, size: int, page_bytes: int) -> None:
        self.address = address
        self.size = size
        self.page_bytes = page_bytes

    def pages(self, size: int) -> int:
        """Return `size` rounded up to whole pages, in bytes."""
        return -(-size // self.page_bytes) * self.page_bytes


class AllocatorBlock:
    """A piece of a segment, linked to its neighbours in address order.

    Attributes:
        address, size: In bytes.
        pool: The free list it belongs to.
        state: FREE, USED, WAITING or UNMAPPED.
        previous, next: Its neighbours in the segment.
        space: The address space of its expandable segment; None in an ordinary segment.
    """

    __slots__ = ("address", "next", "pool", "previous", "size", "space", "state")

    def __init__(
        self,
        address: int,
        size: int,
        pool: FreeList,
        previous: AllocatorBlock | None = None,
        next: AllocatorBlock | None = None,  # noqa: A002  # the field's name in PyTorch, too
        space: AddressSpace | None = None,
        state: int = FREE,
    ) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.previous = previous
        self.next = next
        self.space = space
        self.state = state

    @property
    def stream(self) -> int:
        """The stream whose requests it serves."""
        return self.pool.stream

    @property
    def is_split(self) -> bool:
        """Whether other blocks share its segment."""
        return self.previous is not None or self.next is not None

    def split(self, size: int) -> AllocatorBlock:
        """Keep the first `size` bytes; return a new block with the rest, in no list yet."""
        rest = AllocatorBlock(
            self.address + size, self.size - size, self.pool, self, self.next, self.space, self.state
        )
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_next(self) -> None:
        """Take over the block behind."""
        behind = self.next
        assert behind is not None
        self.size += behind.size
        self.next = behind.next
        if behind.next is not None:
            behind.next.previous = self


class FreeList:
    """Free blocks of one pool and stream, sorted by (size, address).

    Attributes:
        small: Whether it is the pool of requests up to 1 MiB.
        stream: The stream.
        split_from: A block is split when at least this many bytes remain.
        keys, blocks: The free blocks and what they are sorted by, side by side.
        unmapped: Unmapped blocks of expandable segments, by address.
    """

    __slots__ = ("blocks", "keys", "small", "split_from", "stream", "unmapped")

    def __init__(self, *, small: bool, stream: int, split_from: int) -> None:
        self.small = small
        self.stream = stream
        self.split_from = split_from
        self.keys: list[int] = []
        self.blocks: list[AllocatorBlock] = []
        self.unmapped: list[AllocatorBlock] = []

    def first(self, size: int) -> int:
        """Return the position of the smallest block of at least `size` bytes."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def take(self, index: int) -> AllocatorBlock:
        """Remove and return the block at a position."""
        del self.keys[index]
        return self.blocks.pop(index)

    def remove(self, block: AllocatorBlock) -> None:
        """Remove a block that is in the list."""
        index = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[index], self.blocks[index]

    def add(self, block: AllocatorBlock) -> None:
        """Insert a block as it is."""
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)

    def join(self, block: AllocatorBlock) -> AllocatorBlock:
        """Insert a block joined with its free neighbours; return what became of it."""
        keys, blocks = self.keys, self.blocks
        neighbour = block.previous
        if neighbour is not None and not neighbour.state:
            index = bisect_left(keys, neighbour.size << ADDRESS_BITS | neighbour.address)
            del keys[index], blocks[index]
            neighbour.absorb_next()
            block = neighbour
        neighbour = block.next
        if neighbour is not None and not neighbour.state:
            index = bisect_left(keys, neighbour.size << ADDRESS_BITS | neighbour.address)
            del keys[index], blocks[index]
            block.absorb_next()
        block.state = FREE
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(keys, key)
        keys.insert(index, key)
        blocks.insert(index, block)
        return block

    def add_unmapped(self, block: AllocatorBlock) -> None:
        """Insert a block of address space without memory."""
        insort(self.unmapped, block, key=lambda one: one.address)
