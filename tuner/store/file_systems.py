"""Whether a SQLite file lies where SQLite can work: its WAL needs memory that all writers share."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tuner.store.engine import URL, describe_url, sqlite_path

_MOUNTS = Path("/proc/mounts")
# Network file systems, as the kernel names them; https://sqlite.org/wal.html: "All processes using a
# database must be on the same host computer; WAL does not work over a network filesystem."
_NETWORK = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "lustre", "ceph", "beegfs", "beegfs_nodev",
        "gpfs", "glusterfs", "orangefs", "pvfs2", "afs", "ocfs2", "gfs2", "davfs", "ncpfs", "vboxsf",
        "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.gcsfuse",
        "fuse.rclone", "fuse.davfs", "fuse.juicefs", "fuse.mount-s3", "fuse.blobfuse", "fuse.blobfuse2",
        "fuse.lustre", "fuse.mfs", "fuse.seaweedfs", "fuse.hdfs",
    }
)  # fmt: skip


def unsuitable_file_system(url: URL, *, mounts: Path = _MOUNTS) -> str | None:
    """Return a warning when the database is a SQLite file on a network file system.

    Args:
        url: As `parse_url` returns it; the file need not exist.
        mounts: The kernel's table of mounts.

    Returns:
        One sentence that suggests PostgreSQL; None where all is well or nothing is known.
    """
    if url.drivername != "sqlite":
        return None
    kind = _kind_of(sqlite_path(url).absolute().parent, mounts)
    if kind not in _NETWORK:
        return None
    return (
        f"{describe_url(url)} is on a network file system ({kind}), where SQLite may lose data or hang when"
        " several hosts write; use PostgreSQL: --storage postgresql://user@host/database"
    )


def _kind_of(folder: Path, mounts: Path) -> str | None:
    """Return the kind of the file system that a folder is on, or would be made on."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    kinds = {}  # of two mounts on one point, the later one covers the earlier
    for line in lines:
        _, point, kind = (*line.split(" ", 3), "", "", "")[:3]
        kinds[re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point)] = kind
    real = Path(os.path.realpath(folder))
    return next((kinds[str(place)] for place in (real, *real.parents) if str(place) in kinds), None)
