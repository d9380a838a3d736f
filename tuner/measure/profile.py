"""The true allocator peak of a workload on a CPU, from PyTorch's profiler.

The profiler reports every allocation of the CPU allocator, temporaries inside kernels included.
Its sum starts at zero, so the state is made anew under it: what is measured is what a trace
covers, `setup`, training steps and evaluation steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

from tuner.profiling import profiled_peak
from tuner.steps import each_batch, eval_once, set_training, train_once

if TYPE_CHECKING:
    import torch

    from tuner.workload import Workload


def allocated_peak(
    workload: Workload,
    params: dict[str, Any],
    device: torch.device,
    *,
    train_batches: Iterable[Any],
    eval_batches: Iterable[Any] | None,
    train_steps: int,
    eval_steps: int,
) -> int:
    """Return the peak bytes that the CPU allocator held during a few real steps.

    Args:
        workload: What to run.
        params: Its configuration.
        device: A CPU device.
        train_batches: Real batches; the first `train_steps` are used, in turn if there are fewer.
        eval_batches: Real evaluation batches, or None.
        train_steps: How many training steps to run.
        eval_steps: How many evaluation steps to run.
    """
    training = list(islice(iter(train_batches), train_steps))
    evaluation = list(islice(iter(eval_batches), eval_steps)) if eval_batches is not None else []
    with profiled_peak() as peak:
        state = workload.setup(params, device)
        set_training(state, training=True)
        each_batch(training, train_steps, lambda batch: train_once(workload, state, _copied(batch)))
        if workload.has_eval_step and evaluation:
            set_training(state, training=False)
            each_batch(evaluation, eval_steps, lambda batch: eval_once(workload, state, _copied(batch)))
    return peak.bytes


def _copied(batch: Any) -> Any:
    """Return a batch of its own, so that it is counted while its step runs, and no longer."""
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.clone() if hasattr(leaf, "clone") else leaf, batch)
