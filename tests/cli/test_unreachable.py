"""A database that cannot be reached, or does not let us in: one line, and no fragment of the password."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.cli.test_secrets import ENCODED, PASSWORD, leaks
from tests.conftest import TINY, Tuner, clean_environment, processes_with
from tests.store.servers import PASSWORD_ROLE, own_server

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMANDS = {
    "run": ("run", str(TINY), "--trials", "1"),
    "studies": ("studies",),
    "trials": ("trials", "tiny"),
    "db upgrade": ("db", "upgrade"),
    "db current": ("db", "current"),
    "delete": ("delete", "tiny", "--yes"),
}


@pytest.fixture(scope="module")
def closed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server that wants another password than the one in the URL."""
    with own_server(tmp_path_factory.mktemp("runtime")) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {PASSWORD_ROLE} LOGIN PASSWORD 'another'")
        yield server.url_of(user=f"{PASSWORD_ROLE}:{ENCODED}")


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS.keys())
def test_no_command_shows_a_fragment(arguments: tuple[str, ...], tuner: Tuner, closed_server: str) -> None:
    """With --debug, so that tracebacks are looked at too; nothing listens on port 1."""
    storages = {
        "wrong port": (f"postgresql://me:{ENCODED}@127.0.0.1:1/db", "Connection refused"),
        "wrong host": (f"postgresql://me:{ENCODED}@no-such-host.invalid/db", "resolve host"),
        "wrong password": (closed_server, "password authentication failed"),
        "in the query": (f"postgresql://127.0.0.1:1/db?user=me&password={ENCODED}", "Connection refused"),
    }
    if arguments != COMMANDS["run"]:  # one way is enough for those that open the database as it does
        storages = {"wrong password": storages["wrong password"]}
    for where, (storage, reason) in storages.items():
        start = time.monotonic()
        done = tuner("--debug", *arguments, "--storage", storage)
        assert leaks(where, done.stdout + done.stderr) == []
        assert reason in done.stderr, done.stderr
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert (len(errors), done.returncode) == (1, 5), done.stderr
        assert time.monotonic() - start < 60  # what is misspelt is not waited for


def test_the_app_says_where_it_reads_and_passes_no_password_on_a_command_line(tmp_path: Path) -> None:
    storage = f"postgresql://me:{ENCODED}@127.0.0.1:1/db_{tmp_path.name}"
    command = [sys.executable, "-P", "-m", "tuner", "app", "--no-browser", "--port", "0"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=clean_environment(TUNER_STORAGE=storage),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        time.sleep(2)
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_with("streamlit")]
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    assert f"postgresql://127.0.0.1:1/db_{tmp_path.name}" in said
    assert leaks("said", said + out + err) == []
    assert lines
    assert [leak for line in lines for leak in leaks("command line", line)] == []


def test_the_fragments_would_be_seen() -> None:
    assert leaks("here", PASSWORD)
    assert leaks("here", ENCODED)
    assert leaks("here", PASSWORD[3:8])
