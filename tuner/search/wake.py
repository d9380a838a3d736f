"""Waiting for whichever comes first: a child that has something to say, or another thread."""

from __future__ import annotations

import contextlib
import os
import selectors


class Wake:
    """Waits for any of some descriptors, or for a call from another thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def up(self) -> None:
        """End the wait that is going on, or the next one."""
        with contextlib.suppress(OSError):
            os.write(self._write, b".")

    def wait(self, descriptors: list[int], seconds: float) -> None:
        """Wait until a descriptor can be read, `up` is called, or the time is over."""
        with selectors.DefaultSelector() as selector:
            for descriptor in {self._read, *(fd for fd in descriptors if fd >= 0)}:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.select(seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)
