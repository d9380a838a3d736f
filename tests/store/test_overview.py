"""Columns of a whole study against the records that they are made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.app import data
from tuner.errors import UsageError
from tuner.store import overview
from tuner.store.engine import parse_url
from tuner.store.insights import Insights
from tuner.store.opening import reading
from tuner.store.overview import ORDERS, Overview, TrialFilter
from tuner.store.reader import Reader


@pytest.fixture
def reader(storage: str) -> Iterator[Reader]:
    data.fill(storage)
    data.fill(storage, name="another", numbers=range(3))
    with reading(parse_url(storage)) as opened:
        yield opened


@pytest.fixture
def study_id(reader: Reader) -> int:
    return reader.study("digits").id


def test_points_are_the_trials(reader: Reader, study_id: int) -> None:
    trials = reader.trials(study_id)
    table = Overview(reader.engine).points(study_id, param="batch_size")
    assert (len(table), table.total) == (data.TRIALS, data.TRIALS)
    assert table.columns["number"] == [trial.number for trial in trials]
    assert table.columns["outcome"] == [trial.outcome for trial in trials]
    assert table.columns["memory_bytes"] == [trial.peak_bytes for trial in trials]
    assert table.columns["predicted_low_bytes"] == [trial.predicted_low_bytes for trial in trials]
    assert table.columns["param"] == [trial.params.get("batch_size") for trial in trials]
    assert Counter(table.columns["outcome"]) == reader.outcomes(study_id)


def test_thinning_leaves_one_trial_per_cell_and_the_front_whole(
    reader: Reader, study_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "_CELLS", 3)
    table = Overview(reader.engine).points(study_id, most=10)
    drawn = Counter(table.columns["outcome"])
    assert table.total == data.TRIALS
    assert len(table) < data.TRIALS
    assert max(drawn.values()) <= 9
    assert set(drawn) == set(reader.outcomes(study_id))
    front = Overview(reader.engine).front(study_id, budget_bytes=data.BUDGET_MIB * data.MIB)
    assert front.columns["number"] == data.FRONT


def test_the_front_of_any_budget_is_that_of_brute_force(reader: Reader, study_id: int) -> None:
    done = [*data.WITHIN, *data.OVER]
    for budget_mib in (50, 300, 500, 1024, 5000):
        fitting = [n for n in done if data.peak_mib(n) <= budget_mib]
        expected = [
            n
            for n in fitting
            if not any(
                data.value(m) >= data.value(n)
                and data.peak_mib(m) <= data.peak_mib(n)
                and (data.value(m), data.peak_mib(m)) != (data.value(n), data.peak_mib(n))
                for m in fitting
            )
        ]
        found = Overview(reader.engine).front(study_id, budget_bytes=budget_mib * data.MIB)
        assert found.columns["number"] == expected, budget_mib


def test_filters_orders_and_pages(reader: Reader, study_id: int) -> None:
    reads = Overview(reader.engine)

    def numbers(wanted: TrialFilter, **how: object) -> list[int]:
        found = [trial.number for trial in reads.trials(study_id, wanted, **how)]  # type: ignore[arg-type]
        if "limit" not in how:
            assert len(found) == reads.count(study_id, wanted)
        return found

    assert numbers(TrialFilter()) == list(range(data.TRIALS))
    assert numbers(TrialFilter(outcomes=("running", "error"))) == [*data.ERRORS, data.RUNNING]
    assert numbers(TrialFilter(search="ADAM")) == [n for n in range(data.TRIALS) if n % 2]
    assert numbers(TrialFilter(search="%")) == []
    assert numbers(TrialFilter(only_front=True)) == data.FRONT
    assert numbers(TrialFilter(numbers=(3, 5, 999))) == [3, 5]
    assert numbers(TrialFilter(), limit=3, offset=2) == [2, 3, 4]
    by_peak = numbers(TrialFilter(), order="peak_bytes", descending=True)
    assert by_peak[0] == data.OUT_OF_MEMORY[-1]
    assert set(by_peak[-8:]) == {*data.PRUNED, data.RUNNING}, "what is unknown comes last"
    with pytest.raises(UsageError, match="cannot be ordered"):
        reads.trials(study_id, TrialFilter(), order="id; DROP TABLE tuner_trial")
    assert len(ORDERS) == 5


def test_metrics_at_an_epoch_or_the_last(reader: Reader, study_id: int) -> None:
    reads = Overview(reader.engine)
    last = reads.metrics_at(study_id, (0, 1, data.RUNNING), None)
    assert last == {"accuracy": {0: data.value(0), 1: data.value(1)}}
    assert reads.metrics_at(study_id, (0,), 1) == {"accuracy": {0: data.value(0)}}
    assert reads.metrics_at(study_id, (0,), 3) == {}


def test_a_stamp_changes_with_its_study_alone(reader: Reader, study_id: int, storage: str) -> None:
    reads = Overview(reader.engine)
    before = reads.stamp(study_id)
    data.grow(storage, "another", [5])
    assert reads.stamp(study_id) == before
    data.grow(storage, "digits", [data.TRIALS + 1])
    assert reads.stamp(study_id) != before


def test_rows_are_spread_evenly_when_there_are_too_many(reader: Reader, study_id: int) -> None:
    insights = Insights(reader.engine)
    whole = insights.completed(study_id)
    assert (len(whole), whole.total) == (data.COMPLETED, data.COMPLETED)
    some = insights.completed(study_id, most=10)
    assert (len(some), some.total) == (9, data.COMPLETED)
    assert some.columns["number"] == whole.columns["number"][::3]
    assert insights.rejections(study_id).columns == {"number": [], "params": [], "predicted_bytes": []}


def test_savings_and_quality(reader: Reader, study_id: int) -> None:
    insights = Insights(reader.engine)
    savings = insights.savings(study_id)
    assert (savings.pruned, savings.audits, savings.tries) == (len(data.PRUNED), 0, 0)
    assert savings.median_seconds == 12.5
    quality = insights.quality(study_id).columns
    assert quality["trials"] == [data.COMPLETED]
    assert quality["coverage"] == [0.0]
    over_time = insights.error_over_time(study_id).columns
    assert sum(over_time["trials"]) == data.COMPLETED
