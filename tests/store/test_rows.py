"""What is stored comes back: the same bits, the same text, plain numbers, on both databases."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.records import (
    Band,
    EpochMetrics,
    Failure,
    LargeTensor,
    Outcome,
    PeakAt,
    Prediction,
    TrialResult,
    Verdict,
)
from tuner.store.rows import from_storable, to_storable

if TYPE_CHECKING:
    from tests.store.conftest import Store

# optuna issues 3206 and 3238: an inf refused by one database, and large values turned into inf.
VALUES = [math.inf, -math.inf, 1e39, -1e39, 3.4e38, 1e308, -1.7976931348623157e308, 5e-324, 0.1, 2.0**53 + 2]
PREDICTION = Prediction(
    allocated_bytes=2**40,
    reserved_bytes=2**40 + 1,
    device=Band(1, 2, 2**62),
    required=Band(3, 4, 5),
    fits_probability=0.1 + 0.2,
    verdict=Verdict.TRY,
    categories={"parameters": 7},
    peak_at=PeakAt("backward", 2, "layers.0"),
    largest=(LargeTensor(8, "activations", "layers.0", "aten::relu"),),
    growth_bytes=9,
    assumptions=("a sentence", "é €"),
    seconds=1 / 3,
)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def distinct_characters(count: int) -> str:
    """Text that neither compresses nor fits one byte a character: four bytes each in UTF-8."""
    return "".join(chr(0x20000 + 7 * i) for i in range(count))


def test_doubles_come_back_bit_equal(store: Store) -> None:
    study_id = store.study()
    for number, value in enumerate(VALUES):
        epoch = EpochMetrics(1, {"loss": value}, seconds=value)
        result = TrialResult(Outcome.COMPLETED, value, {"loss": value}, (epoch,), seconds=value)
        store.writer.record_result(store.trial(study_id, number), result)
    trials = store.reader.trials(study_id)
    metrics = [store.reader.metrics(trial.id)[0] for trial in trials]
    for got in (
        [t.value for t in trials],
        [t.metrics["loss"] for t in trials],
        [t.seconds for t in trials],
        [m.value for m in metrics],
        [m.seconds for m in metrics],
        [value for (value,) in store.sql("SELECT value FROM tuner_trials ORDER BY number")],
    ):
        assert [bits(value) for value in got] == [bits(value) for value in VALUES]


def test_nan_is_null_as_a_metric_and_as_a_value(store: Store) -> None:
    study_id = store.study()
    epochs = (EpochMetrics(1, {"loss": math.nan, "other": 1.0}, 1.0),)
    result = TrialResult(Outcome.ERROR, value=math.nan, metrics={"loss": math.nan}, epochs=epochs)
    trial_id = store.trial(study_id)
    store.writer.record_result(trial_id, result)
    assert store.sql("SELECT value IS NULL FROM tuner_metric ORDER BY name") == [(True,), (False,)]
    assert [metric.value for metric in store.reader.metrics(trial_id)] == [None, 1.0]
    assert math.isnan(store.reader.trial(study_id, 0).metrics["loss"])
    assert store.sql("SELECT value IS NULL FROM tuner_trial") == [(True,)]


def test_numbers_of_numpy_and_torch_are_stored_as_plain_numbers(store: Store) -> None:
    given_values: dict[str, Any] = {
        "double": np.float64(0.1), "single": np.float32(0.1), "count": np.int64(2**53 + 1),
        "small": np.uint8(255), "flag": np.bool_(1), "name": np.str_("adam"), "tensor": torch.tensor(0.5),
        "inf": np.float32("inf"), "list": [np.int32(1), (np.float16(0.5),)], "none": None,
    }  # fmt: skip
    plain = {
        "double": 0.1, "single": 0.10000000149011612, "count": 2**53 + 1, "small": 255, "flag": True,
        "name": "adam", "tensor": 0.5, "inf": "inf", "list": [1, [0.5]], "none": None,
    }  # fmt: skip
    study_id = store.study(settings=given_values)
    store.trial(study_id, 0, **given_values)
    for column, table in (("params", "tuner_trial"), ("settings", "tuner_study")):
        ((stored,),) = store.sql(f"SELECT CAST({column} AS TEXT) FROM {table}")
        assert json.dumps(json.loads(stored), sort_keys=True) == json.dumps(plain, sort_keys=True)
    params = store.reader.trial(study_id, 0).params
    assert {name: type(value) for name, value in params.items()} == {n: type(v) for n, v in plain.items()}


def test_a_prediction_of_100_kb_comes_back_equal(store: Store) -> None:
    large = dataclasses.replace(PREDICTION, assumptions=tuple(f"{n}: é{'x' * 100}" for n in range(1000)))
    assert len(json.dumps(large.to_json())) > 100_000
    study_id = store.study()
    store.writer.record_prediction(store.trial(study_id, 0), large)
    store.writer.record_prediction(store.trial(study_id, 1), PREDICTION)
    untraced = Prediction(None, None, None, None, None, None, method="untraceable")
    store.writer.record_prediction(store.trial(study_id, 2), untraced)
    trials = [store.reader.trial(study_id, number) for number in range(3)]
    assert [trial.prediction for trial in trials] == [large, PREDICTION, untraced]
    first = trials[0]
    assert (first.predicted_low_bytes, first.predicted_bytes, first.predicted_high_bytes) == (1, 2, 2**62)
    assert (first.verdict, first.fits_probability) == ("try", 0.1 + 0.2)
    assert first.predicted_allocated_bytes == 2**40
    assert store.reader.trials(study_id)[0].prediction is None  # lists leave it out


def test_a_study_name_of_512_unicode_characters_comes_back(store: Store) -> None:
    name = distinct_characters(512)
    study_id = store.study(name, metric=name, device_name=name)
    study = store.reader.study(name)
    assert (study.id, study.name, study.metric, study.device_name) == (study_id, name, name, name)
    assert store.reader.find_study(name[:-1]) is None


def test_a_reason_of_1_mb_comes_back(store: Store) -> None:
    study_id, reason = store.study(), "é\t\n'\"\\ " * 130_000
    assert len(reason.encode()) > 1_000_000
    failure = Failure(reason, "forward", 1, 2, 3, 4, traceback=reason)
    store.writer.record_result(store.trial(study_id, 0), TrialResult(Outcome.ERROR, failure=failure))
    store.writer.record_result(store.trial(study_id, 1), TrialResult(Outcome.LOST, failure=Failure(reason)))
    assert [trial.reason == reason for trial in store.reader.trials(study_id)] == [True, True]
    assert Failure(**(store.reader.trial(study_id, 0).failure or {})) == failure


@pytest.mark.parametrize("character", ["\x00", "\udcff"], ids=["NUL", "surrogate"])
def test_a_reason_with_a_character_that_databases_refuse_still_settles_the_trial(
    store: Store, character: str
) -> None:
    study_id, reason = store.study(), f"ValueError: before{character}after"
    failure = Failure(reason, traceback=reason)
    result = TrialResult(Outcome.ERROR, failure=failure, warnings=(reason,), environment={"note": reason})
    store.writer.record_result(store.trial(study_id, 0), result)
    store.writer.record_result(store.trial(study_id, 1), TrialResult(Outcome.LOST, failure=Failure(reason)))
    trials = store.reader.trials(study_id)
    assert [trial.outcome for trial in trials] == ["error", "lost"]
    assert all("before" in (trial.reason or "") and "after" in (trial.reason or "") for trial in trials)


@pytest.mark.parametrize("storage", ["postgresql"], indirect=True)
def test_moments_are_in_utc_whatever_the_servers_time_zone(store: Store) -> None:
    before = datetime.now(UTC)
    store.study()
    store.sql(f"ALTER DATABASE {store.url.database} SET timezone TO 'Asia/Kathmandu'")
    store.engine.dispose()
    created_at = store.reader.study("plain").created_at
    assert store.sql("SHOW timezone") == [("Asia/Kathmandu",)]
    assert before <= created_at <= datetime.now(UTC)
    assert created_at.utcoffset() == timedelta(0)


def test_launch_and_checkpoint_are_noted_and_forgotten(store: Store) -> None:
    study_id = store.study(budget_bytes=2**62, seed=2**62)
    driver_id = store.driver(study_id)
    trial_id = store.writer.add_trial(study_id, 0, {}, driver_id=driver_id, seed=2**62, repeats=4)
    store.writer.record_launch(trial_id, run_folder="tuner-runs/é/0", reservation_bytes=2**62)
    store.writer.record_result(trial_id, TrialResult(Outcome.COMPLETED, 1.0, checkpoint="weights.pt"))
    trial = store.reader.trial(study_id, 0)
    assert (trial.seed, trial.repeats, trial.checkpoint) == (2**62, 4, "weights.pt")
    assert (trial.run_folder, trial.reservation_bytes) == ("tuner-runs/é/0", 2**62)
    assert trial.started_at is not None
    assert trial.ended_at is not None
    assert trial.asked_at <= trial.started_at <= trial.ended_at
    store.writer.forget_checkpoint(trial_id)
    assert store.reader.trial(study_id, 0) == dataclasses.replace(trial, checkpoint=None)
    store.writer.record_result(store.trial(study_id, 1), TrialResult(Outcome.PRUNED_MEMORY, seconds=5.0))
    assert store.reader.trial(study_id, 1).seconds is None  # nothing ran


TEXT = st.text(max_size=8).filter(lambda text: text not in ("inf", "-inf", "nan"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
KEYS = st.text(max_size=4)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(KEYS, SCALARS | st.dictionaries(KEYS, SCALARS, max_size=3), max_size=5))
def test_dictionaries_survive_strict_json(value: dict[str, Any]) -> None:
    strict = json.dumps(to_storable(value), allow_nan=False)
    assert from_storable(json.loads(strict)) == value


@settings(deadline=None)
@given(st.floats())
def test_every_double_survives_strict_json(value: float) -> None:
    back = from_storable(json.loads(json.dumps(to_storable({"x": value}), allow_nan=False)))["x"]
    assert bits(back) == bits(value) or (math.isnan(back) and math.isnan(value))
