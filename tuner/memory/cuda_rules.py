"""Where CUDA does otherwise than the CPU fakes that a step is traced on.

Each rule is a context manager, on while tracing for a CUDA target. There is one so far:

* `multi_tensor_optimizers`: optimizers take `foreach=True` by default, which costs one more
  parameter-sized set of temporaries (`torch.optim.optimizer._default_to_fused_or_foreach`).

Not modelled: dropout's byte mask, autocast's own cast lists, attention backends, cuDNN's workspaces.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def multi_tensor_optimizers() -> Iterator[None]:
    """Let optimizers that choose for themselves take the multi-tensor path, as on CUDA.

    What the user chose (`foreach=`, `fused=`) is not touched: the choice is not asked for then.
    """
    name = "_default_to_fused_or_foreach"

    def multi_tensor(params: Any, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:  # noqa: FBT001, FBT002
        return use_fused and not differentiable, not (use_fused or differentiable)

    users = [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("torch.optim") and hasattr(module, name)
    ]
    originals = [getattr(module, name) for module in users]
    try:
        for module in users:
            setattr(module, name, multi_tensor)
        yield
    finally:
        for module, original in zip(users, originals, strict=True):
            setattr(module, name, original)


@contextlib.contextmanager
def cuda_rules() -> Iterator[None]:
    """Apply every rule."""
    with multi_tensor_optimizers():
        yield
