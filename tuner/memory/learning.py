"""How launched trials move a calibration: one pass over them, in the order they ended.

Notation, all relative to the prior: a trial has y = device - context - offset - factor · x, with x
the allocator's bytes. The prior's variance, w²(x) = additive² + (relative · x)², is for one part
`_SYSTEMATIC` the same for all trials (an offset and a factor that are not known yet) and for the
rest, g² · w²(x), noise of each.

**Centre.** Three forecasters say a trial's y before it is measured:

* *prior*: 0, no calibration;
* *steady*: offset + factor · x, by recursive Bayesian regression (a Kalman filter of two states).
  A trial with the score z counts as (ν + 1) / (ν + z²) trials, the weight of a t distribution with
  ν = 4, so that outliers move little; with each trial a small share of the prior's uncertainty
  returns, so that a slow drift is followed;
* *recent*: steady, shifted by the median error of the last trials, which follows a step.

The centre is their mean with weights exp(-η · L), L the discounted sum of each one's past errors
(exponentially weighted forecasters: Cesa-Bianchi & Lugosi 2006, chapter 2). Where calibration
predicts worse than none, the prior's weight grows.

**Spread.** spread² = variance of the steady forecast + g² · w²(x). g² grows or falls by a share of
(weight · z² - 1), z being the score of the centre.

**Scores.** A trial's score is the error of the centre, as it was before the trial, over the spread
that was due to it: the forecast's variance of then, g of now. Older ones weigh less (Barber et al.
2023, "Conformal prediction beyond exchangeability").

**Bounds.** A trial that ran out of memory says that its requirement is above L; one that completed
where its cap may have bound says that it is at most L. With l = ±(L - centre) / spread and the
normal hazard h = φ(l) / (1 - Φ(l)), such a trial is a step of Fisher scoring on the likelihood of a
censored normal (Tobin 1958): it counts as h · (h - l) of a trial that was measured 1 / (h - l)
spreads away. A bound that the centre respects by far says nothing. Among the scores it counts as
that much of a trial at its conditional mean, h.

What this does not see: a bias that depends on anything but size, and two mixes of trials in one
study whose biases differ; both widen the band.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import NamedTuple

from tuner.memory.calibration import Calibration, Measured, Says
from tuner.memory.predictive import Predictive
from tuner.memory.regression import Regression

REMEMBERED = 300  # trials: those before weigh less than 0.3 % of the last, and cost time

# Chosen on the simulations of tests/memory/test_calibration.py, none on measured rows.
_SYSTEMATIC = 0.4  # share of the prior's variance that is the same for all trials
_SHAPE_TRIALS = 5.0  # what the prior's distribution of scores counts as
_SPREAD_TRIALS = 12.0  # what its spread counts as
_SPREAD_MEMORY = 60.0  # trials that the spread rests on
_RETURNING = 0.0005  # share of the prior's uncertainty that returns with each trial
_RECENT = 7  # trials
_FRESH = 0.98  # weight of a score against that of the trial after it: 50 trials in all
_DISCOUNT = 0.9  # of past losses
_RATE = 2.0  # η
_LARGEST_LOSS = 6.0
_FIRST_LOSSES = (0.0, 0.0, 1.0)  # of prior, steady, recent
_LEAST_WEIGHT = 0.01
_DEGREES = 4.0  # ν

_SIDES = {Says.DEVICE: 0, Says.REQUIRED_MORE: 1, Says.REQUIRED_AT_MOST: -1}
_NORMAL = NormalDist()


class _Error(NamedTuple):
    """How far a trial was from the centre, and what made up the spread."""

    bytes: float
    forecast_variance: float
    prior_variance: float
    side: int


@dataclass(frozen=True)
class _Trial:
    """A trial relative to the prior; `side` is +1 for a lower bound, -1 for an upper one, else 0."""

    y: float
    size: float
    side: int


class Learner:
    """Takes launched trials one by one; `calibration()` is what they teach.

    Args:
        prior: Where to start.
        context_spread_bytes: How far the target's context may be off.
    """

    def __init__(self, prior: Calibration, *, context_spread_bytes: int = 0) -> None:
        self._prior = prior
        self._additive, self._relative = float(prior.additive_spread_bytes), prior.relative_spread
        self._steady = Regression(
            offset_variance=context_spread_bytes**2 + _SYSTEMATIC * self._additive**2,
            factor_variance=_SYSTEMATIC * self._relative**2,
            returning=_RETURNING,
        )
        self._recent: deque[_Trial] = deque(maxlen=_RECENT)
        self._shift = 0.0  # of the recent forecast, in units of additive + relative · size
        self._losses = list(_FIRST_LOSSES)
        self._growth = 1 - _SYSTEMATIC  # g²
        self._count = 0.0
        self._errors: deque[_Error] = deque(maxlen=REMEMBERED)

    def add(self, measured: Measured) -> None:
        """Learn from one trial."""
        expected = self._prior.expected_bytes(measured.context_bytes, measured.allocator_bytes)
        trial = _Trial(
            measured.device_bytes - expected, float(measured.allocator_bytes), _SIDES[measured.says]
        )
        forecasts, weights = self._forecasts(trial.size), self._weights()
        centre = sum(weight * forecast for weight, forecast in zip(weights, forecasts, strict=True))
        error = _Error(
            trial.y - centre,
            self._steady.variance_bound(trial.size),
            self._prior_variance(trial.size),
            trial.side,
        )
        score, weight = self._score(error)
        if weight < _LEAST_WEIGHT:
            return
        spread = self._spread(error)
        self._blame(trial, forecasts, spread=spread, weight=weight)
        self._regress(trial)
        if trial.side == 0:
            self._follow(trial)
            share = 1 / min(_SPREAD_TRIALS + self._count, _SPREAD_MEMORY)
            self._growth *= 1 + share * (_robust(score) * score**2 - 1)
        self._count += weight
        self._errors.append(error)

    def calibration(self, trials: int) -> Calibration:
        """Return the calibration so far, as one that rests on `trials`."""
        _, steady, recent = self._weights()
        shift = recent * self._shift
        offset = (steady + recent) * self._steady.offset + shift * self._additive
        factor = (steady + recent) * self._steady.factor + shift * self._relative
        unknown = self._steady.unknown_offset
        return Calibration(
            offset_bytes=round(self._prior.offset_bytes + offset),
            factor=self._prior.factor + factor,
            relative_spread=math.sqrt(self._growth * self._relative**2 + self._steady.factor_variance),
            additive_spread_bytes=round(self._additive * math.sqrt(self._growth + _SYSTEMATIC * unknown)),
            context_weight=math.sqrt(unknown),
            quantiles=Predictive(self._prior.quantiles).after(self._scores(), counts_as=_SHAPE_TRIALS),
            mix=self._prior.mix,
            trials=trials,
        )

    def _forecasts(self, size: float) -> tuple[float, float, float]:
        """Return what prior, steady and recent say of a trial's y."""
        steady = self._steady.at(size)
        return 0.0, steady, steady + self._shift * (self._additive + self._relative * size)

    def _weights(self) -> list[float]:
        least = min(self._losses)
        raw = [math.exp(-_RATE * (loss - least)) for loss in self._losses]
        return [weight / sum(raw) for weight in raw]

    def _prior_variance(self, size: float) -> float:
        return self._additive**2 + (self._relative * size) ** 2

    def _spread(self, error: _Error) -> float:
        return max(1.0, math.sqrt(error.forecast_variance + self._growth * error.prior_variance))

    def _score(self, error: _Error) -> tuple[float, float]:
        """Return an error's score at the present g, and how many trials it counts as."""
        score = error.bytes / self._spread(error)
        if error.side == 0:
            return score, 1.0
        bound = error.side * score
        hazard = _hazard(bound)
        return error.side * hazard, hazard * (hazard - bound)

    def _scores(self) -> list[tuple[float, float]]:
        """Return all scores with their weights, sorted."""
        found, fresh = [], 1.0
        for error in reversed(self._errors):
            score, weight = self._score(error)
            found.append((score, weight * fresh))
            fresh *= _FRESH
        return sorted(found)

    def _blame(
        self, trial: _Trial, forecasts: tuple[float, float, float], *, spread: float, weight: float
    ) -> None:
        """Add each forecaster's error to its losses; a bound blames those that violate it."""
        keep = 1 - (1 - _DISCOUNT) * weight
        for index, forecast in enumerate(forecasts):
            error = (trial.y - forecast) / spread
            loss = abs(error) if trial.side == 0 else max(0.0, trial.side * error)
            self._losses[index] = keep * self._losses[index] + min(loss, _LARGEST_LOSS)

    def _regress(self, trial: _Trial) -> None:
        """Let the steady forecaster learn."""
        noise = max(1.0, self._growth * self._prior_variance(trial.size))
        deviation = math.sqrt(noise + self._steady.variance_at(trial.size))
        error = trial.y - self._steady.at(trial.size)
        weight = _robust(error / deviation)
        if trial.side:
            bound = trial.side * error / deviation
            hazard = _hazard(bound)
            weight *= hazard * (hazard - bound)
            error = trial.side * deviation / (hazard - bound)
        if weight > _LEAST_WEIGHT:
            self._steady.add(error, trial.size, noise / weight)

    def _follow(self, trial: _Trial) -> None:
        """Keep the median error of the last trials against the steady forecast."""
        self._recent.append(trial)
        errors = [
            (past.y - self._steady.at(past.size)) / (self._additive + self._relative * past.size)
            for past in self._recent
        ]
        self._shift = median(errors) * len(errors) / (len(errors) + 1)


def _robust(score: float) -> float:
    """Return how many trials one of this score counts as."""
    return (_DEGREES + 1) / (_DEGREES + score**2)


def _hazard(bound: float) -> float:
    """Return φ / (1 - Φ) of a standard normal: the mean of what exceeds `bound`."""
    if bound > 6:  # asymptotic, where 1 - Φ loses its digits
        return bound + 1 / bound
    return _NORMAL.pdf(bound) / (1 - _NORMAL.cdf(bound))
