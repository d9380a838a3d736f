"""Child processes: how they end, that nothing outlives the driver, and who is alive."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import processes_with
from tuner.processes import Child, is_alive, kill_orphans, process_memory, this_process
from tuner.records import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Other = tuple[subprocess.Popen[str], Owner]

DEATH_SECONDS = 5.0  # what we promise; it takes some milliseconds

# A child with a grandchild in its group, one in a session of its own, and a daemon (forked twice);
# all ignore what can be ignored. Each writes its pid into the folder, aside and renamed.
FAMILY = """
import os, signal, subprocess, sys, time
folder, role = sys.argv[1:]
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if role == "daemon":
    if os.fork():
        os._exit(0)
    os.setsid()
path = os.path.join(folder, role)
with open(path + "~", "w") as file:
    file.write(str(os.getpid()))
os.rename(path + "~", path)
if role == "child":
    for name in ("same-group", "setsid", "daemon"):
        subprocess.Popen([sys.executable, __file__, folder, name], start_new_session=name == "setsid")
time.sleep(60)
"""
# SIGINT is what a terminal makes of it, also where the tests run in the background, with it ignored.
DRIVER = """
import pathlib, signal, sys, time
from tuner.processes import Child
signal.signal(signal.SIGINT, signal.default_int_handler)
child = Child([sys.executable, *sys.argv[2:]], log=pathlib.Path(sys.argv[1]))
time.sleep(60)
"""


def family_arguments(folder: Path) -> list[str]:
    script = folder / "family.py"
    script.write_text(FAMILY)
    return [str(script), str(folder), "child"]


def family_pids(folder: Path) -> dict[str, int]:
    """Wait until everybody is there; return their pids."""
    roles = ("child", "same-group", "setsid", "daemon")
    until(lambda: all((folder / role).exists() for role in roles), seconds=30)
    return {role: int((folder / role).read_text()) for role in roles}


def running(pid: int) -> bool:  # by the kernel's own table; a zombie does not run
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], *, seconds: float = DEATH_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(0.02)


def python(code: str, folder: Path, **options: object) -> Child:
    return Child([sys.executable, "-c", code], log=folder / "log.txt", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(7)",
        "import os; os._exit(255)",
        *(f"import os; os.kill(os.getpid(), {int(number)})" for number in (signal.SIGTERM, signal.SIGKILL)),
        "import faulthandler; faulthandler._sigsegv()",
    ],
)
def test_a_child_ends_as_subprocess_says_it_ends(code: str, tmp_path: Path) -> None:
    expected = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode

    status = python(code, tmp_path).wait(30)

    assert status is not None
    assert (status.code, status.signal) == (expected, -expected if expected < 0 else None)


def test_a_child_reports_its_own_peak_not_the_supervisors(tmp_path: Path) -> None:
    ends = [python(code, tmp_path).wait(30) for code in ("pass", "x = bytearray(64 << 20)")]
    peaks = [status.max_resident_bytes or 0 for status in ends if status is not None]
    # 64 MiB are filled; 8 MiB for what differs between two interpreters.
    assert abs(peaks[1] - peaks[0] - (64 << 20)) < 8 << 20


def test_a_program_that_cannot_be_started_is_127_as_in_a_shell(tmp_path: Path) -> None:
    status = Child(["/no/such/program"], log=tmp_path / "log.txt").wait(30)

    assert status is not None
    assert status.code == 127
    assert "cannot start /no/such/program" in (tmp_path / "log.txt").read_text()


def test_output_environment_folder_and_channels_reach_the_child(tmp_path: Path) -> None:
    read, write = os.pipe()
    code = (
        "import os, sys; print(os.environ['WHO'], os.getcwd(), repr(sys.stdin.read()), flush=True);"
        f"print('oops', file=sys.stderr); os.write({write}, b'through')"
    )
    child = python(code, tmp_path, environment={"WHO": "me"}, cwd=tmp_path, channels=(write,))
    os.close(write)
    with os.fdopen(read, "rb") as channel:
        assert channel.read() == b"through"  # and its end: the supervisor keeps no copy

    assert child.wait(30) is not None
    assert (tmp_path / "log.txt").read_text() == f"me {tmp_path} ''\noops\n"


def test_waiting_gives_none_while_the_child_runs(tmp_path: Path) -> None:
    child = python("import time; time.sleep(60)", tmp_path)

    assert child.wait(0.2) is None
    assert child.kill() == child.wait() == child.kill()  # its end stays known


def test_kill_takes_every_descendant(tmp_path: Path) -> None:
    child = Child([sys.executable, *family_arguments(tmp_path)], log=tmp_path / "log.txt")
    pids = family_pids(tmp_path)
    assert all(map(running, pids.values()))
    assert len({os.getsid(pid) for pid in pids.values()}) == 3  # the child's, setsid's, the daemon's

    assert child.kill().signal == signal.SIGKILL

    until(lambda: not any(map(running, pids.values())))


def test_a_child_that_ends_by_itself_leaves_nobody_behind(tmp_path: Path) -> None:
    child = Child([sys.executable, *family_arguments(tmp_path)], log=tmp_path / "log.txt")
    pids = family_pids(tmp_path)
    os.kill(pids["child"], signal.SIGKILL)

    ended = child.wait(DEATH_SECONDS)
    assert ended is not None
    assert ended.signal == signal.SIGKILL
    until(lambda: not any(map(running, pids.values())))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_the_driver_is_killed_every_descendant_goes(number: int, tmp_path: Path) -> None:
    arguments = [str(tmp_path / "log.txt"), *family_arguments(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], stderr=subprocess.DEVNULL) as driver:
        pids = family_pids(tmp_path)
        assert all(map(running, pids.values()))

        driver.send_signal(number)

        until(lambda: not any(map(running, pids.values())))


def supervisor_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_when_the_supervisor_is_killed_the_driver_takes_every_descendant(tmp_path: Path) -> None:
    """They are nobody's children by then: the driver knows them by the mark in their environment."""
    child = Child([sys.executable, *family_arguments(tmp_path)], log=tmp_path / "log.txt")
    pids = family_pids(tmp_path)
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    os.kill(supervisor_of(pids["child"]), signal.SIGKILL)

    ended = child.wait(DEATH_SECONDS)

    assert ended is not None
    assert ended.signal == signal.SIGKILL
    until(lambda: not any(map(running, pids.values())))
    assert bystander.poll() is None
    bystander.communicate()


def test_orphans_of_a_driver_killed_with_its_supervisor_are_found_later(tmp_path: Path) -> None:
    """Nobody is left to kill them at once; those of a driver that lives are left alone."""
    (tmp_path / "living").mkdir()
    child = Child([sys.executable, *family_arguments(tmp_path / "living")], log=tmp_path / "log.txt")
    living = family_pids(tmp_path / "living")
    arguments = [str(tmp_path / "log.txt"), *family_arguments(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", DRIVER, *arguments], stderr=subprocess.DEVNULL) as driver:
        pids = family_pids(tmp_path)
        supervisor = supervisor_of(pids["child"])
        os.kill(supervisor, signal.SIGSTOP)  # so that it cannot be quicker than the second kill
        driver.kill()
        os.kill(supervisor, signal.SIGKILL)
    until(lambda: not running(pids["child"]))
    assert [role for role, pid in pids.items() if running(pid)] == ["same-group", "setsid", "daemon"]

    assert set(kill_orphans()) >= {pids[role] for role in ("same-group", "setsid", "daemon")}

    assert not any(map(running, pids.values()))
    assert all(map(running, living.values()))
    child.kill()


def test_a_log_keeps_its_first_and_last_megabytes(tmp_path: Path) -> None:
    """100 MiB in lines of 16 KiB: at most 8 MiB are kept, and what is left out is counted."""
    width, lines = 2**14 - 1, 100 * 2**6
    code = f"for i in range({lines}): print(f'{{i:0{width}}}')"
    status = python(code, tmp_path).wait(60)

    text = (tmp_path / "log.txt").read_text()
    head, mark, tail = text.partition("\n… ")
    left_out, _, tail = tail.partition(" bytes left out: the log has a limit …\n")
    assert status is not None
    assert status.code == 0
    assert len(text) < 8 << 20
    assert mark
    assert head.startswith(f"{0:0{width}}\n{1:0{width}}\n")
    assert tail.endswith(f"{lines - 1:0{width}}\n")
    assert len(tail) >= 1 << 20
    assert len(head) + int(left_out) + len(tail) == 100 << 20


def test_output_does_not_reorder_or_lose_a_byte_below_the_limit(tmp_path: Path) -> None:
    code = "import os\nfor i in range(20000): os.write(1 + i % 2, b'%06d\\n' % i)\nos.kill(os.getpid(), 11)"
    python(code, tmp_path).wait(60)

    assert (tmp_path / "log.txt").read_text() == "".join(f"{i:06}\n" for i in range(20000))


def test_a_child_that_closes_its_output_runs_on(tmp_path: Path) -> None:
    code = "import os, time; os.write(1, b'bye'); os.close(1); os.close(2); time.sleep(0.5); os._exit(4)"
    started = time.monotonic()
    status = python(code, tmp_path).wait(30)

    assert status is not None
    assert status.code == 4
    assert time.monotonic() - started >= 0.5
    assert (tmp_path / "log.txt").read_text() == "bye"


@pytest.fixture
def one_core() -> Iterator[None]:
    """Whoever forks runs on, and the new process waits: the worst order for a race."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


@pytest.mark.usefixtures("one_core")
def test_kill_right_after_the_start_leaves_nobody_behind(tmp_path: Path) -> None:
    """The supervisor may then see its driver's end before its child has a group of its own."""
    for _ in range(40):
        child = python(f"import time; time.sleep(60)  # {tmp_path}", tmp_path)
        assert child.kill().signal == signal.SIGKILL

    until(lambda: not any(map(running, processes_with(str(tmp_path)))))
    assert (tmp_path / "log.txt").read_text() == ""


@pytest.fixture
def other() -> Iterator[Other]:
    """Another process and its identity, as it says itself."""
    code = (
        "import json; from tuner.processes import this_process;"
        "print(json.dumps(this_process().to_json())); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process, Owner(**json.loads(process.stdout.readline()))
        process.kill()


def test_a_process_that_runs_is_alive(other: Other) -> None:
    assert is_alive(this_process()) is True
    assert is_alive(other[1]) is True
    assert (other[1].pid, this_process().pid) == (other[0].pid, os.getpid())


def test_a_process_that_ended_is_not_alive_even_before_it_is_collected(other: Other) -> None:
    process, owner = other
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: not running(process.pid))
    assert Path(f"/proc/{process.pid}").exists()  # a zombie

    assert is_alive(owner) is False
    process.wait()
    assert is_alive(owner) is False


EARLIER_BOOT = "an-earlier-boot" + this_process().boot_id[36:]


@pytest.mark.parametrize("changed", [{"started": "1"}, {"boot_id": EARLIER_BOOT}, {"started": ""}])
def test_a_pid_that_was_given_out_again_is_not_the_owner(changed: dict[str, str]) -> None:
    assert is_alive(dataclasses.replace(this_process(), **changed)) is False


def test_nothing_is_known_of_another_host() -> None:
    assert is_alive(dataclasses.replace(this_process(), host="another-host")) is None
    assert is_alive(Owner("another-host", "", 1 << 30, "")) is None


def test_memory_is_what_the_kernel_counts() -> None:
    code = (
        "import re; from tuner.processes import process_memory; x = bytearray(64 << 20); del x;"
        "m = process_memory(); text = open('/proc/self/smaps_rollup').read();"
        "print(m.resident_bytes, m.peak_resident_bytes, int(re.search(r'Rss:\\s+(\\d+) kB', text)[1]) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    resident, peak, counted = map(int, done.stdout.split())

    assert abs(resident - counted) <= 1 << 20  # smaps walks the pages; status may be some pages behind
    # The array is gone again; the rest may differ by what reading the figures took.
    assert abs(peak - resident - (64 << 20)) <= 4 << 20
    assert process_memory(1 << 30) is None  # no such process
