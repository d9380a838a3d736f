"""The largest value that fits, against a brute force over all values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from tuner.memory.capacity import MOST_CHECKED, Capacity, largest_that_fits, useful_batch_sizes
from tuner.records import Band, Prediction, Verdict

SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=60)


def prediction(size: int | None, budget: int) -> Prediction:
    """Surely fits up to the budget, may fit up to a tenth more; None cannot be traced."""
    if size is None:
        return Prediction(
            None, None, None, None, None, Verdict.TRY, method="untraceable", assumptions=("cannot: so",)
        )
    verdict = Verdict.LAUNCH if size <= budget else Verdict.TRY if size <= 1.1 * budget else Verdict.PRUNE
    return Prediction(size, size, Band(size, size, size), Band(size, size, size), None, verdict)


def search(values: Sequence[Any], size_of: Callable[[Any], int | None], budget: int) -> Capacity:
    return largest_that_fits(values, lambda value: prediction(size_of(value), budget))


def brute_force(sizes: Sequence[int | None], limit: float) -> int | None:
    return max((i for i, size in enumerate(sizes) if size is not None and size <= limit), default=None)


def answers(found: Capacity) -> tuple[Any, Any]:
    return (
        None if found.largest is None else found.largest.value,
        None if found.largest_to_try is None else found.largest_to_try.value,
    )


def dip_of(sizes: Sequence[int]) -> float:
    """By what share at most a later value is smaller: from all pairs."""
    return max(1 - later / first for i, first in enumerate(sizes) for later in sizes[i:])


@settings(deadline=None)
@given(SIZES, st.integers(1, 1000))
def test_where_larger_values_need_more_it_agrees_with_a_brute_force(sizes: list[int], budget: int) -> None:
    sizes.sort()

    found = search(range(len(sizes)), sizes.__getitem__, budget)

    assert answers(found) == (brute_force(sizes, budget), brute_force(sizes, 1.1 * budget))
    assert found.dip == 0
    assert found.certainty in ("all", "bisection")


@settings(deadline=None, max_examples=500)
@given(SIZES, st.integers(1, 1000))
def test_where_they_do_not_a_wrong_answer_is_never_silent(sizes: list[int], budget: int) -> None:
    found = search(range(len(sizes)), sizes.__getitem__, budget)
    seen = [sizes[probe.value] for probe in found.probes]

    assert found.largest is None or sizes[found.largest.value] <= budget
    assert found.dip == pytest.approx(dip_of(seen))
    assert (found.certainty == "bisection") <= (seen == sorted(seen))
    if found.certainty == "all" or dip_of(sizes) <= 2 * found.dip:  # all 60 values may be looked at
        assert answers(found)[0] == brute_force(sizes, budget)


def test_a_dip_that_no_prediction_shows_is_beyond_it_and_the_certainty_says_so() -> None:
    found = search(range(1000), lambda value: 1 if value == 700 else value, 100)

    assert answers(found)[0] == 100
    assert found.certainty == "bisection"


def test_a_saw_of_two_percent_is_checked_around_the_answer_alone() -> None:
    """As an allocator rounds: every tenth value needs 2 % less than the line."""

    def size(value: int) -> int:
        return round(1000 * value * (0.98 if value % 10 == 0 else 1))

    found = search(range(1, 2001), size, 500_500)

    assert answers(found)[0] == max(v for v in range(1, 2001) if size(v) <= 500_500) == 510
    assert found.certainty == "around"
    assert 0.015 < found.dip < 0.025
    assert len(found.probes) <= 40 + MOST_CHECKED


@pytest.mark.parametrize("count", [100, 10_000, 1_000_000, 10**12])
def test_it_costs_a_logarithm(count: int) -> None:
    found = search(range(1, count + 1), lambda value: value, count // 3)

    assert answers(found) == (count // 3, int(1.1 * (count // 3)))
    assert len(found.probes) <= 5 + 2 * math.log2(count)


def test_up_to_eight_values_are_all_predicted() -> None:
    found = search([8, 16, 24, 32, 64, 96, 128, 256], lambda value: 100 - (value == 96) * 50, 60)

    assert answers(found) == (96, 96)
    assert found.certainty == "all"
    assert len(found.probes) == 8


def test_of_values_that_all_fit_the_last_is_sure_after_five_predictions() -> None:
    found = search(range(10_000), lambda value: 1, 1)

    assert answers(found) == (9999, 9999)
    assert (found.certainty, len(found.probes)) == ("all", 5)


@settings(deadline=None)
@given(SIZES, st.integers(1, 1000), st.data())
def test_what_cannot_be_traced_counts_as_not_fitting_and_is_named(
    sizes: list[int], budget: int, data: st.DataObject
) -> None:
    lost = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    known: list[int | None] = [None if i in lost else size for i, size in enumerate(sorted(sizes))]

    found = search(range(len(sizes)), known.__getitem__, budget)

    predicted = {probe.value for probe in found.probes}
    assert {probe.value for probe in found.untraceable} == predicted & lost
    best = brute_force(known, budget)
    assert answers(found)[0] == best or (found.certainty != "all" and found.untraceable)


def test_without_a_fit_the_smallest_prediction_is_given() -> None:
    found = search(range(100), lambda value: 50 + value, 10)

    assert answers(found) == (None, None)
    assert found.smallest is not None
    assert found.smallest.value == 0


@given(st.sets(st.integers(1, 40), min_size=1), st.integers(1, 30), st.booleans())
def test_useful_batch_sizes_are_those_that_change_pytorchs_batches(
    sizes: set[int], samples: int, drop_last: bool
) -> None:
    """Baseline: the batches of torch.utils.data.BatchSampler."""
    values = sorted(sizes)
    batches = [list(BatchSampler(SequentialSampler(range(samples)), size, drop_last)) for size in values]

    useful = list(useful_batch_sizes(values, samples, drop_last=drop_last))

    if drop_last:
        assert useful == [size for size, some in zip(values, batches, strict=True) if some]
    else:
        assert useful == values[: batches.index(batches[-1]) + 1]
