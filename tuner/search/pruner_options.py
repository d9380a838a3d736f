"""A pruner by its name and options, as a person writes them."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from tuner.errors import UsageError
from tuner.search.pruning import AshaPruner, MedianPruner, NoPruner, PercentilePruner, Pruner

_RULES = (NoPruner, MedianPruner, PercentilePruner, AshaPruner)
_PRUNERS: dict[str, type[NoPruner | MedianPruner | PercentilePruner | AshaPruner]] = {
    rule.name: rule for rule in _RULES
}
_LEAST = {"percentile": 0.0, "startup_trials": 0, "warmup_epochs": 0, "min_trials": 1}
_LEAST |= {"reduction_factor": 2, "min_epochs": 1}


def make_pruner(name: str, options: dict[str, str]) -> Pruner:
    """Return a rule by its name and options as a person writes them.

    Raises:
        UsageError: There is no such rule or option, or a value is none; it lists what is known.
    """
    if name not in _PRUNERS:
        raise UsageError(f"there is no pruner '{name}'", hint=f"known: {', '.join(_PRUNERS)}")
    rule = _PRUNERS[name]
    known = {field.name: field.default for field in fields(rule)}
    for option in options:
        if option not in known:
            names = ", ".join(f"{known_option}={default}" for known_option, default in known.items())
            raise UsageError(
                f"the pruner '{name}' has no option '{option}'",
                hint=f"it has: {names}" if known else "it has none; choose one with --pruner",
            )
    values: dict[str, Any] = {
        option: _number(option, text, known[option]) for option, text in options.items()
    }
    return rule(**values)


def _number(option: str, text: str, default: object) -> float:
    """Return an option's value, of the type that its default has.

    Raises:
        UsageError: It is no such number, or out of range.
    """
    whole = isinstance(default, int)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise UsageError(f"{option}={text}: not a {'whole ' if whole else ''}number") from None
    most = 100.0 if option == "percentile" else math.inf
    if not _LEAST[option] <= value <= most:
        limits = f"{_LEAST[option]:g} to {most:g}" if math.isfinite(most) else f"at least {_LEAST[option]:g}"
        raise UsageError(f"{option}={text}: it has to be {limits}")
    return value
