"""From a trace to a prediction: replay, profile, calibration, verdict.

::

    Trace ──estimate()──► Estimate ──predict()──► Prediction
            replay, rules          context, calibration, budget

The first half runs where the trace was made (a child process); the second half is arithmetic and
runs in the driver, where calibration and budget are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from tuner.memory import rules
from tuner.memory.allocator import ROUNDING, round_up
from tuner.memory.calibration import COMPILED, CONVOLUTIONS, PLAIN, Calibration
from tuner.memory.footprint import Footprint, cuda_footprint
from tuner.memory.targets import Target
from tuner.records import CATEGORIES, LargeTensor, PeakAt, Prediction, Record, Verdict

if TYPE_CHECKING:
    from tuner.memory.recorder import Block
    from tuner.memory.trace import Trace

PRUNE_BELOW = 0.05  # P(fits) under which a configuration surely does not fit
LAUNCH_ABOVE = 0.95  # P(fits) over which it surely fits
_LARGEST = 10


@dataclass(frozen=True)
class Estimate(Record):
    """What a trace says before context and calibration; bytes as on the target's allocator.

    Attributes:
        allocated_bytes: Peak of live blocks, or None when the step could not be traced.
        reserved_bytes: Peak of segments on the device, when nothing else limits it (on a CPU: the same).
        required_bytes: The smallest limit on reserved bytes under which the trace replays.
        categories: Live bytes at the peak by category.
        peak_at: Phase, step and module of the peak.
        largest: The largest live tensors at the peak.
        growth_bytes: What each further training step leaves behind.
        notes: Assumptions, or the reason why there is no trace.
        rules: Names of the rules that turned the CPU trace into the target's.
        seconds: How long trace and replay took.
        mix: The mix of operators, which decides the prior of the calibration.
    """

    allocated_bytes: int | None
    reserved_bytes: int | None
    required_bytes: int | None
    categories: dict[str, int] = field(default_factory=dict)
    peak_at: PeakAt | None = None
    largest: tuple[LargeTensor, ...] = ()
    growth_bytes: int = 0
    notes: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    seconds: float = 0.0
    mix: str = PLAIN

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the estimate that `to_json` wrote."""
        peak_at = fields["peak_at"]
        return cls(
            **{
                **fields,
                "peak_at": None if peak_at is None else PeakAt(**peak_at),
                "largest": tuple(LargeTensor(**tensor) for tensor in fields["largest"]),
                "notes": tuple(fields["notes"]),
                "rules": tuple(fields["rules"]),
            }
        )


def estimate(trace: Trace, target: Target, seconds: float = 0.0) -> Estimate:
    """Replay a trace on the target's allocator and describe its peak."""
    live_bytes, live_at_peak, last = _peak_of_live(trace, target)
    categories: Counter[str] = Counter()
    for block in live_at_peak:
        categories[block.category] += _size(block, target)
    if target.kind == "cuda":
        footprint = cuda_footprint([block.bytes for block in trace.blocks], trace.events, _room(target))
    else:
        footprint = Footprint(live_bytes, live_bytes, live_bytes)
    largest = sorted(live_at_peak, key=lambda block: -block.bytes)[:_LARGEST]
    return Estimate(
        allocated_bytes=footprint.allocated_bytes,
        reserved_bytes=footprint.reserved_bytes,
        required_bytes=footprint.required_bytes,
        categories=dict(categories),
        peak_at=None if last is None else PeakAt(last.phase, last.step, last.module),
        largest=tuple(LargeTensor(b.bytes, b.category, b.module, b.operator) for b in largest),
        growth_bytes=trace.growth_bytes,
        notes=(*trace.notes, *_not_seen(trace, target)),
        rules=trace.rules,
        seconds=seconds,
        mix=_mix(trace),
    )


def untraceable(reason: str, seconds: float = 0.0) -> Estimate:
    """Return the estimate for code that cannot be traced: nothing but the reason."""
    return Estimate(None, None, None, notes=(f"cannot be traced: {reason}",), seconds=seconds)


def predict(
    found: Estimate,
    target: Target,
    calibration: Calibration,
    *,
    context_bytes: int | None,
    budget_bytes: int | None,
) -> Prediction:
    """Add context and calibration to an estimate, and judge it against a budget.

    Args:
        found: What the trace says.
        target: The device.
        calibration: Corrects the centre and sizes the band.
        context_bytes: The context where it was measured; None takes the target's profile.
        budget_bytes: The device bytes one trial may take; None gives no verdict.
    """
    if context_bytes is None:
        context_bytes = target.context_bytes
    notes = [*found.notes, *_limits(target)]
    if found.growth_bytes:
        notes.append(
            f"memory grows with steps: {found.growth_bytes} bytes stay behind after each training step"
        )
    if found.allocated_bytes is None or found.reserved_bytes is None or context_bytes is None:
        return Prediction(
            allocated_bytes=found.allocated_bytes,
            reserved_bytes=found.reserved_bytes,
            device=None,
            required=None,
            fits_probability=None,
            verdict=None if budget_bytes is None else Verdict.TRY,
            method="untraceable",
            assumptions=tuple(notes),
            rules=found.rules,
            seconds=found.seconds,
            mix=found.mix,
        )
    required_bytes = found.required_bytes or found.reserved_bytes
    spread_bytes = max(target.context_spread_bytes, 0)
    device = calibration.band(context_bytes, found.reserved_bytes, context_spread_bytes=spread_bytes)
    required = calibration.band(context_bytes, required_bytes, context_spread_bytes=spread_bytes)
    fits_probability = None
    if budget_bytes is not None:
        fits_probability = calibration.fits_probability(
            context_bytes, required_bytes, context_spread_bytes=spread_bytes, budget_bytes=budget_bytes
        )
    categories = {**dict.fromkeys(CATEGORIES, 0), **found.categories, "context": context_bytes}
    # Fragmentation, and what calibration adds: so that the categories add up to what is expected.
    categories["workspace"] += max(0, device.expected - sum(categories.values()))
    return Prediction(
        allocated_bytes=found.allocated_bytes,
        reserved_bytes=found.reserved_bytes,
        device=device,
        required=required,
        fits_probability=fits_probability,
        verdict=verdict_of(fits_probability),
        categories=categories,
        peak_at=found.peak_at,
        largest=found.largest,
        growth_bytes=found.growth_bytes,
        assumptions=tuple(notes),
        rules=found.rules,
        seconds=found.seconds,
        mix=found.mix,
    )


def verdict_of(fits_probability: float | None) -> Verdict | None:
    """Return what a probability of fitting means for launching; None without one."""
    if fits_probability is None:
        return None
    if fits_probability < PRUNE_BELOW:
        return Verdict.PRUNE
    return Verdict.LAUNCH if fits_probability > LAUNCH_ABOVE else Verdict.TRY


def _mix(trace: Trace) -> str:
    if rules.COMPILED in trace.rules:
        return COMPILED
    return CONVOLUTIONS if _has_convolutions(trace) else PLAIN


def _has_convolutions(trace: Trace) -> bool:
    return any("aten.convolution" in block.operator for block in trace.blocks)


def _not_seen(trace: Trace, target: Target) -> Iterator[str]:
    if target.kind == "cuda" and _has_convolutions(trace):
        yield "not seen: cuDNN's workspaces of convolutions, which depend on the algorithm it chooses"


def _room(target: Target) -> int | None:
    """Return what the device has for the allocator, where it is known."""
    if target.capacity_bytes is None or target.context_bytes is None:
        return None
    return target.capacity_bytes - target.context_bytes


def _limits(target: Target) -> Iterator[str]:
    if target.kind == "cuda":
        yield f"context of {target.name}: {target.context_source}"


def _size(block: Block, target: Target) -> int:
    return round_up(block.bytes, ROUNDING) if target.kind == "cuda" else block.bytes


def _peak_of_live(trace: Trace, target: Target) -> tuple[int, list[Block], Block | None]:
    """Return the peak of live bytes, the blocks alive then, and the one that made the peak."""
    sizes = [_size(block, target) for block in trace.blocks]
    running = peak = 0
    at = -1
    for position, event in enumerate(trace.events):
        running += sizes[event] if event >= 0 else -sizes[~event]
        if running > peak:
            peak, at = running, position
    if at < 0:
        return 0, [], None
    alive: set[int] = set()
    for event in trace.events[: at + 1]:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    return peak, [trace.blocks[index] for index in alive], trace.blocks[trace.events[at]]
