"""Memory-aware proposals: they differ while others run, and repeat with their seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import optuna
import pytest

from tests.search.sampling.test_memory_filter import BUDGET, forecast, needs, score, suggest
from tuner.search.sampling.history import History
from tuner.search.sampling.memory_filter import MemoryFilter
from tuner.search.sampling.models import ScoreModel, not_far_below
from tuner.search.sampling.samplers import build


def study_with(trials: int) -> optuna.Study:
    """Return a study of random trials that fit."""
    study = optuna.create_study(directions=["maximize", "minimize"])
    inner = optuna.samplers.RandomSampler(seed=0)
    study.sampler = MemoryFilter(inner, suggest, forecast, budget_bytes=BUDGET, seed=0)

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        params = suggest(trial)
        return score(params), needs(params)

    study.optimize(objective, n_trials=trials)
    return study


def aware(seed: int) -> MemoryFilter:
    inner = build("memory-aware", {}, seed=seed, random_trials=10, parallel=True)
    return MemoryFilter(
        inner, suggest, forecast, budget_bytes=BUDGET, seed=seed, scores=ScoreModel(), history=History()
    )


def test_proposals_repeat_with_their_seed() -> None:
    proposed = []
    for _ in range(2):
        study = study_with(12)
        study.sampler = aware(3)
        proposed.append(suggest(study.ask()))
    assert proposed[0] == proposed[1]


def test_four_proposals_at_once_differ_and_spread() -> None:
    """None has ended when the next is made: running trials count as what they are expected to reach."""
    study = study_with(20)
    proposed: list[dict[str, Any]] = []
    for _ in range(4):
        study.sampler = aware(7)  # the same seed: only what runs makes them differ
        proposed.append(suggest(study.ask()))
    sizes = {needs(params) for params in proposed}
    assert len({str(params) for params in proposed}) == 4
    assert len(sizes) >= 3
    assert max(sizes) <= BUDGET


@pytest.mark.parametrize("seed", range(3))
def test_the_front_grows_faster_than_with_random_proposals(seed: int) -> None:
    """30 trials: the known best for each memory is width^0.5 + depth; shares of its hypervolume."""

    def reached(study: optuna.Study) -> float:
        best = [
            max((t.values[0] for t in study.trials if t.values[1] <= m), default=0.0) for m in range(BUDGET)
        ]
        return float(np.sum(best))

    study = study_with(10)
    study.sampler = aware(seed)

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        study.sampler = aware(100 * seed + trial.number)
        params = suggest(trial)
        return score(params), needs(params)

    study.optimize(objective, n_trials=20)
    assert reached(study) > 1.03 * reached(study_with(30))


def test_a_crash_does_not_flatten_the_scores() -> None:
    scores = np.array([0.5, 0.6, 0.7, 0.8, -1e9])
    assert not_far_below(scores, 0.6).tolist() == pytest.approx([0.55, 0.6, 0.7, 0.8, 0.55])
