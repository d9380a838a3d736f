"""A parameter's values in order, against Optuna's distributions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution, IntDistribution

from tuner.errors import UsageError
from tuner.memory.parameter_values import grid, nearest, spread, whole_or_chosen
from tuner.stand_in import Choices, Range

WHOLE = Range(16, 96, 16, log=False, whole=True)


@settings(deadline=None)
@given(st.integers(-50, 50), st.integers(0, 60), st.integers(1, 9))
def test_of_a_whole_range_all_values_are_there(low: int, steps: int, step: int) -> None:
    high = low + steps * step
    distribution = IntDistribution(low, high, step=step)
    asked = Range(low, high, step, log=False, whole=True)

    values = list(grid(asked))

    assert values == [v for v in range(low, high + 1) if distribution._contains(v)]
    few = spread(asked, 10)
    assert len(few) <= 10
    assert set(few) <= set(values)
    assert {values[0], values[-1]} <= set(few)


@settings(deadline=None)
@given(st.floats(1e-6, 1e3), st.floats(1.0, 1e6), st.booleans())
def test_of_a_continuous_range_a_grid_inside_it(low: float, factor: float, log: bool) -> None:
    values = grid(Range(low, low * factor, None, log, whole=False))

    assert all(FloatDistribution(low, low * factor, log=log)._contains(value) for value in values)
    assert list(values) == sorted(set(values))
    assert (values[0], values[-1]) == (low, low * factor)
    assert len(values) <= 101


@settings(deadline=None)
@given(st.integers(-20, 20), st.integers(0, 5000))
def test_of_real_steps_values_on_the_grid(quarters: int, steps: int) -> None:
    low, high = quarters / 4, (quarters + steps) / 4  # exact as binary fractions

    values = grid(Range(low, high, 0.25, log=False, whole=False))

    assert all(FloatDistribution(low, high, step=0.25)._contains(value) for value in values)
    assert (values[0], values[-1]) == (low, high)
    assert len(values) == min(steps, 1000) + 1


def test_choices_are_sorted_and_a_maximum_goes_beyond_them_in_whole_numbers() -> None:
    asked = Choices((64, 16, 32))

    assert list(whole_or_chosen("b", asked)) == [16, 32, 64]
    beyond = whole_or_chosen("b", asked, 67)
    assert list(beyond) == [16, 32, 64, 65, 66, 67]
    assert (beyond[-1], beyond[1:4], len(whole_or_chosen("b", asked, 10**9))) == (
        67,
        [32, 64, 65],
        10**9 - 61,
    )
    assert list(whole_or_chosen("b", asked, 40)) == [16, 32]
    with pytest.raises(IndexError):
        beyond[6]


def test_a_maximum_moves_a_ranges_end_and_keeps_its_step() -> None:
    assert list(whole_or_chosen("w", WHOLE, 130)) == [16, 32, 48, 64, 80, 96, 112, 128]
    assert list(whole_or_chosen("w", WHOLE, 50)) == [16, 32, 48]


@pytest.mark.parametrize(
    ("asked", "maximum", "said"),
    [
        (Range(0, 1, None, log=False, whole=False), None, "x is a real number between 0 and 1"),
        (Choices(("adam", "sgd")), None, "the choices of x have no order: adam, sgd"),
        (Choices((True, False)), None, "the choices of x have no order: True, False"),
        (Choices((8, "auto")), None, "the choices of x have no order: 8, auto"),
        (WHOLE, 15, "x is at least 16, so it cannot end at 15"),
    ],
)
def test_what_has_no_largest_value_is_refused(asked: Range | Choices, maximum: int | None, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        whole_or_chosen("x", asked, maximum)

    assert caught.value.message == said


@given(st.sets(st.integers(-99, 99), min_size=1), st.floats(-200, 200))
def test_the_nearest_value_is_nearest(values: set[int], wanted: float) -> None:
    ordered = sorted(values)

    assert abs(ordered[nearest(ordered, wanted)] - wanted) == min(abs(v - wanted) for v in ordered)
