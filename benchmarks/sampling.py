"""What a study's trials hold while they run, seen from outside."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from benchmarks.soak_checks import query
from tuner.processes import process_memory


def rows_of(folder: Path, sql: str) -> list[Any]:
    """Return the rows of a statement on the default database of a folder."""
    return query(f"sqlite:///{folder}/tuner.db", sql)


def resident_bytes(folder: Path) -> list[int]:
    """Return what each running trial's process holds now, by the pids noted with the reservations."""
    if not (folder / "tuner.db").exists():
        return []
    try:
        rows = rows_of(folder, "SELECT pid FROM tuner_reservation WHERE pid IS NOT NULL")
    except sqlite3.OperationalError:  # the tables are being made
        return []
    found = [process_memory(pid) for (pid,) in rows]
    return [memory.resident_bytes for memory in found if memory is not None]
