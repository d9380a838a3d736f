"""Configurations that people give, checked against the space; and whether that is still the same."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial

from tuner.errors import TunerError, UsageError, WorkloadError
from tuner.search.plain_choices import PlainChoices
from tuner.search.sampling.rehearsal import Draw, contains, rehearse
from tuner.search.sampling.uniform import draw_uniformly
from tuner.workload import Workload

_BRANCHES_LOOKED_AT = 64  # random configurations in which a name is looked for


@dataclass(frozen=True)
class Space:
    """A workload's space, seen through random configurations.

    Attributes:
        distributions: By name, of all branches that were met.
    """

    workload: Workload
    distributions: dict[str, BaseDistribution]

    @classmethod
    def of(cls, workload: Workload) -> Space:
        """Look at the space."""
        rng = np.random.default_rng(0)
        found: dict[str, BaseDistribution] = {}
        for _ in range(_BRANCHES_LOOKED_AT):
            with contextlib.suppress(WorkloadError):  # a combination that suggest() itself refuses
                draw = _rehearsed(workload, lambda _, asked: draw_uniformly(asked, rng), {})
                found.update(draw.distributions)
        return cls(workload, found)

    def with_values(self, values: Mapping[str, Any]) -> Draw:
        """Return the configuration with some values, the others drawn at random."""
        rng = np.random.default_rng(0)
        return _rehearsed(self.workload, lambda _, asked: draw_uniformly(asked, rng), values)


def read_queue(path: Path, space: Space) -> list[dict[str, Any]]:
    """Return the configurations in a file, each a part of one or a whole, ready to be queued.

    Args:
        path: JSON: a list of objects, or one.
        space: What values must lie in.

    Raises:
        UsageError: The file cannot be read, or an entry has an unknown name or a value out of range.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path} cannot be read: {reason}", hint='it holds a JSON list: [{"width": 64}, {"width": 128}]'
        ) from None
    entries = [entries] if isinstance(entries, dict) else entries
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(
            f"{path} holds no list of configurations", hint='for example: [{"width": 64}, {"width": 128}]'
        )
    return [_checked(entry, space, f"{path}, entry {place}") for place, entry in enumerate(entries, 1)]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"'{twice}' is there twice")
    return dict(pairs)


def _checked(entry: dict[str, Any], space: Space, where: str) -> dict[str, Any]:
    values = {}
    for name, value in entry.items():
        if name not in space.distributions:
            raise UsageError(
                f"{where}: there is no parameter '{name}'",
                hint=f"its parameters: {', '.join(space.distributions)}",
            )
        values[name] = _value(value, space.distributions[name])
        if not contains(space.distributions[name], values[name]):
            raise UsageError(
                f"{where}: {name} cannot be {value!r}", hint=f"it is {describe(space.distributions[name])}"
            )
    draw = space.with_values(values)
    for name, value in values.items():
        asked = draw.distributions.get(name)
        if asked is None:
            raise UsageError(f"{where}: with these values '{name}' is not asked for")
        if not contains(asked, value):
            raise UsageError(f"{where}: {name} cannot be {value!r}", hint=f"it is {describe(asked)}")
    return values


def _value(value: Any, distribution: BaseDistribution) -> Any:
    """Return a value in the type that is asked for; numbers may be text, as YAML writes 1e-4."""
    if isinstance(distribution, CategoricalDistribution):
        if value in distribution.choices:
            return value
        label = json.dumps(value)
        return label if label in distribution.choices else value
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)  # which no range contains
    if isinstance(distribution, IntDistribution):
        return int(value) if value == int(value) else value
    return float(value)


def describe(distribution: BaseDistribution) -> str:
    """Return a distribution in words."""
    if isinstance(distribution, CategoricalDistribution):
        return "one of " + ", ".join(map(str, distribution.choices))
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    kind = "whole number" if isinstance(distribution, IntDistribution) else "number"
    return f"a {kind} from {distribution.low:g} to {distribution.high:g}"


def check_choices(name: str, trials: list[FrozenTrial], space: Space) -> None:
    """Check that a study's choices are the workload's (case D27): Optuna refuses others in mid-study.

    Raises:
        UsageError: They differ; the message has both.
    """
    for trial in reversed(trials):
        for param, then in trial.distributions.items():
            now = space.distributions.get(param)
            if now is None or (type(then) is type(now) and not isinstance(now, CategoricalDistribution)):
                continue
            if then != now:
                raise UsageError(
                    f"in study '{name}' {param} was {describe(then)}; the workload now has {describe(now)}",
                    hint=f"start a new study that learns from it: --study-name NEW --warm-start {name}",
                )


def translated(trials: list[FrozenTrial], space: Space) -> Iterator[tuple[FrozenTrial, Draw]]:
    """Yield the trials of another study that lie in this space, and what they are in it."""
    for trial in trials:
        values = {
            name: _value(value, space.distributions[name])
            for name, value in trial.params.items()
            if name in space.distributions
        }
        try:
            draw = space.with_values(values)
        except TunerError:
            continue
        asked_for = draw.answers.keys() <= values.keys()
        if asked_for and all(contains(draw.distributions[name], draw.answers[name]) for name in draw.answers):
            yield trial, draw


def _rehearsed(workload: Workload, answer: Any, fixed: Mapping[str, Any]) -> Draw:
    try:
        return rehearse(lambda trial: workload.suggest(PlainChoices(trial)), answer, number=0, fixed=fixed)  # type: ignore[arg-type]
    except Exception as error:
        raise WorkloadError(f"suggest() fails: {type(error).__name__}: {error}") from error
