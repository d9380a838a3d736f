"""What the reader returns: frozen records, never rows of an ORM."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tuner.records import Owner, Prediction, Record


@dataclass(frozen=True)
class NewStudy(Record):
    """What a study is created with; it never changes afterwards."""

    name: str
    workload: str
    workload_reference: str
    workload_digest: str
    target: str
    device_name: str | None
    budget_bytes: int
    metric: str
    direction: str
    single: bool
    seed: int | None
    context_bytes: int | None
    settings: dict[str, Any]
    tuner_version: str


@dataclass(frozen=True)
class StudyRecord(NewStudy):
    """A study and how far it is; the columns of `tuner_study`."""

    id: int
    created_at: datetime

    @property
    def maximize(self) -> bool:
        """Whether more of the metric is better."""
        return self.direction == "maximize"


@dataclass(frozen=True)
class DriverRecord(Record):
    """A process that drives a study, or did; the columns of `tuner_driver`."""

    id: int
    study_id: int
    owner: Owner
    joined_at: datetime
    seen_at: datetime
    ended_at: datetime | None
    end_reason: str | None
    stop_reason: str | None
    environment: dict[str, Any]


@dataclass(frozen=True)
class TrialRecord(Record):
    """A trial; the columns of `tuner_trial`. `outcome` is `running` while it has none."""

    id: int
    study_id: int
    number: int
    repeats: int | None
    audit: bool
    params: dict[str, Any]
    verdict: str | None
    fits_probability: float | None
    predicted_bytes: int | None
    predicted_low_bytes: int | None
    predicted_high_bytes: int | None
    predicted_allocated_bytes: int | None
    reservation_bytes: int | None
    device: str | None
    attempt: int
    attempts: list[dict[str, Any]]
    waiting_seconds: float | None
    outcome: str
    value: float | None
    peak_bytes: int | None
    peak_source: str | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    baseline_bytes: int | None
    host_peak_bytes: int | None
    used_before_bytes: int | None
    device_wide_bytes: int | None
    growth_bytes: int | None
    phases: dict[str, int]
    metrics: dict[str, float]
    reason: str | None
    failure: dict[str, Any] | None
    seed: int | None
    environment: dict[str, Any]
    warnings: list[str]
    run_folder: str | None
    checkpoint: str | None
    asked_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    seconds: float | None
    prediction_seconds: float | None
    driver_id: int | None
    draws: int | None
    rehearsal_seconds: float | None
    rejection_id: int | None
    prediction: Prediction | None = None
    timeline: dict[str, Any] | None = None
    late_result: dict[str, Any] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the trial has no outcome yet."""
        return self.outcome == "running"

    @property
    def params_by_name(self) -> dict[str, Any]:
        """The params; what is no dictionary has the name `params`."""
        return self.params if isinstance(self.params, dict) else {"params": self.params}


@dataclass(frozen=True)
class NewRejection(Record):
    """A configuration that was turned away; `answers` is None where params say the same."""

    params: Any
    answers: dict[str, Any] | None
    predicted_bytes: int | None
    reason: str


@dataclass(frozen=True)
class RejectionRecord(NewRejection):
    """The same as stored: for which trial it was drawn, and as which draw of it."""

    id: int
    number: int
    place: int


@dataclass(frozen=True)
class MetricRecord(Record):
    """One metric at the end of one epoch."""

    epoch: int
    name: str
    value: float | None
    seconds: float | None
    peak_bytes: int | None
    epoch_peak_bytes: int | None = None
    epoch_allocated_bytes: int | None = None
    epoch_reserved_bytes: int | None = None


@dataclass(frozen=True)
class CurveRecord(Record):
    """One trial's learning curve.

    Attributes:
        trial_id: The trial's row.
        outcome: What became of it.
        predicted_bytes, peak_bytes: Its device bytes, as predicted and as measured.
        values: One metric at the end of each epoch, from the first; NaN where it was no number.
    """

    trial_id: int
    outcome: str
    predicted_bytes: int | None
    peak_bytes: int | None
    values: tuple[float, ...]


_METRIC_NAME_LIMIT = 255
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def to_storable(value: Any) -> Any:
    """Return a value as JSON columns hold it: plain numbers, non-finite ones as text."""
    if isinstance(value, dict):
        return {str(key): to_storable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_storable(item) for item in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if hasattr(value, "tolist"):  # a number or an array from NumPy, or a tensor
        plain = value.tolist()
        return to_storable(plain) if type(plain) is not type(value) else to_storable(float(value))
    return storable_text(str(value))


def storable_text(text: str) -> str:
    """Return a text that both databases hold: no lone surrogates, no NUL."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def metric_name(name: str) -> str:
    """Return a name that fits its column: a long one is cut, and stays unique."""
    name = storable_text(name)
    if len(name) <= _METRIC_NAME_LIMIT:
        return name
    return f"{name[: _METRIC_NAME_LIMIT - 9]}…{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def from_storable(value: Any) -> Any:
    """Return what `to_storable` was given, for numbers and dictionaries of them."""
    if isinstance(value, dict):
        return {key: from_storable(item) for key, item in value.items()}
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    return value
