"""The filter inside the sampler, on plain Optuna: nothing that surely does not fit becomes a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
import pytest

from tuner.search.sampling.finding import MOST_REJECTIONS
from tuner.search.sampling.history import Forecast
from tuner.search.sampling.memory_filter import MemoryFilter
from tuner.search.sampling.models import ScoreModel
from tuner.search.sampling.samplers import KINDS, MEMORY_AWARE, build

BUDGET = 100


def suggest(trial: Any) -> dict[str, Any]:
    """A space in which a tenth fits: memory is width × depth, a branch doubles it."""
    params = {"width": trial.suggest_int("width", 1, 64), "depth": trial.suggest_int("depth", 1, 16)}
    params["kind"] = trial.suggest_categorical("kind", ["plain", "wide"])
    if params["kind"] == "wide":
        params["factor"] = trial.suggest_int("factor", 2, 4)
    return params


def needs(params: dict[str, Any]) -> int:
    return int(params["width"] * params["depth"] * params.get("factor", 1))


def forecast(params: dict[str, Any]) -> Forecast:
    return Forecast(needs(params), fits=needs(params) <= BUDGET)


def score(params: dict[str, Any]) -> float:
    return float(params["width"] ** 0.5 + params["depth"])


def numbers(trial: Any) -> dict[str, Any]:
    """The same without categories, for samplers that know numbers only."""
    return {"width": trial.suggest_int("width", 1, 64), "depth": trial.suggest_int("depth", 1, 16)}


@pytest.mark.parametrize("name", KINDS)
def test_around_any_sampler_every_trial_fits(name: str) -> None:
    """From the first one on, past the random phase, in conditional spaces; values are served as found."""
    single = KINDS[name].single
    space = numbers if single else suggest
    if name == "cmaes":
        pytest.importorskip("cmaes")
    sampler = MemoryFilter(
        build(name, {}, seed=1, random_trials=5, parallel=False),
        space,
        forecast,
        budget_bytes=BUDGET,
        seed=1,
        inner_draws=KINDS[name].draws,
        scores=ScoreModel() if name == MEMORY_AWARE else None,
    )
    study = optuna.create_study(
        directions=["maximize"] if single else ["maximize", "minimize"], sampler=sampler
    )

    def objective(trial: optuna.Trial) -> Any:
        params = space(trial)
        found = sampler.rehearsals[trial.number]
        assert found.draw is not None
        assert found.draw.params == params
        return score(params) if single else (score(params), needs(params))

    study.optimize(objective, n_trials=12 if name == "gp" else 20)
    assert max(needs(trial.params) for trial in study.trials) <= BUDGET
    assert len({str(trial.params) for trial in study.trials}) == len(study.trials)


def search(
    space: Callable[[Any], dict[str, Any]], fits: Callable[[dict[str, Any]], bool], seed: int = 0
) -> tuple[optuna.Study, MemoryFilter, list[dict[str, Any]]]:
    """Return a study with a filter, and what is traced."""
    traced = []

    def traces(params: dict[str, Any]) -> Forecast:
        traced.append(params)
        return Forecast(sum(params.values()), fits=fits(params))

    inner = build("tpe", {}, seed=seed, random_trials=10, parallel=False)
    sampler = MemoryFilter(inner, space, traces, budget_bytes=16, seed=seed)
    return optuna.create_study(sampler=sampler), sampler, traced


def test_d20a_what_does_not_fit_is_neither_proposed_nor_traced_again() -> None:
    """Case D20 (a): width from 2 to 20, of which up to 16 fit."""
    study, _, traced = search(
        lambda trial: {"width": trial.suggest_int("width", 2, 20)}, lambda params: params["width"] <= 16
    )
    study.optimize(lambda trial: trial.suggest_int("width", 2, 20), n_trials=15)
    widths = [trial.params["width"] for trial in study.trials]
    assert sorted(widths) == list(range(2, 17))
    rejected = [params["width"] for params in traced if params["width"] > 16]
    assert len(rejected) == len(set(rejected))


@pytest.mark.parametrize("seed", range(10))
def test_d20b_one_point_of_two_hundred_is_found(seed: int) -> None:
    """Case D20 (b): 200 points, of which the smallest alone fits."""

    def space(trial: Any) -> dict[str, Any]:
        return {"a": trial.suggest_int("a", 1, 20), "b": trial.suggest_int("b", 1, 10)}

    study, sampler, traced = search(space, lambda params: sum(params.values()) <= 2, seed)
    trial = study.ask()
    assert space(trial) == {"a": 1, "b": 1}
    assert len(traced) <= MOST_REJECTIONS
    assert sampler.rehearsals[0].forecast == Forecast(2, fits=True)


def test_d20c_where_nothing_fits_the_smallest_is_taken_after_a_stated_number() -> None:
    study, sampler, traced = search(
        lambda trial: {"width": trial.suggest_float("width", 20, 30)}, lambda params: False
    )
    trial = study.ask()
    width = trial.suggest_float("width", 20, 30)
    found = sampler.rehearsals[0]
    assert len(traced) == len(found.rejections) == MOST_REJECTIONS
    assert width == pytest.approx(min(params["width"] for params in traced), abs=1)
    assert found.forecast is not None
    assert not found.forecast.fits


def test_d23_no_point_is_tried_twice_until_all_are() -> None:
    """Case D23: a choice of two, asked for three times."""

    def space(trial: Any) -> dict[str, Any]:
        return {"batch": trial.suggest_categorical("batch", [1, 2])}

    study, sampler, _ = search(space, lambda params: True)
    for _ in range(2):
        study.optimize(lambda trial: float(space(trial)["batch"]), n_trials=1)
    assert {trial.params["batch"] for trial in study.trials} == {1, 2}
    study.ask().suggest_categorical("batch", [1, 2])
    assert sampler.rehearsals[2].draw is None


def test_a_doubtful_draw_is_taken_only_when_nothing_likelier_turns_up() -> None:
    def doubts(params: dict[str, Any]) -> Forecast:
        return Forecast(params["width"], fits=True, fits_probability=0.9 if params["width"] < 4 else 0.3)

    def never(params: dict[str, Any]) -> Forecast:
        return Forecast(params["width"], fits=True, fits_probability=0.1 + params["width"] / 100)

    for forecasts, expected in ((doubts, {1, 2, 3}), (never, {20})):
        inner = optuna.samplers.RandomSampler(seed=1)
        space = lambda trial: {"width": trial.suggest_int("width", 1, 20)}  # noqa: E731
        sampler = MemoryFilter(inner, space, forecasts, budget_bytes=16, seed=1, inner_draws=200)
        study = optuna.create_study(sampler=sampler)
        assert space(study.ask())["width"] in expected
        assert sampler.rehearsals[0].rejections == ()


def test_a_given_value_is_kept_and_the_rest_is_found() -> None:
    sampler = MemoryFilter(optuna.samplers.RandomSampler(seed=1), suggest, forecast, budget_bytes=BUDGET)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial({"width": 50})
    params = suggest(study.ask())
    assert params["width"] == 50
    assert needs(params) <= BUDGET
