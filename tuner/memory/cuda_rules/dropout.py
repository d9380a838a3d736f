"""Dropout: CUDA keeps a mask of one byte per element, the CPU a noise tensor of the input's type.

Source: `is_fused_kernel_acceptable` and `dropout` in aten/src/ATen/native/Dropout.cpp. In-place
dropout, feature dropout and alpha dropout run the same way on both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.memory.rules import Journal, Substitute

NAME = "dropout"


def _dropout(
    journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    names = ("input", "p", "train")
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    if not bound["train"] or not 0 < bound["p"] < 1 or bound["input"].numel() == 0:
        return function(*args, **kwargs)
    journal.rules.setdefault(NAME)
    return torch.native_dropout(bound["input"], bound["p"], train=True)[0]


DROPOUT: dict[Any, Substitute] = {torch.dropout: _dropout}
