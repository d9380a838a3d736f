"""Which commit a study file is of, and whether the commit is what runs."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tuner.records import Record

_MOST_SECONDS = 5.0  # `git status` on a cold, large or remote checkout; a study must not wait for it
# Set inside a git hook, they name another repository than the file's.
_MISLEADING = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")


@dataclass(frozen=True)
class Revision(Record):
    """The state of a repository.

    Attributes:
        root: Its working tree.
        commit: The commit that is checked out, in full; None where there is none yet.
        dirty: Whether the commit is not what runs: a tracked file was changed, or the study file is
            not tracked. Other untracked files do not count, since databases and run folders lie
            there. None when git did not answer in time.
    """

    root: str
    commit: str | None
    dirty: bool | None


def revision_of(file: Path) -> Revision | None:
    """Return the state of the repository that holds `file`; None outside one, or without git.

    It sees the one repository: not its submodules' own state, and not packages installed elsewhere.
    """
    folder = file.resolve().parent
    root = _git(folder, "rev-parse", "--show-toplevel")
    if not root:
        return None
    commit = _git(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    tracked = _git(folder, "ls-files", "--", file.resolve().name)
    dirty = None if changes is None or tracked is None else bool(changes) or not tracked
    return Revision(root, commit or None, dirty)


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git prints; None when it fails, is missing, or takes too long.

    It writes nothing (no index refresh) and starts no helper that a repository names.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _MISLEADING}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments],  # noqa: S607
            env={**kept, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=_MOST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
