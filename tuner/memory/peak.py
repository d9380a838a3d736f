"""`tuner.predict_peak`: the prediction for a step of one's own, without a study."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tuner.errors import Untraceable
from tuner.memory.calibration import Calibration
from tuner.memory.prediction import estimate, predict, untraceable
from tuner.memory.targets import resolve_target
from tuner.processes import process_memory
from tuner.records import Prediction
from tuner.units import parse_bytes

if TYPE_CHECKING:
    import torch


def predict_peak(
    build: Callable[[torch.device], Callable[[], Any]],
    target: str = "cpu",
    steps: int = 3,
    *,
    budget: str | int | None = None,
) -> Prediction:
    """Predict the peak memory of a training step, by tracing it in this process.

    Random states and everything that is patched on the way are restored.

    Args:
        build: `build(device)` makes model and optimizer on `device` and returns a function of no
            arguments that performs one training step.
        target: `cpu`, `cuda`, or a profile such as `a100-40gb`; it need not be present.
        steps: Training steps to trace; 3 see every state an optimizer makes.
        budget: Device bytes to judge against, such as `"8GiB"`; None gives no verdict.

    Returns:
        The prediction; `method` is `untraceable` where the step cannot be followed, with the reason
        among the assumptions. On a CPU target the context is what this process holds now.

    Raises:
        UsageError: Target or budget cannot be understood, or `steps` is not positive.
    """
    from tuner.errors import UsageError
    from tuner.memory.target_rules import rules_for
    from tuner.memory.trace import trace_build

    if steps < 1:
        raise UsageError(f"at least one step is traced, not {steps}")
    resolved = resolve_target(target)
    budget_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
    memory = process_memory() if resolved.kind == "cpu" else None
    start = time.perf_counter()
    try:
        trace = trace_build(build, rules_for(resolved), steps)
        found = estimate(trace, resolved, time.perf_counter() - start)
    except Untraceable as reason:
        found = untraceable(reason.message, time.perf_counter() - start)
    return predict(
        found,
        resolved,
        Calibration.of_mix(resolved.kind, found.mix),
        context_bytes=None if memory is None else memory.resident_bytes,
        budget_bytes=budget_bytes,
    )
