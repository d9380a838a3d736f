"""One holder in the world, on both databases; a killed one lets go."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psycopg
import pytest

from tuner.errors import StoreError
from tuner.store.engine import open_engine, parse_url
from tuner.store.locks import advisory_key, exclusive

if TYPE_CHECKING:
    from pathlib import Path

HOLD = """
import sys, time
from pathlib import Path
from tuner.store.engine import open_engine, parse_url
from tuner.store.locks import exclusive
storage, name, log, rounds, seconds = sys.argv[1:]
engine = open_engine(parse_url(storage))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(rounds)):
    with exclusive(engine, name), open(log, "a", buffering=1) as file:
        file.write("in\\n")
        time.sleep(float(seconds))
        file.write("out\\n")
"""
ODD = ["a", "A", "", " ", "study-1", "study-12", "../../a", "a/b", "a\0b", "a:b", "é" * 300, "🙂", "\udcff",
       "x" * 40, "x" * 41, "a%b?c#d"]  # fmt: skip


def holder(storage: str, name: str, log: Path, rounds: int, seconds: float) -> subprocess.Popen[str]:
    """Start a process that takes the lock some times once it reads a line."""
    command = [sys.executable, "-P", "-c", HOLD, storage, name, str(log), str(rounds), str(seconds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.parametrize("shared", [True, False])
def test_processes_take_turns_under_one_name_and_not_under_several(
    storage: str, tmp_path: Path, shared: bool
) -> None:
    log = tmp_path / "log"
    with ExitStack() as stack:
        processes = [
            stack.enter_context(holder(storage, "one" if shared else f"one-{i}", log, 5, 0.03))
            for i in range(4)
        ]
        for process in processes:
            go(process)
        for process in processes:
            process.communicate(timeout=60)
    lines = log.read_text().split()
    assert sorted(lines) == ["in"] * 20 + ["out"] * 20
    assert (lines == ["in", "out"] * 20) is shared  # the baseline: under other names they do mix


def test_a_killed_holder_lets_go(storage: str, tmp_path: Path) -> None:
    engine, taken, log = open_engine(parse_url(storage)), threading.Event(), tmp_path / "log"

    def take() -> None:
        with exclusive(engine, "one"):
            taken.set()

    with holder(storage, "one", log, 1, 600) as process:
        go(process)
        while not log.exists() or not log.read_text():
            pass
        waiting = threading.Thread(target=take)
        waiting.start()
        assert not taken.wait(1)
        process.kill()
    assert taken.wait(20)
    waiting.join()
    engine.dispose()


def test_an_error_in_the_body_lets_go(storage: str) -> None:
    engine = open_engine(parse_url(storage))
    for _ in range(2):
        with pytest.raises(KeyError), exclusive(engine, "one"):
            raise KeyError
    engine.dispose()


def test_every_name_is_a_lock_of_its_own(storage: str, tmp_path: Path) -> None:
    engine = open_engine(parse_url(storage))
    with ExitStack() as stack:
        for name in ODD:  # all at once: two that were one lock would wait for one another
            stack.enter_context(exclusive(engine, name))
    engine.dispose()
    assert len({advisory_key(name) for name in ODD}) == len(ODD)
    assert all(0 <= advisory_key(name) < 2**63 for name in ODD)
    if storage.startswith("sqlite"):
        files = [path.name for path in tmp_path.iterdir()]
        assert len({name.lower() for name in files}) == len(ODD)  # some file systems fold cases
        assert all(name.startswith("tuner.db.") and len(name) < 80 for name in files)


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    engine = open_engine(parse_url(f"sqlite:///{tmp_path}/missing/tuner.db"))
    with pytest.raises(StoreError, match=r"missing/tuner\.db cannot be opened: is its folder there"):
        exclusive(engine, "one").__enter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("storage", ["postgresql"], indirect=True)
def test_the_servers_time_limits_do_not_take_the_lock_away(storage: str) -> None:
    url = parse_url(storage)
    with psycopg.connect(storage, autocommit=True) as connection:
        for setting in ("statement_timeout", "lock_timeout", "idle_session_timeout"):
            connection.execute(f'ALTER DATABASE "{url.database}" SET {setting} = 100')
    holding, waiting = open_engine(url), open_engine(url)
    order: list[str] = []

    def take() -> None:
        with exclusive(waiting, "one"):
            order.append("second")

    with exclusive(holding, "one"):
        second = threading.Thread(target=take)
        second.start()
        second.join(0.6)
        order.append("first")
    second.join(10)
    assert order == ["first", "second"]
    holding.dispose()
    waiting.dispose()
