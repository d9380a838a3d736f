"""What is expected of configurations that nobody has run or traced: models from scikit-learn.

| model | of | used to |
|---|---|---|
| `MemoryModel` | log₂ of predicted bytes | order draws before they are traced; it rejects nothing |
| `ScoreModel` | the objective's score | expect what a configuration would reach, and how surely |
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Kernel

Floats = NDArray[np.float64]

_TREES = 32
_MOST_MEMORY_ROWS = 500  # the latest: a fit stays under 50 ms
_MOST_SCORE_ROWS = 400
_MOST_KERNEL_ROWS = 200  # for its three hyperparameters; the time of a fit grows with the cube
_REFIT_GROWTH = 1.25  # hyperparameters are fitted anew when there are so many times more scores
_BELOW = 0.25  # of the range from the reference to the best score, below which a score counts as no worse


class MemoryModel:
    """Orders configurations by memory.

    Args:
        rows: Encoded configurations, shape (n, d).
        memory_bytes: What each was predicted to need.
        seed: Seeds the trees.
    """

    def __init__(self, rows: Floats, memory_bytes: Sequence[int], seed: int) -> None:
        from sklearn.ensemble import ExtraTreesRegressor  # a second, which a study without it saves

        self._trees = ExtraTreesRegressor(_TREES, bootstrap=False, random_state=seed, n_jobs=1)
        self._trees.fit(rows[-_MOST_MEMORY_ROWS:], np.log2(memory_bytes[-_MOST_MEMORY_ROWS:]))

    def expected_bytes(self, rows: Floats) -> Floats:
        """Return what each configuration is expected to need, shape (n,)."""
        return np.asarray(np.exp2(self._trees.predict(rows)))


class ScoreModel:
    """A Gaussian process (Matérn 5/2, one length scale) over encoded configurations.

    The kernel's hyperparameters are fitted when the number of scores has grown by a quarter, from
    the first scores alone: what is expected depends on the trials, not on when it is asked.
    """

    def __init__(self) -> None:
        self._fitted_with = 0
        self._columns = 0
        self._kernel: Kernel | None = None
        self._process: GaussianProcessRegressor | None = None

    def fit(self, rows: Floats, scores: Floats) -> None:
        """Take in scores, shape (n,), of encoded configurations, shape (n, d)."""
        rows, scores = rows[-_MOST_SCORE_ROWS:], scores[-_MOST_SCORE_ROWS:]
        wanted = _fitted_with(len(scores))
        if self._kernel is None or wanted != self._fitted_with or rows.shape[1] != self._columns:
            self._kernel = _fit_kernel(rows[:wanted], scores[:wanted])
            self._fitted_with, self._columns = wanted, rows.shape[1]
        self.condition(rows, scores)

    def condition(self, rows: Floats, scores: Floats) -> None:
        """Take in scores, some of which may be expected ones only: the kernel stays as it was fitted."""
        from sklearn.gaussian_process import GaussianProcessRegressor

        process = GaussianProcessRegressor(self._kernel, optimizer=None, normalize_y=True)
        self._process = process.fit(rows, scores)

    def expected(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return mean and standard deviation of each configuration's score, shape (n,)."""
        assert self._process is not None
        mean, deviation = self._process.predict(rows, return_std=True)
        return np.asarray(mean), np.asarray(deviation)


def not_far_below(scores: Floats, worst: float) -> Floats:
    """Return scores with those that are far below the reference lifted.

    Nothing is gained below the reference, so how far below a crash lies does not matter; a model
    that had to follow it would see little else.
    """
    return np.asarray(np.maximum(scores, worst - _BELOW * max(float(scores.max()) - worst, 1e-12)))


def _fitted_with(count: int) -> int:
    """Return the largest step of the schedule up to `count`."""
    step = 5.0
    while step * _REFIT_GROWTH <= min(count, _MOST_KERNEL_ROWS):
        step *= _REFIT_GROWTH
    return min(count, int(step))


def _fit_kernel(rows: Floats, scores: Floats) -> Kernel:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    # One length scale for all columns: with one for each, ten scores would be fitted by chance.
    kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern(1.0, (1e-1, 1e2), nu=2.5) + WhiteKernel(
        1e-2, (1e-5, 1.0)
    )
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a length scale at its bound: no matter
        return process.fit(rows, scores).kernel_
