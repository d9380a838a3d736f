"""Kill an upgrade at one statement after the other, and look at what is left each time.

Run as a script, since it forks: STORAGE names a database at the first revision, which is copied.
Prints a JSON line for each moment: `at` the first revision, or wholly at the newest, or `torn`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import event

from tests.migrations.databases import contents, opened
from tuner.store import migrations
from tuner.store.engine import parse_url

COPIES = 0


def copy(storage: str) -> str:
    """Return the URL of a copy of a database that nobody uses."""
    global COPIES
    COPIES += 1
    url = parse_url(storage)
    name = f"{url.database}_{COPIES}"
    if url.drivername == "sqlite":
        shutil.copy(str(url.database), name)
        return f"sqlite:///{name}"
    with psycopg.connect(storage, dbname="postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{url.database}" STRATEGY FILE_COPY')
    return storage.replace(f"/{url.database}", f"/{name}")


def drop(storage: str) -> None:
    url = parse_url(storage)
    if url.drivername == "sqlite":
        for companion in Path(str(url.database)).parent.glob(f"{Path(str(url.database)).name}*"):
            companion.unlink()
        return
    with psycopg.connect(storage, dbname="postgres", autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{url.database}" WITH (FORCE)')


def upgrade(storage: str, kill_at: int | str | None) -> int:
    """Upgrade in a process of its own, killed before its n-th statement, its COMMIT or its exit.

    Returns:
        The number of statements where it lived, or minus the signal that ended it.
    """
    child = os.fork()
    if child == 0:
        count = 0

        def on_statement(*arguments: Any) -> None:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_commit(connection: Any) -> None:
            if kill_at == "commit":
                os.kill(os.getpid(), signal.SIGKILL)

        with opened(storage) as engine:
            event.listen(engine, "before_cursor_execute", on_statement)
            event.listen(engine, "commit", on_commit)
            migrations.upgrade(engine)
            if kill_at == "exit":
                os.kill(os.getpid(), signal.SIGKILL)
        os._exit(min(count, 255))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def main(storage: str, moments: int) -> None:
    old = contents(storage)
    whole = copy(storage)
    statements = upgrade(whole, None)
    new = contents(whole)
    step = max(1, statements // moments)
    for kill_at in [*range(1, statements + 1, step), "commit", "exit"]:
        each = copy(storage)
        ended = upgrade(each, kill_at)
        left = contents(each)
        with opened(each) as engine:
            migrations.upgrade(engine)
        found = {
            "kill_at": kill_at,
            "of": statements,
            "ended": ended,
            "left": "old" if left == old else "new" if left == new else "torn",
            "then": "new" if contents(each) == new else "torn",
        }
        sys.stdout.write(f"{json.dumps(found)}\n")
        sys.stdout.flush()
        drop(each)
    drop(whole)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
