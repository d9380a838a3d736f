"""How a search went, launch by launch. No Streamlit in here."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tuner.store.rows import StudyRecord

Floats = NDArray[np.float64]


def launches_of(study: StudyRecord, progress: pd.DataFrame) -> tuple[Floats, Floats]:
    """Return memory and score of each launch, more being better; what does not fit has ∞ and NaN.

    Args:
        study: The study.
        progress: As `Insights.progress` gives it.
    """
    memory = progress["memory_bytes"].astype(float).to_numpy()
    fits = memory <= study.budget_bytes
    sign = 1.0 if study.maximize else -1.0
    scores = sign * progress["value"].astype(float).to_numpy()
    return np.where(fits, memory, np.inf), np.where(fits, scores, np.nan)


def best_so_far(scores: Floats) -> Floats:
    """Return the largest of the scores up to each; NaN before the first."""
    filled = np.where(np.isfinite(scores), scores, -np.inf)
    best = np.maximum.accumulate(filled) if len(filled) else filled
    return np.where(np.isfinite(best), best, np.nan)


def hypervolume_so_far(memory: Floats, scores: Floats, *, budget: float, worst: float) -> Floats:
    """Return the area that the points up to each dominate, less memory and a larger score being better.

    Args:
        memory: Of each point, in order of time.
        scores: The same; points that are not finite, or outside the reference, add nothing.
        budget: The reference point's memory.
        worst: The reference point's score.
    """
    front_memory: list[float] = []
    front_scores: list[float] = []
    area, found = 0.0, []
    for size, score in zip(memory.tolist(), scores.tolist(), strict=True):
        if size <= budget and worst < score < np.inf:
            area += _insert(front_memory, front_scores, size, score, budget, worst)
        found.append(area)
    return np.array(found)


def _insert(
    memory: list[float], scores: list[float], size: float, score: float, budget: float, worst: float
) -> float:
    """Put a point into a front that is sorted by memory; return the area that it adds."""
    place = bisect_right(memory, size)
    if place and scores[place - 1] >= score:
        return 0.0
    first = bisect_left(memory, size)
    last = first
    while last < len(memory) and scores[last] <= score:
        last += 1
    added, left, height = 0.0, size, scores[first - 1] if first else worst
    for beaten in range(first, last):
        added += (memory[beaten] - left) * (score - height)
        left, height = memory[beaten], scores[beaten]
    added += ((memory[last] if last < len(memory) else budget) - left) * (score - height)
    memory[first:last], scores[first:last] = [size], [score]
    return added


def thinned(count: int, most: int = 512) -> NDArray[np.int64]:
    """Return at most `most` places of `count`, evenly spread, the last among them."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(np.int64))
