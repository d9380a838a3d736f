"""Which device a trial goes to, or what it waits for: pure decisions on numbers.

* A trial goes to the device on which it leaves least (best fit), so that room for large ones stays.
* Who waits longer comes first: behind a trial that waits for a device nobody is let onto it, so that
  a large trial is not starved by small ones. The other devices stay open. The host's memory that it
  waits for, or will need, is kept for it on all of them.
* A study's pool limits that study alone. A trial that waits for it alone keeps nothing from others'.
* Alone on a device a trial may have all that others leave; the headroom is kept between trials.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuner.store.reservations import Held
from tuner.units import format_bytes


@dataclass(frozen=True)
class Wish:
    """What a trial needs set aside: on its device, and of the host's memory."""

    device_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class Room:
    """A device, or the host's memory, as it is now.

    Attributes:
        key: A GPU's UUID, `cpu@HOST`, or the host.
        name: What a person calls it: `cuda:0`, `cpu`, `host memory`.
        pool_bytes: What the trials of all studies may have together.
        alone_bytes: What a single one may have; None where a single one is always let in.
        others: What is known of other users, as a sentence's end; "" where there are none.
        study_bytes: What the trials of the asking one's study may have together; None: no limit.
    """

    key: str
    name: str
    pool_bytes: int
    alone_bytes: int | None
    others: str = ""
    study_bytes: int | None = None


@dataclass(frozen=True)
class Decision:
    """Where a trial goes now, or on which device it waits, and for what.

    Attributes:
        room: The device.
        granted: Whether the trial may start.
        reason: What it waits for, a sentence; "" when granted.
        for_pool: Whether it waits for its study's pool, the device having room for it.
    """

    room: Room
    granted: bool
    reason: str = ""
    for_pool: bool = False


def decide(
    wish: Wish, rooms: Sequence[Room], host: Room, held: Sequence[Held], *, trial_id: int, study_id: int = 0
) -> Decision:
    """Return where a trial goes, or which device it waits for.

    Args:
        wish: What it needs.
        rooms: The devices it may go to, at least one.
        host: The host's memory.
        held: The reservations of all living drivers, who waits longest first; its own may be among them.
        trial_id: The trial.
        study_id: Its study.
    """
    own_id = next((row.id for row in held if row.trial_id == trial_id), None)
    others = [row for row in held if row.trial_id != trial_id]
    running = [row for row in others if row.granted]
    earlier = [
        row
        for row in others
        if not row.granted
        and (own_id is None or row.id < own_id)
        and (row.study_id == study_id or not row.for_pool)
    ]
    host_reason = _lacks_host(wish.host_bytes, host, running, earlier)
    found: list[tuple[int, Room]] = []
    waits: list[tuple[int, Decision]] = []
    for room in rooms:
        there = [row for row in running if row.device == room.key]
        taken = [row.device_bytes for row in there]
        from_pool = [row.device_bytes for row in there if row.study_id == study_id]
        left_bytes = _left_bytes(room, taken, from_pool) - wish.device_bytes
        reason = host_reason or _lacks(wish.device_bytes, room, taken)
        pool_reason = "" if reason else _lacks_pool(wish.device_bytes, room, from_pool)
        reason = reason or pool_reason or _behind(earlier, room)
        if reason:
            waiting = Decision(room, granted=False, reason=reason, for_pool=bool(pool_reason))
            waits.append((left_bytes, waiting))
        else:
            found.append((left_bytes, room))
    if found:
        return Decision(min(found, key=lambda place: (place[0], place[1].name))[1], granted=True)
    return max(waits, key=lambda place: place[0])[1]


def _left_bytes(room: Room, taken: Sequence[int], from_pool: Sequence[int]) -> int:
    left_bytes = room.pool_bytes - sum(taken)
    return left_bytes if room.study_bytes is None else min(left_bytes, room.study_bytes - sum(from_pool))


def _lacks_pool(wanted_bytes: int, room: Room, from_pool: Sequence[int]) -> str:
    if room.study_bytes is None:
        return ""
    return _lacks(wanted_bytes, Room(room.key, room.name, room.study_bytes, room.study_bytes), from_pool)


def _lacks_host(wanted_bytes: int, host: Room, running: Sequence[Held], earlier: Sequence[Held]) -> str:
    taken = _host_bytes(running, host)
    kept_bytes = sum(_host_bytes(earlier, host))
    reason = _lacks(wanted_bytes, host, taken)
    if reason or not taken or not wanted_bytes:
        return reason
    if sum(taken) + kept_bytes + wanted_bytes <= host.pool_bytes:
        return ""
    return f"its turn on {host.name}: {format_bytes(kept_bytes)} are kept for who waits longer"


def _host_bytes(rows: Iterable[Held], host: Room) -> list[int]:
    return [row.host_bytes for row in rows if row.host == host.key and row.host_bytes]


def _lacks(wanted_bytes: int, room: Room, taken: Sequence[int]) -> str:
    """Return why so much cannot be had, or "" when it can."""
    if wanted_bytes == 0:
        return ""
    if not taken:
        if room.alone_bytes is None or wanted_bytes <= room.alone_bytes:
            return ""
        free = format_bytes(room.alone_bytes)
        return f"{format_bytes(wanted_bytes)} on {room.name}, {free} are free{room.others}"
    free_bytes = room.pool_bytes - sum(taken)
    if wanted_bytes <= free_bytes:
        return ""
    running = "1 trial there holds" if len(taken) == 1 else f"{len(taken)} trials there hold"
    return (
        f"{format_bytes(wanted_bytes)} on {room.name}: {running} {format_bytes(sum(taken))} "
        f"of {format_bytes(room.pool_bytes)}{room.others}"
    )


def _behind(earlier: Sequence[Held], room: Room) -> str:
    first = next((row for row in earlier if row.device == room.key), None)
    if first is None:
        return ""
    return f"its turn on {room.name}, behind one that needs {format_bytes(first.device_bytes)}"
