"""The largest value of one parameter that fits, by bisection on predictions.

Larger values nearly always need more memory, but not surely: an allocator rounds, and code may take
another way beyond some size. So monotonicity is checked:

1. Up to 8 values are all predicted. Of more, both ends and three between, then a bisection.
2. All predictions are compared. Where no larger value needs less than a smaller one, that is the
   answer: about 5 + 2·log2(n) predictions, and `certainty` is `bisection`.
3. Where one does, by a share d at most, values above the answer are predicted too, from the top
   down, up to the first value that needs so much that a dip twice as deep would not make it fit;
   at most 64 of them. `certainty` is `all` when no value above the answer is left, else `around`.

What it does not see: a dip between two values that were predicted, in a space of which no
prediction shows one. `certainty` says so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tuner.records import Prediction, Record, Verdict

PREDICT_ALL = 8
PROBES_BETWEEN = 3
MOST_CHECKED = 64

Predict = Callable[[Any], Prediction]
Fits = Callable[[Prediction], bool]


@dataclass(frozen=True)
class Probe(Record):
    """One value and what was predicted for it."""

    value: Any
    prediction: Prediction


@dataclass(frozen=True)
class Capacity(Record):
    """The answer, and what it rests on.

    Attributes:
        largest: The largest value that surely fits (verdict `launch`), or None.
        largest_to_try: The largest that at least may fit (verdict `try`), or None.
        certainty: Of `largest`: `all` (every larger value was predicted), `bisection` (no
            prediction speaks against it), or `around` (some larger value needs less than a smaller
            one; those around the answer were predicted, larger ones may fit).
        dip: By what share at most a larger value needs less than a smaller one; 0 for none.
        values: How many values there are.
        probes: What was predicted, by value, ascending.
    """

    largest: Probe | None
    largest_to_try: Probe | None
    certainty: str
    dip: float
    values: int
    probes: tuple[Probe, ...]

    @property
    def untraceable(self) -> tuple[Probe, ...]:
        """Values that could not be predicted: they count as not fitting, though they may."""
        return tuple(probe for probe in self.probes if not is_traced(probe.prediction))

    @property
    def smallest(self) -> Probe | None:
        """The probe that needs least, or None when none could be predicted."""
        traced = [probe for probe in self.probes if is_traced(probe.prediction)]
        return min(traced, key=lambda probe: size_of(probe.prediction) or 0, default=None)

    @property
    def shown(self) -> Probe | None:
        """The answer, else the value to try, else the one that needs least."""
        return self.largest or self.largest_to_try or self.smallest


def is_traced(prediction: Prediction) -> bool:
    """Whether a prediction says anything about memory."""
    return prediction.required is not None


def size_of(prediction: Prediction) -> int | None:
    """Return the bytes that decide whether a configuration fits."""
    return None if prediction.required is None else prediction.required.expected


def surely_fits(prediction: Prediction) -> bool:
    """Whether the verdict is `launch`."""
    return is_traced(prediction) and prediction.verdict is Verdict.LAUNCH


def may_fit(prediction: Prediction) -> bool:
    """Whether the verdict is `launch` or `try`, from a trace."""
    return is_traced(prediction) and prediction.verdict in (Verdict.LAUNCH, Verdict.TRY)


def largest_that_fits(
    values: Sequence[Any], predict: Predict, *, fits: Fits = surely_fits, may: Fits = may_fit
) -> Capacity:
    """Return the largest of `values` that fits.

    Args:
        values: Ascending and not empty.
        predict: Predicts one value; asked once per value at most.
        fits: Whether a prediction fits. Of two that differ in size it must not hold for the larger
            alone.
        may: Whether it at least may fit.
    """
    search = _Search(values, predict)
    search.look_at(_first_positions(len(values)))
    counted = -1
    while counted != search.count:  # each boundary may show a dip that concerns the other
        counted = search.count
        search.find_boundary(fits)
        search.find_boundary(may)
    return search.answer(fits, may)


def _first_positions(count: int) -> list[int]:
    if count <= PREDICT_ALL:
        return list(range(count))
    return _spread(0, count, PROBES_BETWEEN + 2)


def _spread(start: int, stop: int, count: int) -> list[int]:
    """Return `count` positions from `start` to before `stop`, both ends among them where count > 1."""
    last = stop - 1 - start
    if last < count:
        return list(range(start, stop))
    if count == 1:
        return [start]
    return [start + last * i // (count - 1) for i in range(count)]


class _Search:
    """What was predicted so far, by position in the values."""

    def __init__(self, values: Sequence[Any], predict: Predict) -> None:
        self._values, self._predict = values, predict
        self._known: dict[int, Prediction] = {}
        self._checked = 0

    @property
    def count(self) -> int:
        """How many values were predicted."""
        return len(self._known)

    def look_at(self, positions: Sequence[int]) -> None:
        """Predict the values at some positions."""
        for position in positions:
            self._at(position)

    def find_boundary(self, fits: Fits) -> None:
        """Bisect for the largest value that fits; where values dip, check around it."""
        self._bisect(fits)
        while doubtful := self._doubtful(fits):
            for position in reversed(doubtful):
                self._checked += 1
                if fits(self._at(position)):
                    break
            self._bisect(fits)

    def answer(self, fits: Fits, may: Fits) -> Capacity:
        """Return what was found."""
        above = len(self._values) - 1 - self._largest(fits)
        known_above = sum(position > self._largest(fits) for position in self._known)
        dip = self._dip()
        certainty = "all" if known_above == above else "bisection" if dip == 0 else "around"
        return Capacity(
            largest=self._probe(self._largest(fits)),
            largest_to_try=self._probe(self._largest(may)),
            certainty=certainty,
            dip=dip,
            values=len(self._values),
            probes=tuple(Probe(self._values[p], self._known[p]) for p in sorted(self._known)),
        )

    def _at(self, position: int) -> Prediction:
        if position not in self._known:
            self._known[position] = self._predict(self._values[position])
        return self._known[position]

    def _largest(self, fits: Fits) -> int:
        """Return the largest position known to fit, or -1."""
        return max((p for p, prediction in self._known.items() if fits(prediction)), default=-1)

    def _probe(self, position: int) -> Probe | None:
        return None if position < 0 else Probe(self._values[position], self._known[position])

    def _bisect(self, fits: Fits) -> None:
        low = self._largest(fits)
        high = min((p for p in self._known if p > low), default=len(self._values))
        while high - low > 1:
            middle = (low + high) // 2
            if fits(self._at(middle)):
                low = middle
            else:
                high = middle

    def _dip(self) -> float:
        """Return by what share at most a larger value needs less than a smaller one."""
        sizes = [size for p in sorted(self._known) if (size := size_of(self._known[p])) is not None]
        highest = accumulate(sizes, max)
        return max((1 - size / top for size, top in zip(sizes, highest, strict=True) if top), default=0.0)

    def _doubtful(self, fits: Fits) -> list[int]:
        """Return positions above the answer that a dip might make fit, as far as they are to be checked."""
        dip, allowed = self._dip(), MOST_CHECKED - self._checked
        if dip == 0 or allowed <= 0:
            return []
        answer = self._largest(fits)
        stop = self._too_large(answer, fits, dip)
        width = stop - answer - 1
        if width <= MOST_CHECKED + self.count:
            unknown = [p for p in range(answer + 1, stop) if p not in self._known]
            return (
                unknown
                if len(unknown) <= allowed
                else [unknown[i] for i in _spread(0, len(unknown), allowed)]
            )
        return [p for p in _spread(answer + 1, stop, allowed) if p not in self._known]

    def _too_large(self, answer: int, fits: Fits, dip: float) -> int:
        """Return the first known position from which even a dip twice as deep does not help."""
        sizes = {p: size for p in sorted(self._known) if (size := size_of(self._known[p])) is not None}
        failing = min((size for p, size in sizes.items() if not fits(self._known[p])), default=None)
        if failing is not None:
            for position, size in sizes.items():
                if position > answer and size * (1 - 2 * dip) > failing:
                    return position
        return len(self._values)


def useful_batch_sizes(values: Sequence[Any], samples: int, *, drop_last: bool) -> Sequence[Any]:
    """Return the batch sizes that a training set of some length makes use of.

    They end with the first that holds all samples. Where the loader drops a batch that is not full,
    they end with the last that is not larger than the set, and there may be none.
    """
    position = bisect_left(values, samples)
    holds_exactly = position < len(values) and values[position] == samples
    return values[:position] if drop_last and not holds_exactly else values[: position + 1]
