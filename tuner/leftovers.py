"""Finding a child's descendants by a mark in their environment, when nobody else can.

A supervisor that ends (supervisor.py) takes its child with it, but not what the child started:
those processes now belong to nobody. They still carry the environment they were started with, so
each child gets a variable of its own, and whoever has it is the child's. What clears its
environment *and* leaves the child's session is not found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tuner.records import Owner

VARIABLE = "VRAM_TUNER_CHILD"
_PATIENCE_SECONDS = 5.0


def new_mark(owner: Owner) -> str:
    """Return a mark for one child of `owner`: who started it, and a token."""
    return ",".join((owner.host, owner.boot_id, str(owner.pid), owner.started, uuid.uuid4().hex))


def owner_of(mark: str) -> Owner | None:
    """Return who started a marked process; None for what is no mark of ours."""
    fields = mark.split(",")
    if len(fields) != 5 or not fields[2].isdigit():
        return None
    return Owner(fields[0], fields[1], int(fields[2]), fields[3])


def kill_where(chosen: Callable[[str], bool]) -> list[int]:
    """Kill every process whose mark is chosen, and what it starts meanwhile; return their pids.

    Waits until they are gone, for 5 s at most: a process in an uninterruptible call takes longer.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        found = {pid for pid in _pids() if _kill_if(pid, chosen)}
        killed |= found
        if not found or time.monotonic() > deadline:
            return sorted(killed)
        time.sleep(0.01)


def mark_of(pid: int) -> str | None:
    """Return the mark of a process; None when it has none, is gone, or is not ours to read."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    name = f"{VARIABLE}=".encode()
    for variable in environment.split(b"\0"):
        if variable.startswith(name):
            return variable[len(name) :].decode("utf-8", "replace")
    return None


def _kill_if(pid: int, chosen: Callable[[str], bool]) -> bool:
    """Kill a process if its mark is chosen; whether it was."""
    try:
        process = os.pidfd_open(pid)  # from here on the number cannot come to mean another process
    except OSError:
        return False
    try:
        mark = mark_of(pid)
        if mark is None or not chosen(mark):
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return True
    finally:
        os.close(process)


def _pids() -> Iterator[int]:
    mine = os.getpid()
    for name in os.listdir("/proc"):  # noqa: PTH208 - Path objects for every process are slow
        if name.isdigit() and int(name) != mine:
            yield int(name)
