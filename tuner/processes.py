"""Child processes that cannot outlive the driver, and what the kernel says about a process.

A `Child` is started below a supervisor (supervisor.py) that kills the child's whole process group
when the driver ends, however it ends; should the supervisor end first, the driver does it (leftovers.py).
No fork of this process runs Python code of ours: the child is a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.leftovers import VARIABLE, kill_where, new_mark, owner_of
from tuner.oom_killer import evidence, oom_kills
from tuner.records import Owner

_SUPERVISOR = Path(__file__).with_name("supervisor.py")
_NOT_FOR_CHILDREN = ("TUNER_STORAGE",)  # it may hold a password, and a child opens no database


@dataclass(frozen=True)
class ExitStatus:
    """How a child ended.

    Attributes:
        code: Its exit code, or the signal that killed it as a negative number.
        max_resident_bytes: Its resident peak; None when nobody was there to see its end.
        oom_evidence: What points to the kernel's out-of-memory killer, where a signal 9 came that
            we did not send.
    """

    code: int
    max_resident_bytes: int | None = None
    oom_evidence: str | None = None

    @property
    def signal(self) -> int | None:
        """The signal that killed the child, or None."""
        return -self.code if self.code < 0 else None


class Child:
    """A running child process below its supervisor.

    Args:
        command: The program (an absolute path) and its arguments.
        log: File that receives the child's standard output and error.
        environment: Variables set over the driver's own, of which a child gets all but the storage URL.
        cwd: The child's working folder.
        channels: File descriptors that the child inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        channels: Sequence[int] = (),
    ) -> None:
        joined = ",".join(map(str, channels)) or "-"
        inherited = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}
        self._mark = new_mark(this_process())
        self._oom_kills = oom_kills()
        with log.open("ab") as log_file:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), joined, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                env={**inherited, **(environment or {}), VARIABLE: self._mark},
                cwd=cwd,
                pass_fds=tuple(channels),
                start_new_session=True,  # Ctrl-C in the terminal is the driver's to handle
            )
        self._messages = b""
        self._exit: ExitStatus | None = None
        self._killed = False
        self.pid: int | None = None

    def wait(self, timeout_seconds: float | None = None) -> ExitStatus | None:
        """Return how the child ended, or None when it still runs after the time-out."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._exit is None:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._read(remaining):
                return None
        return self._exit

    def fileno(self) -> int:
        """Return a descriptor that can be read when something has happened; -1 after the end."""
        pipe = self._supervisor.stdout
        return -1 if pipe is None or pipe.closed else pipe.fileno()

    def kill(self) -> ExitStatus:
        """Kill the child and everything it started; return how it ended."""
        self.begin_to_kill()
        ended = self.wait()
        assert ended is not None
        return ended

    def begin_to_kill(self) -> None:
        """Have the child and everything it started killed, while another thread waits for its end."""
        self._killed = True
        if self._supervisor.stdin is not None and not self._supervisor.stdin.closed:
            self._supervisor.stdin.close()

    def _read(self, timeout_seconds: float | None) -> bool:
        """Take in what the supervisor says; False when it said nothing in time."""
        assert self._supervisor.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._supervisor.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_seconds):
                return False
        data = os.read(self._supervisor.stdout.fileno(), 65536)
        if not data:
            self._kill_unsupervised()
            self._end(-signal.SIGKILL, None)
            return True
        *lines, self._messages = (self._messages + data).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            self.pid = message.get("started", self.pid)
            if "exit" in message:
                self._end(message["exit"], message["max_resident_bytes"])
        return True

    def _kill_unsupervised(self) -> None:
        """The supervisor was killed, and the child with it: kill what the child had started."""
        if self.pid is not None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
        kill_where(lambda mark: mark == self._mark)

    def _end(self, code: int, max_resident_bytes: int | None) -> None:
        unasked = code == -signal.SIGKILL and not self._killed
        found = evidence(self._oom_kills, self.pid) if unasked else None
        self._exit = ExitStatus(code, max_resident_bytes, found)
        for pipe in (self._supervisor.stdin, self._supervisor.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
        self._supervisor.wait()


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process as its `/proc/<pid>/status` gives it, in bytes."""

    resident_bytes: int
    peak_resident_bytes: int
    data_bytes: int


def process_memory(pid: int | str = "self") -> ProcessMemory | None:
    """Return the memory of a process, or None when it is gone or not ours to read."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    sizes = {line.split(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith("Vm")}
    if "VmRSS" not in sizes:
        return None  # a zombie
    kib = 1024
    return ProcessMemory(int(sizes["VmRSS"]) * kib, int(sizes["VmHWM"]) * kib, int(sizes["VmData"]) * kib)


def reset_peak_resident() -> bool:
    """Start this process's `VmHWM` anew from what is resident now; False where not allowed."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return True
    return False


def this_process() -> Owner:
    """Return the identity of this process."""
    return Owner(socket.gethostname(), _boot_id(), os.getpid(), _start_time(os.getpid()) or "")


def is_alive(owner: Owner) -> bool | None:
    """Return whether an owner still runs; None for another host, of which nothing is known."""
    here = this_process()
    boot, space, machine = _parts(owner.boot_id)
    own_boot, own_space, own_machine = _parts(here.boot_id)
    if (owner.host, machine) != (here.host, own_machine):
        return None  # another machine, which may have the same name
    if boot == own_boot and space != own_space:
        return None  # another container of the same name: its pids mean nothing here
    return boot == own_boot and _start_time(owner.pid) == owner.started


def kill_orphans() -> list[int]:
    """Kill what was started below drivers of this host that are gone; return the pids.

    Its supervisor does that when a driver ends. Where both were killed at once, nobody is left to.
    """

    def orphaned(mark: str) -> bool:
        owner = owner_of(mark)
        return owner is not None and is_alive(owner) is False

    return kill_where(orphaned)


@functools.cache
def _boot_id() -> str:
    """Return boot, namespace of pids, and machine: within them a pid and its start are unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        space = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return ""
    machine = b""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_bytes()
    return f"{boot}/{space}/{hashlib.sha256(machine).hexdigest()[:8]}"  # the id itself is to be kept secret


def _parts(boot_id: str) -> tuple[str, str, str]:
    boot, space, machine, *_ = *boot_id.split("/"), "", ""
    return boot, space, machine


def _start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
