"""The views: every column is documented, every documented query runs, figures agree with plain Python."""

from __future__ import annotations

import pytest
from sqlalchemy import inspect, text

from docs.generate import QUERIES
from tests.app import data
from tests.store.conftest import Store
from tuner.store.engine import parse_url
from tuner.store.views import SAYS, VIEWS, meaning_of, unit_of


@pytest.fixture
def filled(storage: str) -> Store:
    data.fill(storage, "digits_cnn")
    return Store(parse_url(storage))


def columns(store: Store, view: str) -> list[str]:
    return [column["name"] for column in inspect(store.engine).get_columns(view)]


def test_every_column_has_a_meaning(store: Store) -> None:
    assert set(SAYS) == set(VIEWS)
    nameless = [(view, name) for view in VIEWS for name in columns(store, view) if not meaning_of(view, name)]
    assert nameless == []
    assert {name: unit_of(name) for name in ("peak_bytes", "seconds", "ended_at", "error", "number")} == {
        "peak_bytes": "bytes",
        "seconds": "seconds",
        "ended_at": "UTC",
        "error": "share",
        "number": "",
    }


def test_documented_queries_run_on_both_databases(filled: Store) -> None:
    assert len(QUERIES) == 10
    found = {title: filled.sql(query) for title, query in QUERIES.items()}
    filled.engine.dispose()
    assert len(found["All trials, smallest first"]) == data.TRIALS
    assert [row[0] for row in found["The front"]] == data.FRONT
    best = max(n for n in data.FRONT if data.peak_mib(n) <= 512)
    assert found["The best trial in half a gibibyte"][0][0] == best


def test_predictions_compare_what_ran_to_its_end(filled: Store) -> None:
    rows = filled.sql("SELECT number, error, in_band, outcome FROM tuner_predictions ORDER BY number")
    filled.engine.dispose()
    assert [row[0] for row in rows] == list(range(data.TRIALS))
    for number, error, in_band, outcome in rows:
        if outcome != "completed":
            assert (error, in_band) == (None, None)
        else:
            assert error == pytest.approx(data.predicted_mib(number) / data.peak_mib(number) - 1)
            assert not in_band  # predicted 7 MiB more than measured, with a band of 1 MiB


def test_memory_and_devices_have_a_row_per_phase_and_launch(filled: Store) -> None:
    phases = filled.sql("SELECT number, phase, phase_bytes FROM tuner_memory WHERE outcome = 'completed'")
    launched = filled.sql("SELECT count(*) FROM tuner_devices")
    filled.engine.dispose()
    assert len(phases) == data.COMPLETED
    assert {row[1:] for row in phases} == {("train", 90 * data.MIB)}
    assert launched == [(data.TRIALS - len(data.PRUNED),)]


def test_a_front_of_many_points_is_found_in_one_pass(store: Store) -> None:
    """The number of steps grows with the points, not with their square: SQLite counts them."""
    count = 3_000
    study_id = store.study()
    driver_id = store.driver(study_id)
    rows = [
        {
            "s": study_id,
            "d": driver_id,
            "n": n,
            "v": (n * 7919 % count) / count,
            "p": 1000 + n * 104_729 % count,
        }
        for n in range(count)
    ]
    with store.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO tuner_trial (study_id, driver_id, number, audit, params, outcome, value,"
                " peak_bytes, asked_at)"
                " VALUES (:s, :d, :n, :audit, '{}', 'completed', :v, :p, CURRENT_TIMESTAMP)"
            ),
            [{**row, "audit": False} for row in rows],
        )
    found = {row[0] for row in store.sql("SELECT number FROM tuner_pareto")}
    expected = {
        row["n"]
        for row in rows
        if not any(
            (other["p"] <= row["p"] and other["v"] > row["v"])
            or (other["p"] < row["p"] and other["v"] >= row["v"])
            for other in rows
        )
    }
    assert found == expected
    if store.engine.dialect.name == "sqlite":
        with store.engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            steps: list[int] = []
            driver.set_progress_handler(lambda: steps.append(1) and None, 1000)
            driver.execute("SELECT count(*) FROM tuner_pareto").fetchall()
            driver.set_progress_handler(None, 0)
        assert len(steps) * 1000 < 1000 * count, (
            "a window that starts anew for each row takes 30 times as many"
        )
