"""What counts as the same result; the figures are made up, the tolerances are the documented ones."""

from __future__ import annotations

import dataclasses
import math
from datetime import UTC, datetime
from typing import Any

import pytest

from tuner.records import EpochMetrics, Outcome, Peaks, TrialResult
from tuner.search.agreement import RESIDENT_BYTES, Comparison, compare
from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord
from tuner.units import MIB

PEAK = 1000 * MIB
EPOCHS = [0.5, 0.75, 0.7]


def record(kind: type[Any], **known: Any) -> Any:
    """Return a record with the given fields; those that play no part are None."""
    return kind(**{**{field.name: None for field in dataclasses.fields(kind)}, **known})


STUDY: StudyRecord = record(StudyRecord, name="plain", metric="score", direction="maximize", single=False)


def compared(
    outcome: str = "completed",
    then: list[float | None] = EPOCHS,
    now: list[float] = EPOCHS,
    *,
    then_peaks: tuple[int | None, int | None] = (PEAK, 100),
    now_peaks: tuple[int | None, int | None] = (PEAK, 100),
    now_outcome: Outcome = Outcome.COMPLETED,
    repeatable: bool = True,
) -> Comparison:
    known = [value for value in then if value is not None]
    trial: TrialRecord = record(
        TrialRecord, number=0, outcome=outcome, value=max(known, default=None), peak_bytes=then_peaks[0],
        allocated_bytes=then_peaks[1], asked_at=datetime.now(UTC),
    )  # fmt: skip
    metrics = [MetricRecord(n, "score", value, 0.0, None) for n, value in enumerate(then, start=1)]
    metrics += [MetricRecord(n, "loss", 9.0 - n, 0.0, None) for n in range(1, len(then) + 1)]
    result = TrialResult(
        now_outcome,
        value=max((value for value in now if not math.isnan(value)), default=None),
        epochs=tuple(EpochMetrics(n, {"score": value, "loss": 1.0}, 0.0) for n, value in enumerate(now, 1)),
        peaks=Peaks(device_bytes=now_peaks[0], allocated_bytes=now_peaks[1]),
    )
    return compare(STUDY, trial, metrics, result, repeatable=repeatable)


def test_the_same_figures_agree() -> None:
    found = compared()
    assert (found.agrees, found.differences, found.notes) == (True, (), ())
    assert found.then.value == found.now.value == 0.75


def test_a_last_bit_of_the_metric_is_a_difference_where_it_repeats() -> None:
    found = compared(now=[0.5, math.nextafter(0.75, 1), 0.7])
    assert found.agrees is False
    assert found.differences == ("score was 0.75, and is 0.7500000000000001 (+1.11e-16), first in epoch 2",)


def test_an_epoch_that_is_not_the_best_is_compared_too() -> None:
    found = compared(now=[0.5, 0.75, 0.6])
    assert found.agrees is False
    assert "first in epoch 3" in found.differences[0]


def test_where_it_does_not_repeat_the_metric_is_told_and_not_judged() -> None:
    found = compared(now=[0.5, 0.7, 0.7], repeatable=False)
    assert (found.agrees, found.differences) == (True, ())
    assert found.notes == ("score was 0.75, and is 0.7 (-0.05), first in epoch 2; it may, without a seed or on a GPU",)  # fmt: skip  # noqa: E501


def test_an_epoch_without_a_number_agrees_with_itself() -> None:
    assert compared(then=[None, 0.5], now=[math.nan, 0.5]).agrees is True
    assert compared(then=[None, 0.5], now=[0.1, 0.5]).agrees is False


@pytest.mark.parametrize(
    ("now_peaks", "agrees"),
    [
        ((PEAK + 20 * MIB, 100), True),  # 2 %
        ((PEAK + 20 * MIB + 1, 100), False),
        ((PEAK - 20 * MIB - 1, 100), False),
        ((PEAK, 101), False),
        ((None, None), True),  # not measured: not judged
    ],
)
def test_peaks_are_judged_by_the_stated_tolerance(
    now_peaks: tuple[int | None, int | None], *, agrees: bool
) -> None:
    assert compared(now_peaks=now_peaks).agrees is agrees


def test_a_small_resident_peak_may_differ_by_a_few_mib() -> None:
    small = 50 * MIB
    assert compared(then_peaks=(small, 100), now_peaks=(small + RESIDENT_BYTES, 100)).agrees is True
    assert compared(then_peaks=(small, 100), now_peaks=(small + RESIDENT_BYTES + 1, 100)).agrees is False


def test_on_a_gpu_the_allocators_peak_may_differ_by_2_percent() -> None:
    assert compared(then_peaks=(PEAK, 1000), now_peaks=(PEAK, 1020), repeatable=False).agrees is True
    assert compared(then_peaks=(PEAK, 1000), now_peaks=(PEAK, 1021), repeatable=False).agrees is False


def test_another_outcome_is_a_difference() -> None:
    found = compared(now=[], now_outcome=Outcome.OUT_OF_MEMORY, now_peaks=(None, None))
    assert found.agrees is False
    assert found.differences[0] == "the outcome was completed, and is out_of_memory"


def test_the_same_failure_agrees_whatever_its_peak() -> None:
    peaks = {"then_peaks": (PEAK, None), "now_peaks": (9, None)}
    found = compared("out_of_memory", [], [], now_outcome=Outcome.OUT_OF_MEMORY, **peaks)
    assert found.agrees is True


@pytest.mark.parametrize("outcome", ["pruned_metric", "timed_out", "interrupted", "killed", "lost"])
def test_what_was_ended_from_outside_is_compared_as_far_as_it_went(outcome: str) -> None:
    found = compared(outcome, [0.5], EPOCHS, then_peaks=(9, None))
    assert found.agrees is True
    assert (found.then.value, found.now.value) == (0.5, 0.5)
    assert "the metric of its 1 epochs is" in found.notes[0]
    assert compared(outcome, [0.6], EPOCHS).agrees is False
    assert compared(outcome, [], EPOCHS).agrees is None


def test_a_trial_that_was_never_launched_has_nothing_to_compare() -> None:
    found = compared("pruned_memory", [], EPOCHS)
    assert (found.agrees, found.differences) == (None, ())
    assert found.notes == ("it was never launched: there is nothing to compare with",)
