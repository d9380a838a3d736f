"""What the writer promises: repeatable calls, nothing left after a delete."""

from __future__ import annotations

import dataclasses
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import insert

from tuner.errors import SchemaError, StudyBusy, UsageError
from tuner.records import EpochMetrics, Failure, Outcome, Peaks, TrialResult
from tuner.store import schema
from tuner.store.engine import open_engine, parse_url
from tuner.store.opening import open_existing, reading, writing
from tuner.store.writer import Writer

if TYPE_CHECKING:
    from tests.store.conftest import Store

RESULT = TrialResult(
    outcome=Outcome.COMPLETED,
    value=0.75,
    metrics={"accuracy": 0.75},
    epochs=(EpochMetrics(1, {"accuracy": 0.5, "loss": 2.0}, 1.5, 10), EpochMetrics(2, {"accuracy": 0.75}, 3)),
    peaks=Peaks(1000, "VmHWM", 700, 800, 200, {"setup": 300, "train": 1000}),
    seconds=3.5,
    environment={"torch": "2.11", "threads": 2},
    checkpoint="weights.pt",
    warnings=("slow",),
)
TABLES = ("tuner_study", "tuner_trial", "tuner_metric")


def rows(store: Store) -> dict[str, list[Any]]:
    return {table: sorted(map(str, store.sql(f"SELECT * FROM {table}"))) for table in TABLES}


def test_a_study_is_created_once_and_never_changed(store: Store) -> None:
    first = store.study("one", seed=3, settings={"trials": {"value": 30}})
    before = rows(store)
    assert store.study("one", seed=4, budget_bytes=1) == first
    assert rows(store) == before
    study = store.reader.study("one")
    for name, value in dataclasses.asdict(store.new_study("one", seed=3)).items():
        assert name == "settings" or getattr(study, name) == value
    assert study.settings == {"trials": {"value": 30}}


def test_two_drivers_that_create_a_study_at_once_get_the_same_one(store: Store) -> None:
    engine = open_engine(store.url)
    values = {**dataclasses.asdict(store.new_study()), "created_at": datetime.now(UTC)}
    with ThreadPoolExecutor() as pool:
        with store.engine.begin() as connection:  # the first driver is just before its COMMIT
            key = connection.execute(insert(schema.study).values(**values)).inserted_primary_key
            second = pool.submit(Writer(engine).create_study, store.new_study())
            deadline = time.monotonic() + 10
            while store.url.drivername != "sqlite" and time.monotonic() < deadline:
                if connection.exec_driver_sql("SELECT 1 FROM pg_locks WHERE NOT granted").fetchall():
                    break  # the second waits for the first
                time.sleep(0.01)
        assert key is not None
        try:
            assert second.result() == key[0]
        finally:
            engine.dispose()


def test_names_that_only_look_alike_are_different_studies(store: Store) -> None:
    names = ["a", "A", "a ", "é", "e\u0301", "'; DROP TABLE tuner_trial; --", "../a", "<b>", "%", "a\nb"]
    ids = [store.study(name) for name in names]
    assert [study.name for study in store.reader.studies()] == names[::-1]
    assert [store.reader.study(name).id for name in names] == ids


def test_a_trial_is_added_once(store: Store) -> None:
    study_id, other_id = store.study(), store.study("other")
    first = store.trial(study_id, 0, lr=0.1)
    before = rows(store)
    assert store.trial(study_id, 0, lr=0.2) == first
    assert rows(store) == before
    assert len({first, store.trial(study_id, 1), store.trial(other_id, 0)}) == 3
    assert store.reader.trial(study_id, 0).is_running


def test_a_result_is_recorded_once(store: Store) -> None:
    study_id = store.study()
    trial_id = store.trial(study_id)
    assert store.writer.record_result(trial_id, RESULT)
    before = rows(store)
    trial, metrics = store.reader.trial(study_id, 0), store.reader.metrics(trial_id)
    assert store.writer.record_result(trial_id, RESULT)
    assert rows(store) == before
    again = dataclasses.replace(RESULT, value=0.1, epochs=(EpochMetrics(3, {"accuracy": 0.1}, 9.0),))
    for late in (again, TrialResult(Outcome.ERROR), TrialResult(Outcome.LOST, failure=Failure("late"))):
        assert not store.writer.record_result(trial_id, late)  # kept as a note, see test_drivers.py
    unchanged = dataclasses.replace(store.reader.trial(study_id, 0), late_result=None)
    assert (unchanged, store.reader.metrics(trial_id)) == (trial, metrics)
    assert TrialResult(
        Outcome(trial.outcome), trial.value, trial.metrics, RESULT.epochs,
        Peaks(trial.peak_bytes, trial.peak_source, trial.allocated_bytes, trial.reserved_bytes,
              trial.baseline_bytes, trial.phases),
        None, trial.seconds or 0, trial.environment, trial.checkpoint, tuple(trial.warnings),
    ) == RESULT  # fmt: skip
    unknown = (None, None, None)  # peaks within an epoch
    assert [dataclasses.astuple(metric) for metric in store.reader.metrics(trial_id)] == [
        (1, "accuracy", 0.5, 1.5, 10, *unknown), (1, "loss", 2.0, 1.5, 10, *unknown),
        (2, "accuracy", 0.75, 3.0, None, *unknown),
    ]  # fmt: skip


def test_trials_are_listed_by_number_counted_and_filtered_by_outcome(store: Store) -> None:
    study_id = store.study()
    for number, outcome in enumerate([Outcome.LOST, Outcome.ERROR, None, Outcome.LOST]):
        trial_id = store.trial(study_id, 3 - number)
        if outcome is not None:
            store.writer.record_result(trial_id, TrialResult(outcome, failure=Failure("why")))
    assert [(t.number, t.outcome) for t in store.reader.trials(study_id)] == [
        (0, "lost"), (1, "running"), (2, "error"), (3, "lost")
    ]  # fmt: skip
    assert store.reader.outcomes(study_id) == {"lost": 2, "error": 1, "running": 1}
    assert [t.number for t in store.reader.trials(study_id, ["running", "error"])] == [1, 2]
    with pytest.raises(UsageError, match="no trial 4"):
        store.reader.trial(study_id, 4)
    with pytest.raises(UsageError, match="no study 'x'") as caught:
        store.reader.study("x")
    assert caught.value.hint == "known studies: plain"


def test_deleting_a_study_takes_its_trials_and_metrics_and_nothing_else(store: Store) -> None:
    store.writer.record_result(store.trial(store.study("kept")), RESULT)
    before = rows(store)
    gone = store.study("gone")
    store.writer.record_result(store.trial(gone), RESULT)
    assert all(len(rows(store)[table]) == 2 * len(before[table]) for table in TABLES)
    with pytest.raises(StudyBusy, match="a driver works on study 'gone'"):
        store.writer.delete_study(gone)
    store.drivers.leave(store.driver(gone), "done")
    for _ in range(2):
        store.writer.delete_study(gone)
    assert rows(store) == before


def test_errors_of_other_files_pass_an_open_database_as_they_are(store: Store) -> None:
    for opening in (reading, writing):
        with pytest.raises(BrokenPipeError, match="theirs"), opening(store.url):
            raise BrokenPipeError(32, "theirs")


@pytest.mark.parametrize("storage", ["postgresql"], indirect=True)
def test_a_database_that_is_refused_is_closed_again(storage: str) -> None:
    with pytest.raises(SchemaError, match="holds no studies") as caught:
        open_existing(parse_url(storage))
    with psycopg.connect(storage) as connection:
        ours = "SELECT query FROM pg_stat_activity WHERE datname = current_database()"
        left = connection.execute(f"{ours} AND pid <> pg_backend_pid()").fetchall()
    del caught  # its traceback keeps a forgotten engine, and its open connection, until here
    gc.collect()
    assert left == []
