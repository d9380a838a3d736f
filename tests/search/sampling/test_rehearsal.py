"""Rehearsals: a stand-in trial answers as Optuna's own would."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from tuner.search.sampling.encoding import Encoder
from tuner.search.sampling.rehearsal import Draw, contains, rehearse, restored
from tuner.search.sampling.uniform import draw_uniformly

SPACE: dict[str, BaseDistribution] = {
    "rate": FloatDistribution(1e-4, 1e-1, log=True),
    "dropout": FloatDistribution(0.0, 0.5),
    "share": FloatDistribution(0.1, 0.9, step=0.2),
    "width": IntDistribution(8, 512, log=True),
    "layers": IntDistribution(1, 10, step=3),
    "hidden": CategoricalDistribution(["128", "256, 128", None]),
    "only": IntDistribution(3, 3),
}


def suggest(trial: Any) -> dict[str, Any]:
    params = {
        "rate": trial.suggest_float("rate", 1e-4, 1e-1, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
        "share": trial.suggest_float("share", 0.1, 0.9, step=0.2),
        "width": trial.suggest_int("width", 8, 512, log=True),
        "layers": trial.suggest_int("layers", 1, 10, step=3),
        "hidden": trial.suggest_categorical("hidden", ["128", "256, 128", None]),
        "only": trial.suggest_int("only", 3, 3),
    }
    if params["hidden"] is None:
        params["depth"] = trial.suggest_int("depth", 1, 2)
    assert trial.suggest_int("width", 8, 512, log=True) == params["width"] == trial.params["width"]
    return params


def test_a_rehearsal_asks_and_answers_what_a_real_trial_would() -> None:
    """Baseline: Optuna's own trial, given the same values."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        draw = rehearse(suggest, lambda name, asked: draw_uniformly(asked, rng), number=0)
        study = optuna.create_study()
        study.enqueue_trial(draw.answers)
        real = study.ask()
        assert suggest(real) == draw.params
        assert real.params == draw.answers
        assert real.distributions == draw.distributions


@pytest.mark.parametrize("name", [name for name in SPACE if name != "only"])
def test_uniform_values_are_optunas_own(name: str) -> None:
    """4,000 draws each; means of the internal values within five standard errors, and the same values."""
    distribution, rng = SPACE[name], np.random.default_rng(1)
    sampler = optuna.samplers.RandomSampler(seed=2)
    study = optuna.create_study()
    trial = study.get_trials() or [optuna.trial.create_trial(value=0.0)]
    ours = [draw_uniformly(distribution, rng) for _ in range(4000)]
    theirs = [sampler.sample_independent(study, trial[0], name, distribution) for _ in range(4000)]
    assert all(contains(distribution, value) for value in ours)
    if isinstance(distribution, CategoricalDistribution) or name in ("share", "layers"):
        mine, other = Counter(map(str, ours)), Counter(map(str, theirs))
        assert mine.keys() == other.keys()
        assert all(abs(mine[value] - other[value]) < 5 * (4000 / 2) ** 0.5 for value in mine)
    else:
        log = getattr(distribution, "log", False)
        a, b = (np.log(values) if log else np.asarray(values, float) for values in (ours, theirs))
        assert abs(a.mean() - b.mean()) < 5 * (a.var() / 4000 + b.var() / 4000) ** 0.5
        assert a.std() == pytest.approx(b.std(), rel=0.1)


def test_a_choice_that_went_through_json_comes_back_as_it_was() -> None:
    with pytest.warns(UserWarning, match="tuple"):  # Optuna's own
        distribution = CategoricalDistribution([(128,), (256, 128), None])
    for choice in distribution.choices:
        assert restored(distribution, json.loads(json.dumps(choice))) == choice
    assert restored(SPACE["width"], 12) == 12


def test_rows_keep_order_scale_and_what_is_missing() -> None:
    plain = Draw({}, {"width": 8, "batch": 16, "kind": "a"}, {
        "width": SPACE["width"], "batch": CategoricalDistribution([64, 16, 32]),
        "kind": CategoricalDistribution(["a", "b"]),
    })  # fmt: skip
    deep = Draw({}, {"width": 64, "batch": 64, "kind": "b", "depth": 2}, {
        **plain.distributions, "depth": IntDistribution(1, 3),
    })  # fmt: skip
    rows = Encoder([plain, deep]).rows([plain, deep])
    # batch by rank; depth; kind a, kind b; width on a logarithmic axis; whether there is a depth.
    expected = np.array([[0, 0.5, 1, 0, 0, 0], [1, 0.5, 0, 1, 0.5, 1]])
    assert rows == pytest.approx(expected, abs=1e-9)
