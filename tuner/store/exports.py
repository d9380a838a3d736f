"""Trials as flat rows for other programs: CSV, JSON, Parquet."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from datetime import datetime
from typing import IO, Any

from tuner.store.rows import StudyRecord, TrialRecord, to_storable

# What a row does not hold: it is large, of one trial, or shown as columns of its own.
_LEFT_OUT = (
    *("id", "study_id", "params", "metrics", "phases", "prediction", "timeline", "late_result"),
    *("environment", "failure", "attempts", "warnings"),
)
Row = dict[str, Any]


def rows_of(study: StudyRecord, trials: Sequence[TrialRecord]) -> list[Row]:
    """Return a row per trial with the same columns, each of one type; unknown is None."""
    rows = [_row(study, trial) for trial in trials]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _of_one_type([row.get(name) for row in rows]) for name in names}
    return [{name: columns[name][place] for name in names} for place in range(len(rows))]


def write(rows: Sequence[Row], file: IO[bytes], form: str) -> None:
    """Write rows as `csv`, `json` or `parquet`.

    Non-finite numbers are `inf`, `-inf` and `nan` in CSV, the same as text in JSON, which has no
    such numbers, and themselves in Parquet.
    """
    if form == "parquet":
        _write_parquet(rows, file)
    elif form == "json":
        plain = [{name: _plain(value) for name, value in row.items()} for row in rows]
        file.write(json.dumps(plain, indent=1, ensure_ascii=False).encode() + b"\n")
    else:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(list(rows[0]) if rows else [])
        writer.writerows([[_cell(value) for value in row.values()] for row in rows])
        file.write(text.getvalue().encode())


def _write_parquet(rows: Sequence[Row], file: IO[bytes]) -> None:
    import pyarrow as pa  # a quarter of a second, which other forms save
    import pyarrow.parquet as pq

    names = list(rows[0]) if rows else []
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in names}), file)


def _row(study: StudyRecord, trial: TrialRecord) -> Row:
    fields = {name: value for name, value in vars(trial).items() if name not in _LEFT_OUT}
    number = fields.pop("number")
    return {
        "study": study.name,
        "number": number,
        **fields,
        "budget_bytes": study.budget_bytes,
        **{f"phase.{name}_bytes": size for name, size in trial.phases.items()},
        **{f"param.{name}": value for name, value in trial.params_by_name.items()},
        **{f"metric.{name}": value for name, value in trial.metrics.items()},
    }


def _of_one_type(values: list[Any]) -> list[Any]:
    """Return a column's values as one type: numbers, switches, moments, else text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and float in kinds:
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and kinds <= {int, float, bool, str, datetime}:
        return values
    return [
        value if value is None or isinstance(value, str) else json.dumps(to_storable(value))
        for value in values
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    return "" if value is None else value.isoformat() if isinstance(value, datetime) else value
