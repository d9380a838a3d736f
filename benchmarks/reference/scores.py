"""Predictions of reference rows, and what they are worth."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Scored:
    """One row: what was measured, what was predicted.

    Attributes:
        name: The row, for people.
        family: The model family, for the split.
        measured_bytes, predicted_bytes: The quantity of the file; predicted is None when untraceable.
        low_bytes, high_bytes: The 95 % band, or None where the file gives a peak to the byte.
        out_of_memory: Whether the real run died.
        fits_probability: P(it fits the card), or None.
        seconds: How long the prediction took.
        published: Other estimators' predictions, bytes.
        extra: Further figures.
    """

    name: str
    family: str
    measured_bytes: float
    predicted_bytes: float | None
    low_bytes: float | None = None
    high_bytes: float | None = None
    out_of_memory: bool = False
    fits_probability: float | None = None
    seconds: float = 0.0
    published: dict[str, float] | None = None
    extra: dict[str, Any] | None = None

    @property
    def error(self) -> float:
        """Predicted against measured, relative."""
        assert self.predicted_bytes is not None
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def covered(self) -> bool:
        """Whether the measured value is inside the band."""
        return (
            self.low_bytes is not None
            and self.high_bytes is not None
            and self.low_bytes <= self.measured_bytes <= self.high_bytes
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True)
class Summary:
    """What the predictions of one group of rows are worth; errors are absolute and relative."""

    group: str
    rows: int
    median: float
    percentile_90: float
    worst: float
    coverage: float | None
    band_width: float | None
    out_of_memory_hit: int
    out_of_memory_missed: int
    false_alarms: int
    seconds: float

    @classmethod
    def of(cls, group: str, rows: Sequence[Scored]) -> Summary:
        """Summarise rows; errors are those of rows that ran."""
        ran = [row for row in rows if not row.out_of_memory and row.predicted_bytes is not None]
        died = [row for row in rows if row.out_of_memory]
        banded = [row for row in ran if row.low_bytes is not None]
        judged = [row for row in ran if row.fits_probability is not None]
        errors = [abs(row.error) for row in ran]
        hit = sum((row.fits_probability or 0) < 0.5 for row in died)
        return cls(
            group,
            len(ran),
            statistics.median(errors),
            percentile(errors, 0.9),
            max(errors),
            statistics.mean(row.covered for row in banded) if banded else None,
            statistics.median(_width(row) for row in banded) if banded else None,
            hit,
            len(died) - hit,
            sum((row.fits_probability or 0) < 0.5 for row in judged),
            statistics.median(row.seconds for row in rows),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return asdict(self)


def percentile(values: Iterable[float], share: float) -> float:
    """Return a percentile, interpolated linearly."""
    ordered = sorted(values)
    if len(ordered) == 1:
        return ordered[0]
    return statistics.quantiles(ordered, n=100, method="inclusive")[round(share * 100) - 1]


def others(rows: Sequence[Scored]) -> dict[str, list[float]]:
    """Return the absolute relative errors of each published estimator on the rows that ran.

    As published; and with the constant that suits the estimator best subtracted (`less constant`),
    since some add the context, which the measured figures do not hold.
    """
    found: dict[str, list[float]] = {}
    names = sorted({name for row in rows for name in row.published or {}})
    for name in names:
        pairs = [
            (row.published[name], row.measured_bytes)
            for row in rows
            if not row.out_of_memory and row.published and name in row.published
        ]
        found[name] = [abs(said / measured - 1) for said, measured in pairs]
        constant = statistics.median(said - measured for said, measured in pairs)
        found[f"{name}, less constant"] = [abs((said - constant) / measured - 1) for said, measured in pairs]
    return found


def _width(row: Scored) -> float:
    assert row.low_bytes is not None
    assert row.high_bytes is not None
    assert row.predicted_bytes is not None
    return (row.high_bytes - row.low_bytes) / row.predicted_bytes
