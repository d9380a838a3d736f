"""Ways to search a table under a cap, each in so many launches; see search_quality.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler
from optuna.trial import TrialState

from benchmarks.hpo_tables import Configuration, Table
from tuner.search.sampling.history import Forecast
from tuner.search.sampling.memory_filter import MemoryFilter
from tuner.search.sampling.models import ScoreModel

LAUNCHES = 60
_MOST_ASKS = 2000
_SURELY_NOT = 0.05  # P(fits) below which a configuration is pruned, as in the product


@dataclass(frozen=True)
class Policy:
    """One way to search.

    Attributes:
        sampler: Makes the sampler of a seed.
        too_large: What Optuna is told of a launch that did not fit: nothing (FAIL), or PRUNED with
            the constraint.
        predicts: What is done with predictions: nothing, prune the trial, or filter in the sampler.
        error: Relative error of predictions: uniform within ± so much.
        aware: Whether proposals go by the expected gain of feasible hypervolume.
    """

    sampler: Callable[[int], BaseSampler]
    too_large: str = "constraint"
    predicts: str = "nothing"
    error: float = 0.0
    aware: bool = False


def tpe(seed: int) -> BaseSampler:
    """Return TPE as the product uses it."""
    return TPESampler(multivariate=True, group=True, seed=seed)


def tpe_default(seed: int) -> BaseSampler:
    """Return TPE as Optuna's defaults have it."""
    return TPESampler(seed=seed)


ONE_OBJECTIVE = {
    "plain Optuna (OOM is FAIL)": Policy(tpe, "fail"),
    "constraint after launch": Policy(tpe),
    "predict and prune": Policy(tpe, predicts="prune"),
    "filter": Policy(tpe, predicts="filter"),
    "filter, ±10 %": Policy(tpe, predicts="filter", error=0.10),
    "filter, ±20 %": Policy(tpe, predicts="filter", error=0.20),
}
TWO_OBJECTIVES = {
    "TPE, constraint": Policy(tpe_default),
    "NSGA-II, constraint": Policy(lambda seed: NSGAIISampler(seed=seed)),
    "predict and prune": Policy(tpe, predicts="prune"),
    "filter": Policy(tpe, predicts="filter"),
    "memory-aware": Policy(tpe, predicts="filter", aware=True),
    "memory-aware, ±10 %": Policy(tpe, predicts="filter", aware=True, error=0.10),
    "memory-aware, ±20 %": Policy(tpe, predicts="filter", aware=True, error=0.20),
    "GP, constraint": Policy(lambda seed: GPSampler(seed=seed)),
}


@dataclass(frozen=True)
class Run:
    """What one search launched, in order.

    Attributes:
        sizes, scores: Of each launch.
        asks: How many trials Optuna was asked for.
        seconds: How long asking took, all in all.
    """

    sizes: list[int]
    scores: list[float]
    asks: int
    seconds: float


class Predictor:
    """Predicts sizes with a relative error that is fixed for a configuration."""

    def __init__(self, table: Table, cap: int, error: float, seed: int) -> None:
        self._table, self._cap, self._error = table, cap, error
        self._rng = np.random.default_rng([seed, 1])
        self._errors: dict[Configuration, float] = {}

    def forecast(self, configuration: Configuration) -> Forecast:
        """Return the forecast as the product makes it: pruned when it fits with less than 5 %."""
        size = self._table.sizes[configuration]
        if not self._error:
            return Forecast(size, fits=size <= self._cap)
        if configuration not in self._errors:
            self._errors[configuration] = self._rng.uniform(-self._error, self._error)
        predicted = size * (1 + self._errors[configuration])
        # size = predicted / (1 + u) fits when u >= predicted / cap - 1
        probability = float(np.clip((1 + self._error - predicted / self._cap) / (2 * self._error), 0, 1))
        return Forecast(round(predicted), fits=probability >= _SURELY_NOT, fits_probability=probability)


def search(table: Table, cap: int, policy: Policy, seed: int, *, two: bool) -> Run:
    """Search a table with one policy and seed."""
    study = optuna.create_study(directions=["maximize", "minimize"] if two else ["maximize"])
    predictor = Predictor(table, cap, policy.error, seed)
    study.sampler = policy.sampler(seed)
    if policy.predicts == "filter":
        study.sampler = MemoryFilter(
            policy.sampler(seed),
            table.suggest,
            predictor.forecast,
            budget_bytes=cap,
            seed=seed,
            scores=ScoreModel() if policy.aware else None,
        )
    sizes: list[int] = []
    scores: list[float] = []
    asks, seconds = 0, 0.0
    while len(sizes) < LAUNCHES and asks < _MOST_ASKS:
        started = time.perf_counter()
        trial = study.ask()
        configuration = table.suggest(trial)
        seconds += time.perf_counter() - started
        asks += 1
        size = table.sizes[configuration]
        forecast = None if policy.predicts == "nothing" else predictor.forecast(configuration)
        if forecast is not None and not forecast.fits:
            trial.set_constraint("memory", max(1e-6, (forecast.memory_bytes or 0) / cap - 1))
            study.tell(trial, state=TrialState.PRUNED)
            continue
        sizes.append(size)
        scores.append(table.scores[configuration])
        if size <= cap:
            trial.set_constraint("memory", size / cap - 1)
            study.tell(trial, [scores[-1], float(size)] if two else scores[-1])
        elif policy.too_large == "fail":
            study.tell(trial, state=TrialState.FAIL)
        else:
            trial.set_constraint("memory", size / cap - 1)
            study.tell(trial, state=TrialState.PRUNED)
    return Run(sizes, scores, asks, seconds)
