"""Optimizers on CUDA: the multi-tensor path by default, `capturable=True` allowed.

With `foreach`, an update builds lists of temporaries as large as all parameters together; what the
user chose (`foreach=`, `fused=`) is not touched, and what each path allocates is PyTorch's own
code, traced. Source: `_default_to_fused_or_foreach` and `_get_capturable_supported_devices` in
torch/optim/optimizer.py, `_has_foreach_support` in torch/utils/_foreach_utils.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tuner.memory.patches import replaced_everywhere
from tuner.memory.rules import Journal

NAME = "multi-tensor optimizers"
_PACKAGES = ("torch.optim", "torch.nn.utils", "torch.utils._foreach")


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
            stack.enter_context(replaced_everywhere(name, answer, _PACKAGES))
        yield
