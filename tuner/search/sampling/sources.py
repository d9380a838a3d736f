"""Where a rehearsal's draws come from, one source after the other.

| source | draws | used |
|---|---|---|
| `Inner` | the inner sampler's | first |
| `Promising` | the best of many by the expected gain of hypervolume | in place of it, once scores are known |
| `Fitting` | random ones, likely to fit first | when the others found nothing |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from tuner.search.sampling.encoding import Encoder
from tuner.search.sampling.history import Forecast, History
from tuner.search.sampling.models import MemoryModel
from tuner.search.sampling.rehearsal import Answer, Draw, Suggest, contains, rehearse
from tuner.search.sampling.uniform import draw_uniformly

_POOL = 256
_KNOWN_BEFORE_ORDERING = 10  # forecasts from which memory is modelled
_TRACED_PER_POOL = 16  # then the model has learned enough for a new one


class Source(Protocol):
    """Yields draws for one trial."""

    def draw(self) -> Draw | None:
        """Return another draw, or None when there is none."""

    def takes(self, draw: Draw, forecast: Forecast) -> bool:
        """Whether a draw that fits is the one; else it goes on."""


class Drawer:
    """Rehearses one trial with answers from a sampler.

    Args:
        study: The study.
        trial: The trial, which is running.
        suggest: The workload's.
        fixed: Values that are given.
        sampler: The inner one.
    """

    def __init__(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        suggest: Suggest,
        fixed: dict[str, object],
        sampler: BaseSampler,
    ) -> None:
        self.study, self.trial = study, trial
        self._suggest, self._fixed, self._sampler = suggest, fixed, sampler

    @functools.cached_property
    def _space(self) -> dict[str, BaseDistribution]:
        """Of the inner sampler: it goes through all trials for it, and they are the same for all draws."""
        return self._sampler.infer_relative_search_space(self.study, self.trial)

    def draw(self) -> Draw:
        """Return a draw of the inner sampler: what it knows relatively, else independently."""
        relative = self._sampler.sample_relative(self.study, self.trial, self._space)

        def otherwise(name: str, distribution: BaseDistribution) -> Any:
            return self._sampler.sample_independent(self.study, self.trial, name, distribution)

        return self._answered(relative, otherwise)

    def draw_uniformly(
        self, rng: np.random.Generator, kept: Mapping[str, Any] = MappingProxyType({})
    ) -> Draw:
        """Return a uniform draw in which some values are kept, where they are in range."""
        return self._answered(kept, lambda name, distribution: draw_uniformly(distribution, rng))

    def _answered(self, values: Mapping[str, Any], otherwise: Answer) -> Draw:
        def answer(name: str, distribution: BaseDistribution) -> Any:
            if name in values and contains(distribution, values[name]):
                return values[name]
            return otherwise(name, distribution)

        return rehearse(self._suggest, answer, number=self.trial.number, fixed=self._fixed)


class Inner:
    """The inner sampler's draws, so many of them."""

    def __init__(self, drawer: Drawer, count: int) -> None:
        self._drawer, self._left = drawer, count

    def draw(self) -> Draw | None:
        """Return the next draw."""
        if self._left <= 0:
            return None
        self._left -= 1
        return self._drawer.draw()

    def takes(self, draw: Draw, forecast: Forecast) -> bool:
        """Take whatever fits."""
        return True


class Fitting:
    """Random draws that are new, those first that are likely to fit, then the smallest.

    Args:
        drawer: Of the trial.
        history: What is known; it grows while draws are traced.
        budget_bytes: What fits.
        seed: Of the draws.
    """

    def __init__(self, drawer: Drawer, history: History, budget_bytes: int, seed: int | None) -> None:
        self._drawer, self._history, self._budget_bytes = drawer, history, budget_bytes
        self._seed = 0 if seed is None else seed
        self._rng = np.random.default_rng(seed)
        self._tried = history.tried(drawer.study, drawer.trial.number)
        self._pool: list[Draw] = []
        self._served = 0

    def draw(self) -> Draw | None:
        """Return the next draw; None when a whole pool holds nothing new."""
        if not self._pool or self._served >= _TRACED_PER_POOL:
            self._pool, self._served = self._new_pool(), 0
        self._served += 1
        return self._pool.pop(0) if self._pool else None

    def takes(self, draw: Draw, forecast: Forecast) -> bool:
        """Take whatever fits."""
        return True

    def _new_pool(self) -> list[Draw]:
        known = self._tried | self._history.rejected
        found: dict[str, Draw] = {}
        for _ in range(_POOL):
            draw = self._drawer.draw_uniformly(self._rng)
            if draw.key not in known:
                found.setdefault(draw.key, draw)
        pool = list(found.values())
        bytes_of = expected_bytes(self._history, pool, self._seed)
        if bytes_of is None:
            return pool
        order = np.argsort(np.maximum(bytes_of, self._budget_bytes), kind="stable")
        return [pool[index] for index in order]


def expected_bytes(history: History, draws: list[Draw], seed: int) -> np.ndarray | None:
    """Return what draws are expected to need: as traced, else as modelled; None while little is known."""
    known = [(draw, forecast.memory_bytes) for draw, forecast in history.forecasts.values()]
    traced = [(draw, size) for draw, size in known if size is not None]
    if len(traced) < _KNOWN_BEFORE_ORDERING or not draws:
        return None
    encoder = Encoder([*(draw for draw, _ in traced), *draws])
    model = MemoryModel(encoder.rows([draw for draw, _ in traced]), [size for _, size in traced], seed)
    found = model.expected_bytes(encoder.rows(draws))
    for index, draw in enumerate(draws):
        if draw.key in history.forecasts:
            found[index] = history.forecasts[draw.key][1].memory_bytes or found[index]
    return found
