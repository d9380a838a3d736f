"""When a trial is stopped early: pure rules over learning curves.

With two objectives a trial is compared with those alone that need no more memory than it: a model
that learns worse than a larger one may still be the best of its size. With one objective every
trial is compared with every other, as Optuna does.

| rule | at each epoch, a trial goes on as long as its best so far reaches |
|---|---|
| `none` | anything |
| `median` | the median of finished trials |
| `percentile` | the best `percentile` per cent of finished trials |
| `asha` | at epochs 1, 5, 25, …: the best fifth of the trials that came so far, itself included |

These are Optuna's `MedianPruner`, `PercentilePruner` and `SuccessiveHalvingPruner`, on the best so
far on both sides: what a trial is worth is its best epoch. None asks for more than the best of those
that a trial is compared with has reached: what is not worse than all of them is never stopped, nor
is what is compared with nobody, the smallest.

What they do not see: that a curve is late and will cross others. `warmup_epochs` is for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from tuner.execution.limits import Limit, Limits


@dataclass(frozen=True)
class Curve:
    """What a trial that has ended had reached by each epoch.

    Attributes:
        needs_bytes: Device bytes: predicted, else measured; None where neither is known.
        best: The objective's best so far at the end of each epoch, from the first; NaN while none.
        finished: Whether it was trained to its end; else it was stopped early.
    """

    needs_bytes: int | None
    best: tuple[float, ...]
    finished: bool

    def at(self, epoch: int) -> float | None:
        """Return the best by the end of an epoch; None where there is none.

        A trial that finished earlier than others keeps its best.
        """
        if not self.best or (epoch > len(self.best) and not self.finished):
            return None
        value = self.best[min(epoch, len(self.best)) - 1]
        return None if math.isnan(value) else value


def best_so_far(values: Iterable[float], *, maximize: bool) -> tuple[float, ...]:
    """Return the best of the values up to each of them; NaN while there was no number."""

    def better(one: float, other: float) -> float:
        if math.isnan(one) or math.isnan(other):
            return other if math.isnan(one) else one
        return max(one, other) if maximize else min(one, other)

    return tuple(itertools.accumulate(values, better))


class Pruner(Protocol):
    """A rule with its options."""

    name: ClassVar[str]

    def limit(self, epoch: int, others: Sequence[Curve], *, maximize: bool) -> Limit | None:
        """Return what a trial has to have reached by an epoch, or None.

        Args:
            epoch: From 1.
            others: The trials that it is compared with.
            maximize: Whether more of the objective is better.
        """

    @property
    def startup_trials(self) -> int:
        """Finished trials in the study before any is stopped."""


@dataclass(frozen=True)
class NoPruner:
    """Stops nothing."""

    name: ClassVar[str] = "none"
    startup_trials: ClassVar[int] = 0

    def limit(self, epoch: int, others: Sequence[Curve], *, maximize: bool) -> Limit | None:
        """Return None."""
        return None


NO_PRUNER = NoPruner()


@dataclass(frozen=True)
class MedianPruner:
    """Stops what is below the median of finished trials.

    Attributes:
        startup_trials: Finished trials in the study before any is stopped.
        warmup_epochs: Epochs at whose end nothing is stopped.
        min_trials: Finished trials to compare with before a trial is stopped.
    """

    name: ClassVar[str] = "median"
    startup_trials: int = 5
    warmup_epochs: int = 0
    min_trials: int = 1

    def limit(self, epoch: int, others: Sequence[Curve], *, maximize: bool) -> Limit | None:
        """Return the median of the finished trials' best by that epoch."""
        return _percentile_limit(self, 50, epoch, others, maximize=maximize)


@dataclass(frozen=True)
class PercentilePruner:
    """Stops what is not among the best `percentile` per cent of finished trials.

    Attributes:
        percentile: How many per cent of the finished trials a trial may lag behind: 0 to 100.
        startup_trials, warmup_epochs, min_trials: As of MedianPruner.
    """

    name: ClassVar[str] = "percentile"
    percentile: float = 25.0
    startup_trials: int = 5
    warmup_epochs: int = 0
    min_trials: int = 1

    def limit(self, epoch: int, others: Sequence[Curve], *, maximize: bool) -> Limit | None:
        """Return the percentile of the finished trials' best by that epoch."""
        return _percentile_limit(self, self.percentile, epoch, others, maximize=maximize)


@dataclass(frozen=True)
class AshaPruner:
    """Asynchronous successive halving (https://arxiv.org/abs/1810.05934), without promotion later on.

    Attributes:
        reduction_factor: At each rung one trial in so many goes on; the next is so many times later.
        min_epochs: The first rung.
        startup_trials: Finished trials in the study before any is stopped.
    """

    name: ClassVar[str] = "asha"
    reduction_factor: int = 5  # keeps 99 % of the front in 60 % of 3 epochs, see docs/early-stopping.md
    min_epochs: int = 1
    startup_trials: int = 0

    def limit(self, epoch: int, others: Sequence[Curve], *, maximize: bool) -> Limit | None:
        """Return what the trials that go on from a rung had reached there."""
        if not self._is_rung(epoch):
            return None
        values = sorted(_values_at(epoch, others), reverse=maximize)
        if not values:
            return None
        go_on = max(1, (len(values) + 1) // self.reduction_factor)
        return Limit(values[go_on - 1], f"the best {go_on} ({values[go_on - 1]:.4g}) of {len(values)} trials")

    def _is_rung(self, epoch: int) -> bool:
        rung = self.min_epochs
        while rung < epoch:
            rung *= self.reduction_factor
        return rung == epoch


def limits_for(
    pruner: Pruner, needs_bytes: int | None, ended: Sequence[Curve], *, maximize: bool, by_memory: bool
) -> Limits:
    """Return the limits of a trial, for every epoch that others have come to.

    Args:
        pruner: The rule.
        needs_bytes: What the trial needs; None: unknown, it is then never stopped if `by_memory`.
        ended: The study's trials that finished or were stopped early.
        maximize: Whether more of the objective is better.
        by_memory: Whether it is compared with those alone that need no more memory.
    """
    if sum(curve.finished for curve in ended) < pruner.startup_trials:
        return Limits(maximize)
    others = no_larger(needs_bytes, ended) if by_memory else ended
    suffix = " that need no more memory" if by_memory else ""
    by_epoch = {}
    for epoch in range(1, max((len(curve.best) for curve in others), default=0) + 1):
        limit = pruner.limit(epoch, others, maximize=maximize)
        if limit is not None:
            by_epoch[epoch] = Limit(limit.value, limit.told + suffix)
    return Limits(maximize, by_epoch)


def no_larger(needs_bytes: int | None, curves: Sequence[Curve]) -> list[Curve]:
    """Return the curves of trials that need no more memory."""
    if needs_bytes is None:
        return []
    return [curve for curve in curves if curve.needs_bytes is not None and curve.needs_bytes <= needs_bytes]


def _percentile_limit(
    rule: MedianPruner | PercentilePruner,
    percentile: float,
    epoch: int,
    others: Sequence[Curve],
    *,
    maximize: bool,
) -> Limit | None:
    if epoch <= rule.warmup_epochs:
        return None
    values = _values_at(epoch, [curve for curve in others if curve.finished])
    if len(values) < rule.min_trials or not values:
        return None
    value = _percentile(sorted(values), 100 - percentile if maximize else percentile)
    if math.isnan(value):  # between -inf and inf
        return None
    number = f"{value:.4g}"
    words = f"the median {number}" if percentile == 50 else f"the best {percentile:g} % ({number})"
    return Limit(value, f"{words} of {len(values)} trials")


def _values_at(epoch: int, curves: Sequence[Curve]) -> list[float]:
    reached = (curve.at(epoch) for curve in curves)
    return [value for value in reached if value is not None]


def _percentile(ordered: Sequence[float], percentile: float) -> float:
    """Return a percentile with linear interpolation, rounded as NumPy does."""
    position = (len(ordered) - 1) * (percentile / 100)
    below = min(math.floor(position), len(ordered) - 1)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    if low == high:
        return low
    part = position - below
    return low + (high - low) * part if part < 0.5 else high - (high - low) * (1 - part)
