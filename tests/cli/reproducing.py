"""One study in a repository, run once for many tests: two trials, an edit of the file, a third."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import TINY, clean_environment


@dataclass(frozen=True)
class Folder:
    """A working folder with a database, in which commands are run."""

    path: Path

    @property
    def file(self) -> Path:
        """The study file."""
        return self.path / "tiny.py"

    def tuner(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command there."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "tuner", *map(str, arguments)],
            cwd=self.path,
            env=clean_environment(**{"COLUMNS": "80", **environment}),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def git(self, *arguments: str) -> str:
        """Run git there."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=self.path, env=kept, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Run one statement on the database."""
        with closing(sqlite3.connect(self.path / "tuner.db")) as connection, connection:
            return connection.execute(statement, values).fetchall()

    def copy(self, to: Path) -> Folder:
        """Return a copy that a test may change; the study's file is the copy's own."""
        shutil.copytree(self.path, to, dirs_exist_ok=True)
        copied = Folder(to)
        copied.sql("UPDATE tuner_study SET workload_reference = ?", f"{copied.file}:Tiny")
        return copied

    def json(self, *arguments: str) -> Any:
        """Run a command with `-f json` and return what it prints."""
        done = self.tuner(*arguments, "-f", "json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout)


def make_study(path: Path) -> Folder:
    """Run the study: trials 0 and 1 at a clean commit, trial 2 with a file edited since."""
    folder = Folder(path)
    shutil.copy(TINY, folder.file)
    folder.git("init", "--quiet")
    folder.git("add", "tiny.py")
    folder.git("commit", "--quiet", "--message", "a study")
    for count in ("2", "3"):
        done = folder.tuner("run", "tiny.py", "--trials", count, "--seed", "1", "--threads", "1")
        assert done.returncode == 0, done.stderr
        with folder.file.open("a", encoding="utf-8") as file:
            file.write("\n# edited\n" if count == "2" else "")
    return folder
