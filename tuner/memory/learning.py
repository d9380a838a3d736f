"""How measured trials move a calibration: one pass over the trials, in the order they ended.

Notation, all relative to the prior: trial i has y = device - context - prior offset - prior factor
· x, with x the allocator's bytes; its noise has the standard deviation g · w(x), where
w(x) = hypot(additive, relative · x) is the prior's.

**Centre.** Three forecasters say a trial's y before it is measured:

* *prior*: 0, no calibration;
* *steady*: offset + factor · x, by recursive Bayesian regression (a Kalman filter of two states).
  Its prior variances are the context's spread and half of the prior's variances. A trial with the
  score z counts as (ν + 1) / (ν + z²) trials, the weight of a t distribution with ν = 4, so that
  outliers move little; a small share of the prior's uncertainty returns with each trial, so that
  the slowest drift is followed;
* *recent*: steady, shifted by the median error of the last trials, which follows a step.

The centre is their mean with weights exp(-η · L), L being the discounted sum of each one's past
errors (exponentially weighted forecasters: Cesa-Bianchi & Lugosi 2006, chapter 2). Where
calibration predicts worse than none, the prior's weight grows: that is what keeps calibration from
getting worse than none.

**Spread.** g² grows or falls by a share of (weight · z² - 1), z the score of the centre.

**Bounds.** A trial that ran out of memory says that the requirement is above L; one that completed
where its cap may have bound says that it is at most L. With l = ±(L - centre) / spread and the
normal hazard h = φ(l) / (1 - Φ(l)), such a trial is a step of Fisher scoring on the likelihood of
a censored normal (Tobin 1958): it counts as h · (h - l) of a trial that was measured 1 / (h - l)
spreads away. A bound that the centre respects by far says nothing. In the distribution of scores
it counts as that much of a trial at its conditional mean, h.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import NormalDist, median
from typing import TYPE_CHECKING, NamedTuple

from tuner.memory.predictive import Predictive

if TYPE_CHECKING:
    from tuner.memory.calibration import Calibration, Measured

REMEMBERED = 300  # trials; a drift is older than that, and an update stays below 10 ms
PRIOR_TRIALS = 5.0  # what the prior's shape counts as
_SPREAD_TRIALS = 12.0  # what its spread counts as
_DEGREES = 4.0
_SYSTEMATIC = 0.5  # share of the prior's variance that is the same for all trials of a study
_RETURNING = 0.0005  # share of the prior's uncertainty that returns with each trial
_SPREAD_MEMORY = 60.0  # trials that the spread rests on
_FRESH = 0.98  # weight of a score against that of the trial after it
_RECENT = 7
_DISCOUNT = 0.9
_RATE = 2.0  # η
_LARGEST_LOSS = 6.0
_LEAST_WEIGHT = 0.01

_NORMAL = NormalDist()


class _Error(NamedTuple):
    """How far a trial was from the centre, and how far it was expected to be."""

    bytes: float
    context_variance: float
    prior_variance: float
    side: int


class Learner:
    """Takes launched trials one by one; `calibration()` is what they teach.

    Args:
        prior: Where to start.
        context_spread_bytes: How far the target's context may be off.
    """

    def __init__(self, prior: Calibration, *, context_spread_bytes: int = 0) -> None:
        self._prior = prior
        self._context_spread = float(context_spread_bytes)
        self._additive, self._relative = float(prior.additive_spread_bytes), prior.relative_spread
        self._first = (
            self._context_spread**2 + self._additive**2,
            _SYSTEMATIC * self._relative**2,
        )
        self._steady = _Regression(*self._first)
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._shift = 0.0
        self._losses = [0.0, 0.0, 1.0]
        self._growth = 1.0  # g²
        self._count = 0.0
        self._errors: deque[_Error] = deque(maxlen=REMEMBERED)

    def add(self, trial: Measured) -> None:
        """Learn from one trial."""
        prior, size = self._prior, float(trial.allocator_bytes)
        y = trial.device_bytes - prior.expected_bytes(trial.context_bytes, trial.allocator_bytes)
        side = _SIDES[trial.says]
        forecasts = self._forecasts(size)
        centre = _mean(forecasts, self._weights())
        spread = self._spread(size)
        score, weight = _score((y - centre) / spread, side)
        if weight < _LEAST_WEIGHT:
            return
        self._blame(y, forecasts, spread=spread, side=side, weight=weight)
        self._regress(y, size, side)
        if side == 0:
            self._follow(y, size)
            share = 1 / min(_SPREAD_TRIALS + self._count, _SPREAD_MEMORY)
            self._growth *= 1 + share * (_robust(score) * score**2 - 1)
        self._count += weight
        self._errors.append(_Error(y - centre, self._context_variance(), self._prior_variance(size), side))

    def calibration(self, trials: int) -> Calibration:
        """Return the calibration so far, as one that rests on `trials`."""
        from tuner.memory.calibration import Calibration

        weights = self._weights()
        learned = weights[1] + weights[2]
        offset = learned * self._steady.offset + weights[2] * self._shift * self._additive
        factor = learned * self._steady.factor + weights[2] * self._shift * self._relative
        g = math.sqrt(self._growth)
        return Calibration(
            offset_bytes=round(self._prior.offset_bytes + offset),
            factor=self._prior.factor + factor,
            relative_spread=self._relative * g,
            additive_spread_bytes=round(self._additive * g),
            context_weight=self._context_weight(),
            quantiles=Predictive(self._prior.quantiles).after(self._scores(), counts_as=PRIOR_TRIALS),
            mix=self._prior.mix,
            trials=trials,
        )

    def _forecasts(self, size: float) -> tuple[float, float, float]:
        steady = self._steady.at(size)
        return 0.0, steady, steady + self._shift * (self._additive + self._relative * size)

    def _weights(self) -> list[float]:
        least = min(self._losses)
        raw = [math.exp(-_RATE * (loss - least)) for loss in self._losses]
        return [weight / sum(raw) for weight in raw]

    def _context_weight(self) -> float:
        return math.sqrt(self._steady.offset_variance / self._first[0]) if self._first[0] else 0.0

    def _context_variance(self) -> float:
        return (self._context_weight() * self._context_spread) ** 2

    def _prior_variance(self, size: float) -> float:
        return self._additive**2 + (self._relative * size) ** 2

    def _spread(self, size: float) -> float:
        return max(1.0, math.sqrt(self._context_variance() + self._growth * self._prior_variance(size)))

    def _scores(self) -> list[tuple[float, float]]:
        """Return all scores at the spread of now with their weights, sorted."""
        found, fresh = [], 1.0
        for error in reversed(self._errors):
            spread = max(1.0, math.sqrt(error.context_variance + self._growth * error.prior_variance))
            score, weight = _score(error.bytes / spread, error.side)
            found.append((score, weight * fresh))
            fresh *= _FRESH
        return sorted(found)

    def _blame(
        self, y: float, forecasts: tuple[float, float, float], *, spread: float, side: int, weight: float
    ) -> None:
        """Add each forecaster's error to its losses; a bound blames those that violate it."""
        for index, forecast in enumerate(forecasts):
            error = (y - forecast) / spread
            loss = abs(error) if side == 0 else max(0.0, side * error)
            keep = 1 - (1 - _DISCOUNT) * weight
            self._losses[index] = keep * self._losses[index] + min(loss, _LARGEST_LOSS)

    def _regress(self, y: float, size: float, side: int) -> None:
        steady = self._steady
        noise = self._growth * self._prior_variance(size)
        deviation = math.sqrt(noise + steady.variance_at(size))
        error = y - steady.at(size)
        weight = _robust(error / deviation)
        if side:
            bound = side * error / deviation
            hazard = _hazard(bound)
            weight *= hazard * (hazard - bound)
            error = side * deviation / (hazard - bound)
        if weight > _LEAST_WEIGHT:
            steady.add(error, size, max(1.0, noise) / weight)
            steady.relax(*self._first)

    def _follow(self, y: float, size: float) -> None:
        """Keep the median error of the last trials against the steady forecast."""
        self._recent.append((y, size))
        errors = [
            (past - self._steady.at(x)) / (self._additive + self._relative * x) for past, x in self._recent
        ]
        self._shift = median(errors) * len(errors) / (len(errors) + 1)


class _Regression:
    """Recursive Bayesian regression of y on offset + factor · size, from zero."""

    def __init__(self, offset_variance: float, factor_variance: float) -> None:
        self.offset = self.factor = 0.0
        self.offset_variance, self._factor_variance = offset_variance, factor_variance
        self._covariance = 0.0

    def at(self, size: float) -> float:
        """Return the forecast for a size."""
        return self.offset + self.factor * size

    def variance_at(self, size: float) -> float:
        """Return the forecast's variance."""
        twice = 2 * self._covariance * size
        return max(0.0, self.offset_variance + twice + self._factor_variance * size**2)

    def add(self, error: float, size: float, noise_variance: float) -> None:
        """Take in a trial whose y is off by `error`."""
        by_offset = self.offset_variance + self._covariance * size
        by_factor = self._covariance + self._factor_variance * size
        total = self.variance_at(size) + noise_variance
        self.offset += by_offset / total * error
        self.factor += by_factor / total * error
        self.offset_variance = max(0.0, self.offset_variance - by_offset**2 / total)
        self._factor_variance = max(0.0, self._factor_variance - by_factor**2 / total)
        self._covariance -= by_offset * by_factor / total

    def relax(self, offset_variance: float, factor_variance: float) -> None:
        """Let a share of the first uncertainty return."""
        self.offset_variance += _RETURNING * (offset_variance - self.offset_variance)
        self._factor_variance += _RETURNING * (factor_variance - self._factor_variance)
        self._covariance *= 1 - _RETURNING


_SIDES = {"device": 0, "required more than": 1, "required at most": -1}


def _mean(values: tuple[float, float, float], weights: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def _robust(score: float) -> float:
    """Return how many trials one of this score counts as."""
    return (_DEGREES + 1) / (_DEGREES + score**2)


def _score(score: float, side: int) -> tuple[float, float]:
    """Return the score that a trial is kept with, and how many trials it counts as."""
    if side == 0:
        return score, 1.0
    bound = side * score
    hazard = _hazard(bound)
    return side * hazard, hazard * (hazard - bound)


def _hazard(bound: float) -> float:
    """Return φ / (1 - Φ) of a standard normal: the mean of what exceeds `bound`."""
    if bound > 6:  # asymptotic, where 1 - Φ loses its digits
        return bound + 1 / bound
    return _NORMAL.pdf(bound) / (1 - _NORMAL.cdf(bound))
