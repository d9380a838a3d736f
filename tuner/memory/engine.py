"""What autograd's engine does in place in a real run, but out of place where it sees fakes.

Where one tensor feeds two consumers, the engine adds the gradients that arrive, into the one it has
gathered so far if nobody else can see it. For tensor subclasses it never does, nor do some formulas
of backward: taken as they come, a trace would count a tensor too many each time.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# Nodes whose own formula adds; there an add is the formula's, not the engine's.
_ADDING_NODES = ("Logsumexp", "Pow", "Std", "Var", "Norm", "Cumprod", "Prod", "Linalg", "WeightNorm", "Lerp")
# A fake's storage is held by its tensor and by the Python object that was asked for it.
_UNIQUE_STORAGE_COUNT = 2


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells a tensor's storage from all others that are alive."""
    return int(tensor.untyped_storage()._cdata)


def as_the_engine_runs(func: Any, args: tuple[Any, ...], node: Any) -> Any:
    """Return the operator that a real run calls where `func` is called on fakes.

    Args:
        func: The operator.
        args: Its positional arguments; the caller must hold no other reference to the tensors.
        node: The autograd node that calls it, or None.
    """
    if node is None:
        return func
    if func is _aten.add.Tensor and len(args) == 2 and not node.name().startswith(_ADDING_NODES):
        return _aten.add_.Tensor if _is_added_in_place(args) else func
    if func is _aten.index_put.default and node.name() == "IndexBackward0":
        return _aten.index_put_.default  # index_backward in FunctionsManual.cpp
    return func


def _is_added_in_place(args: tuple[Any, ...]) -> bool:
    """Whether the engine adds the arriving gradient args[1] into the gathered one args[0].

    `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp: nobody else holds the gathered
    one, and its storage is dense. The arriving one is never added into.
    """
    if not (isinstance(args[0], FakeTensor) and isinstance(args[1], torch.Tensor)):
        return False
    gathered: Any = args[0]
    references = (gathered._use_count(), sys.getrefcount(gathered))
    if torch.is_grad_enabled() or gathered.shape != args[1].shape:
        return False
    if any(count > alone for count, alone in zip(references, references_of_engine(), strict=True)):
        return False
    if torch._C._storage_Use_Count(storage_key(gathered)) > _UNIQUE_STORAGE_COUNT:
        return False
    dense: bool = gathered.untyped_storage().nbytes() == gathered.numel() * gathered.element_size()
    return dense


@functools.cache
def references_of_engine() -> tuple[int, int]:
    """Return how often a gradient is referenced, in C++ and Python, that only the engine holds.

    Counted on a graph where that is so, once, and never below another mode: call it beforehand.
    """
    seen: list[tuple[int, int]] = []

    def count(args: tuple[Any, ...]) -> None:
        gathered = args[0]  # as many names as where it is compared
        seen.append((gathered._use_count(), sys.getrefcount(gathered)))

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func is _aten.add.Tensor and torch._C._current_autograd_node() is not None:
                count(args)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Watch():  # type: ignore[no-untyped-call]
        x = torch.empty(1, requires_grad=True) * 1
        (x * 2 + x * 3).backward()  # type: ignore[no-untyped-call]
    return seen[0]
