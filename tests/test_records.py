"""Records survive JSON unchanged, and the outcomes are what the state diagram says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.records import (
    CATEGORIES,
    Band,
    EpochMetrics,
    Failure,
    LargeTensor,
    Outcome,
    PeakAt,
    Peaks,
    Prediction,
    TrialResult,
    Verdict,
)

SIZE = st.integers(0, 1 << 60)
MAYBE_SIZE = st.none() | SIZE
WORDS = st.text(max_size=20)
NUMBER = st.floats(allow_nan=False)  # ±inf is kept; NaN equals nothing, itself included
SECONDS = st.floats(0, 1e9)
JSON_VALUE = st.none() | st.booleans() | st.integers() | NUMBER | WORDS | st.lists(st.integers(), max_size=3)

BANDS = st.builds(Band, SIZE, SIZE, SIZE)
PREDICTIONS = st.builds(
    Prediction,
    allocated_bytes=MAYBE_SIZE,
    reserved_bytes=MAYBE_SIZE,
    device=st.none() | BANDS,
    required=st.none() | BANDS,
    fits_probability=st.none() | st.floats(0, 1),
    verdict=st.none() | st.sampled_from(Verdict),
    categories=st.dictionaries(st.sampled_from(CATEGORIES), SIZE),
    peak_at=st.none() | st.builds(PeakAt, WORDS, st.integers(1, 9), WORDS),
    largest=st.lists(st.builds(LargeTensor, SIZE, WORDS, WORDS, WORDS), max_size=4).map(tuple),
    growth_bytes=SIZE,
    method=st.sampled_from(["fake-tensors", "untraceable"]),
    assumptions=st.lists(WORDS, max_size=4).map(tuple),
    seconds=SECONDS,
)
METRICS = st.dictionaries(WORDS, NUMBER, max_size=4)
RESULTS = st.builds(
    TrialResult,
    outcome=st.sampled_from(Outcome),
    value=st.none() | NUMBER,
    metrics=METRICS,
    epochs=st.lists(st.builds(EpochMetrics, st.integers(1), METRICS, SECONDS, MAYBE_SIZE), max_size=3).map(
        tuple
    ),
    peaks=st.builds(
        Peaks, MAYBE_SIZE, st.none() | WORDS, MAYBE_SIZE, MAYBE_SIZE, MAYBE_SIZE, st.dictionaries(WORDS, SIZE)
    ),
    failure=st.none()
    | st.builds(
        Failure, WORDS, st.none() | WORDS, MAYBE_SIZE, MAYBE_SIZE, MAYBE_SIZE, MAYBE_SIZE, st.none() | WORDS
    ),
    seconds=SECONDS,
    environment=st.dictionaries(WORDS, JSON_VALUE, max_size=4),
    checkpoint=st.none() | WORDS,
    warnings=st.lists(WORDS, max_size=3).map(tuple),
)


def through_json(fields: dict[str, Any]) -> dict[str, Any]:
    """Return what another process reads."""
    received: dict[str, Any] = json.loads(json.dumps(fields))
    return received


@settings(deadline=None)
@given(PREDICTIONS)
def test_a_prediction_comes_back_equal_and_of_the_same_types(prediction: Prediction) -> None:
    back = Prediction.from_json(through_json(prediction.to_json()))

    assert back == prediction
    assert hash(back.largest) == hash(prediction.largest)  # tuples, not lists
    assert back.verdict is prediction.verdict  # the enum, not its text


@settings(deadline=None)
@given(PREDICTIONS)
def test_the_json_of_a_prediction_has_the_documented_names(prediction: Prediction) -> None:
    fields = through_json(prediction.to_json())

    assert {"device_bytes", "required_bytes", "allocated_bytes", "reserved_bytes"} <= set(fields)
    assert not {"device", "required"} & set(fields)
    if prediction.device is not None:
        expected = {"low": prediction.device.low, "expected": prediction.device.expected}
        assert fields["device_bytes"] == {**expected, "high": prediction.device.high}


@settings(deadline=None)
@given(RESULTS)
def test_a_trial_result_comes_back_equal_and_of_the_same_types(result: TrialResult) -> None:
    back = TrialResult.from_json(through_json(result.to_json()))

    assert back == result
    assert back.outcome is result.outcome
    assert all(type(epoch) is EpochMetrics for epoch in back.epochs)
    assert type(back.peaks) is Peaks


@settings(deadline=None)
@given(RESULTS)
def test_a_report_of_a_later_version_with_more_fields_can_be_read(result: TrialResult) -> None:
    fields = {**through_json(result.to_json()), "version": 2, "new_in_2": [1]}

    assert TrialResult.from_json(fields) == result


def test_the_shortest_report_is_filled_with_defaults() -> None:
    assert TrialResult.from_json({"outcome": "completed"}) == TrialResult(Outcome.COMPLETED)


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinite_objective_is_kept(value: float) -> None:
    back = TrialResult.from_json(through_json(TrialResult(Outcome.COMPLETED, value=value).to_json()))

    assert back.value == value


def test_an_outcome_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="exploded"):
        TrialResult.from_json({"outcome": "exploded"})


# From the table in ../shared/DESIGN.md ("told to Optuna"), not from the code: FAIL, and not queued again.
TOLD_FAIL = {"timed_out", "host_out_of_memory", "killed", "crashed", "error", "lost"}


@pytest.mark.parametrize("outcome", list(Outcome))
def test_what_counts_as_launched_failed_and_final(outcome: Outcome) -> None:
    assert outcome.failed == (outcome.value in TOLD_FAIL)
    assert outcome.launched == (outcome.value != "pruned_memory")
    assert outcome.final == (outcome.value != "interrupted")
