"""Looking into a database past our own code, and databases as the first revision left them."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from alembic import command
from sqlalchemy import Engine, inspect, text

from tuner.store import migrations
from tuner.store.engine import open_engine, parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuner.records import Owner

STUDY_0001 = {
    "workload": "w.py:W", "workload_reference": "/w.py:W", "workload_digest": "0" * 64, "target": "cpu",
    "budget_bytes": 2**40, "metric": "accuracy", "direction": "maximize", "single": False, "seed": 2**40,
    "settings": json.dumps({"trials": {"value": 30}}), "created_at": "2026-01-02 03:04:05.678901",
    "tuner_version": "0.1.0",
}  # fmt: skip
TRIAL_0001 = {
    "repeats": None, "audit": False, "params": json.dumps({"lr": 0.1, "name": "é 🙂", "limit": "inf"}),
    "verdict": "launch", "fits_probability": 0.1 + 0.2, "predicted_bytes": 2**40 + 1,
    "prediction": json.dumps({"mix": "plain", "seconds": "nan", "largest": [1, 2**40], "x": 1e308}),
    "outcome": "completed", "value": 5e-324, "peak_bytes": 2**39, "metrics": json.dumps({"loss": "-inf"}),
    "reason": None, "asked_at": "2026-01-02 03:04:06.000001",
}  # fmt: skip
METRICS_0001 = {"loss": 1e308, "nan": None, "inf": float("inf"), "low": float("-inf")}


@contextmanager
def opened(storage: str) -> Iterator[Engine]:
    engine = open_engine(parse_url(storage))
    try:
        yield engine
    finally:
        engine.dispose()


def upgraded(storage: str) -> bool:
    with opened(storage) as engine:
        return migrations.upgrade(engine)


def move(storage: str, revision: str) -> None:
    """Take a database to a revision, forwards or backwards."""
    config = migrations.alembic_config()
    with opened(storage) as engine, migrations.whole_transaction(engine) as connection:
        config.attributes["connection"] = connection
        backwards = revision < (migrations.current_revision_of(connection) or "")
        (command.downgrade if backwards else command.upgrade)(config, revision)


def sql(storage: str, *statements: str, **values: Any) -> list[tuple[Any, ...]]:
    """Run statements past our own code; return the last one's rows, if it has any."""
    rows: list[tuple[Any, ...]] = []
    with opened(storage) as engine, engine.begin() as connection:
        for statement in statements:
            result = connection.execute(text(statement), values)
            rows = [tuple(row) for row in result] if result.returns_rows else []
    return rows


def contents(storage: str) -> dict[str, object]:
    """Everything in a database: tables with their columns and rows, views with their text."""
    with opened(storage) as engine, engine.connect() as connection:
        seen = inspect(connection)
        found: dict[str, object] = {name: seen.get_view_definition(name) for name in seen.get_view_names()}
        for name in seen.get_table_names():
            rows = sorted(map(str, connection.execute(text(f'SELECT * FROM "{name}"'))))
            columns = [(column["name"], str(column["type"])) for column in seen.get_columns(name)]
            foreign = sorted(seen.get_foreign_keys(name), key=lambda key: str(key["name"]))
            found[name] = (columns, seen.get_indexes(name), foreign, rows)
    return found


def insert(storage: str, table: str, **values: Any) -> None:
    names = ", ".join(values)
    sql(
        storage,
        f"INSERT INTO {table} ({names}) VALUES ({', '.join(f':{name}' for name in values)})",
        **values,
    )


def fill_0001(storage: str, *, studies: int = 2, trials: int = 3) -> None:
    """Bring a database to the first revision, with rows in every table."""
    move(storage, "0001")
    for study in range(1, studies + 1):
        insert(storage, "tuner_study", **STUDY_0001, id=study, name=f"study {study} é🙂")
        for number in range(trials):
            trial = 100 * study + number
            insert(storage, "tuner_trial", **TRIAL_0001, id=trial, study_id=study, number=number)
            for name, value in METRICS_0001.items():
                insert(storage, "tuner_metric", trial_id=trial, epoch=1, name=name, value=value)


def own_0001(storage: str, study_id: int, owner: Owner, seen_at: str) -> None:
    """Let a process be the driver of a study, as the first revision kept it."""
    sql(
        storage,
        "UPDATE tuner_study SET owner_host = :host, owner_boot_id = :boot_id, owner_pid = :pid,"
        " owner_started = :started, owner_seen_at = :seen_at WHERE id = :id",
        **owner.to_json(), seen_at=seen_at, id=study_id,
    )  # fmt: skip
