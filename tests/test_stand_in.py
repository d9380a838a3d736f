"""The stand-in trial: against Optuna's FixedTrial and distributions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FixedTrial

from tuner.errors import UsageError, WorkloadError
from tuner.stand_in import Choices, Range, StandInTrial, configuration
from tuner.workload import Maximize, Workload


class Net(Workload):
    objective = Maximize("accuracy")

    def suggest(self, trial: Any) -> dict[str, Any]:
        params = {
            "width": trial.suggest_int("width", 8, 512, log=True),
            "depth": trial.suggest_int("depth", 1, 9, step=2),
            "rate": trial.suggest_float("rate", 1e-4, 1e-1, log=True),
            "dropout": trial.suggest_float("dropout", 0.0, 0.5),
            "kind": trial.suggest_categorical("kind", ["plain", "residual"]),
            "amp": trial.suggest_categorical("amp", [True, False]),
        }
        if params["kind"] == "residual":
            params["skip"] = trial.suggest_int("skip", 1, 4)
        trial.set_user_attr("seen", True)
        return params


def test_what_is_not_set_gets_a_value_that_optuna_would_accept_and_what_is_set_gets_that() -> None:
    given_values = {"width": "100", "rate": "1e-3", "kind": "residual", "amp": "False"}

    params = configuration(Net(), given_values)

    assert {name: params[name] for name in given_values} == {
        "width": 100,
        "rate": 0.001,
        "kind": "residual",
        "amp": False,
    }
    # FixedTrial warns about a value outside its range, and a warning is an error here.
    assert params == Net().suggest(FixedTrial(params))
    assert [type(value) for value in params.values()] == [int, int, float, float, str, bool, int]


def test_a_conditional_parameter_is_there_only_on_its_branch() -> None:
    assert "skip" not in configuration(Net(), {})
    with pytest.raises(UsageError, match="Net has no parameter 'skip'"):
        configuration(Net(), {"skip": "2"})
    assert configuration(Net(), {"skip": "2", "kind": "residual"})["skip"] == 2


@settings(deadline=None)
@given(st.integers(-1000, 1000), st.integers(0, 100), st.integers(1, 50))
def test_a_whole_default_lies_on_the_grid(low: int, steps: int, step: int) -> None:
    high = low + steps * step

    value = StandInTrial({}).suggest_int("n", low, high, step=step)

    assert value in range(low, high + 1, step)
    assert IntDistribution(low, high, step=step)._contains(value)


@settings(deadline=None)
@given(st.integers(-1000, 1000), st.integers(0, 5000), st.integers(1, 50))
def test_a_step_that_does_not_divide_the_range_is_kept(low: int, length: int, step: int) -> None:
    value = StandInTrial({}).suggest_int("n", low, low + length, step=step)

    assert value in range(low, low + length + 1, step)


@settings(deadline=None)
@given(st.integers(1, 1 << 20), st.integers(0, 1 << 20))
def test_a_whole_default_on_a_log_scale_lies_inside(low: int, length: int) -> None:
    value = StandInTrial({}).suggest_int("n", low, low + length, log=True)

    assert IntDistribution(low, low + length, log=True)._contains(value)


@settings(deadline=None)
@given(st.floats(1e-9, 1e6), st.floats(1.0, 1e6), st.booleans())
def test_a_real_default_lies_inside(low: float, factor: float, log: bool) -> None:
    high = low * factor

    value = StandInTrial({}).suggest_float("x", low, high, log=log)

    # The middle is a rounded operation: one part in 10^12 of the bounds is allowed.
    assert low * (1 - 1e-12) <= value <= high * (1 + 1e-12)


@pytest.mark.parametrize(
    ("low", "high", "step"), [(0.0, 0.5, 0.1), (0.0, 1.0, 0.25), (-1.0, 2.0, 1.0), (0.1, 0.1, 0.1)]
)
def test_a_real_default_with_a_step_lies_on_the_grid(low: float, high: float, step: float) -> None:
    value = StandInTrial({}).suggest_float("x", low, high, step=step)

    assert FloatDistribution(low, high, step=step)._contains(value)


def test_it_records_what_was_asked_as_optuna_would() -> None:
    trial = StandInTrial({})
    params = Net().suggest(trial)
    fixed = FixedTrial(params)
    Net().suggest(fixed)

    assert list(trial.asked) == list(fixed.distributions)
    assert trial.params == fixed.params
    for name, distribution in fixed.distributions.items():
        asked = trial.asked[name]
        if isinstance(distribution, CategoricalDistribution):
            assert asked == Choices(distribution.choices)
        else:
            assert isinstance(distribution, (IntDistribution, FloatDistribution))
            whole = isinstance(distribution, IntDistribution)
            bounds = (distribution.low, distribution.high, distribution.step)
            assert asked == Range(*bounds, log=distribution.log, whole=whole)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="Net has no parameter 'nope'") as caught:
        configuration(Net(), {"nope": "1"})

    assert caught.value.hint == "its parameters: width, depth, rate, dropout, kind, amp"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("width", "abc", "width must be a whole number, not 'abc'"),
        ("width", "1.5", "width must be a whole number, not '1.5'"),
        ("rate", "fast", "rate must be a number, not 'fast'"),
        ("rate", "", "rate must be a number, not ''"),
        ("rate", "nan", "rate must be a number, not 'nan'"),  # and `predict -f json` would not be JSON
        ("kind", "other", "kind cannot be 'other'"),
        ("amp", "true", "amp cannot be 'true'"),
    ],
)
def test_a_value_that_does_not_suit_its_parameter_is_refused(name: str, text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        configuration(Net(), {name: text})

    assert caught.value.message == said


def test_a_refused_choice_lists_the_choices() -> None:
    with pytest.raises(UsageError) as caught:
        configuration(Net(), {"kind": "other"})

    assert caught.value.hint == "its choices: plain, residual"


def test_a_suggest_that_fails_or_returns_something_else_is_the_workloads_error() -> None:
    class Fails(Net):
        def suggest(self, trial: Any) -> dict[str, Any]:
            raise KeyError("width")

    class Lists(Net):
        def suggest(self, trial: Any) -> Any:
            return [trial.suggest_int("width", 1, 2)]

    with pytest.raises(WorkloadError, match=r"suggest\(\) fails: KeyError: 'width'"):
        configuration(Fails(), {})
    with pytest.raises(WorkloadError, match="returns list, not a dictionary"):
        configuration(Lists(), {})
