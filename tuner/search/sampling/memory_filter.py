"""A sampler around another one that turns away what surely does not fit, before a trial is spent.

Before the trial's first `suggest_*`, the workload's `suggest` is rehearsed: a stand-in trial answers
from the inner sampler (its relative draw, else an independent one), the configuration's memory is
forecast, and so on until one fits. Its values are then served to the real trial. So the random phase,
the first trials and conditional spaces are filtered as well. Public Optuna API only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from tuner.search.sampling.finding import Finder, Rehearsal
from tuner.search.sampling.history import Forecast, History, given_values
from tuner.search.sampling.models import ScoreModel
from tuner.search.sampling.promising import Promising
from tuner.search.sampling.rehearsal import Suggest, contains
from tuner.search.sampling.sources import Drawer, Fitting, Inner, Source


class MemoryFilter(BaseSampler):
    """Filters an inner sampler's draws by forecast memory.

    Args:
        inner: Any sampler.
        suggest: The workload's: takes a trial, returns params.
        forecast: What is known of a configuration's memory.
        budget_bytes: What fits, for models that order draws; forecasts alone turn away.
        history: What is known from earlier trials; grows.
        seed: Of draws that are not the inner sampler's.
        inner_draws: How many draws of the inner sampler there are per trial before random ones,
            likely to fit first, take their place.
        scores: The model of scores, kept from trial to trial, for a memory-aware search of two
            objectives; None for the inner sampler's draws.
        on_turned_away: Told how many draws were turned away so far.
    """

    def __init__(
        self,
        inner: BaseSampler,
        suggest: Suggest,
        forecast: Callable[[Any], Forecast],
        *,
        budget_bytes: int,
        history: History | None = None,
        seed: int | None = None,
        inner_draws: int = 50,
        scores: ScoreModel | None = None,
        on_turned_away: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.inner = inner
        self.history = history if history is not None else History()
        self._suggest, self._forecast = suggest, forecast
        self._budget_bytes, self._seed, self._inner_draws = budget_bytes, seed, inner_draws
        self._scores = scores
        self._on_turned_away = on_turned_away
        self.rehearsals: dict[int, Rehearsal] = {}

    def reseed_rng(self) -> None:
        """Reseed the inner sampler."""
        self.inner.reseed_rng()

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Tell the inner sampler."""
        self.inner.before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Tell the inner sampler."""
        self.rehearsals.pop(trial.number, None)
        self.inner.after_trial(study, trial, state, values)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Rehearse, unless that was done; return the space of what was found."""
        if trial.number not in self.rehearsals:
            self.rehearse(study, trial)
        draw = self.rehearsals[trial.number].draw
        return {} if draw is None else dict(draw.distributions)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values that were found."""
        draw = self.rehearsals[trial.number].draw
        if draw is None:
            return {}
        return {name: draw.answers[name] for name in search_space if name in draw.answers}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the inner sampler's draw of what was not found: `suggest` asks for other things now."""
        rehearsal = self.rehearsals.get(trial.number)
        if rehearsal is not None and rehearsal.draw is not None:
            value = rehearsal.draw.answers.get(param_name)
            if param_name in rehearsal.draw.answers and contains(param_distribution, value):
                return value
        return self.inner.sample_independent(study, trial, param_name, param_distribution)

    def rehearse(self, study: optuna.Study, trial: FrozenTrial) -> Rehearsal:
        """Find a configuration for a trial, and keep it for its `suggest_*`."""
        given = given_values(trial)
        drawer = Drawer(study, trial, self._suggest, given, self.inner)
        finder = Finder(
            self.history,
            self._forecast,
            tried=self.history.tried(study, trial.number),
            on_turned_away=self._on_turned_away,
        )
        found = dataclasses.replace(finder.find(self._sources(drawer)), given=bool(given))
        self.rehearsals[trial.number] = found
        return found

    def _sources(self, drawer: Drawer) -> Iterator[Source]:
        """Yield where a trial's draws come from, one after the other, each made when it is needed.

        A memory-aware search takes turns: every second proposal is the inner sampler's, which looks
        where the model of scores is wrong.
        """
        turn = drawer.trial.number % 2 == 0
        if self._scores is not None and turn and Promising.is_ready(drawer):
            yield Promising(
                drawer,
                self.history,
                self._scores,
                budget_bytes=self._budget_bytes,
                seed=self._seed,
            )
        else:
            yield Inner(drawer, self._inner_draws)
        yield Fitting(drawer, self.history, self._budget_bytes, self._seed)
