"""What trials wait for, told now and then: in a full pool every trial waits a little."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

EVERY_SECONDS = 30.0


class Waits:
    """Tells what trials wait for, now and then; what is too early is kept, and told later if it still holds.

    Args:
        tell: Called with a trial's number and reason, also from another thread.
    """

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self._tell, self._lock = tell, threading.Lock()
        self._kept: dict[int, str] = {}
        self._told = -math.inf
        self._timer: threading.Timer | None = None

    def waits(self, number: int, reason: str, *, at_once: bool = False) -> None:
        """Note what a trial waits for."""
        with self._lock:
            self._kept[number] = reason
            if at_once:
                self._tell_those([number])
            self._look()

    def ends(self, number: int) -> None:
        """Note that a trial does not wait any more."""
        with self._lock:
            self._kept.pop(number, None)

    def close(self) -> None:
        """Tell nothing any more."""
        with self._lock:
            self._kept.clear()
            if self._timer is not None:
                self._timer.cancel()

    def _look(self) -> None:
        left_seconds = self._told + EVERY_SECONDS - time.monotonic()
        if left_seconds <= 0:
            self._tell_those(list(self._kept))
        elif self._kept and self._timer is None:
            self._timer = threading.Timer(left_seconds, self._is_due)
            self._timer.daemon = True
            self._timer.start()

    def _is_due(self) -> None:
        with self._lock:
            self._timer = None
            self._look()

    def _tell_those(self, numbers: list[int]) -> None:
        for number in numbers:
            self._told = time.monotonic()
            self._tell(number, self._kept.pop(number))
