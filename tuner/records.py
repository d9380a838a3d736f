"""Frozen values that cross the borders between packages, processes and the database.

Each has `to_json` and, where it is read back, `from_json`: plain dictionaries with a version, no
pickle. Unknown is `None`. Bytes are `int`, seconds are `float`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self


class Verdict(StrEnum):
    """What a prediction says about launching: surely fits, may fit, surely does not fit."""

    LAUNCH = "launch"
    TRY = "try"
    PRUNE = "prune"


class Outcome(StrEnum):
    """What became of a trial.

    ::

        asked ──► pruned_memory                              never launched
          └─► launched ─┬─► completed
                        ├─► out_of_memory, pruned_metric     told to Optuna as PRUNED
                        ├─► timed_out, host_out_of_memory,
                        │   killed, crashed, error, lost     told to Optuna as FAIL
                        └─► interrupted                      FAIL, queued again on resume
    """

    COMPLETED = "completed"
    PRUNED_MEMORY = "pruned_memory"
    OUT_OF_MEMORY = "out_of_memory"
    PRUNED_METRIC = "pruned_metric"
    TIMED_OUT = "timed_out"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    KILLED = "killed"
    CRASHED = "crashed"
    ERROR = "error"
    LOST = "lost"
    INTERRUPTED = "interrupted"

    @property
    def launched(self) -> bool:
        """Whether a process was started for the trial."""
        return self is not Outcome.PRUNED_MEMORY

    @property
    def failed(self) -> bool:
        """Whether the trial counts against `--max-failures`."""
        return self in _FAILURES

    @property
    def final(self) -> bool:
        """Whether the trial is settled: an interrupted one is run again."""
        return self is not Outcome.INTERRUPTED


_FAILURES = frozenset(
    {
        Outcome.TIMED_OUT,
        Outcome.HOST_OUT_OF_MEMORY,
        Outcome.KILLED,
        Outcome.CRASHED,
        Outcome.ERROR,
        Outcome.LOST,
    }
)

CATEGORIES = (
    "parameters",
    "buffers",
    "gradients",
    "optimizer_state",
    "activations",
    "temporaries",
    "inputs",
    "workspace",
    "context",
)


class Record:
    """A frozen dataclass that turns into a plain dictionary."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON-ready values."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class Band(Record):
    """Bytes with their uncertainty: the 2.5 %, 50 % and 97.5 % quantiles."""

    low: int
    expected: int
    high: int


@dataclass(frozen=True)
class PeakAt(Record):
    """Where a peak happens: the phase (setup, forward, …), the step from 1, the module."""

    phase: str
    step: int
    module: str


@dataclass(frozen=True)
class LargeTensor(Record):
    """A tensor alive at the peak, for explanations."""

    bytes: int
    category: str
    module: str
    operator: str


@dataclass(frozen=True)
class Prediction(Record):
    """The predicted peak memory of one configuration on one target.

    Attributes:
        allocated_bytes: Peak of live blocks; None when the step could not be traced.
        reserved_bytes: Peak of the segments that hold them (on a CPU target: the same).
        device: All the trial takes on the device when nothing limits it; None when unknown.
        required: The smallest cap under which it still runs; None when unknown.
        fits_probability: P(required ≤ budget); None without a budget or a trace.
        verdict: What to do under the budget; None without a budget.
        categories: Device bytes at the expected peak by category (CATEGORIES).
        peak_at: Where the peak happens.
        largest: The largest tensors alive at the peak, largest first.
        growth_bytes: Bytes that each further training step leaves behind; 0 is the rule.
        method: `fake-tensors`, or `untraceable`.
        assumptions: What was taken for granted and what is not seen, a sentence each.
        rules: Names of the rules that turned the traced step into the target's.
        seconds: How long the prediction took.
        mix: The mix of operators: trials of the same mix calibrate one another.
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    device: Band | None
    required: Band | None
    fits_probability: float | None
    verdict: Verdict | None
    categories: dict[str, int] = field(default_factory=dict)
    peak_at: PeakAt | None = None
    largest: tuple[LargeTensor, ...] = ()
    growth_bytes: int = 0
    method: str = "fake-tensors"
    assumptions: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    seconds: float = 0.0
    mix: str = "plain"

    def to_json(self) -> dict[str, Any]:
        """Return the documented JSON form (`device_bytes`, `required_bytes`, …)."""
        fields = super().to_json()
        fields["device_bytes"] = fields.pop("device")
        fields["required_bytes"] = fields.pop("required")
        fields["assumptions"] = list(self.assumptions)
        fields["rules"] = list(self.rules)
        fields["largest"] = [tensor.to_json() for tensor in self.largest]
        return fields

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the prediction that `to_json` wrote."""
        values = dict(fields)
        device, required = values.pop("device_bytes"), values.pop("required_bytes")
        values["device"] = None if device is None else Band(**device)
        values["required"] = None if required is None else Band(**required)
        verdict, peak_at = values["verdict"], values["peak_at"]
        values["verdict"] = None if verdict is None else Verdict(verdict)
        values["peak_at"] = None if peak_at is None else PeakAt(**peak_at)
        values["largest"] = tuple(LargeTensor(**tensor) for tensor in values["largest"])
        values["assumptions"] = tuple(values["assumptions"])
        values["rules"] = tuple(values.get("rules", ()))
        return cls(**values)


@dataclass(frozen=True)
class Peaks(Record):
    """Measured peak memory of one trial.

    Attributes:
        device_bytes: Everything the trial's process took on the device.
        source: Where `device_bytes` comes from: `VmHWM`, `nvml-process`, `nvml-delta`, …
        allocated_bytes: Peak of the allocator's live blocks (`torch.profiler`, torch.cuda).
        reserved_bytes: Peak of the caching allocator's segments; None on a CPU.
        baseline_bytes: Device bytes after the warm-up, before the workload: the context.
        phases: Peak device bytes by phase (`setup`, `train`, `eval`).
        used_before_bytes: What anybody used on the device before the process touched it; on a CPU,
            what was not available of the host's memory.
        device_wide_bytes: Peak use of the whole device, other processes included; only where NVML
            does not know the process's own.
    """

    device_bytes: int | None = None
    source: str | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    baseline_bytes: int | None = None
    phases: dict[str, int] = field(default_factory=dict)
    used_before_bytes: int | None = None
    device_wide_bytes: int | None = None


@dataclass(frozen=True)
class Failure(Record):
    """Why a trial did not complete, as text and numbers, never as a live exception."""

    reason: str
    phase: str | None = None
    requested_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    free_bytes: int | None = None
    traceback: str | None = None


@dataclass(frozen=True)
class EpochMetrics(Record):
    """The metrics reported at the end of one epoch, and peaks.

    Attributes:
        epoch: From 1.
        metrics: As reported.
        seconds: Since the start of training.
        peak_bytes: Peak device bytes so far.
        epoch_peak_bytes: Peak device bytes within the epoch.
        epoch_allocated_bytes: Peak of live blocks within the epoch; CUDA only.
        epoch_reserved_bytes: Peak of segments within the epoch; CUDA only.
    """

    epoch: int
    metrics: dict[str, float]
    seconds: float
    peak_bytes: int | None = None
    epoch_peak_bytes: int | None = None
    epoch_allocated_bytes: int | None = None
    epoch_reserved_bytes: int | None = None


@dataclass(frozen=True)
class TrialResult(Record):
    """What the driver knows of a trial when it has ended.

    Attributes:
        outcome: What became of it.
        value: The objective's best value, or None; ±inf is kept, NaN becomes an error.
        metrics: All metrics at the best epoch.
        epochs: Metrics per epoch.
        peaks: Measured peaks.
        failure: What went wrong, or None.
        seconds: Wall time from launch to end.
        environment: Versions, threads and flags of the process that ran it.
        checkpoint: Path of the kept weights below the run folder, or None.
        warnings: What the process noticed, a sentence each.
        host_peak_bytes: Peak resident bytes of its process on the host.
        growth_bytes: What each further training step left behind, 0 where nothing; None when there
            were too few steps to say.
        timeline: Device bytes over time, as measure/timeline.py documents it, or None.
    """

    outcome: Outcome
    value: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    epochs: tuple[EpochMetrics, ...] = ()
    peaks: Peaks = field(default_factory=Peaks)
    failure: Failure | None = None
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    warnings: tuple[str, ...] = ()
    host_peak_bytes: int | None = None
    growth_bytes: int | None = None
    timeline: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the result that `to_json` wrote; unknown keys are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in fields.items() if name in known}
        values["outcome"] = Outcome(values["outcome"])
        values["epochs"] = tuple(EpochMetrics(**epoch) for epoch in values.get("epochs", ()))
        values["peaks"] = Peaks(**values.get("peaks", {}))
        failure = values.get("failure")
        values["failure"] = None if failure is None else Failure(**failure)
        values["warnings"] = tuple(values.get("warnings", ()))
        return cls(**values)


@dataclass(frozen=True)
class Owner(Record):
    """The process that holds a study or a trial, unique over hosts, reboots and reused pids."""

    host: str
    boot_id: str
    pid: int
    started: str
