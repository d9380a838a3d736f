"""An observer whose output may break: a terminal that closes must not cost a running trial."""

from __future__ import annotations

import contextlib

from tuner.search.events import Ended, Launched, Observer

_BROKEN = contextlib.suppress(OSError, ValueError)  # a closed pipe or terminal; a closed file


class Unbreakable:
    """Passes on what an observer is told; output that nobody can read any more is dropped."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def turned_away(self, number: int, count: int) -> None:
        """So many draws for a trial did not fit so far."""
        with _BROKEN:
            self._observer.turned_away(number, count)

    def waiting(self, number: int, reason: str) -> None:
        """A trial waits for memory."""
        with _BROKEN:
            self._observer.waiting(number, reason)

    def launched(self, trial: Launched) -> None:
        """A trial's process is about to start."""
        with _BROKEN:
            self._observer.launched(trial)

    def again(self, trial: Ended) -> None:
        """A trial gets the whole budget."""
        with _BROKEN:
            self._observer.again(trial)

    def ended(self, trial: Ended) -> None:
        """A trial has an outcome."""
        with _BROKEN:
            self._observer.ended(trial)

    def note(self, message: str) -> None:
        """Something that a person should know."""
        with _BROKEN:
            self._observer.note(message)
