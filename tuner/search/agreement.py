"""Whether a trial that was run again gives what it gave before, and what it was to be judged by.

With a seed on a CPU, training repeats to the bit, and so does the allocator's peak; the resident
peak differs by what the kernel, the C library's arenas and threads happen to hold. On a GPU, and
without a seed, the metric may differ: by how much is said, and not judged. What was ended from
outside (a time-out, early stopping, an interruption) runs to its end now: the epochs of both are
compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tuner.records import Outcome, Record, TrialResult
from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord
from tuner.units import MIB, format_bytes

# Six runs each of tests/workloads/tiny.py, studies/digits_cnn.py and studies/char_gpt.py, two sizes, 1
# and 2 threads, on a busy machine: highest less lowest resident peak is 0.2 to 4.3 MiB, 0.9 % at most.
RESIDENT_SHARE = 0.02
RESIDENT_BYTES = 8 * MIB
# Not measured: kernels that choose their workspace by what is free, allocations in another order.
LOOSE_SHARE = 0.02

_CUT_SHORT = frozenset(
    {Outcome.PRUNED_METRIC, Outcome.TIMED_OUT, Outcome.INTERRUPTED, Outcome.KILLED, Outcome.LOST}
)


@dataclass(frozen=True)
class Figures(Record):
    """What one run of a configuration gave.

    Attributes:
        outcome: What became of it; None where the trial was never launched.
        value: The objective's best value over the epochs that both runs reported.
        device_bytes: Measured peak on the device.
        allocated_bytes: Measured peak of the allocator's live blocks.
        epochs: The objective's value by epoch; None for NaN.
    """

    outcome: Outcome | None
    value: float | None
    device_bytes: int | None
    allocated_bytes: int | None
    epochs: dict[int, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison(Record):
    """Two runs of one configuration.

    Attributes:
        then: What is recorded.
        now: What running it again gave.
        agrees: Whether nothing that was judged differs; None where there was nothing to judge.
        differences: What does not agree, a sentence each.
        notes: What was not judged, and why, a sentence each.
    """

    then: Figures
    now: Figures
    agrees: bool | None
    differences: tuple[str, ...]
    notes: tuple[str, ...]


def compare(
    study: StudyRecord,
    trial: TrialRecord,
    metrics: Sequence[MetricRecord],
    result: TrialResult,
    *,
    repeatable: bool,
) -> Comparison:
    """Compare what is recorded of a trial with what running it again gave.

    Args:
        study: The trial's study.
        trial: The trial as recorded.
        metrics: Its metrics per epoch.
        result: What running it again gave.
        repeatable: True for a seeded run on a CPU: metric and allocator's peak must be equal.
    """
    then, now = _figures(study, trial, metrics, result)
    if then.outcome is None:
        return Comparison(then, now, None, (), ("it was never launched: there is nothing to compare with",))
    differences: list[str] = []
    notes: list[str] = []
    common = then.epochs.keys() & now.epochs.keys()
    cut_short = then.outcome in _CUT_SHORT
    if cut_short:
        notes.append(
            f"it was ended from outside then ({then.outcome}): outcome and peaks are not judged, "
            f"the metric of its {len(common)} epochs is"
        )
    elif then.outcome is not now.outcome:
        differences.append(f"the outcome was {then.outcome}, and is {now.outcome}")
    sentence = _metric_difference(study.metric, then, now)
    if sentence is not None and repeatable:
        differences.append(sentence)
    elif sentence is not None:
        notes.append(f"{sentence}; it may, without a seed or on a GPU")
    if then.outcome is now.outcome is Outcome.COMPLETED:
        differences.extend(_peak_differences(then, now, repeatable=repeatable))
    agrees = None if cut_short and not common else not differences
    return Comparison(then, now, agrees, tuple(differences), tuple(notes))


def _figures(
    study: StudyRecord, trial: TrialRecord, metrics: Sequence[MetricRecord], result: TrialResult
) -> tuple[Figures, Figures]:
    was = {metric.epoch: metric.value for metric in metrics if metric.name == study.metric}
    found = {epoch.epoch: epoch.metrics.get(study.metric) for epoch in result.epochs}
    common = sorted(was.keys() & found.keys())
    outcome = Outcome(trial.outcome)
    then = Figures(
        outcome=outcome if outcome.launched else None,
        value=_best(study, [was[epoch] for epoch in common]) if outcome in _CUT_SHORT else trial.value,
        device_bytes=trial.peak_bytes,
        allocated_bytes=trial.allocated_bytes,
        epochs=was,
    )
    now = Figures(
        outcome=result.outcome,
        value=_best(study, [found[epoch] for epoch in common]) if outcome in _CUT_SHORT else result.value,
        device_bytes=result.peaks.device_bytes,
        allocated_bytes=result.peaks.allocated_bytes,
        epochs={epoch: _number(value) for epoch, value in found.items()},
    )
    return then, now


def _metric_difference(metric: str, then: Figures, now: Figures) -> str | None:
    """Return by how much the metric differs, and where that begins; None when it is equal."""
    common = sorted(then.epochs.keys() & now.epochs.keys())
    at = next((epoch for epoch in common if then.epochs[epoch] != now.epochs[epoch]), None)
    if at is None and then.value == now.value:
        return None
    where = "" if at is None else f", first in epoch {at}"
    return f"{metric} was {then.value!r}, and is {now.value!r}{_apart(then.value, now.value)}{where}"


def _peak_differences(then: Figures, now: Figures, *, repeatable: bool) -> list[str]:
    allocated = _Peak("the allocator's peak", then.allocated_bytes, now.allocated_bytes)
    device = _Peak("the device's peak", then.device_bytes, now.device_bytes)
    share, least_bytes = (0.0, 0) if repeatable else (LOOSE_SHARE, 0)
    found = [
        _peak_difference(allocated, share=share, least_bytes=least_bytes),
        _peak_difference(device, share=RESIDENT_SHARE, least_bytes=RESIDENT_BYTES),
    ]
    return [sentence for sentence in found if sentence is not None]


class _Peak(NamedTuple):
    name: str
    then_bytes: int | None
    now_bytes: int | None


def _peak_difference(peak: _Peak, *, share: float, least_bytes: int) -> str | None:
    """Return how a peak differs beyond the tolerance; None when it does not, or is not known."""
    if peak.then_bytes is None or peak.now_bytes is None:
        return None
    apart_bytes = peak.now_bytes - peak.then_bytes
    if abs(apart_bytes) <= max(share * peak.then_bytes, least_bytes):
        return None
    return (
        f"{peak.name} was {format_bytes(peak.then_bytes)}, and is {format_bytes(peak.now_bytes)} "
        f"({apart_bytes:+,d} bytes)"
    )


def _best(study: StudyRecord, values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    return max(known) if study.maximize else min(known)


def _number(value: float | None) -> float | None:
    """Return a value as the database holds it: None for NaN."""
    return None if value is None or math.isnan(value) else value


def _apart(then: float | None, now: float | None) -> str:
    if then is None or now is None or not math.isfinite(then - now) or then == now:
        return ""
    return f" ({now - then:+.3g})"
