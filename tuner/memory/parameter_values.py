"""The values of one parameter in order, as a search for the largest or the nearest needs them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any, overload

from tuner.errors import UsageError
from tuner.stand_in import Choices, Range

Number = int | float
_GRID = 100  # steps of a continuous range
_MOST_STEPS = 1000  # of a range of real numbers with a step
_DIGITS = 3  # significant digits of a value on that grid


class ChoicesThenWhole(Sequence[Number]):
    """Ordered choices, then every whole number after the last of them up to a maximum."""

    def __init__(self, choices: Sequence[Number], maximum: int) -> None:
        self._choices = list(choices)
        self._beyond = range(math.floor(self._choices[-1]) + 1, maximum + 1)

    def __len__(self) -> int:
        return len(self._choices) + len(self._beyond)

    @overload
    def __getitem__(self, index: int) -> Number: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Number]: ...
    def __getitem__(self, index: int | slice) -> Number | Sequence[Number]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        if index < len(self._choices):
            return self._choices[index]
        return self._beyond[index - len(self._choices)]


def is_ordered(asked: Range | Choices) -> bool:
    """Whether a parameter's values have an order: numbers do, text and truth values do not."""
    if isinstance(asked, Range):
        return True
    return all(isinstance(choice, (int, float)) and not isinstance(choice, bool) for choice in asked.choices)


def whole_or_chosen(name: str, asked: Range | Choices, maximum: int | None = None) -> Sequence[Number]:
    """Return the values of a whole number or an ordered choice, ascending.

    Args:
        name: The parameter, for messages.
        asked: Its distribution.
        maximum: Where the values end instead; beyond the last choice every whole number counts.

    Raises:
        UsageError: The parameter has no such values, or none up to `maximum`.
    """
    if isinstance(asked, Range) and not asked.whole:
        raise UsageError(
            f"{name} is a real number between {asked.low:g} and {asked.high:g}",
            hint="the largest is looked for among whole numbers and ordered choices",
        )
    if not is_ordered(asked):
        assert isinstance(asked, Choices)
        raise UsageError(
            f"the choices of {name} have no order: {', '.join(map(str, asked.choices))}",
            hint="the largest is looked for among whole numbers and choices that are numbers",
        )
    values = grid(asked)
    if maximum is None:
        return values
    if maximum < values[0]:
        raise UsageError(f"{name} is at least {values[0]}, so it cannot end at {maximum}")
    if isinstance(asked, Range):
        return range(int(asked.low), maximum + 1, int(asked.step or 1))
    kept = [value for value in values if value <= maximum]
    return ChoicesThenWhole(kept, maximum) if len(kept) == len(values) else kept


def grid(asked: Range | Choices) -> Sequence[Number]:
    """Return a parameter's values, ascending; a continuous range as 100 steps of three digits.

    Of a range of real numbers with a step, 1001 values at most.
    """
    if isinstance(asked, Choices):
        return sorted(set(asked.choices))
    if asked.whole:
        return range(int(asked.low), int(asked.high) + 1, int(asked.step or 1))
    if asked.step is not None:
        steps = math.floor((asked.high - asked.low) / asked.step + 1e-9)
        positions = sorted({round(steps * i / _MOST_STEPS) for i in range(_MOST_STEPS + 1)})
        return [asked.low + position * asked.step for position in positions]
    inner = (_rounded(_between(asked.low, asked.high, i / _GRID, log=asked.log)) for i in range(1, _GRID))
    return sorted({asked.low, asked.high, *(value for value in inner if asked.low < value < asked.high)})


def spread(asked: Range | Choices, count: int) -> list[Any]:
    """Return at most `count` values that cover a range; of choices all, as they were given."""
    if isinstance(asked, Choices):
        return list(dict.fromkeys(asked.choices))
    values = grid(asked)
    if len(values) <= count:
        return list(values)
    wanted = [_between(asked.low, asked.high, i / (count - 1), log=asked.log) for i in range(count)]
    return sorted({values[nearest(values, value)] for value in wanted})


def nearest(values: Sequence[Number], value: Number) -> int:
    """Return the position of the value that is nearest to `value`."""
    after = bisect.bisect_left(values, value)
    if after == 0:
        return 0
    if after == len(values):
        return len(values) - 1
    return after if values[after] - value < value - values[after - 1] else after - 1


def _between(low: float, high: float, share: float, *, log: bool) -> float:
    return low * (high / low) ** share if log else low + (high - low) * share


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
