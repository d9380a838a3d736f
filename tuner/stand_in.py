"""A stand-in for an Optuna trial: runs a workload's `suggest` without a study.

It answers from given values, else from a default inside the range, and records what was asked, so
that a search space can be described, and a configuration completed, without Optuna.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import UsageError, WorkloadError
from tuner.workload import Workload

_RANDOM_DRAWS = 300  # finds a branch that one configuration in 50 takes with 99.8 %


@dataclass(frozen=True)
class Range:
    """A numeric parameter's range; `step` is None for a continuous one."""

    low: float
    high: float
    step: float | None
    log: bool
    whole: bool


@dataclass(frozen=True)
class Choices:
    """A categorical parameter's choices."""

    choices: tuple[Any, ...]


@dataclass(frozen=True)
class Draw:
    """One configuration with the space it lies in.

    Attributes:
        params: What `suggest` returned.
        answers: What its trial answered, by the name that was asked for.
        space: The distributions asked for, by name, in order.
    """

    params: dict[str, Any]
    answers: dict[str, Any]
    space: dict[str, Range | Choices]


class StandInTrial:
    """Answers Optuna's suggest calls; numbers default to the middle, choices to the first.

    Args:
        values: Answers as text, which must suit their parameters.
        fixed: Answers given as they are, even outside the space; they win over `values`.

    Attributes:
        asked: What was asked for, by parameter, in order.
        params: What was answered.
    """

    number = 0

    def __init__(self, values: Mapping[str, str], fixed: Mapping[str, Any] | None = None) -> None:
        self._values = dict(values)
        self._fixed = dict(fixed or {})
        self.asked: dict[str, Range | Choices] = {}
        self.params: dict[str, Any] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Answer for a real number."""
        self.asked[name] = Range(low, high, step, log, whole=False)
        if name in self._fixed:
            return float(self._answer(name, self._fixed[name]))
        middle = math.sqrt(low * high) if log else (low + high) / 2
        if step is not None:
            middle = low + math.floor((middle - low) / step + 1e-9) * step
        value = float(self._number(name, float) if name in self._values else middle)
        self.params[name] = value
        return value

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Answer for a whole number."""
        self.asked[name] = Range(low, high, step, log, whole=True)
        if name in self._fixed:
            return int(self._answer(name, self._fixed[name]))
        middle = round(math.sqrt(low * high)) if log else low + (high - low) // 2 // step * step
        value = int(self._number(name, int) if name in self._values else middle)
        self.params[name] = value
        return value

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Answer with one of the choices.

        Raises:
            UsageError: The given value is none of them.
        """
        self.asked[name] = Choices(tuple(choices))
        if name in self._fixed:
            return self._answer(name, self._fixed[name])
        if name not in self._values:
            return self._answer(name, choices[0])
        for choice in choices:
            if str(choice) == self._values[name]:
                return self._answer(name, choice)
        known = ", ".join(map(str, choices))
        raise UsageError(f"{name} cannot be '{self._values[name]}'", hint=f"its choices: {known}")

    def set_user_attr(self, key: str, value: Any) -> None:
        """Accept an attribute, as a trial would."""

    def unknown(self) -> list[str]:
        """Return the given names that `suggest` never asked for."""
        return [name for name in self._values if name not in self.asked]

    def _answer(self, name: str, value: Any) -> Any:
        self.params[name] = value
        return value

    def _number(self, name: str, kind: type[int] | type[float]) -> float:
        text = self._values[name]
        try:
            number = kind(text)
            if not math.isfinite(number):
                raise ValueError
            return number
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise UsageError(f"{name} must be {wanted}, not '{text}'") from None


def require_plain(params: Any) -> None:
    """Check that params can travel to a child process as JSON.

    Raises:
        TypeError: A value is not a number, text, truth value, None, list or dictionary.
    """
    json.dumps(params)


def configuration(workload: Workload, values: Mapping[str, str]) -> dict[str, Any]:
    """Return the params that `suggest` gives with some values set, as text.

    Raises:
        UsageError: A name is unknown, or a value does not suit its parameter.
        WorkloadError: `suggest` itself fails.
    """
    return draw(workload, values).params


def draw(workload: Workload, values: Mapping[str, str], fixed: Mapping[str, Any] | None = None) -> Draw:
    """Return the configuration with some values set, and the space that `suggest` asked for.

    Args:
        workload: Whose `suggest` is run.
        values: Values as text; each must be a parameter of this configuration.
        fixed: Values as they are, even outside the space; those that are not asked for are ignored.

    Raises:
        UsageError: A name is unknown, or a value does not suit its parameter.
        WorkloadError: `suggest` itself fails.
    """
    trial = StandInTrial(values, fixed)
    try:
        params = workload.suggest(trial)  # type: ignore[arg-type]
        require_plain(params)
    except UsageError:
        raise
    except Exception as error:
        raise WorkloadError(f"suggest() fails: {type(error).__name__}: {error}") from error
    if not isinstance(params, dict):
        raise WorkloadError(f"suggest() returns {type(params).__name__}, not a dictionary of params")
    unknown = trial.unknown()
    if unknown:
        raise UsageError(
            f"{type(workload).__name__} has no parameter '{unknown[0]}'",
            hint=f"its parameters: {', '.join(trial.asked)}",
        )
    return Draw(params, trial.params, trial.asked)


def check_memory_free(workload: Workload) -> None:
    """Check that every name in the workload's `memory_free` is one of its params.

    A name that the default configuration lacks may belong to another branch of the space: it is
    looked for in random configurations before it is refused.

    Raises:
        WorkloadError: `memory_free` is not a collection of names, or names something else.
    """
    names = workload.memory_free
    where = type(workload).__name__
    if not isinstance(names, (tuple, list, set, frozenset)) or not all(isinstance(n, str) for n in names):
        raise WorkloadError(
            f"{where}.memory_free must be a tuple of names, not {names!r}",
            hint='write for example: memory_free = ("learning_rate",)',
        )
    known = dict.fromkeys(draw(workload, {}).params)
    rng = random.Random(0)  # noqa: S311
    for _ in range(_RANDOM_DRAWS):
        if set(names) <= set(known):
            return
        with contextlib.suppress(WorkloadError):  # a combination that suggest() itself refuses
            known.update(dict.fromkeys(_random_params(workload, rng)))
    missing = sorted(set(names) - set(known))
    if missing:
        raise WorkloadError(
            f"{where}.memory_free names '{missing[0]}', which is not one of its params",
            hint=f"its params: {', '.join(known)}",
        )


def _random_params(workload: Workload, rng: random.Random) -> dict[str, Any]:
    """Return a random configuration: any choice, and the ends or the middle of each range."""
    fixed: dict[str, Any] = {}
    while True:  # each round settles what the round before asked for
        found = draw(workload, {}, fixed)
        fresh = [name for name in found.space if name not in fixed]
        if not fresh:
            return found.params
        for name in fresh:
            asked = found.space[name]
            if isinstance(asked, Choices):
                fixed[name] = rng.choice(asked.choices)
            else:
                fixed[name] = rng.choice((asked.low, asked.high, found.answers[name]))
