"""The timeline stays small, keeps its peak, and comes back from events."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tuner.measure.timeline import EVENT, MOST_POINTS, Point, Timeline, timeline_from_events

SIZES = st.lists(st.integers(1, 1 << 40), max_size=400)
PHASES = ("setup", "train", "eval")


def filled(sizes: list[int], most: int = 16) -> Timeline:
    timeline = Timeline(most)
    for place, size in enumerate(sizes):
        timeline.add(Point(place / 20, size, PHASES[place % 3]))
    return timeline


@given(SIZES)
def test_it_is_bounded_in_order_and_holds_the_peak_and_real_readings_only(sizes: list[int]) -> None:
    points = filled(sizes).points
    readings = {(place / 20, size, PHASES[place % 3]) for place, size in enumerate(sizes)}
    assert len(points) <= 16
    assert len(points) >= min(8, len(sizes))
    assert {(point.seconds, point.bytes, point.phase) for point in points} <= readings
    assert [point.seconds for point in points] == sorted(point.seconds for point in points)
    assert max((point.bytes for point in points), default=0) == max(sizes, default=0)


@given(SIZES)
def test_its_json_is_documented(sizes: list[int]) -> None:
    timeline = filled(sizes)
    found = json.loads(json.dumps(timeline.to_json()))
    if not sizes:
        assert found is None
        return
    restored = [Point(seconds, size, found["phases"][place]) for seconds, size, place in found["points"]]
    assert restored == timeline.points


@given(SIZES, st.integers(1, 50))
def test_events_tell_the_same_peak_and_are_few(sizes: list[int], every: int) -> None:
    timeline, events = Timeline(16), [{"kind": "epoch"}]
    for place, size in enumerate(sizes, start=1):
        timeline.add(Point(place / 20, size, PHASES[place % 3]))
        if place % every == 0 or place == len(sizes):
            events.append({"kind": EVENT, "points": timeline.take_new()})
    told = timeline_from_events(json.loads(json.dumps(events)))
    if not sizes:
        assert told is None
        return
    assert told is not None
    assert len(told["points"]) <= MOST_POINTS
    assert max(size for _, size, _ in told["points"]) == max(sizes)
    peaks_seen = sum(size > max(sizes[:place], default=0) for place, size in enumerate(sizes))
    sent = sum(len(event.get("points", [])) for event in events)
    assert sent <= 16 + 8 * 6 + peaks_seen  # six doublings reach 400 readings


def test_a_day_at_twenty_readings_a_second_is_ten_kilobytes() -> None:
    timeline = Timeline()
    for place in range(24 * 3600 * 20):
        timeline.add(Point(place / 20, 10**10 + place, "train"))
    assert len(timeline.points) <= MOST_POINTS
    assert len(json.dumps(timeline.to_json(), separators=(",", ":"))) < 16_000
    assert len(timeline.take_new()) <= MOST_POINTS + 256 * 12
