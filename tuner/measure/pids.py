"""Process numbers, and whether those that NVML gives are of this PID namespace.

NVML gives numbers as the driver sees them: those of the host, or with newer drivers those of the
caller's container. `NSpid` in `/proc/self/status` cannot tell the host's number from inside: it
shows the namespaces from that of `/proc` inwards only.
"""

from __future__ import annotations

import os
from pathlib import Path

_INITIAL = 0xEFFFFFFC  # PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h


def in_initial_namespace() -> bool:
    """Whether this process counts as the host does, so that every number means one process."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _INITIAL
    except OSError:
        return False


def runs_here(pid: int) -> bool:
    """Whether a process of that number runs in this PID namespace, whoever's it is."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
