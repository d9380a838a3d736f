"""What tracing, profiling and training share, so that the three run the same code.

`modules_in`, `optimizers_in` find what a workload's state holds; `train_once` and `eval_once` are
the only places that call a workload's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tuner.workload import Workload

TRAIN_STEPS = 3  # optimizer state appears in the first, gradients set to None move the peak later
EVAL_STEPS = 2  # the second shows what the first kept


def train_once(workload: Workload, state: Any, batch: Any) -> Any:
    """Run one training step and return what it reports."""
    return workload.train_step(state, batch)


def eval_once(workload: Workload, state: Any, batch: Any) -> Any:
    """Run one evaluation step without gradients and return what it reports."""
    import torch

    with torch.no_grad():
        return workload.eval_step(state, batch)


def set_training(state: Any, *, training: bool) -> None:
    """Put every module of the state into training or evaluation mode."""
    for module in modules_in(state):
        module.train(training)


def modules_in(state: Any) -> list[torch.nn.Module]:
    """Return the outermost modules that a state holds, each once."""
    import torch

    return list(_found(state, torch.nn.Module))


def optimizers_in(state: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a state holds, each once."""
    import torch

    return list(_found(state, torch.optim.Optimizer))


def named_modules(state: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module below a state with a readable path (`net.3.conv`)."""
    for root in modules_in(state):
        for name, module in root.named_modules():
            yield (name or type(root).__name__), module


def _found(state: Any, kind: type[Any]) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [state]
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, kind):
            yield value
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
        elif not _is_opaque(value):
            waiting.extend(vars(value).values())


def _is_opaque(value: Any) -> bool:
    import torch

    closed = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, type)
    return isinstance(value, closed) or not hasattr(value, "__dict__")


def batches_in(example: Any) -> list[Any]:
    """Return the batches that `example_batch` gave: a list holds several, else it is one.

    A list of tensors that differ in type or number of dimensions is one batch all the same, as
    PyTorch's default collation makes it (`[images, labels]`).
    """
    if not isinstance(example, list):
        return [example]
    kinds = {(getattr(part, "dtype", None), getattr(part, "ndim", None)) for part in example}
    return [example] if len(kinds) > 1 else example


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch (any nesting of containers) with its tensors on `device`."""
    import torch
    from torch.utils._pytree import tree_map

    def moved(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    return tree_map(moved, batch)


def each_batch(batches: list[Any], count: int, use: Callable[[Any], None]) -> None:
    """Call `use` with `count` batches, taking the given ones in turn."""
    for index in range(count):
        use(batches[index % len(batches)])
