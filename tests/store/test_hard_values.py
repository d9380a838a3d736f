"""Values that databases and drivers trip over, on our side and Optuna's (cases D29, D31)."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from optuna.trial import TrialState

from tuner.records import EpochMetrics, Failure, Outcome, Peaks, TrialResult
from tuner.search.optuna_storage import optuna_storage
from tuner.search.optuna_study import OptunaStudy
from tuner.store.engine import parse_url
from tuner.store.schema import NAME_LIMIT
from tuner.units import GIB

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

    from tests.store.conftest import Store

FINITE = [1e39, -1e39, 3.4e38, 1e308, 5e-324, -5e-324, 0.1]  # SQLite keeps no sign of zero
VALUES = [math.inf, -math.inf, *FINITE]
BUDGET_BYTES = 2**40


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def told(storage: str, values: list[float], *, single: bool) -> list[FrozenTrial]:
    """Tell Optuna values of completed trials; return the trials as another connection reads them."""
    url = parse_url(storage)
    study = OptunaStudy(url, "hard", maximize=True, single=single, seed=1, budget_bytes=GIB)
    for value in values:
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        if single:
            trial.report(value, 1)
        study.tell(
            trial.number, Outcome.COMPLETED, value=value, memory_bytes=2**39, budget_bytes=BUDGET_BYTES
        )
    study.close()
    with optuna_storage(url) as theirs:
        return theirs.get_all_trials(theirs.get_study_id_from_name("hard"))


@pytest.mark.parametrize("single", [True, False])
def test_what_optuna_is_told_comes_back_bit_equal(storage: str, single: bool) -> None:
    trials = told(storage, VALUES, single=single)
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * len(VALUES)
    assert [bits(trial.values[0]) for trial in trials] == [bits(value) for value in VALUES]
    assert all(trial.values[1:] == ([] if single else [2.0**39]) for trial in trials)
    if single:
        reported = [trial.intermediate_values[1] for trial in trials]
        assert [bits(value) for value in reported] == [bits(value) for value in VALUES]


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_what_is_not_finite_is_never_on_the_front(store: Store, direction: str) -> None:
    study_id = store.study(direction=direction, budget_bytes=BUDGET_BYTES)
    values = [*VALUES, math.nan]
    for number, value in enumerate(values):
        result = TrialResult(Outcome.COMPLETED, value, peaks=Peaks(device_bytes=100 - number))
        store.writer.record_result(store.trial(study_id, number), result)
    finite = [value for value in values if math.isfinite(value)]
    front = [trial.value for trial in store.reader.front(study_id)]
    assert all(value is not None and math.isfinite(value) for value in front)
    assert (max if direction == "maximize" else min)(finite) in front


def test_numbers_of_numpy_and_tensors_are_plain_numbers_everywhere(store: Store) -> None:
    study_id = store.study()
    params: dict[str, Any] = {"lr": np.float32(0.5), "width": np.int64(2**40), "bias": np.bool_(1)}
    params["scale"] = torch.tensor(0.25)
    metrics: dict[str, Any] = {"accuracy": np.float32(0.5), "count": np.int64(3), "loss": torch.tensor(0.25)}
    trial_id = store.trial(study_id, 0, **params)
    value: Any = np.float32(0.5)
    epoch = EpochMetrics(1, metrics, seconds=1.5)
    store.writer.record_result(trial_id, TrialResult(Outcome.COMPLETED, value, metrics, (epoch,)))
    trial = store.reader.trial(study_id, 0)
    assert json.dumps(trial.params) == '{"lr": 0.5, "width": 1099511627776, "bias": true, "scale": 0.25}'
    assert (trial.value, type(trial.value)) == (0.5, float)
    assert json.dumps(trial.metrics) == '{"accuracy": 0.5, "count": 3, "loss": 0.25}'
    assert {metric.name: metric.value for metric in store.reader.metrics(trial_id)} == {
        "accuracy": 0.5, "count": 3.0, "loss": 0.25
    }  # fmt: skip


NAMES = {
    "letters": "n" * NAME_LIMIT,
    "four bytes each": "𠀀" * NAME_LIMIT,
    "emoji of several characters": "👩‍👩‍👧‍👦" * (NAME_LIMIT // 7),
    "combining": "e\u0301" * (NAME_LIMIT // 2),
    "right to left": "دراسة \u202bעברית" * 30,
    "quotes": "'; DROP TABLE tuner_trial; -- \"%s{}\\",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_name_of_any_script_is_the_same_study_on_both_sides(store: Store, name: str) -> None:
    study_id = store.study(name)
    for _ in range(2):  # created, and found again
        study = OptunaStudy(store.url, name, maximize=True, single=True, seed=None, budget_bytes=GIB)
        study.ask()
        study.close()
    assert store.reader.study(name).id == study_id
    with optuna_storage(store.url) as theirs:
        assert [study.study_name for study in theirs.get_all_studies()] == [name]
        assert len(theirs.get_all_trials(theirs.get_study_id_from_name(name))) == 2


def test_long_reports_and_errors_are_stored_whole_for_hundreds_of_trials(store: Store) -> None:
    """100 kB with each trial, 1 MB of error text at the end: no commit fails at trial 300."""
    study_id, report = store.study(), {"lines": ["é" * 100] * 500}
    assert len(json.dumps(report, ensure_ascii=False).encode()) > 100_000
    for number in range(300):
        result = TrialResult(Outcome.COMPLETED, float(number), environment=report)
        store.writer.record_result(store.trial(study_id, number), result)
    reason = "x" * 1_000_000
    failure = Failure(reason, traceback=reason)
    store.writer.record_result(store.trial(study_id, 300), TrialResult(Outcome.ERROR, failure=failure))
    trials = store.reader.trials(study_id)
    assert [trial.environment == report for trial in trials] == [True] * 300 + [False]
    assert trials[300].reason == reason
