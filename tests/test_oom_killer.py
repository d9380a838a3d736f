"""What the kernel tells of its out-of-memory killer: really, and in the layouts of other hosts."""

from __future__ import annotations

import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tuner.oom_killer import OomKills, evidence, oom_kills
from tuner.processes import Child

if TYPE_CHECKING:
    from collections.abc import Iterator

V2_CGROUP = "0::/user.slice/job\n"
V2_MOUNT = "30 23 0:26 / {mount} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_CGROUP = "8:cpu,cpuacct:/\n4:memory:/user.slice/job\n0::/\n"
V1_MOUNT = (
    "28 23 0:24 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    "31 23 0:27 / {mount} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
)
CONTAINER_MOUNT = "30 23 0:26 /user.slice {mount} rw - cgroup2 cgroup2 rw\n"


class Host:
    """A /proc and a control group with files as the kernel writes them (cgroup-v2.rst, memory.rst)."""

    def __init__(self, folder: Path, cgroup: str, mountinfo: str, group: str) -> None:
        self.proc, self.group = folder / "proc", folder / "cgroup" / group
        (self.proc / "self" / "ns").mkdir(parents=True)
        self.group.mkdir(parents=True)
        (self.proc / "self" / "cgroup").write_text(cgroup)
        (self.proc / "self" / "mountinfo").write_text(mountinfo.format(mount=folder / "cgroup"))
        (self.proc / "self" / "ns" / "pid").symlink_to("pid:[4026531836]")
        self.log = folder / "kmsg"
        self.kills(host=0)

    def kills(self, *, host: int) -> None:
        (self.proc / "vmstat").write_text(f"nr_free_pages 100\noom_kill {host}\n")

    def evidence(self, before: OomKills, pid: int = 42) -> str | None:
        return evidence(before, pid, proc=self.proc, log=self.log)


def version_2(host: Host, kills: int) -> None:
    (host.group / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\n")
    (host.group / "memory.max").write_text("2147483648\n")
    (host.group / "memory.peak").write_text("2147479552\n")


def version_1(host: Host, kills: int) -> None:
    (host.group / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    (host.group / "memory.limit_in_bytes").write_text("2147483648\n")
    (host.group / "memory.max_usage_in_bytes").write_text("2147479552\n")


@pytest.mark.parametrize(
    ("write", "cgroup", "mountinfo", "group"),
    [
        (version_2, V2_CGROUP, V2_MOUNT, "user.slice/job"),
        (version_2, V2_CGROUP, CONTAINER_MOUNT, "job"),
        (version_1, V1_CGROUP, V1_MOUNT, "user.slice/job"),
    ],
    ids=["version 2", "part of version 2", "version 1"],
)
def test_a_kill_in_the_control_group_is_told_with_its_limit(
    write: object, cgroup: str, mountinfo: str, group: str, tmp_path: Path
) -> None:
    host = Host(tmp_path, cgroup, mountinfo, group)
    assert callable(write)
    write(host, 3)
    before = oom_kills(host.proc)
    assert host.evidence(before) is None

    write(host, 4)

    assert host.evidence(before) == (
        "the kernel's out-of-memory killer took 1 process of its control group in that time "
        "(limit 2.00 GiB, peak 2.00 GiB)"
    )


def test_no_limit_is_not_called_one(tmp_path: Path) -> None:
    host = Host(tmp_path, V2_CGROUP, V2_MOUNT, "user.slice/job")
    version_2(host, 0)
    before = oom_kills(host.proc)
    version_2(host, 1)
    (host.group / "memory.max").write_text("max\n")

    assert (host.evidence(before) or "").endswith("in that time (peak 2.00 GiB)")


def test_a_kill_elsewhere_on_the_host_is_the_weakest_sign(tmp_path: Path) -> None:
    host = Host(tmp_path, V2_CGROUP, V2_MOUNT, "user.slice/job")
    before = oom_kills(host.proc)
    host.kills(host=2)

    assert (
        host.evidence(before)
        == "the kernel's out-of-memory killer took 2 processes of this host in that time"
    )


def test_the_kernels_log_names_the_process_and_no_other(tmp_path: Path) -> None:
    """One record, as /dev/kmsg gives them one by one; another pid, and one of an earlier time."""
    host = Host(tmp_path, V2_CGROUP, V2_MOUNT, "user.slice/job")
    now_us = int(time.monotonic() * 1e6)
    line = "Out of memory: Killed process 42 (python) total-vm:9000kB, anon-rss:8000kB, UID:0 oom_score_adj:0"
    host.log.write_text(f"3,1201,{now_us},-;{line}\n SUBSYSTEM=memory\n")
    before = OomKills(None, None)

    assert host.evidence(before) == f"the kernel's log says: {line}"
    assert host.evidence(before, pid=4) is None
    host.log.write_text(f"3,1201,{now_us - 60_000_000},-;{line}\n")
    assert host.evidence(before) is None
    (host.proc / "self" / "ns" / "pid").unlink()
    (host.proc / "self" / "ns" / "pid").symlink_to("pid:[4026532999]")  # a container: other numbers
    host.log.write_text(f"3,1201,{now_us},-;{line}\n")
    assert host.evidence(before) is None


def test_a_kernel_that_tells_nothing_is_no_evidence(tmp_path: Path) -> None:
    before = oom_kills(tmp_path)

    assert (before.group, before.host) == (None, None)
    assert evidence(before, 42, proc=tmp_path, log=tmp_path / "kmsg") is None


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 64 MiB, as root may make one."""
    name = f"tuner-test-{uuid.uuid4().hex}"
    for root, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        folder = Path(root) / name
        try:
            folder.mkdir()
        except OSError:
            continue
        if (folder / limit).exists():  # the kernel made it: this is a control group
            (folder / limit).write_text(str(64 << 20))
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("only root may make a control group here")


def test_a_child_that_the_kernel_really_kills_has_evidence(small_group: Path, tmp_path: Path) -> None:
    code = (
        f"import os; open({str(small_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
        "x = bytearray(os.urandom(1 << 20)) * 256"
    )
    child = Child([sys.executable, "-c", code], log=tmp_path / "log.txt")
    status = child.wait(60)

    assert status is not None
    assert status.signal == 9
    assert status.oom_evidence is not None
    assert "Killed process" in status.oom_evidence or "out-of-memory killer took" in status.oom_evidence
    assert not Path(f"/proc/{child.pid}").exists()


def test_a_child_that_somebody_kills_has_none(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], log=tmp_path / "log.txt")
    status = child.wait(60)

    assert status is not None
    assert status.signal == 9
    assert status.oom_evidence is None
