"""Optimizers on CUDA: the multi-tensor path by default, `capturable=True` allowed.

With `foreach`, an update builds lists of temporaries as large as all parameters together; what the
user chose (`foreach=`, `fused=`) is not touched, and what each path allocates is PyTorch's own
code, traced. Source: `_default_to_fused_or_foreach` and `_get_capturable_supported_devices` in
torch/optim/optimizer.py, `_has_foreach_support` in torch/utils/_foreach_utils.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tuner.memory.rules import Journal

NAME = "multi-tensor optimizers"


@contextlib.contextmanager
def cuda_optimizers(journal: Journal) -> Iterator[None]:
    """Let optimizers that choose for themselves choose as on CUDA."""

    def multi_tensor(params: Any, differentiable: bool, use_fused: bool = False) -> tuple[bool, bool]:  # noqa: FBT001, FBT002
        if differentiable or use_fused:
            return use_fused and not differentiable, False
        journal.rules.setdefault(NAME)
        return False, True

    with contextlib.ExitStack() as stack:
        for name, answer in (
            ("_default_to_fused_or_foreach", multi_tensor),
            ("_has_foreach_support", lambda tensors, device: True),
            ("_device_has_foreach_support", lambda device: True),
            ("_get_capturable_supported_devices", lambda supports_xla=True: ["cuda", "cpu"]),
        ):
            stack.enter_context(_replaced_everywhere(name, answer))
        yield


@contextlib.contextmanager
def _replaced_everywhere(name: str, answer: Callable[..., Any]) -> Iterator[None]:
    """Replace a function in every module of PyTorch that imported it."""
    users = [
        module
        for module_name, module in list(sys.modules.items())
        if module_name.startswith(("torch.optim", "torch.nn.utils", "torch.utils._foreach"))
        and name in vars(module)
    ]
    originals = [getattr(module, name) for module in users]
    try:
        for module in users:
            setattr(module, name, answer)
        yield
    finally:
        for module, original in zip(users, originals, strict=True):
            setattr(module, name, original)
