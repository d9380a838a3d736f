"""What the pages read, cached for a few seconds so that a running study stays live."""

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

FRESH_SECONDS = 3
_LOCKED_AFTER_SECONDS = 3.0
MIB = 1 << 20
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
        _engine(text)
    return Database(text, describe_url(url))


@st.cache_resource(show_spinner=False)
def _engine(url_text: str) -> Engine:
    return open_existing(parse_url(url_text), busy_timeout_seconds=_LOCKED_AFTER_SECONDS)


def _reader(database: Database) -> Reader:
    return Reader(_engine(database.url_text))


def load_studies(database: Database) -> list[StudyRecord]:
    """Return all studies, newest first."""
    with store_errors(parse_url(database.url_text)):
        return _studies(database.url_text)


@st.cache_data(ttl=FRESH_SECONDS, show_spinner=False)
def _studies(url_text: str) -> list[StudyRecord]:
    return Reader(_engine(url_text)).studies()


def load_trials(database: Database, study: StudyRecord) -> tuple[list[TrialRecord], list[int]]:
    """Return a study's trials, and the numbers of those on its front."""
    with store_errors(parse_url(database.url_text)):
        return _trials(database.url_text, study.id, study.created_at.isoformat())


@st.cache_data(ttl=FRESH_SECONDS, show_spinner=False)
def _trials(url_text: str, study_id: int, created_at: str) -> tuple[list[TrialRecord], list[int]]:
    # `created_at` is part of the key: a study that was deleted and made anew may have the same id.
    reader = Reader(_engine(url_text))
    return reader.trials(study_id), [trial.number for trial in reader.front(study_id)]


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
    """Return trials as a table: a column per parameter, sizes in MiB, one type per column."""
    on_front = set(front)
    metric = f"metric {study.metric}" if study.metric in _COLUMNS else study.metric
    taken = {*_COLUMNS, metric}
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
            **{f"param {name}" if name in taken else name: value for name, value in trial.params.items()},
            "reason": trial.reason or "",
        }
        for trial in trials
    ]
    table = pd.DataFrame(rows)
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
