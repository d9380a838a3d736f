"""Progress of a search against an independent hypervolume and a plain running maximum."""

from __future__ import annotations

import moocore
import numpy as np
import pytest

from app.progress import best_so_far, hypervolume_so_far, thinned


@pytest.mark.parametrize("seed", range(20))
def test_hypervolume_agrees_with_moocore_at_every_launch(seed: int) -> None:
    """To 1e-9 of the whole; with ties, points outside the reference, and points that are no number."""
    rng = np.random.default_rng(seed)
    count = 60
    memory = rng.integers(1, 25, count).astype(float)
    scores = rng.integers(-3, 15, count).astype(float)
    scores[rng.random(count) < 0.1] = np.nan
    memory[rng.random(count) < 0.1] = np.inf
    found = hypervolume_so_far(memory, scores, budget=20, worst=0)
    for end in range(1, count + 1):
        inside = (memory[:end] <= 20) & (scores[:end] > 0)
        points = np.column_stack([memory[:end][inside], -scores[:end][inside]])
        expected = moocore.hypervolume(points, ref=[20, 0]) if len(points) else 0.0
        assert found[end - 1] == pytest.approx(expected, abs=1e-9 * 20 * 15)


def test_best_so_far_passes_over_what_is_no_number() -> None:
    scores = np.array([np.nan, 1.0, np.inf, 0.5, 2.0, np.nan])
    assert np.array_equal(best_so_far(scores), [np.nan, 1, 1, 1, 2, 2], equal_nan=True)
    assert len(best_so_far(np.array([]))) == 0


@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 100_000])
def test_thinning_keeps_first_and_last(count: int) -> None:
    places = thinned(count)
    assert len(places) == min(count, 512)
    if count:
        assert (places[0], places[-1]) == (0, count - 1)
        assert len(set(places.tolist())) == len(places)
