"""A small parent for one child process, run as `python -I -S supervisor.py CHANNELS COMMAND…`.

The driver holds the other end of this script's standard input. At its end of file, whatever the
reason, the child and everything it started is killed: process group first, then every orphan,
since orphans of the child become children of this process (`PR_SET_CHILD_SUBREAPER`). The child
dies with the supervisor too (`PR_SET_PDEATHSIG`: this script has one thread, so that signal cannot
come early).

One JSON line on standard output when the child has started, one when it has ended. CHANNELS are
file descriptors, joined by commas, that the child keeps (`-` for none). What the child prints goes
through this process to its standard error, the log, which keeps the first and the last megabytes.
"""

import collections
import ctypes
import json
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_MIB = 1 << 20
_LOG_MOST, _LOG_HEAD, _LOG_TAIL = 8 * _MIB, 4 * _MIB, _MIB


def main() -> None:
    channels, command = sys.argv[1], sys.argv[2:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    output_read, output_write = os.pipe()
    child = _start(command, [] if channels == "-" else [int(fd) for fd in channels.split(",")], output_write)
    _say({"started": child})
    log = _Log(output_read)
    while True:
        ready, _, _ = select.select([0, wake_read, *log.sources], [], [])
        if output_read in ready:
            log.copy()
        if 0 in ready and not os.read(0, 4096):
            os.kill(child, signal.SIGKILL)  # it may not have a group of its own yet
            _, status, usage = os.wait4(child, 0)
            break
        if wake_read in ready:
            os.read(wake_read, 4096)
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid == child:
                break
            _reap_others(child)
    _kill_leftovers(child)
    while log.copy():
        pass
    code = os.waitstatus_to_exitcode(status)
    _say({"exit": code, "max_resident_bytes": usage.ru_maxrss * 1024})


class _Log:
    """Copies the child's output to the log on descriptor 2; a log that grows too long loses its middle."""

    def __init__(self, source: int) -> None:
        os.set_blocking(source, False)
        self.sources = [source]
        self._bytes = os.fstat(2).st_size
        self._tail: collections.deque[bytes] = collections.deque()
        self._tail_bytes = 0

    def copy(self) -> bool:
        """Copy some of what there is; False when there is nothing now or will be nothing any more."""
        if not self.sources:
            return False
        try:
            data = os.read(self.sources[0], 65536)
        except BlockingIOError:
            return False
        if not data:  # everybody has closed it
            self.sources.clear()
            return False
        self._remember(data)
        try:
            if os.fstat(2).st_size + len(data) > _LOG_MOST:
                self._cut()
            else:
                os.write(2, data)
        except OSError:
            pass  # the disk is full: the child shall not suffer from it
        return True

    def _remember(self, data: bytes) -> None:
        self._bytes += len(data)
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= _LOG_TAIL:
            self._tail_bytes -= len(self._tail.popleft())

    def _cut(self) -> None:
        left_out = self._bytes - _LOG_HEAD - self._tail_bytes
        os.ftruncate(2, _LOG_HEAD)  # opened for appending: what follows is written there
        mark = f"\n… {left_out} bytes left out: the log has a limit …\n"
        os.write(2, b"".join([mark.encode(), *self._tail]))


def _start(command: list[str], channels: list[int], output: int) -> int:
    supervisor = os.getpid()
    pid = os.fork()
    if pid:
        for fd in (*channels, output):
            os.close(fd)
        return pid
    try:
        os.setsid()
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor:
            os._exit(127)  # it ended before it could be watched
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for fd in channels:
            os.set_inheritable(fd, True)
        os.execv(command[0], command)
    except BaseException as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(127)


def _reap_others(child: int) -> None:
    """Collect orphans that ended while the child still runs; never the child itself."""
    for pid in _children():
        if pid != child:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


def _kill_leftovers(group: int) -> None:
    """Kill what the child left running, wherever it moved to."""
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
    while True:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it is gone, or has become another user's
                pass
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as children:
            return [int(pid) for pid in children.read().split()]
    except OSError:  # the kernel is built without CONFIG_PROC_CHILDREN
        mine = os.getpid()
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _parent(name) == mine]


def _parent(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _say(message: dict[str, int]) -> None:
    try:
        os.write(1, (json.dumps(message) + "\n").encode())
    except BrokenPipeError:
        pass  # the driver is gone; what is left to do is the same


if __name__ == "__main__":
    main()
