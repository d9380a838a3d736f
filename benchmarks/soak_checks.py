"""What must hold after a soak: every trial accounted for, three times, and nothing left over.

Everything is read with plain SQL and from run folders, past the code that wrote it.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg

_NOT_FINAL = {"pruned_memory", "interrupted"}
_TOLD = {"completed": "COMPLETE", "out_of_memory": "PRUNED", "pruned_memory": "PRUNED"}  # else FAIL
_TRIALS = """
SELECT number, outcome, value, run_folder, repeats, late_result IS NOT NULL
FROM tuner_trial ORDER BY number"""
_TOLD_VALUES = """
SELECT t.number, v.value FROM trials t JOIN trial_values v ON v.trial_id = t.trial_id WHERE v.objective = 0"""


def query(url: str, sql: str) -> list[Any]:
    """Return the rows of one statement.

    Args:
        url: `sqlite:///…` or `postgresql://…`.
        sql: The statement.
    """
    if url.startswith("sqlite:///"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)) as connection:
            return connection.execute(sql).fetchall()
    with psycopg.connect(url, connect_timeout=5) as server:
        return server.execute(sql.encode()).fetchall()


def check(url: str, runs: Path, trials: int) -> dict[str, list[str]]:
    """Return what is wrong, by what was checked; each list is empty when all is well.

    Args:
        url: The database, which holds one study.
        runs: The folder of its run folders.
        trials: How many launched trials were wanted.
    """
    rows = query(url, _TRIALS)
    return {
        f"{trials} final launches": _launches(rows, trials),
        "none is running": _running(url, rows),
        "Optuna has the same": _optuna(url, rows),
        "no result is lost": _lost(rows, runs),
        "no trial is repeated that had ended": _repeated(rows),
        "nothing is held": _held(url),
    }


def _launches(rows: list[Any], trials: int) -> list[str]:
    final = [row[0] for row in rows if row[1] is not None and row[1] not in _NOT_FINAL]
    return [] if len(final) == trials else [f"there are {len(final)}"]


def _running(url: str, rows: list[Any]) -> list[str]:
    ours = [f"trial {row[0]} is running" for row in rows if row[1] is None]
    theirs = query(url, "SELECT number, state FROM trials WHERE state IN ('RUNNING', 'WAITING')")
    return ours + [f"trial {number} is {state} for Optuna" for number, state in theirs]


def _optuna(url: str, rows: list[Any]) -> list[str]:
    states = dict(query(url, "SELECT number, state FROM trials"))
    values = dict(query(url, _TOLD_VALUES))
    found = []
    for number, outcome, value, *_ in rows:
        if states.get(number) != _TOLD.get(outcome, "FAIL"):
            found.append(f"trial {number} is {outcome}, for Optuna {states.get(number)}")
        elif outcome == "completed" and values.get(number) != value:
            found.append(f"trial {number} has {value!r}, for Optuna {values.get(number)!r}")
    strangers = set(states) - {row[0] for row in rows}
    found += [f"trial {n} is {states[n]}, and not ours" for n in strangers if states[n] != "FAIL"]
    counts = Counter(number for (number,) in query(url, "SELECT number FROM trials"))
    return found + [f"number {number} is there twice" for number, count in counts.items() if count > 1]


def _lost(rows: list[Any], runs: Path) -> list[str]:
    """Compare with run folders, both ways."""
    found = []
    by_folder = {row[3]: row for row in rows if row[3] is not None}
    for number, outcome, value, folder, *_ in rows:
        if outcome in _NOT_FINAL or outcome is None:
            continue
        result = None if folder is None else _result(Path(folder))
        if result is None or (result["outcome"], result["value"]) != (outcome, value):
            found.append(f"trial {number} is {outcome}, its folder says {result and result['outcome']}")
    for folder in runs.glob("*/*/"):
        result, row = _result(folder), by_folder.get(str(folder))
        if result is not None and result["outcome"] == "completed":
            kept = row is not None and (row[1] == "completed" or row[5])
            found += [] if kept else [f"the result in {folder.name} is nowhere"]
    return found


def _result(folder: Path) -> dict[str, Any] | None:
    for name in ("result.json", "report.json"):
        if (folder / name).exists():
            found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
            return found
    return None


def _repeated(rows: list[Any]) -> list[str]:
    """Check that what was interrupted was run again once, and nothing else was."""
    interrupted = {row[0] for row in rows if row[1] == "interrupted"}
    again = Counter(row[4] for row in rows if row[4] is not None)
    found = [f"trial {number} was run again {count} times" for number, count in again.items() if count > 1]
    found += [f"trial {number} had ended, and was run again" for number in again.keys() - interrupted]
    return found + [f"trial {number} was not run again" for number in interrupted - again.keys()]


def _held(url: str) -> list[str]:
    found = []
    for table in ("tuner_slot", "tuner_reservation"):
        found += [f"{table} holds {row}" for row in query(url, f"SELECT * FROM {table}")]
    living = query(url, "SELECT id, host, pid FROM tuner_driver WHERE ended_at IS NULL")
    return found + [f"driver {row} has not ended" for row in living]
