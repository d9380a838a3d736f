"""What the pages read of studies and of one trial, and trials as a table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from tuner.execution.run_folder import RunFolder
from tuner.store.engine import DEFAULT_URL, Engine, describe_url, parse_url, store_errors
from tuner.store.opening import open_existing
from tuner.store.reader import Reader
from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord
from tuner.units import MIB

FRESH_SECONDS = 3
_LOCKED_AFTER_SECONDS = 3.0
# Columns of the table of trials; a metric or a parameter of such a name is shown under another.
_COLUMNS = frozenset(
    {"trial", "outcome", "on front", "peak MiB", "predicted MiB", "allocated MiB", "seconds", "reason"}
)


@dataclass(frozen=True)
class Database:
    """An open database; `place` may be shown, the URL may not."""

    url_text: str
    place: str


def open_database() -> Database:
    """Return the database that TUNER_STORAGE names.

    Raises:
        StoreError: It is not there, outdated, locked, or cannot be used.
    """
    text = os.environ.get("TUNER_STORAGE", DEFAULT_URL)
    url = parse_url(text)
    with store_errors(url):
        engine_of(text)
    return Database(text, describe_url(url))


@st.cache_resource(show_spinner=False)
def engine_of(url_text: str) -> Engine:
    """Return the engine of a database that was opened before; it reads only."""
    return open_existing(parse_url(url_text), busy_timeout_seconds=_LOCKED_AFTER_SECONDS)


def _reader(database: Database) -> Reader:
    return Reader(engine_of(database.url_text))


def load_studies(database: Database) -> list[StudyRecord]:
    """Return all studies, newest first."""
    with store_errors(parse_url(database.url_text)):
        return _studies(database.url_text)


@st.cache_data(ttl=FRESH_SECONDS, show_spinner=False)
def _studies(url_text: str) -> list[StudyRecord]:
    return Reader(engine_of(url_text)).studies()


def load_trial(database: Database, study: StudyRecord, number: int) -> tuple[TrialRecord, list[MetricRecord]]:
    """Return one trial with its prediction, and its metrics per epoch."""
    with store_errors(parse_url(database.url_text)):
        reader = _reader(database)
        trial = reader.trial(study.id, number)
        return trial, reader.metrics(trial.id)


def load_log(trial: TrialRecord) -> str:
    """Return the end of a trial's log, empty where it is not on this host."""
    if trial.run_folder is None:
        return ""
    try:
        return RunFolder(Path(trial.run_folder)).log_tail()
    except OSError:
        return ""


def table_of(study: StudyRecord, trials: list[TrialRecord], front: list[int]) -> pd.DataFrame:
    """Return trials as a table: a column per parameter, sizes in MiB, one type per column.

    `attrs["params"]` names the columns of parameters.
    """
    on_front = set(front)
    metric = f"metric {study.metric}" if study.metric in _COLUMNS else study.metric
    taken = {*_COLUMNS, metric}

    def shown_as(name: str) -> str:
        return f"param {name}" if name in taken else name

    rows: list[dict[str, Any]] = [
        {
            "trial": trial.number,
            "outcome": trial.outcome,
            "on front": trial.number in on_front,
            metric: trial.value,
            "peak MiB": _mib(trial.peak_bytes),
            "predicted MiB": _mib(trial.predicted_bytes),
            "allocated MiB": _mib(trial.allocated_bytes),
            "seconds": trial.seconds,
            **{shown_as(name): value for name, value in trial.params_by_name.items()},
            "reason": trial.reason or "",
        }
        for trial in trials
    ]
    always = ["trial", "outcome", "on front", metric, "peak MiB", "predicted MiB", "allocated MiB", "seconds"]
    table = pd.DataFrame(rows, columns=None if rows else [*always, "reason"])
    table.attrs["params"] = list(
        dict.fromkeys(shown_as(name) for trial in trials for name in trial.params_by_name)
    )
    for column in table.columns:
        if table[column].dtype == object and column not in ("outcome", "reason"):
            numbers = pd.to_numeric(table[column], errors="coerce")
            mixed = numbers.isna() & table[column].notna()
            table[column] = table[column].map(_as_text) if mixed.any() else numbers
    return table


def _as_text(value: Any) -> str | None:
    return None if value is None or value != value else str(value)


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB
