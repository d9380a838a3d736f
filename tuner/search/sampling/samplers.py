"""Optuna's samplers by name: `--sampler` and `--sampler-option`."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.samplers import BaseSampler

import tuner.search.quiet  # noqa: F401 - for its effect
from tuner.errors import UsageError

MEMORY_AWARE = "memory-aware"
DEFAULT = "tpe"


@dataclass(frozen=True)
class Kind:
    """One sampler.

    Attributes:
        sampler: Its class.
        says: One line about it.
        draws: How often it is asked before others look for something that fits: one that answers
            the same until it is told more is not asked often.
        single: Whether it knows one objective only.
        defaults: Options that differ from Optuna's defaults.
        needs: A package that it needs beside Optuna.
        sequence: Whether its trials are one sequence, which one seed makes; else each has its own.
    """

    sampler: Callable[..., BaseSampler]
    says: str
    draws: int = 50
    single: bool = False
    defaults: Mapping[str, Any] | None = None
    needs: str | None = None
    sequence: bool = False


# Multivariate, since memory depends on products of params; grouped, since spaces are conditional.
_TPE = {"multivariate": True, "group": True}
KINDS = {
    "tpe": Kind(optuna.samplers.TPESampler, "multivariate TPE, conditional spaces in groups", defaults=_TPE),
    MEMORY_AWARE: Kind(
        optuna.samplers.TPESampler,
        "expected improvement of the feasible hypervolume: the score is modelled, memory is known",
        defaults=_TPE,
    ),
    "nsga2": Kind(optuna.samplers.NSGAIISampler, "genetic, NSGA-II"),
    "nsga3": Kind(optuna.samplers.NSGAIIISampler, "genetic, NSGA-III"),
    "gp": Kind(optuna.samplers.GPSampler, "Gaussian process", draws=3),
    "cmaes": Kind(optuna.samplers.CmaEsSampler, "CMA-ES; numbers only", single=True, needs="cmaes"),
    "qmc": Kind(optuna.samplers.QMCSampler, "quasi-Monte Carlo (Sobol')", sequence=True),
    "random": Kind(optuna.samplers.RandomSampler, "uniform at random"),
}
# What is ours to say: seeds and random phases are derived, the constraint is set on trials.
_OURS = {"self", "seed", "constraints_func", "independent_sampler", "constant_liar"}


def check_sampler(name: str, options: Mapping[str, Any], *, single: bool) -> None:
    """Check a sampler's name and options.

    Raises:
        UsageError: It is unknown, cannot be used here, or has no such option.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise UsageError(f"there is no sampler '{name}'", hint=f"samplers: {', '.join(KINDS)}")
    if kind.single and not single:
        raise UsageError(
            f"sampler '{name}' knows one objective only", hint="add --single, or take another one"
        )
    if name == MEMORY_AWARE and single:
        raise UsageError(
            f"sampler '{name}' trades memory against the metric",
            hint="leave --single out, or take another sampler",
        )
    if kind.needs is not None and importlib.util.find_spec(kind.needs) is None:
        raise UsageError(
            f"sampler '{name}' needs the package '{kind.needs}'", hint=f"pip install {kind.needs}"
        )
    known = options_of(name)
    for option in options:
        if option not in known:
            raise UsageError(
                f"sampler '{name}' has no option '{option}'", hint=f"its options: {', '.join(known)}"
            )
    try:
        build(name, options, seed=0, random_trials=10, parallel=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"sampler '{name}' refuses its options: {error}") from None


def typed(options: Mapping[str, str]) -> dict[str, Any]:
    """Return options that came as text: JSON where they can be, else text."""
    found: dict[str, Any] = {}
    for name, text in options.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


def options_of(name: str) -> list[str]:
    """Return the options that a sampler takes."""
    return [option for option in inspect.signature(KINDS[name].sampler).parameters if option not in _OURS]


def build(
    name: str, options: Mapping[str, Any], *, seed: int | None, random_trials: int, parallel: bool
) -> BaseSampler:
    """Return a sampler.

    Args:
        name: One of KINDS.
        options: Its options.
        seed: Of this sampler.
        random_trials: How long its random phase is, where it has one.
        parallel: Whether several trials run at once: TPE then takes running ones for poor, so that
            proposals differ.
    """
    kind = KINDS[name]
    known = inspect.signature(kind.sampler).parameters
    given: dict[str, Any] = {
        "n_startup_trials": random_trials,
        "constant_liar": parallel,
        **(kind.defaults or {}),
        **options,
    }
    arguments = {option: value for option, value in given.items() if option in known}
    return kind.sampler(seed=seed, **arguments)
