"""A workload's `suggest` on a stand-in trial: what a configuration would be, before a trial is spent."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

_SHARED: dict[BaseDistribution, BaseDistribution] = {}  # thousands of draws ask for the same ones
Answer = Callable[[str, BaseDistribution], Any]
Suggest = Callable[[Any], Any]


@dataclass(frozen=True)
class Draw:
    """One configuration, as it was drawn.

    Attributes:
        params: What `suggest` returned.
        answers: What it was answered, by Optuna's names.
        distributions: What it asked for, by the same names.
    """

    params: Any
    answers: dict[str, Any]
    distributions: dict[str, BaseDistribution]

    @property
    def key(self) -> str:
        """The same text for the same answers."""
        return key_of(self.answers)


def key_of(answers: Mapping[str, Any]) -> str:
    """Return the same text for the same answers, whether they were stored meanwhile or not."""
    return json.dumps(answers, sort_keys=True, default=str)


class RehearsalTrial(optuna.trial.BaseTrial):
    """Answers `suggest_*` from a function, and remembers what was asked.

    Args:
        number: The number of the trial that is rehearsed.
        answer: Returns the value for a name and a distribution of more than one value.
        fixed: Values that are given, such as those of an enqueued trial.
    """

    def __init__(self, number: int, answer: Answer, fixed: Mapping[str, Any]) -> None:
        self._number, self._answer, self._fixed = number, answer, fixed
        self._answers: dict[str, Any] = {}
        self._distributions: dict[str, BaseDistribution] = {}
        self._user_attrs: dict[str, Any] = {}
        self._start = datetime.datetime.now()

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Answer for a real number."""
        return float(self._suggest(name, FloatDistribution(low, high, log=log, step=step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Answer for a whole number."""
        return int(self._suggest(name, IntDistribution(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Answer with one of the choices."""
        return self._suggest(name, CategoricalDistribution(choices))

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        """Answer as Optuna's older name for `suggest_float` does."""
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        """Answer as Optuna's older name for a logarithmic `suggest_float` does."""
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        """Answer as Optuna's older name for a stepped `suggest_float` does."""
        return self.suggest_float(name, low, high, step=q)

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        if name not in self._answers:
            if name in self._fixed:
                value = self._fixed[name]
            elif distribution.single():
                value = distribution.to_external_repr(_only_value(distribution))
            else:
                value = self._answer(name, distribution)
            self._answers[name] = value
            self._distributions[name] = _SHARED.setdefault(distribution, distribution)
        return self._answers[name]

    def report(self, value: float, step: int) -> None:
        """Take no notice: nothing is trained."""

    def should_prune(self) -> bool:
        """Return False."""
        return False

    def set_user_attr(self, key: str, value: Any) -> None:
        """Keep an attribute for this rehearsal."""
        self._user_attrs[key] = value

    def set_constraint(self, key: str, value: float) -> None:
        """Take no notice."""

    @property
    def number(self) -> int:
        """The number of the trial that is rehearsed."""
        return self._number

    @property
    def params(self) -> dict[str, Any]:
        """What was answered so far."""
        return dict(self._answers)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """What was asked for so far."""
        return dict(self._distributions)

    @property
    def user_attrs(self) -> dict[str, Any]:
        """What `set_user_attr` was given."""
        return dict(self._user_attrs)

    @property
    def constraints(self) -> dict[str, float]:
        """None are known."""
        return {}

    @property
    def datetime_start(self) -> datetime.datetime | None:
        """When the rehearsal began."""
        return self._start


def rehearse(
    suggest: Suggest, answer: Answer, *, number: int, fixed: Mapping[str, Any] | None = None
) -> Draw:
    """Return the configuration that `suggest` makes of some answers; what it raises is raised."""
    trial = RehearsalTrial(number, answer, fixed or {})
    params = suggest(trial)
    return Draw(params, trial.params, trial.distributions)


def contains(distribution: BaseDistribution, value: Any) -> bool:
    """Whether a value is one of a distribution's."""
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    if not isinstance(distribution, FloatDistribution | IntDistribution):
        return False
    if not isinstance(value, int | float) or not distribution.low <= value <= distribution.high:
        return False
    if isinstance(distribution, IntDistribution):
        return (value - distribution.low) % distribution.step == 0
    return True


def restored(distribution: BaseDistribution, value: Any) -> Any:
    """Return a value that went through JSON as it was: a choice that is a tuple came back as a list."""
    if isinstance(distribution, CategoricalDistribution) and value not in distribution.choices:
        written = json.dumps(value)
        return next((choice for choice in distribution.choices if json.dumps(choice) == written), value)
    return value


def _only_value(distribution: BaseDistribution) -> float:
    """Return the internal value of a distribution that has one value only."""
    return 0.0 if isinstance(distribution, CategoricalDistribution) else float(distribution.low)  # type: ignore[attr-defined]
