"""The ledger: what is free on each device now, and who may start there.

    room = what others leave (NVML or /proc, read anew) × (1 - headroom) - reservations of running trials

The reservations are rows in the study's database, so that all drivers which share it share one
ledger; what nobody there knows of is seen as used by others. Memory is read before the reservations
are held still: it takes longer than a decision, and all drivers of all studies wait for that.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True)
class _Seen:
    """Memory as it was read just before a decision.

    Attributes:
        held: The reservations then: a trial that has ended since is still in what was read.
        gpus: What is used on each GPU, by its key.
        available_bytes: What of the host's memory can be had.
        resident: What our trials' processes hold of it, by pid.
    """

    held: Sequence[Held]
    gpus: Mapping[str, nvml.DeviceMemory]
    available_bytes: int
    resident: Mapping[int, int]

    def resident_bytes(self, rows: Sequence[Held]) -> int:
        """Return what trials hold of the host's memory."""
        return sum(self.resident.get(row.pid, 0) for row in rows if row.pid is not None)

    def unused_bytes(self, promised: Sequence[tuple[int | None, int]]) -> int:
        """Return what processes may still take of the host's memory, each given with its share."""
        return sum(
            max(0, share_bytes - (0 if pid is None else self.resident.get(pid, 0)))
            for pid, share_bytes in promised
        )


class Ledger:
    """Admits the trials of one driver to its devices.

    Args:
        reservations: The rows that all drivers share.
        places: Its devices, at least one, all of one kind.
        pool_bytes: What all trials of the study on a device may have together; None: what others leave.
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
        seen = self._look()

        def decision(book: Book) -> Decision:
            rooms = [self._room(place, book.held, seen) for place in self._places.values()]
            host_room, study_id = self._host_room(book.held, seen), book.study_of(driver_id)
            made = decide(wish, rooms, host_room, book.held, trial_id=trial_id, study_id=study_id)
            book.put(
                trial_id,
                driver_id,
                device=made.room.key,
                device_bytes=wish.device_bytes,
                host=self._host,
                host_bytes=wish.host_bytes,
                granted=made.granted,
                for_pool=made.for_pool,
            )
            return made

        made = self._reservations.decide(decision)
        return Admission(self._places[made.room.key], made.granted, made.reason)

    def runs_as(self, trial_id: int, pid: int) -> None:
        """Note a trial's process, so that its use is not taken for somebody else's."""
        self._reservations.runs_as(trial_id, pid)

    def _look(self) -> _Seen:
        """Read what is used now, on the devices and of the host's memory."""
        held = self._reservations.all()
        pids = [row.pid for row in held if row.pid is not None and row.host == self._host]
        memories = {pid: process_memory(pid) for pid in pids}
        return _Seen(
            held,
            {place.key: nvml.memory_of(place.key) for place in self._places.values() if place.kind != "cpu"},
            available_host_bytes(),
            {pid: memory.resident_bytes for pid, memory in memories.items() if memory is not None},
        )

    def _room(self, place: Place, held: Sequence[Held], seen: _Seen) -> Room:
        if place.kind == "cpu":
            ours = _granted_on(place.key, held)
            promised = [(row.pid, row.host_bytes) for row in held if row.granted and row.host == self._host]
            free_bytes = seen.available_bytes + seen.resident_bytes(ours) - seen.unused_bytes(promised)
            return self._limited(place, free_bytes, others="", alone=False)
        ours = _granted_on(place.key, {row.id: row for row in (*seen.held, *held)}.values())
        memory = seen.gpus[place.key]
        others_bytes = self._others_bytes(place.key, memory, ours)
        others = f"; other processes use {format_bytes(others_bytes)}" if others_bytes else ""
        # What is used on a card without a process is the NVIDIA driver's own: a trial that may have the
        # whole budget must not wait for that.
        idle = memory.by_pid == {}
        return self._limited(place, place.capacity_bytes - others_bytes, others=others, alone=not idle)

    def _limited(self, place: Place, free_bytes: int, *, others: str, alone: bool) -> Room:
        """Return a device's room; as for what is free, a single trial on a CPU is always let in.

        The host's memory is soft: what is free there changes with every cache, and a single trial
        has a cap of its own.
        """
        pool_bytes = int(free_bytes * (1 - HEADROOM))
        alone_bytes = free_bytes if alone else None
        return Room(place.key, place.target, pool_bytes, alone_bytes, others, self._pool_bytes)

    def _others_bytes(self, key: str, memory: nvml.DeviceMemory, ours: Sequence[Held]) -> int:
        """Return what others use on a GPU, as far as can be known.

        Memory that a dead trial left behind is others', too. Of trials whose use is not known, all
        that they may use is taken for theirs; so others hold what they were last seen with at least, but no
        more than is used now.
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
        self._others_seen[key] = min(seen_bytes, rest_bytes)
        return max(self._others_seen[key], rest_bytes - sum(row.device_bytes for row in unknown))

    def _host_room(self, held: Sequence[Held], seen: _Seen) -> Room:
        granted = [row for row in held if row.granted and row.host == self._host]
        promised = [(row.pid, row.device_bytes) for row in granted if row.device == cpu_key(self._host)]
        free_bytes = seen.available_bytes - seen.unused_bytes(promised)
        free_bytes += seen.resident_bytes([row for row in granted if row.host_bytes])
        return Room(self._host, "the host's memory", int(free_bytes * (1 - HEADROOM)), None)


def _granted_on(key: str, rows: Iterable[Held]) -> list[Held]:
    return [row for row in rows if row.device == key and row.granted]
