"""Casts that CUDA's autocast makes, for functions that stand in for operators on its lists.

The context is the CPU's (see `autocast`): what casts before the dispatcher would must ask it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map


def is_eligible(leaf: object) -> bool:
    """Whether autocast may change a value's type: any floating-point tensor but float64."""
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype is not torch.float64


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Return `values` (any nesting of containers) with every eligible tensor in `dtype`."""
    return tree_map(lambda leaf: leaf.to(dtype) if is_eligible(leaf) else leaf, values)


def under_autocast(values: Any, dtype: torch.dtype | None = None) -> Any:
    """Return `values` as an operator on autocast's lists gets them; unchanged where it is off.

    `dtype` is torch.float32 for an operator on the fp32 list, None for the lower type.
    """
    if not torch.is_autocast_enabled("cpu"):
        return values
    return cast(values, dtype or torch.get_autocast_dtype("cpu"))


def is_transformed(*tensors: torch.Tensor) -> bool:
    """Whether a transform of torch.func is at work, which stand-ins made of autograd functions refuse."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run what is below autocast, as the dispatcher does once an operator's arguments are cast."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with torch._C._ExcludeDispatchKeyGuard(key):
        yield
