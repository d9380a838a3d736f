"""The Optuna side of a study: its storage, its sampler, and what each outcome is told as.

| outcome | told as | constraint `memory` = (bytes − budget) / budget |
|---|---|---|
| completed | COMPLETE | measured |
| pruned_memory | PRUNED | predicted, > 0 |
| out_of_memory | PRUNED | from the failed request, > 0 |
| pruned_metric | PRUNED | measured so far |
| anything else | FAIL | none |
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeGuard

import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tuner.records import Outcome
from tuner.search.optuna_storage import close, open_storage
from tuner.search.sampling.finding import Rehearsal
from tuner.search.sampling.history import Forecast, History, given_values
from tuner.search.sampling.memory_filter import MemoryFilter
from tuner.search.sampling.models import ScoreModel
from tuner.search.sampling.rehearsal import Draw, Suggest
from tuner.search.sampling.samplers import DEFAULT, KINDS, MEMORY_AWARE, build
from tuner.search.seeds import derived_seed
from tuner.store.engine import URL
from tuner.store.transactions import Patience, at_once

MEMORY = "memory"
REPEATS = "tuner_repeats"  # user attribute: number of the trial whose params are run again
AUDIT = "tuner_audit"  # user attribute: predicted not to fit, launched to check that; the rejection's id
_RANDOM_TRIALS = 10
_SMALLEST_EXCESS = 1e-6  # a constraint that is violated is above zero, whatever was measured
_TOLD_AS_PRUNED = frozenset({Outcome.PRUNED_MEMORY, Outcome.OUT_OF_MEMORY, Outcome.PRUNED_METRIC})
_TOLD_WITH_CONSTRAINT = _TOLD_AS_PRUNED | {Outcome.COMPLETED}


class OptunaStudy:
    """One study on Optuna's side, in the same database as our tables.

    Args:
        url: The database; Optuna's tables are created where missing.
        name: The study's name; it is created where missing.
        maximize: Whether more of the metric is better.
        single: True for the metric alone; else peak device bytes are minimised too.
        seed: Seeds the sampler, or None.
        parallel: Whether several trials run at once: proposals then differ from what runs.
        budget_bytes: What one trial may take.
        sampler: The sampler's name, as in sampling/samplers.py.
        sampler_options: Its options.
        patience: Repeats what fails since the database is away. A trial that is asked for twice
            then is running for nobody: `recover` sees to it.
    """

    def __init__(
        self,
        url: URL,
        name: str,
        *,
        maximize: bool,
        single: bool,
        seed: int | None,
        budget_bytes: int,
        parallel: bool = False,
        sampler: str = DEFAULT,
        sampler_options: Mapping[str, Any] = MappingProxyType({}),
        patience: Patience = at_once,
    ) -> None:
        self._patience = patience
        self._database = open_storage(url)
        # With a memory of trials that are finished: what is read from the database stays little.
        self._storage = optuna.storages.get_storage(self._database)
        metric = StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
        directions = [metric, StudyDirection.MINIMIZE]
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=name,
            directions=directions[:1] if single else directions,
            load_if_exists=True,
        )
        self._study_id = self._storage.get_study_id_from_name(name)
        self._name, self._seed, self._parallel = name, seed, parallel
        self._budget_bytes = budget_bytes
        self._sampler, self._sampler_options = sampler, dict(sampler_options)
        self._scores = ScoreModel() if sampler == MEMORY_AWARE else None
        self._random_trials: int | None = None  # how long the random phase is; None while it lasts
        self.history = History()

    def ask(self) -> optuna.Trial:
        """Return a new trial; queued params come first. Nothing is drawn before `rehearse`."""
        return self._patience(self._study.ask)

    def rehearse(
        self,
        trial: optuna.Trial,
        suggest: Suggest,
        forecast: Callable[[Any], Forecast],
        *,
        on_turned_away: Callable[[int], None] = lambda count: None,
    ) -> Rehearsal:
        """Find a configuration for the trial that was asked for last, in the same thread.

        Its `suggest_*` are then answered with it.
        """
        random_trials = self._random_trials or self._patience(self._count_random_trials)
        derived = None if self._seed is None else derived_seed(self._seed, trial.number)
        sampler = MemoryFilter(
            build(
                self._sampler,
                self._sampler_options,
                seed=self._sequence_seed() if KINDS[self._sampler].sequence else derived,
                random_trials=random_trials,
                parallel=self._parallel,
            ),
            suggest,
            forecast,
            budget_bytes=self._budget_bytes,
            history=self.history,
            seed=derived,
            inner_draws=KINDS[self._sampler].draws,
            scores=self._scores,
            on_turned_away=on_turned_away,
        )
        self._study.sampler = sampler
        return self._patience(lambda: sampler.rehearse(self._study, self._frozen(trial.number)))

    def _sequence_seed(self) -> int:
        """Return the seed of a sampler whose trials are one sequence: the study's, or its name's."""
        return self._seed if self._seed is not None else derived_seed(0, self._name)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._storage.get_trial(
            self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        )

    def trials(self) -> list[FrozenTrial]:
        """Return all trials by number, as Optuna keeps them."""
        return self._patience(lambda: self._study.get_trials(deepcopy=False))

    def _count_random_trials(self) -> int:
        """Return after how many trials TPE begins.

        TPE counts pruned trials into its random phase, which would end it with little known that
        fits: the phase is longer by those that did not fit. Once it is over, more of them make no
        difference. Trials that were stopped early count as any other: they fitted.
        """
        told = (TrialState.COMPLETE, TrialState.PRUNED)
        trials = self._study.get_trials(deepcopy=False, states=told)
        too_large = sum(trial.constraints.get(MEMORY, 0.0) > 0 for trial in trials)
        random_trials = _RANDOM_TRIALS + too_large
        if len(trials) - too_large >= _RANDOM_TRIALS:
            self._random_trials = random_trials
        return random_trials

    def ask_again(self, number: int) -> optuna.Trial:
        """Return a new trial that suggests the params of an earlier one."""
        earlier = self._patience(lambda: self._study.get_trials(deepcopy=False)[number])
        return self.ask_for(earlier.params, earlier.distributions, {REPEATS: number})

    def ask_for(
        self,
        answers: dict[str, Any],
        distributions: dict[str, BaseDistribution],
        user_attrs: dict[str, Any],
    ) -> optuna.Trial:
        """Return a new trial that suggests given values.

        It never waits in Optuna's queue, where another driver could take it for its own.
        """
        template = optuna.trial.create_trial(
            state=TrialState.RUNNING, params=answers, distributions=distributions, user_attrs=user_attrs
        )
        trial_id = self._patience(lambda: self._storage.create_new_trial(self._study_id, template))
        return self._patience(lambda: optuna.Trial(self._study, trial_id))

    def enqueue(self, queue: Sequence[Mapping[str, Any]]) -> int:
        """Queue configurations, or parts of them, that are not known; return how many there were."""
        before = len(self.trials())
        for values in queue:
            self._patience(partial(self._study.enqueue_trial, dict(values), skip_if_exists=True))
        return len(self.trials()) - before

    def put_back(self, number: int, *, again: bool) -> None:
        """Tell that no trial came of one that was asked for.

        Args:
            number: Its number.
            again: Whether what had been queued waits again.
        """
        given = given_values(self._patience(lambda: self._frozen(number)))
        if given and again:  # before it is told: a driver that dies in between leaves it twice, not never
            self._patience(lambda: self._study.enqueue_trial(given))
        self.tell(number, Outcome.INTERRUPTED, value=None, memory_bytes=None, budget_bytes=1)

    def add(
        self,
        draw: Draw,
        *,
        value: float | None,
        memory_bytes: float,
        user_attrs: Mapping[str, Any],
    ) -> None:
        """Add what is known of a configuration from elsewhere: a value, or that it has none."""
        excess = (memory_bytes - self._budget_bytes) / self._budget_bytes
        completed = value is not None and excess <= 0
        values = [value, memory_bytes][: len(self._study.directions)]
        trial = optuna.trial.create_trial(
            state=TrialState.COMPLETE if completed else TrialState.PRUNED,
            values=values if completed else None,  # type: ignore[arg-type]
            params=draw.answers,
            distributions=draw.distributions,
            user_attrs=dict(user_attrs),
            constraints={MEMORY: excess},
        )
        self._patience(lambda: self._study.add_trial(trial))

    def running(self) -> list[int]:
        """Return the numbers of the trials that Optuna takes for running."""
        running = (TrialState.RUNNING,)
        trials = self._patience(lambda: self._study.get_trials(deepcopy=False, states=running))
        return [trial.number for trial in trials]

    def tell(
        self,
        number: int,
        outcome: Outcome,
        *,
        value: float | None,
        memory_bytes: int | None,
        budget_bytes: int,
    ) -> None:
        """Tell Optuna what became of a trial; one that is told already stays as it is.

        Args:
            number: The trial's number.
            outcome: What became of it.
            value: The objective's value of a completed trial.
            memory_bytes: Device bytes: measured, predicted, or needed by the failed request.
            budget_bytes: The study's budget.
        """
        self._patience(
            lambda: self._tell(
                number, outcome, value=value, memory_bytes=memory_bytes, budget_bytes=budget_bytes
            )
        )

    def _tell(
        self,
        number: int,
        outcome: Outcome,
        *,
        value: float | None,
        memory_bytes: int | None,
        budget_bytes: int,
    ) -> None:
        trial_id = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, number)
        so_far = self._storage.get_trial(trial_id)
        # Told by another driver in the meantime, it stays as it is; told by halves, it keeps its constraint.
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            if (
                memory_bytes is not None
                and outcome in _TOLD_WITH_CONSTRAINT
                and MEMORY not in so_far.constraints
            ):
                excess = (memory_bytes - budget_bytes) / budget_bytes
                if outcome in (Outcome.PRUNED_MEMORY, Outcome.OUT_OF_MEMORY):
                    excess = max(excess, _SMALLEST_EXCESS)
                optuna.Trial(self._study, trial_id).set_constraint(MEMORY, excess)
            if outcome in _TOLD_AS_PRUNED:
                self._study.tell(number, state=TrialState.PRUNED, skip_if_finished=True)
            elif outcome is Outcome.COMPLETED and _is_number(value) and memory_bytes is not None:
                values = [float(value), float(memory_bytes)]
                self._study.tell(number, values[: len(self._study.directions)], skip_if_finished=True)
            else:
                self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def close(self) -> None:
        """Close the connections to the database."""
        close(self._database)


def _is_number(value: float | None) -> TypeGuard[float]:
    """Whether Optuna takes a value: NaN is no result, ±inf is one."""
    return value is not None and not math.isnan(value)
