"""Configurations as rows of numbers from 0 to 1, for models.

Numbers are scaled, on a logarithmic axis where they were drawn on one; choices that are numbers keep
their order, other choices are one column each. A name that some configurations lack has a column that
says so, and lies in the middle where it is missing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from tuner.search.sampling.rehearsal import Draw

_MISSING = 0.5


class Encoder:
    """Turns answers into rows.

    Args:
        draws: All that will be encoded, or at least one of each shape.
    """

    def __init__(self, draws: Sequence[Draw]) -> None:
        self._columns: dict[str, list[BaseDistribution]] = {}
        counts: dict[str, int] = {}
        for draw in draws:
            for name in draw.answers:
                counts[name] = counts.get(name, 0) + 1
            for name, distribution in draw.distributions.items():
                known = self._columns.setdefault(name, [])
                if distribution not in known:
                    known.append(distribution)
        self._axes = [axis for name in sorted(self._columns) for axis in _axes(name, self._columns[name])]
        self._optional = [name for name in sorted(self._columns) if counts[name] < len(draws)]

    def rows(self, draws: Sequence[Draw]) -> NDArray[np.float64]:
        """Return one row per configuration."""
        found = [
            [
                *(axis.place(draw.answers) for axis in self._axes),
                *(float(name in draw.answers) for name in self._optional),
            ]
            for draw in draws
        ]
        return np.asarray(found, dtype=np.float64).reshape(len(draws), -1)


class _Scaled:
    """A number between the lowest and the highest that was ever asked for."""

    def __init__(self, name: str, low: float, high: float, *, log: bool) -> None:
        self._name, self._log = name, log
        self._low, self._high = self._on_axis(low), self._on_axis(high)

    def place(self, answers: dict[str, Any]) -> float:
        if self._name not in answers:
            return _MISSING
        return (self._on_axis(answers[self._name]) - self._low) / ((self._high - self._low) or 1.0)

    def _on_axis(self, value: float) -> float:
        return math.log(value) if self._log else float(value)


class _Choice:
    """Whether one choice was taken."""

    def __init__(self, name: str, choice: Any) -> None:
        self._name, self._choice = name, choice

    def place(self, answers: dict[str, Any]) -> float:
        return float(self._name in answers and answers[self._name] == self._choice)


class _Rank:
    """Which of several numbers, in their order, was taken."""

    def __init__(self, name: str, choices: Sequence[Any]) -> None:
        self._name = name
        self._places = {choice: place for place, choice in enumerate(sorted(choices))}

    def place(self, answers: dict[str, Any]) -> float:
        if answers.get(self._name) not in self._places:
            return _MISSING
        return self._places[answers[self._name]] / max(1, len(self._places) - 1)


def _axes(name: str, distributions: list[BaseDistribution]) -> list[_Scaled | _Choice | _Rank]:
    numeric = [d for d in distributions if isinstance(d, FloatDistribution | IntDistribution)]
    if numeric:
        low, high = min(d.low for d in numeric), max(d.high for d in numeric)
        return [_Scaled(name, low, high, log=all(d.log for d in numeric))]
    choices: list[Any] = []
    for distribution in distributions:
        if isinstance(distribution, CategoricalDistribution):
            choices += [choice for choice in distribution.choices if choice not in choices]
    if all(isinstance(choice, int | float) and not isinstance(choice, bool) for choice in choices):
        return [_Rank(name, choices)]
    return [_Choice(name, choice) for choice in choices]
