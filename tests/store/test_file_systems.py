"""A SQLite file on a network file system is warned of, by the kernel's table of mounts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tuner.store.engine import open_engine, parse_url
from tuner.store.file_systems import unsuitable_file_system

if TYPE_CHECKING:
    from pathlib import Path

MOUNTS = """\
overlay / overlay rw,relatime 0 0
proc /proc proc rw 0 0
server:/export /home nfs4 rw,vers=4.2 0 0
tmpfs /home/me/scratch tmpfs rw 0 0
//server/share /mnt/my\\040share cifs rw 0 0
me@host: /mnt/host fuse.sshfs rw 0 0
/dev/sda1 /data ext4 rw 0 0
lustre /data lustre rw 0 0
"""


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    path = tmp_path / "mounts"
    path.write_text(MOUNTS)
    return path


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("/home/me/tuner.db", "nfs4"),
        ("/home/tuner.db", "nfs4"),
        ("/mnt/my share/deep/er/tuner.db", "cifs"),
        ("/mnt/host/tuner.db", "fuse.sshfs"),
        ("/data/tuner.db", "lustre"),  # of two mounts on one point the later one counts
        ("/home/me/scratch/tuner.db", None),
        ("/homework/tuner.db", None),
        ("/tuner.db", None),
    ],
)
def test_the_nearest_mount_decides(mounts: Path, file: str, kind: str | None) -> None:
    said = unsuitable_file_system(parse_url(f"sqlite:///{file}"), mounts=mounts)
    assert (said is None) is (kind is None)
    if kind is not None and said is not None:
        assert f"{file} is on a network file system ({kind})" in said
        assert "--storage postgresql://" in said
        assert "\n" not in said


def test_a_link_counts_as_where_it_leads(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/home/me")
    assert unsuitable_file_system(parse_url(f"sqlite:///{tmp_path}/link/tuner.db"), mounts=mounts)


def test_an_engines_own_url_is_understood(mounts: Path) -> None:
    engine = open_engine(parse_url("sqlite:////mnt/my share/tuner.db"))
    assert unsuitable_file_system(engine.url, mounts=mounts)


def test_other_databases_and_a_missing_table_are_nothing_to_warn_of(mounts: Path, tmp_path: Path) -> None:
    assert unsuitable_file_system(parse_url("postgresql://host/home"), mounts=mounts) is None
    assert unsuitable_file_system(parse_url("sqlite:////home/a.db"), mounts=tmp_path / "none") is None


def test_the_table_of_this_machine_can_be_read(tmp_path: Path) -> None:
    said = unsuitable_file_system(parse_url(f"sqlite:///{tmp_path}/tuner.db"))
    assert said is None or "is on a network file system" in said
