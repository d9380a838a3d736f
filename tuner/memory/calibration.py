"""Corrects the centre of a prediction and sizes its band from trials that were measured.

A trial's device bytes are modelled as::

    device = context + offset + factor · allocator + spread(allocator) · score
    spread = hypot(context weight · context spread, relative · allocator, additive)

and its required bytes by the same offset, factor and score, from the allocator's bytes under the
smallest limit. Until trials of the same host and device were measured, a prior speaks; it depends
on the mix of operators. `learning.py` says how trials move offset, factor and spread, and
`predictive.py` how they shape the distribution of the score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from tuner.memory.predictive import Predictive, heavy_tailed
from tuner.records import Band, Record
from tuner.units import MIB

PLAIN, CONVOLUTIONS, COMPILED = "plain", "convolutions", "compiled"


@dataclass(frozen=True)
class MixPrior:
    """What is assumed of predictions for one mix of operators, before any trial.

    Attributes:
        offset_bytes: Device bytes beyond context and allocator.
        additive_bytes: Their standard deviation.
        relative_low: Standard deviation below the centre, as a fraction of the allocator's bytes.
        relative_high: The same above it: errors may be skewed.
    """

    offset_bytes: int
    additive_bytes: int
    relative_low: float
    relative_high: float


# Standard deviations are those of the normal distribution with the same 95 % band.
# CPU: resident peak - context - allocated was 7 to 18 MiB over 30 trials of `digits_cnn` and 7 to
# 31 MiB over 8 of `char_gpt`.
_CPU = MixPrior(12 * MIB, 9 * MIB, 0.02, 0.02)
# CUDA, of the public rows in reference/nvml_rows.csv against a plain trace: language models, median
# error 0.8 %, 2.5 % in the tail, up to 16 % where lengths vary from batch to batch; convolutions,
# median 2 %, -16 to +13 %, for cuDNN's workspaces. Library modules that load late: 14 to 18 MiB.
# A compiled step may take more or less than the eager one that was traced: no figures.
_CUDA = {
    PLAIN: MixPrior(0, 16 * MIB, 0.02, 0.02),
    CONVOLUTIONS: MixPrior(0, 16 * MIB, 0.05, 0.05),
    COMPILED: MixPrior(0, 16 * MIB, 0.10, 0.10),
}


class Says(StrEnum):
    """What a trial's figure says: the device bytes themselves, or a bound on required bytes."""

    DEVICE = "device"
    REQUIRED_MORE = "required more than"
    REQUIRED_AT_MOST = "required at most"


@dataclass(frozen=True)
class Measured:
    """One launched trial beside what was estimated for it.

    Attributes:
        context_bytes: Its context.
        allocator_bytes: The estimate of the allocator's bytes: those reserved when nothing limits
            them for `Says.DEVICE`, those required for a bound.
        device_bytes: What was measured, or the bound; context included.
        says: Which of the two.
        mix: The mix of operators; only trials of the same mix calibrate one another.
    """

    context_bytes: int
    allocator_bytes: int
    device_bytes: int
    says: Says = Says.DEVICE
    mix: str = PLAIN


@dataclass(frozen=True)
class Calibration(Record):
    """How to turn context and allocator bytes into device bytes, and how sure that is.

    Attributes:
        offset_bytes: Added to every prediction.
        factor: Multiplies the allocator's bytes.
        relative_spread: Standard deviation as a fraction of the allocator's bytes.
        additive_spread_bytes: Standard deviation that does not depend on size.
        context_weight: How much of the target's context spread is still unknown (1: all).
        quantiles: Of the score, at `predictive.LEVELS`.
        mix: The mix of operators it holds for.
        trials: How many launched trials this rests on.
    """

    offset_bytes: int
    factor: float
    relative_spread: float
    additive_spread_bytes: int
    context_weight: float
    quantiles: tuple[float, ...]
    mix: str
    trials: int

    @classmethod
    def prior(cls, target_kind: str, *, convolutions: bool = False, compiled: bool = False) -> Self:
        """Return what is assumed before anything was measured.

        Args:
            target_kind: `cpu` or `cuda`.
            convolutions: Whether the step runs convolutions.
            compiled: Whether it runs under `torch.compile`.
        """
        mix = COMPILED if compiled else CONVOLUTIONS if convolutions else PLAIN
        return cls.of_mix(target_kind, mix)

    @classmethod
    def of_mix(cls, target_kind: str, mix: str) -> Self:
        """Return the prior of a mix by its name, as `Estimate.mix` gives it."""
        assumed = _CPU if target_kind == "cpu" else _CUDA[mix]
        relative = max(assumed.relative_low, assumed.relative_high)
        shape = heavy_tailed(assumed.relative_low / relative, assumed.relative_high / relative)
        return cls(assumed.offset_bytes, 1.0, relative, assumed.additive_bytes, 1.0, shape, mix, 0)

    def updated(self, measured: Iterable[Measured], *, context_spread_bytes: int = 0) -> Calibration:
        """Return the calibration after the launched trials `measured`, in the order they ended.

        Trials of another mix are left aside. Without any, this is self, the prior.

        Args:
            measured: What was measured.
            context_spread_bytes: The target's: how far the context may be off.
        """
        from tuner.memory.learning import REMEMBERED, Learner  # which needs this module

        same = [trial for trial in measured if trial.mix == self.mix]
        if not same:
            return self
        learner = Learner(self, context_spread_bytes=context_spread_bytes)
        for trial in same[-REMEMBERED:]:
            learner.add(trial)
        return learner.calibration(trials=len(same))

    def expected_bytes(self, context_bytes: int, allocator_bytes: int) -> float:
        """Return the centre of the device bytes."""
        return context_bytes + self.offset_bytes + self.factor * allocator_bytes

    def spread_bytes(self, allocator_bytes: int, context_spread_bytes: int) -> float:
        """Return the spread of the device bytes, at least 1."""
        return max(
            1.0,
            math.hypot(
                context_spread_bytes * self.context_weight,
                allocator_bytes * self.relative_spread,
                self.additive_spread_bytes,
            ),
        )

    def band(self, context_bytes: int, allocator_bytes: int, *, context_spread_bytes: int) -> Band:
        """Return the 2.5 % quantile, the centre and the 97.5 % quantile of the device bytes."""
        centre = self.expected_bytes(context_bytes, allocator_bytes)
        spread = self.spread_bytes(allocator_bytes, context_spread_bytes)
        score = Predictive(self.quantiles)
        low, high = min(0.0, score.quantile(0.025)), max(0.0, score.quantile(0.975))
        return Band(round(max(0.0, centre + low * spread)), round(centre), round(centre + high * spread))

    def fits_probability(
        self, context_bytes: int, required_bytes: int, *, context_spread_bytes: int, budget_bytes: int
    ) -> float:
        """Return P(device bytes of a trial that requires `required_bytes` of its allocator ≤ budget)."""
        margin_bytes = budget_bytes - self.expected_bytes(context_bytes, required_bytes)
        return Predictive(self.quantiles).cdf(
            margin_bytes / self.spread_bytes(required_bytes, context_spread_bytes)
        )
