"""Which single change of one parameter makes a configuration fit.

Each parameter is changed alone, the others stay. The ends of its values are predicted first:

* no effect: both ends need what the configuration needs (or `memory_free` says so);
* not enough: neither end fits;
* else a change: a bisection between the configuration's value and an end that fits finds the
  nearest value that fits. Up to 8 values, and choices without an order, are all predicted.

A change that is shown was predicted and fits. That it is the nearest rests on memory growing
steadily between the two; so does "not enough", where values between the ends were not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.memory.capacity import PREDICT_ALL, Fits, is_traced, size_of, surely_fits
from tuner.memory.parameter_values import grid, is_ordered, nearest
from tuner.records import Prediction, Record
from tuner.stand_in import Draw
from tuner.stand_in import draw as draw_from
from tuner.workload import Workload


@dataclass(frozen=True)
class Change(Record):
    """One parameter changed alone, and what is predicted then.

    Attributes:
        param: The parameter's name.
        before: Its value in the configuration.
        after: Its value after the change.
        share: How large the change is: |after − before| over the larger of the two; None for
            choices without an order.
        prediction: Of the changed configuration.
    """

    param: str
    before: Any
    after: Any
    share: float | None
    prediction: Prediction


@dataclass(frozen=True)
class SingleChanges(Record):
    """What changing one parameter alone does.

    Attributes:
        changes: The smallest change of each parameter that makes it fit, smallest first.
        not_enough: Parameters that lower memory, but never enough: each at its best.
        no_effect: Names of parameters on which memory does not depend.
    """

    changes: tuple[Change, ...]
    not_enough: tuple[Change, ...]
    no_effect: tuple[str, ...]


def single_changes(
    workload: Workload,
    draw: Draw,
    predict: Callable[[dict[str, Any]], Prediction],
    *,
    fits: Fits = surely_fits,
) -> SingleChanges:
    """Return what to change in a configuration that does not surely fit.

    Args:
        workload: Whose `suggest` completes the changed configurations.
        draw: The configuration.
        predict: Predicts params.
        fits: Whether a prediction fits.
    """
    changes, not_enough, no_effect = [], [], []
    current = predict(draw.params)
    for name in draw.space:
        probe = _Parameter(workload, draw, name, predict)
        if name in workload.memory_free or not probe.matters(current):
            no_effect.append(name)
        elif (change := probe.nearest_that_fits(fits)) is not None:
            changes.append(change)
        elif (best := probe.best()) is not None and _needs_less(best.prediction, current):
            not_enough.append(best)
    changes.sort(key=lambda change: (change.share is None, change.share or 0.0))
    return SingleChanges(tuple(changes), tuple(not_enough), tuple(no_effect))


class _Parameter:
    """One parameter of a configuration, and what was predicted for its values."""

    def __init__(
        self, workload: Workload, draw: Draw, name: str, predict: Callable[[dict[str, Any]], Prediction]
    ) -> None:
        self._workload, self._answers, self._name, self._predict = workload, draw.answers, name, predict
        self._before = draw.answers[name]
        asked = draw.space[name]
        self._ordered = is_ordered(asked)
        self._values: Sequence[Any] = grid(asked) if self._ordered else getattr(asked, "choices", ())
        self._known: dict[Any, Prediction] = {}

    def matters(self, current: Prediction) -> bool:
        """Whether memory depends on the parameter, by its ends or, where few, all its values."""
        few = len(self._values) <= PREDICT_ALL or not self._ordered
        looked_at = self._values if few else (self._values[0], self._values[-1])
        # A value that cannot be traced does not show that memory depends on it.
        sizes = {size_of(p) for p in map(self._at, looked_at) if is_traced(p)}
        return bool(sizes - {size_of(current)})

    def nearest_that_fits(self, fits: Fits) -> Change | None:
        """Return the smallest change that fits, of those above and those below the value."""
        found = [value for value, prediction in self._known.items() if fits(prediction)]
        if self._ordered and len(self._values) > PREDICT_ALL:
            start = nearest(self._values, self._before)
            ends = [end for end in (0, len(self._values) - 1) if fits(self._at(self._values[end]))]
            found = [self._values[self._bisect(end, start, fits)] for end in ends]
        return min(map(self._change, found), key=lambda change: change.share or 0.0, default=None)

    def best(self) -> Change | None:
        """Return the change that needs least of those predicted, or None when none was traced."""
        traced = [value for value, prediction in self._known.items() if is_traced(prediction)]
        value = min(traced, key=lambda value: size_of(self._known[value]) or 0, default=None)
        return None if value is None else self._change(value)

    def _at(self, value: Any) -> Prediction:
        if value not in self._known:
            fixed = {**self._answers, self._name: value}
            self._known[value] = self._predict(draw_from(self._workload, {}, fixed).params)
        return self._known[value]

    def _bisect(self, fitting: int, failing: int, fits: Fits) -> int:
        """Return the position nearest to `failing` that fits."""
        while abs(failing - fitting) > 1:
            middle = (fitting + failing) // 2
            if fits(self._at(self._values[middle])):
                fitting = middle
            else:
                failing = middle
        return fitting

    def _change(self, value: Any) -> Change:
        share = None
        if self._ordered:
            larger = max(abs(value), abs(self._before))
            share = abs(value - self._before) / larger if larger else 0.0
        return Change(self._name, self._before, value, share, self._known[value])


def _needs_less(prediction: Prediction, current: Prediction) -> bool:
    size, now = size_of(prediction), size_of(current)
    return size is not None and (now is None or size < now)
