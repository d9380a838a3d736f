"""Corrects the centre of a prediction and sizes its band from trials that were measured.

Until enough trials of the same host, device and study were measured, a prior speaks: it counts as
`PRIOR_TRIALS` trials of typical error. A CPU's prior: resident peak - context - allocated was
7 to 18 MiB over 30 trials of `digits_cnn` and 7 to 31 MiB over 8 of `char_gpt`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

from tuner.records import Record
from tuner.units import MIB

PRIOR_TRIALS = 5
_MAD_TO_SIGMA = 1.4826  # a normal distribution's standard deviation over its median deviation


@dataclass(frozen=True)
class Measured:
    """One measured trial beside what was estimated for it."""

    context_bytes: int
    allocator_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class Calibration(Record):
    """How to turn context and allocator bytes into device bytes, and how sure that is.

    device = context + offset + factor · allocator, with a standard deviation of
    hypot(context spread · context_weight, relative_spread · allocator, additive_spread).

    Attributes:
        offset_bytes: Added to every prediction.
        factor: Multiplies the allocator's bytes.
        relative_spread: Standard deviation as a fraction of the allocator's bytes.
        additive_spread_bytes: Standard deviation that does not depend on size.
        context_weight: How much of the target's context spread is still unknown (1: all).
        trials: How many measured trials this rests on.
    """

    offset_bytes: int
    factor: float
    relative_spread: float
    additive_spread_bytes: int
    context_weight: float
    trials: int

    @classmethod
    def prior(cls, target_kind: str) -> Self:
        """Return what is assumed before anything was measured."""
        if target_kind == "cpu":
            return cls(12 * MIB, 1.0, 0.02, 9 * MIB, 1.0, 0)
        return cls(0, 1.0, 0.05, 0, 1.0, 0)

    def updated(self, measured: Sequence[Measured]) -> Calibration:
        """Return the calibration after `measured` trials; self, the prior, where there are none.

        The offset is the median residual, shrunk towards the prior's; the spread is the median
        absolute deviation from it, shrunk likewise.
        """
        if not measured:
            return self
        residuals = [m.device_bytes - m.context_bytes - self.factor * m.allocator_bytes for m in measured]
        weight = len(measured) / (len(measured) + PRIOR_TRIALS)
        centre = weight * median(residuals) + (1 - weight) * self.offset_bytes
        deviation = _MAD_TO_SIGMA * median(abs(residual - centre) for residual in residuals)
        additive = math.hypot(
            math.sqrt(weight) * deviation, math.sqrt(1 - weight) * self.additive_spread_bytes
        )
        return Calibration(
            offset_bytes=round(centre),
            factor=self.factor,
            relative_spread=self.relative_spread * math.sqrt(1 - weight / 2),
            additive_spread_bytes=round(additive),
            context_weight=math.sqrt(1 - weight),
            trials=len(measured),
        )
