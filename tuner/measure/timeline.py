"""A trial's device bytes over time, in a bounded number of points.

::

    readings ──► buckets of `stride` readings, each kept as its maximum ──► at most 512 points
                 (when they are full, neighbours are joined and the stride doubles)

Every point is a reading that was taken, so the largest is always among them, whatever the length.

The JSON form, which `tuner_trial.timeline` holds::

    {"phases": ["start", "data", "setup", "train"],
     "points": [[0.05, 314572800, 0], …]}      seconds since the baseline, device bytes, phase's place
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_POINTS = 512
EVENT = "timeline"


@dataclass(frozen=True)
class Point:
    """Device bytes at one moment: seconds since the baseline, bytes, and the phase."""

    seconds: float
    bytes: int
    phase: str


class Timeline:
    """Collects readings in order of time."""

    def __init__(self, most_points: int = MOST_POINTS) -> None:
        self._most_points = most_points
        self._points: list[Point] = []
        self._unsent: list[Point] = []
        self._sent_bytes = -1
        self._bucket: Point | None = None
        self._in_bucket = 0
        self._stride = 1

    @property
    def points(self) -> list[Point]:
        """The points so far, the bucket that is being filled included."""
        return [*self._points, self._bucket] if self._bucket is not None else list(self._points)

    def add(self, point: Point) -> None:
        """Take in one reading."""
        self._bucket = point if self._bucket is None else _larger(self._bucket, point)
        self._in_bucket += 1
        if self._in_bucket < self._stride:
            return
        self._points.append(self._bucket)
        self._unsent.append(self._bucket)
        self._bucket, self._in_bucket = None, 0
        if len(self._points) >= self._most_points:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [_larger(first, second) for first, second in pairs]
            self._stride *= 2

    def take_new(self) -> list[list[Any]]:
        """Return what was not returned before, for events.jsonl, as `[seconds, bytes, phase]`.

        That is each full bucket, and the one being filled where it holds the largest reading so
        far. Buckets grow with the trial's length, so that all events of a trial together hold at
        most 512 points and 256 for each doubling of its length, and the peaks.
        """
        new, self._unsent = self._unsent, []
        known_bytes = max([self._sent_bytes, *(point.bytes for point in new)])
        if self._bucket is not None and self._bucket.bytes > known_bytes:
            new = [*new, self._bucket]
            known_bytes = self._bucket.bytes
        self._sent_bytes = known_bytes
        return [[point.seconds, point.bytes, point.phase] for point in new]

    def to_json(self) -> dict[str, Any] | None:
        """Return the JSON form, or None where nothing was read."""
        points = self.points
        phases = list(dict.fromkeys(point.phase for point in points))
        places = {phase: place for place, phase in enumerate(phases)}
        rows = [[round(point.seconds, 3), point.bytes, places[point.phase]] for point in points]
        return {"phases": phases, "points": rows} if rows else None


def timeline_from_events(events: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the timeline that a run folder's events tell, for a trial that left no report.

    Args:
        events: All of them; those of other kinds are passed over.
    """
    found = Timeline()
    for event in events:
        if event.get("kind") == EVENT:
            for seconds, size_bytes, phase in event["points"]:
                found.add(Point(seconds, size_bytes, phase))
    return found.to_json()


def _larger(first: Point, second: Point) -> Point:
    return second if second.bytes > first.bytes else first
