"""A stand-in for an Optuna trial: runs a workload's `suggest` without a study.

It answers from given values, else from a default inside the range, and records what was asked, so
that a search space can be described, and a configuration completed, without Optuna.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import UsageError, WorkloadError
from tuner.workload import Workload


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


class StandInTrial:
    """Answers Optuna's suggest calls; numbers default to the middle, choices to the first.

    Attributes:
        asked: What was asked for, by parameter, in order.
        params: What was answered.
    """

    number = 0

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)
        self.asked: dict[str, Range | Choices] = {}
        self.params: dict[str, Any] = {}

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Answer for a real number."""
        self.asked[name] = Range(low, high, step, log, whole=False)
        middle = math.sqrt(low * high) if log else (low + high) / 2
        if step is not None:
            middle = low + math.floor((middle - low) / step + 1e-9) * step
        value = float(self._number(name, float) if name in self._values else middle)
        self.params[name] = value
        return value

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Answer for a whole number."""
        self.asked[name] = Range(low, high, step, log, whole=True)
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
    trial = StandInTrial(values)
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
    return params
