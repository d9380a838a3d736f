"""Memory that each training step leaves behind: told from noise, caches and fragmentation.

What is held at the end of training steps is noted, at most 512 times, and a line is put through
the steady ones: the median of the slopes of all pairs (H. Theil, 1950; P. K. Sen, 1968, "Estimates
of the regression coefficient based on Kendall's tau", JASA 63), which a third of outliers does not
move. Growth is said only where four successive quarters of the steps rise one after the other,
each by its share: caches fill up and the allocator settles, a leak goes on.

Nothing is said while batches keep coming in shapes that were not seen before: kernels are compiled
and kept for each (oneDNN, 50 MiB in 300 steps of a small CNN), which looks as a leak does.

What it does not see: fewer than 40 steps, less than the meter's `least_growth_bytes` in all, and
growth that a training loop of the workload's own makes outside `Run.train_epoch`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

_MOST_POINTS = 512
_LEAST_POINTS = 32
_PAIRED_POINTS = 128  # 8,128 slopes take 2 ms
_FIRST_STEPS = 8  # optimizer state, workspaces, the first autograd graphs
_LEAST_SLOPE_BYTES = 512  # the smallest block of CUDA's caching allocator: less is Python's own lists
_QUARTERS = 4
# Of leaks in real runs, the least rise was 0.6 of what the line gives and the last 0.77 of the first.
_LEAST_SHARE = 0.3
_LEAST_LAST = 0.6
_MOST_NEW_SHAPES = 0.02  # of the steady steps; two are let through: an epoch's last batch is smaller


@dataclass(frozen=True)
class StepSize:
    """What was held at the end of a training step, counted from 1.

    Attributes:
        step: Which step.
        bytes: What was held at its end.
        shapes: How many shapes of batches there had been so far.
    """

    step: int
    bytes: int
    shapes: int = 1


class StepSizes:
    """What was held at the end of training steps, thinned by doubling the stride.

    Args:
        least_bytes: Growth of less than this over all steady steps is noise.
    """

    def __init__(self, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._points: list[StepSize] = []
        self._stride = 1
        self._steps = 0
        self._shapes = 0
        self._first_epoch_steps: int | None = None

    def step(self, held_bytes: Callable[[], int | None], *, new_shape: bool = False) -> None:
        """Note the end of one training step; `held_bytes` is asked for few of them."""
        self._steps += 1
        self._shapes += new_shape
        if self._steps % self._stride:
            return
        held = held_bytes()
        if held is None:
            return
        self._points.append(StepSize(self._steps, held, self._shapes))
        if len(self._points) >= _MOST_POINTS:
            self._points = self._points[1::2]
            self._stride *= 2

    def epoch_ended(self) -> None:
        """Note the end of an epoch: the first one fills caches."""
        if self._first_epoch_steps is None and self._steps:
            self._first_epoch_steps = self._steps

    def growth_bytes(self) -> int | None:
        """Return what each further step left behind; None when there were too few steps to say."""
        skipped = max(_FIRST_STEPS, self._steps // 4)
        if self._first_epoch_steps is not None and self._first_epoch_steps <= self._steps // 2:
            skipped = max(_FIRST_STEPS, self._first_epoch_steps)
        steady = [point for point in self._points if point.step > skipped]
        return growth_per_step(steady, self._least_bytes)


def growth_per_step(points: Sequence[StepSize], least_bytes: int) -> int | None:
    """Return the steady growth of a series in bytes per step, 0 where there is none.

    Args:
        points: Steady steps, in order.
        least_bytes: Growth of less than this from first to last is noise.

    Returns:
        None when there are fewer than 32 points, or too many new shapes among them.
    """
    if len(points) < _LEAST_POINTS:
        return None
    span = points[-1].step - points[0].step
    if points[-1].shapes - points[0].shapes > max(2, _MOST_NEW_SHAPES * span):
        return None
    slope = theil_sen(points)
    if slope < _LEAST_SLOPE_BYTES or slope * span < least_bytes:
        return 0
    quarter = len(points) // _QUARTERS
    heights = [
        statistics.median(point.bytes for point in points[place * quarter : (place + 1) * quarter])
        for place in range(_QUARTERS)
    ]
    least_rise = max(_LEAST_SHARE * slope * span / _QUARTERS, 3 * _scatter(points, slope))
    rises = [after - before for before, after in pairwise(heights)]
    goes_on = min(rises) >= least_rise and rises[-1] >= _LEAST_LAST * rises[0]
    return round(slope) if goes_on else 0


def theil_sen(points: Sequence[StepSize]) -> float:
    """Return the median slope of all pairs, of at most 128 of the points, in bytes per step."""
    points = points[:: -(-len(points) // _PAIRED_POINTS)]
    slopes = [(b.bytes - a.bytes) / (b.step - a.step) for a, b in combinations(points, 2)]
    return float(statistics.median(slopes))


def _scatter(points: Sequence[StepSize], slope: float) -> float:
    """Return the standard error of a quarter's median, from the residuals around the line."""
    residuals = [point.bytes - slope * point.step for point in points]
    middle = statistics.median(residuals)
    deviation = 1.4826 * statistics.median(abs(residual - middle) for residual in residuals)
    return 1.2533 * deviation / math.sqrt(len(points) / _QUARTERS)
