"""Expected improvement of the feasible hypervolume, where memory is known and the score is not.

A configuration of known memory m and score Y ~ N(μ, σ²) adds to the hypervolume the area above the
front's staircase from m to the budget and below Y. The staircase has the height h over each strip
between two points of the front; the expected area over a strip of width w is w · E[max(0, Y − h)],
which has the closed form of expected improvement (Jones, Schonlau, Welch 1998):
(μ − h) Φ(z) + σ φ(z) with z = (μ − h) / σ. Their sum is exact.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]


def front_of(memory: Floats, scores: Floats) -> tuple[Floats, Floats]:
    """Return memory and scores of the points that no other beats, by rising memory.

    Args:
        memory: Of each point; less is better.
        scores: Of each point; more is better.
    """
    order = np.lexsort((-scores, memory))
    memory, scores = memory[order], scores[order]
    best = np.maximum.accumulate(scores) if len(scores) else scores
    better = np.ones(len(scores), dtype=bool)
    better[1:] = scores[1:] > best[:-1]
    return memory[better], scores[better]


def expected_improvement(mean: Floats, deviation: Floats, level: Floats) -> Floats:
    """Return E[max(0, Y − level)] for Y ~ N(mean, deviation²); shapes broadcast."""
    deviation = np.maximum(deviation, 1e-12)
    z = (mean - level) / deviation
    return np.asarray((mean - level) * ndtr(z) + deviation * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi))


def expected_gain(
    mean: Floats,
    deviation: Floats,
    memory: Floats,
    *,
    front: tuple[Floats, Floats],
    worst_score: float,
    budget: float,
) -> Floats:
    """Return the expected improvement of the hypervolume for each of n configurations.

    Args:
        mean: Expected scores, shape (n,); more is better.
        deviation: Their standard deviations, shape (n,).
        memory: What each needs, shape (n,); known.
        front: Memory and scores of the front, by rising memory.
        worst_score: The reference point's score.
        budget: The reference point's memory.
    """
    front_memory, front_scores = front
    heights = np.concatenate([[worst_score], np.maximum(front_scores, worst_score)])
    starts = np.concatenate([[-np.inf], front_memory])
    ends = np.concatenate([front_memory, [np.inf]])
    left = np.maximum(starts[None, :], memory[:, None])
    widths = np.maximum(0.0, np.minimum(ends, budget)[None, :] - left)
    gains = expected_improvement(mean[:, None], deviation[:, None], heights[None, :])
    return np.asarray((widths * gains).sum(axis=1))
