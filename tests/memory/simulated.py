"""Studies whose truth is known: what a calibration says of each trial before it learns of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuner.memory.calibration import Calibration, Measured, Says
from tuner.memory.learning import Learner
from tuner.units import MIB

CONTEXT = 450 * MIB
BUDGET = 8192 * MIB
Floats = NDArray[np.float64]
Random = np.random.Generator
# Relative errors of the allocator's estimate, one for each of n trials.
Errors = Callable[[Random, int], Floats]


class Ahead(NamedTuple):
    """Figures by study and trial, each made before the trial was learned from."""

    error: Floats
    uncalibrated_error: Floats
    covered: Floats
    width: Floats
    probability_of_truth: Floats
    signed: Floats


def sizes(rng: Random, n: int) -> Floats:
    """Return allocator bytes from 200 MiB to 12 GiB, even in their logarithm."""
    return np.exp(rng.uniform(math.log(200), math.log(12_000), n)) * MIB


def step_ahead(
    prior: Calibration, errors: Errors, *, trials: int = 100, studies: int = 40, equal_sizes: bool = False
) -> Ahead:
    """Run studies in which every trial is measured: context + allocator · (1 + error) + 5 MiB · noise."""
    rows = []
    for seed in range(studies):
        rng = np.random.default_rng(seed)
        estimated = np.full(trials, 4096.0 * MIB) if equal_sizes else sizes(rng, trials)
        truth = CONTEXT + estimated * (1 + errors(rng, trials)) + 5 * MIB * rng.standard_normal(trials)
        learner, calibration = Learner(prior), prior
        for size, actual in zip(estimated.astype(int).tolist(), truth.astype(int).tolist(), strict=True):
            band = calibration.band(CONTEXT, size, context_spread_bytes=0)
            probability = calibration.fits_probability(
                CONTEXT, size, context_spread_bytes=0, budget_bytes=actual
            )
            rows.append(
                (
                    abs(band.expected - actual),
                    abs(prior.expected_bytes(CONTEXT, size) - actual),
                    band.low <= actual <= band.high,
                    (band.high - band.low) / band.expected,
                    probability,
                    (band.expected - actual) / actual,
                )
            )
            learner.add(Measured(CONTEXT, size, actual))
            calibration = learner.calibration(1)
    return Ahead(*np.array(rows, float).reshape(studies, trials, -1).transpose(2, 0, 1))


def under_a_budget(
    prior: Calibration,
    errors: Errors,
    *,
    trials: int = 80,
    studies: int = 150,
    saved: float = 0.0,
    bounds: bool = True,
    completions: bool = True,
    least: int = 5500,
    most: int = 10_500,
) -> tuple[Floats, Floats]:
    """Return P(fits) and whether it did, of studies that prune below 5 % and launch under a cap.

    Args:
        prior: The first calibration.
        errors: Of the estimates.
        trials: Configurations of each study, most of them near the budget.
        studies: How many.
        saved: How much less than the free footprint is required.
        bounds: Whether trials that ran out of memory are learned from.
        completions: Whether those that did not are.
        least: MiB that the smallest takes of its allocator.
        most: What the largest takes.
    """
    said, fitted = [], []
    for seed in range(studies):
        rng = np.random.default_rng(seed)
        error = errors(rng, trials)
        learner, calibration = Learner(prior), prior
        for index in range(trials):
            free = int(math.exp(rng.uniform(math.log(least), math.log(most))) * MIB)
            required = int(free * (1 - saved))
            needs_bytes = int(CONTEXT + required * (1 + error[index]))
            takes_bytes = int(CONTEXT + free * (1 + error[index]))
            probability = calibration.fits_probability(
                CONTEXT, required, context_spread_bytes=0, budget_bytes=BUDGET
            )
            said.append(probability)
            fitted.append(needs_bytes <= BUDGET)
            if probability < 0.05:
                continue
            if needs_bytes > BUDGET and bounds:
                asked = min(needs_bytes, BUDGET + int(rng.uniform(0, 800) * MIB))
                learner.add(Measured(CONTEXT, required, asked, Says.REQUIRED_MORE))
            elif needs_bytes <= BUDGET and completions:
                if saved and takes_bytes > 0.97 * BUDGET:
                    bound = min(takes_bytes, BUDGET)
                    learner.add(Measured(CONTEXT, required, bound, Says.REQUIRED_AT_MOST))
                else:
                    learner.add(Measured(CONTEXT, free, takes_bytes))
            calibration = learner.calibration(1)
    return np.array(said), np.array(fitted, float)
