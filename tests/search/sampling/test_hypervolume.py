"""The expected gain of feasible hypervolume, against a library and the normal distribution's own draws."""

from __future__ import annotations

import moocore
import numpy as np
import pytest

from tuner.search.sampling.hypervolume import expected_gain, front_of

BUDGET, WORST = 10.0, 0.0


def hypervolume(memory: np.ndarray, scores: np.ndarray) -> float:
    """moocore's, which minimises: within the budget and above the worst score."""
    inside = (memory < BUDGET) & (scores > WORST)
    points = np.column_stack([memory, -scores])[inside]
    return float(moocore.hypervolume(points, ref=[BUDGET, -WORST])) if len(points) else 0.0


@pytest.mark.parametrize("seed", range(8))
def test_the_expected_gain_is_the_mean_over_draws(seed: int) -> None:
    """4,000 draws of the score; within five standard errors, and 0.001 for what no draw reached."""
    rng = np.random.default_rng(seed)
    memory, scores = rng.uniform(1, 12, 9), rng.normal(0.5, 1, 9)
    front = front_of(memory[memory <= BUDGET], scores[memory <= BUDGET])
    new = np.array([0.5, 3.0, 9.0, 11.0])
    mean, deviation = rng.normal(0.5, 1, 4), rng.uniform(0.1, 1, 4)
    gains = expected_gain(mean, deviation, new, front=front, worst_score=WORST, budget=BUDGET)
    before = hypervolume(memory, scores)
    for index in range(4):
        draws = rng.normal(mean[index], deviation[index], 4000)
        added = [
            hypervolume(np.append(memory, new[index]), np.append(scores, draw)) - before for draw in draws
        ]
        assert gains[index] == pytest.approx(np.mean(added), abs=5 * np.std(added) / 4000**0.5 + 1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_the_front_is_the_librarys(seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory, scores = rng.integers(1, 20, 60).astype(float), rng.integers(1, 20, 60).astype(float)
    kept = moocore.is_nondominated(np.column_stack([memory, -scores]), keep_weakly=False)
    found = front_of(memory, scores)
    assert set(zip(*found, strict=True)) == set(zip(memory[kept], scores[kept], strict=True))
    assert len(found[0]) == kept.sum()


def test_what_cannot_improve_gains_nothing() -> None:
    """A configuration that a surely better and smaller one dominates, and one beyond the budget."""
    front = (np.array([1.0]), np.array([5.0]))
    gains = expected_gain(
        np.array([4.0, 9.0]), np.array([1e-9, 1e-9]), np.array([2.0, 11.0]),
        front=front, worst_score=WORST, budget=BUDGET,
    )  # fmt: skip
    assert gains == pytest.approx([0, 0], abs=1e-9)
