"""Recursive Bayesian regression on offset + factor · size: a Kalman filter of two states."""

from __future__ import annotations


class Regression:
    """Starts at zero, with the uncertainties it is given; takes in one observation at a time.

    Args:
        offset_variance: Of the offset, before any observation.
        factor_variance: Of the factor; the two are independent then.
        returning: Share of these that returns with each observation, so that old ones fade.

    Attributes:
        offset: The offset's mean.
        factor: The factor's mean.
        offset_variance: The offset's variance.
        factor_variance: The factor's variance.
    """

    def __init__(self, *, offset_variance: float, factor_variance: float, returning: float) -> None:
        self.offset = self.factor = 0.0
        self.offset_variance = self._first_offset = offset_variance
        self.factor_variance = self._first_factor = factor_variance
        self._covariance = 0.0
        self._returning = returning

    @property
    def unknown_offset(self) -> float:
        """How much of the offset's first variance is left, from 0 to 1."""
        return self.offset_variance / self._first_offset if self._first_offset else 0.0

    def at(self, size: float) -> float:
        """Return the forecast for a size."""
        return self.offset + self.factor * size

    def variance_at(self, size: float) -> float:
        """Return the forecast's variance."""
        return max(0.0, self.variance_bound(size) + 2 * self._covariance * size)

    def variance_bound(self, size: float) -> float:
        """Return the forecast's variance were offset and factor independent.

        They are correlated negatively once observations of similar sizes were seen, so that this
        is at least the variance.
        """
        return self.offset_variance + self.factor_variance * size**2

    def add(self, error: float, size: float, noise_variance: float) -> None:
        """Take in an observation that is off by `error`."""
        by_offset = self.offset_variance + self._covariance * size
        by_factor = self._covariance + self.factor_variance * size
        total = self.variance_at(size) + noise_variance
        self.offset += by_offset / total * error
        self.factor += by_factor / total * error
        self.offset_variance = max(0.0, self.offset_variance - by_offset**2 / total)
        self.factor_variance = max(0.0, self.factor_variance - by_factor**2 / total)
        self._covariance -= by_offset * by_factor / total
        self.offset_variance += self._returning * (self._first_offset - self.offset_variance)
        self.factor_variance += self._returning * (self._first_factor - self.factor_variance)
        self._covariance *= 1 - self._returning
