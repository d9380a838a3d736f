"""Which device a trial goes to: against a brute force over all devices, and over time."""

from __future__ import annotations

import dataclasses
import itertools
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tuner.scheduling.packing import Room, Wish, decide
from tuner.store.reservations import Held
from tuner.units import GIB

HOST = Room("h", "the host's memory", 100, None)
IDS = itertools.count(1)


def gpu(number: int, pool: int = 100, alone: int | None = 105, others: str = "") -> Room:
    return Room(f"GPU-{number}", f"cuda:{number}", pool, alone, others)


def row(
    device: int, size: int, *, granted: bool = True, host: int = 0, key: int | None = None, on: str = "h"
) -> Held:
    key = next(IDS) if key is None else key
    return Held(key, key, f"GPU-{device}", size, on, host, granted=granted)


rows = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 60),
        st.booleans(),
        st.sampled_from([0, 0, 10, 30]),
        st.sampled_from("hx"),
    ),
    max_size=7,
)
rooms = st.lists(st.tuples(st.integers(1, 120), st.sampled_from([None, 0, 5])), min_size=1, max_size=3)


@settings(max_examples=400, deadline=None)
@given(rows, rooms, st.integers(1, 130), st.sampled_from([0, 10, 40, 120]), st.integers(0, 8))
@example([(0, 60, True, 0, "h")], [(100, 5)], 40, 0, 8)  # to the last byte
@example([(0, 60, True, 0, "h")], [(100, 5)], 41, 0, 8)
def test_a_decision_is_the_best_of_all_that_are_allowed(
    rows: list[tuple[int, int, bool, int, str]],
    rooms: list[tuple[int, int | None]],
    size: int,
    host_bytes: int,
    place_in_queue: int,
) -> None:
    """Baseline: every device is tried, the rules written out once more."""
    places = [gpu(n, pool, None if more is None else pool + more) for n, (pool, more) in enumerate(rooms)]
    held = [
        row(device, size_, granted=granted, host=host, key=key if key < place_in_queue else key + 1, on=on)
        for key, (device, size_, granted, host, on) in enumerate(rows)
    ]
    own = Held(place_in_queue, place_in_queue, places[0].key, size, "h", host_bytes, granted=False)
    made = decide(
        Wish(size, host_bytes), places, HOST, sorted([*held, own], key=lambda r: r.id), trial_id=own.id
    )

    running = [r for r in held if r.granted]
    earlier = [r for r in held if not r.granted and r.id < own.id]
    on_host = [r.host_bytes for r in running if r.host == "h" and r.host_bytes]
    kept = sum(r.host_bytes for r in earlier if r.host == "h")
    host_ok = not host_bytes or not on_host or sum(on_host) + kept + host_bytes <= HOST.pool_bytes
    left = {}
    for place in places:
        taken = [r.device_bytes for r in running if r.device == place.key]
        if taken:
            fits = sum(taken) + size <= place.pool_bytes
        else:
            fits = place.alone_bytes is None or size <= place.alone_bytes
        if host_ok and fits and not any(r.device == place.key for r in earlier):
            left[place.key] = place.pool_bytes - sum(taken) - size
    assert made.granted == bool(left)
    if left:
        assert left[made.room.key] == min(left.values())
        assert made.reason == ""
    else:
        assert made.room in places
        assert " B" in made.reason  # names sizes


def test_the_reasons_are_sentences_with_sizes() -> None:
    two = gpu(0, 8 * GIB, 8 * GIB, "; other processes use 2.00 GiB")
    one = row(0, 6 * GIB)
    reason = lambda wish, held: decide(wish, [two], HOST, held, trial_id=-1).reason  # noqa: E731
    assert reason(Wish(2 * GIB), [one]) == ""
    assert reason(Wish(3 * GIB), [one]) == (
        "3.00 GiB on cuda:0: 1 trial there holds 6.00 GiB of 8.00 GiB; other processes use 2.00 GiB"
    )
    assert "2 trials there hold 7.00 GiB" in reason(Wish(3 * GIB), [one, row(0, GIB)])
    assert reason(Wish(9 * GIB), []) == (
        "9.00 GiB on cuda:0, 8.00 GiB are free; other processes use 2.00 GiB"
    )
    waiting = row(0, 7 * GIB, granted=False)
    assert reason(Wish(GIB), [one, waiting]) == "its turn on cuda:0, behind one that needs 7.00 GiB"


def test_a_trial_goes_where_it_leaves_least() -> None:
    held = [row(0, 20), row(1, 50), row(2, 90)]
    places = [gpu(0), gpu(1), gpu(2)]
    assert [
        decide(Wish(size), places, HOST, held, trial_id=-1).room.key for size in (5, 40, 60)
    ] == ["GPU-2", "GPU-1", "GPU-0"]  # fmt: skip


def test_small_ones_do_not_pass_a_large_one_but_use_the_other_device() -> None:
    held = [row(0, 40), row(1, 60), row(0, 90, granted=False)]
    places = [gpu(0), gpu(1)]
    assert decide(Wish(30), places, HOST, held, trial_id=-1).room.key == "GPU-1"
    assert not decide(Wish(30), places[:1], HOST, held, trial_id=-1).granted
    assert decide(Wish(90), places, HOST, [row(0, 10), *held[1:]], trial_id=held[2].id).granted


def test_a_large_one_gets_its_turn_in_an_endless_stream_of_small_ones() -> None:
    """Two devices, two small trials always waiting, each of 5 to 14 rounds; then one of a whole device.

    It waits for the two before it and for what runs on its device then: 28 rounds at most.
    """
    for seed in range(20):
        draw = random.Random(seed)
        places, held, ends = [gpu(0, 100, 100), gpu(1, 100, 100)], [], {}
        large = 10**6
        waited, passed, granted = 0, 0, False
        for round_ in range(200):
            held = [r for r in held if not r.granted or ends[r.trial_id] > round_]
            asking = [(r.trial_id, r.device_bytes) for r in held if not r.granted]
            small = 2 - sum(trial != large for trial, _ in asking)
            asking += [(next(IDS), draw.choice([10, 25, 40])) for _ in range(small)]
            if round_ >= 30 and not granted:
                waited += 1
                asking += [(large, 100)] if all(trial != large for trial, _ in asking) else []
            for trial_id, size in asking:
                made = decide(Wish(size), places, HOST, held, trial_id=trial_id)
                known = next((r.id for r in held if r.trial_id == trial_id), next(IDS))
                held = [r for r in held if r.trial_id != trial_id]
                held.append(Held(known, trial_id, made.room.key, size, "h", 0, granted=made.granted))
                held.sort(key=lambda r: r.id)
                if made.granted:
                    ends[trial_id] = round_ + draw.randrange(5, 15)
                    granted = granted or trial_id == large
                    passed += waited > 0 and not granted
            for place in places:
                assert sum(r.device_bytes for r in held if r.granted and r.device == place.key) <= 100
        assert granted
        assert waited <= 28
        assert passed > 0  # the other device was used meanwhile


def test_alone_a_trial_may_have_the_headroom_too() -> None:
    assert decide(Wish(105), [gpu(0)], HOST, [], trial_id=-1).granted
    assert not decide(Wish(106), [gpu(0)], HOST, [], trial_id=-1).granted
    assert not decide(Wish(96), [gpu(0)], HOST, [row(0, 5)], trial_id=-1).granted
    assert decide(Wish(10**9), [gpu(0, alone=None)], HOST, [], trial_id=-1).granted  # a CPU is soft


def test_host_memory_limits_trials_on_all_devices_together() -> None:
    places, held = [gpu(0), gpu(1)], [row(0, 10, host=60), row(1, 10, host=35, on="elsewhere")]
    assert decide(Wish(10, 40), places, HOST, held, trial_id=-1).granted
    refused = decide(Wish(10, 41), places, HOST, held, trial_id=-1)
    assert refused.reason == "41 B on the host's memory: 1 trial there holds 60 B of 100 B"
    assert decide(Wish(10, 101), places, HOST, held[1:], trial_id=-1).granted  # the first one there


def test_host_memory_is_kept_for_who_waits_longer_on_any_device() -> None:
    """Small trials on the second device would otherwise take it for ever."""
    places, waiting = [gpu(0), gpu(1)], row(0, 10, host=50, granted=False)
    held = [waiting, row(1, 10, host=45)]
    refused = decide(Wish(10, 10), places, HOST, held, trial_id=-1)
    assert refused.reason == "its turn on the host's memory: 50 B are kept for who waits longer"
    assert decide(Wish(10, 5), places, HOST, held, trial_id=-1).room.key == "GPU-1"
    assert decide(Wish(10, 50), places, HOST, held, trial_id=waiting.trial_id).granted


def test_a_small_pool_holds_back_its_own_study_alone() -> None:
    """An 80 GiB card: study 1 has a pool of 10 and runs 6 of it, study 2 has 12 GiB trials."""
    place = Room("GPU-0", "cuda:0", 80, 80, study_bytes=10)
    held = [
        Held(1, 1, "GPU-0", 12, "h", 0, granted=True, study_id=2),
        Held(2, 2, "GPU-0", 6, "h", 0, granted=True, study_id=1),
    ]
    assert decide(Wish(4), [place], HOST, held, trial_id=3, study_id=1).granted  # 10 of 10
    made = decide(Wish(6), [place], HOST, held, trial_id=3, study_id=1)
    assert (made.granted, made.for_pool) == (False, True)
    assert made.reason == "6 B on cuda:0: 1 trial there holds 6 B of 10 B"
    waiting = Held(3, 3, "GPU-0", 6, "h", 0, granted=False, study_id=1, for_pool=True)
    open_place = dataclasses.replace(place, study_bytes=None)
    assert decide(Wish(62), [open_place], HOST, [*held, waiting], trial_id=4, study_id=2).granted
    assert not decide(Wish(1), [place], HOST, [*held, waiting], trial_id=4, study_id=1).granted  # its turn
    blocking = dataclasses.replace(waiting, for_pool=False)  # the device has no room for it
    assert not decide(Wish(1), [open_place], HOST, [*held, blocking], trial_id=4, study_id=2).granted
