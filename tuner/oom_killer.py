"""What the kernel tells of its out-of-memory killer, as text: was a process killed by it?

Three sources, the surest first: the kernel's log names the process (`/dev/kmsg`, where it may be
read), the control group counts its victims (`memory.events` of version 2, `memory.oom_control` of
version 1), the host counts them all (`oom_kill` in `/proc/vmstat`). A count that grew while the
process ran is a suspicion, since it does not say who was killed.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from tuner.units import format_bytes

_PROC = Path("/proc")
_KERNEL_LOG = Path("/dev/kmsg")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: the kernel's log speaks of its pids
_LONGEST_RECORD = 8192  # CONSOLE_EXT_LOG_MAX: a shorter read of /dev/kmsg fails


@dataclass(frozen=True)
class OomKills:
    """How many processes the killer has taken so far.

    Attributes:
        group: In this process's control group; None when that is not counted.
        host: On this host; None when that is not counted.
        seconds: When this was read, by the clock of the kernel's log.
    """

    group: int | None
    host: int | None
    seconds: float = field(default_factory=time.monotonic)


def oom_kills(proc: Path = _PROC) -> OomKills:
    """Return the counts as they are now; unknown where the kernel does not tell.

    Args:
        proc: Where the kernel's process table is mounted.
    """
    folder = _memory_group(proc)
    group = None
    if folder is not None:
        counts = [_number(folder / name, "oom_kill") for name in ("memory.events", "memory.oom_control")]
        group = next((count for count in counts if count is not None), None)
    return OomKills(group, _number(proc / "vmstat", "oom_kill"))


def evidence(before: OomKills, pid: int | None, *, proc: Path = _PROC, log: Path = _KERNEL_LOG) -> str | None:
    """Return what points to the killer having taken a process, or None.

    Args:
        before: The counts when the process was started.
        pid: The process.
        proc: Where the kernel's process table is mounted.
        log: The kernel's log.
    """
    line = None if pid is None else _log_line(pid, before.seconds, proc, log)
    if line is not None:
        return f"the kernel's log says: {line}"
    now = oom_kills(proc)
    killer = "the kernel's out-of-memory killer took"
    if grown := _grown(before.group, now.group):
        return f"{killer} {_processes(grown)} of its control group in that time{_limits(proc)}"
    if grown := _grown(before.host, now.host):
        return f"{killer} {_processes(grown)} of this host in that time"
    return None


def _grown(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else now - before


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _limits(proc: Path) -> str:
    """Return limit and peak of the control group in words, as far as they are known."""
    folder = _memory_group(proc)
    if folder is None:
        return ""
    names = {
        "limit": ("memory.max", "memory.limit_in_bytes"),
        "peak": ("memory.peak", "memory.max_usage_in_bytes"),
    }
    known = []
    for what, files in names.items():
        sizes = [text for name in files if (text := _text(folder / name).strip()).isdigit()]
        if sizes:
            known.append(f"{what} {format_bytes(int(sizes[0]))}")
    return f" ({', '.join(known)})" if known else ""


def _memory_group(proc: Path) -> Path | None:
    """Return the folder of the control group that limits this process's memory."""
    groups = dict(line.split(":", 2)[1:] for line in _text(proc / "self/cgroup").splitlines())
    name = next((name for name in groups if "memory" in name.split(",")), "")
    if name not in groups:
        return None
    for line in _text(proc / "self/mountinfo").splitlines():
        fields, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        root, mount = fields.split(" ")[3:5]
        if kind == ("cgroup" if name else "cgroup2") and (not name or "memory" in options.split(",")):
            inside = os.path.relpath(groups[name], root)  # a container sees its part of the tree alone
            return Path(mount) if inside.startswith("..") else Path(mount) / inside
    return None


def _log_line(pid: int, since_seconds: float, proc: Path, log: Path) -> str | None:
    """Return the kernel's own line about the end of a process, or None."""
    try:
        if (proc / "self/ns/pid").readlink() != Path(_INITIAL_PID_NAMESPACE):
            return None
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    found = None
    try:
        while record := os.read(descriptor, _LONGEST_RECORD):
            head, _, text = record.decode("utf-8", "replace").partition(";")
            stamp = head.split(",")[2]  # priority, sequence number, microseconds since boot
            if int(stamp) / 1e6 >= since_seconds - 1 and re.search(rf"Killed process {pid}\b", text):
                found = text.splitlines()[0]
    except (OSError, ValueError, IndexError):
        pass  # its end (EAGAIN), or a record that was overwritten
    finally:
        os.close(descriptor)
    return found


def _number(path: Path, name: str) -> int | None:
    """Return the number behind a name in one of the kernel's tables."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
