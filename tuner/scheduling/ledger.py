"""The ledger: what is free on each device now, and who may start there.

    room = what others leave (NVML or /proc, read anew) × (1 - headroom) - reservations of running trials

The reservations are rows in the study's database, so that all drivers which share it share one
ledger; what nobody there knows of is seen as used by others.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

from tuner.measure import nvml
from tuner.processes import process_memory
from tuner.scheduling.devices import HEADROOM, Place, available_host_bytes, cpu_key
from tuner.scheduling.packing import Decision, Room, Wish, decide
from tuner.store.reservations import Book, Held, Reservations
from tuner.units import GIB, format_bytes

HOST_BYTES_PER_TRIAL = 3 * GIB  # of a CUDA child, until its own use is known: context, libraries, data


@dataclass(frozen=True)
class Admission:
    """What the ledger says of one trial.

    Attributes:
        place: Where it may start, or which device it waits for.
        granted: Whether it may start.
        reason: What it waits for, a sentence; "" when granted.
    """

    place: Place
    granted: bool
    reason: str


class Ledger:
    """Admits the trials of one driver to its devices.

    Args:
        reservations: The rows that all drivers share.
        places: Its devices, at least one, all of one kind.
        pool_bytes: What all trials on a device may have together; None: what others leave.
    """

    def __init__(
        self,
        reservations: Reservations,
        places: Sequence[Place],
        *,
        pool_bytes: int | None = None,
    ) -> None:
        self._reservations = reservations
        self._places = {place.key: place for place in places}
        self._pool_bytes = pool_bytes
        self._host = socket.gethostname()
        # What others held when it could last be told apart from what our trials use.
        self._others_seen: dict[str, int] = {}

    def admit(self, trial_id: int, driver_id: int, wish: Wish) -> Admission:
        """Set aside what a trial needs, or let it wait in the queue of a device.

        Raises:
            LeaseLost: Others have given this driver up.
        """

        def decision(book: Book) -> Decision:
            rooms = [self._room(place, book.held) for place in self._places.values()]
            made = decide(wish, rooms, self._host_room(book.held), book.held, trial_id=trial_id)
            book.put(
                trial_id,
                driver_id,
                device=made.room.key,
                device_bytes=wish.device_bytes,
                host=self._host,
                host_bytes=wish.host_bytes,
                granted=made.granted,
            )
            return made

        made = self._reservations.decide(decision)
        return Admission(self._places[made.room.key], made.granted, made.reason)

    def runs_as(self, trial_id: int, pid: int) -> None:
        """Note a trial's process, so that its use is not taken for somebody else's."""
        self._reservations.runs_as(trial_id, pid)

    def _room(self, place: Place, held: Sequence[Held]) -> Room:
        ours = [row for row in held if row.device == place.key and row.granted]
        if place.kind == "cpu":
            promised = [(row.pid, row.host_bytes) for row in held if row.granted and row.host == self._host]
            free_bytes = available_host_bytes() + _resident_bytes(ours) - _unused_bytes(promised)
            return self._limited(place, free_bytes, others="", alone=False)
        memory = nvml.memory_of(place.key)
        others_bytes = self._others_bytes(place.key, memory, ours)
        others = f"; other processes use {format_bytes(others_bytes)}" if others_bytes else ""
        return self._limited(place, place.capacity_bytes - others_bytes, others=others, alone=True)

    def _limited(self, place: Place, free_bytes: int, *, others: str, alone: bool) -> Room:
        """Return a device's room under the pool; a single trial on a CPU is always let in.

        The host's memory is soft: what is free there changes with every cache, and a single trial
        has a cap of its own.
        """
        pool_bytes = int(free_bytes * (1 - HEADROOM))
        if self._pool_bytes is None:
            return Room(place.key, place.target, pool_bytes, free_bytes if alone else None, others)
        pool_bytes = min(pool_bytes, self._pool_bytes)
        alone_bytes = min(free_bytes, self._pool_bytes) if alone else self._pool_bytes
        return Room(place.key, place.target, pool_bytes, alone_bytes, others)

    def _others_bytes(self, key: str, memory: nvml.DeviceMemory, ours: Sequence[Held]) -> int:
        """Return what others use on a GPU, as far as can be known.

        Memory that a dead trial left behind is others', too. Of trials whose use is not known, all
        that they may use is taken for theirs; so others hold what they were last seen with at least.
        """
        seen_bytes = self._others_seen.get(key, 0)
        if memory.used_bytes is None:
            return seen_bytes
        listed = memory.by_pid or {}
        known_bytes = sum(listed.get(row.pid, 0) for row in ours if row.pid is not None)
        unknown = [row for row in ours if memory.by_pid is None or row.pid is None]
        rest_bytes = max(0, memory.used_bytes - known_bytes)
        if not unknown:
            self._others_seen[key] = rest_bytes
            return rest_bytes
        return max(seen_bytes, rest_bytes - sum(row.device_bytes for row in unknown))

    def _host_room(self, held: Sequence[Held]) -> Room:
        granted = [row for row in held if row.granted and row.host == self._host]
        promised = [(row.pid, row.device_bytes) for row in granted if row.device == cpu_key(self._host)]
        free_bytes = available_host_bytes() - _unused_bytes(promised)
        free_bytes += _resident_bytes([row for row in granted if row.host_bytes])
        return Room(self._host, "the host's memory", int(free_bytes * (1 - HEADROOM)), None)


def _resident_bytes(rows: Sequence[Held]) -> int:
    """Return what our trials' processes hold of the host's memory."""
    found = [process_memory(row.pid) for row in rows if row.pid is not None]
    return sum(memory.resident_bytes for memory in found if memory is not None)


def _unused_bytes(promised: Sequence[tuple[int | None, int]]) -> int:
    """Return what processes may still take of the host's memory, each given with its share."""
    total_bytes = 0
    for pid, share_bytes in promised:
        memory = None if pid is None else process_memory(pid)
        total_bytes += max(0, share_bytes - (0 if memory is None else memory.resident_bytes))
    return total_bytes
