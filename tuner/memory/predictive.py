"""Distributions given by a table of quantiles, and how observed scores reshape one.

A score is (measured - expected) / spread: an error in units of what was expected of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import NormalDist

LEVELS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4),
    *(0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.995, 0.999),
)
_NORMAL = NormalDist()
_NORMAL_SCORES = tuple(_NORMAL.inv_cdf(level) for level in LEVELS)
_BAND = _NORMAL.inv_cdf(0.975)


def student_quantile(level: float) -> float:
    """Return a quantile of Student's t with 4 degrees of freedom.

    Closed form of Shaw (2006), "Sampling Student's T distribution": with a = 4p(1 - p),
    |t| = 2 · sqrt(cos(arccos(√a) / 3) / √a - 1).
    """
    root = math.sqrt(4 * level * (1 - level))
    inside = math.cos(math.acos(min(1.0, root)) / 3) / root - 1
    return math.copysign(2 * math.sqrt(max(0.0, inside)), level - 0.5)


def heavy_tailed(low: float = 1.0, high: float = 1.0) -> tuple[float, ...]:
    """Return the quantiles at LEVELS of a t distribution whose 95 % band is a normal one's.

    Of the same band, a t distribution has more mass in the middle and more far out, as errors of
    memory predictions have.

    Args:
        low: Standard deviation, of the normal with this band, below 0.
        high: The same above 0.
    """
    unit = _BAND / student_quantile(0.975)
    return tuple(student_quantile(p) * unit * (low if p < 0.5 else high) for p in LEVELS)


@dataclass(frozen=True)
class Predictive:
    """A distribution of scores: quantiles at LEVELS, which do not fall.

    Between two of them, and beyond the last, the normal score of the level is linear in the
    quantile: so a normal distribution is given exactly.
    """

    quantiles: Sequence[float]

    def cdf(self, score: float) -> float:
        """Return P(a score ≤ `score`)."""
        at = min(max(bisect_right(self.quantiles, score), 1), len(LEVELS) - 1)
        left, right = self.quantiles[at - 1], self.quantiles[at]
        share = (score - left) / max(right - left, 1e-9)
        below, above = _NORMAL_SCORES[at - 1], _NORMAL_SCORES[at]
        return _NORMAL.cdf(below + share * (above - below))

    def quantile(self, level: float) -> float:
        """Return the score below which a share `level` lies."""
        normal_score = _NORMAL.inv_cdf(min(max(level, 1e-9), 1 - 1e-9))
        at = min(max(bisect_right(_NORMAL_SCORES, normal_score), 1), len(LEVELS) - 1)
        below, above = _NORMAL_SCORES[at - 1], _NORMAL_SCORES[at]
        left, right = self.quantiles[at - 1], self.quantiles[at]
        return left + (normal_score - below) / (above - below) * (right - left)

    def after(self, scores: Sequence[tuple[float, float]], *, counts_as: float) -> tuple[float, ...]:
        """Return the quantiles at LEVELS once scores were observed.

        n scores cut the line into n + 1 gaps, and the next score falls into each with the same
        chance: 1 / (n + 1), whatever their distribution (conformal prediction; Vovk et al. 2005).
        Inside a gap, and beyond the least and the greatest score, it is distributed as by this
        distribution, the prior B. With few scores B itself still counts, as k trials::

            F(z) = ((n + 1) · conformal(z) + k · B(z)) / (n + 1 + k)

        With many scores the 2.5 % and 97.5 % quantiles are conformal ones.

        Args:
            scores: Pairs of score and weight, sorted by score; a weight of 1 is one trial.
            counts_as: k, above 0.
        """
        cut_at = [0.0, *(self.cdf(score) for score, _ in scores), 1.0]
        below = [0.0, *accumulate((weight for _, weight in scores)), 0.0]
        below[-1] = below[-2] + 1.0
        mass = [count + counts_as * share for count, share in zip(below, cut_at, strict=True)]
        found = []
        for level in LEVELS:
            wanted = level * mass[-1]
            gap = min(max(bisect_left(mass, wanted), 1), len(mass) - 1)
            part = (wanted - mass[gap - 1]) / max(mass[gap] - mass[gap - 1], 1e-12)
            found.append(self.quantile(cut_at[gap - 1] + part * (cut_at[gap] - cut_at[gap - 1])))
        return tuple(found)
