"""RMSNorm: one kernel on CUDA, half a dozen operators on the CPU.

The fused kernel keeps its input and one fp32 statistic a row; the composition that the CPU runs keeps
the normed tensor as well, in fp32, and takes seven temporaries of its size in backward. As on CUDA,
channels-last or complex input and a weight of another type fall back to the composition.

Source: `_fused_rms_norm` in native_functions.yaml and derivatives.yaml,
`rms_norm_symint` in aten/src/ATen/native/layer_norm.cpp. Below a transform of torch.func (`vmap`,
`grad`) it is composed too: not seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tuner.memory.cuda_rules.casting import is_transformed, under_autocast
from tuner.memory.rules import Journal, Substitute

NAME = "fused RMSNorm"


class _FusedRmsNorm(torch.autograd.Function):
    """Allocates what the kernel does, forward and backward; computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dimensions: int) -> torch.Tensor:
        kind = torch.float64 if x.dtype is torch.float64 else torch.float32
        rows = (*x.shape[: x.dim() - dimensions], *[1] * dimensions)
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=kind))
        ctx.dimensions = dimensions
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        if torch.is_grad_enabled():  # a backward that is differentiated again is composed
            return *_composed_backward(x, weight, gradient, ctx.dimensions), None
        of_x, of_weight = ctx.needs_input_grad[:2]
        gradient = gradient.contiguous()
        return (
            torch.empty_like(x, memory_format=torch.contiguous_format) if of_x else None,
            torch.empty_like(weight) if of_weight else None,
            None,
        )


def _composed_backward(
    x: torch.Tensor, weight: torch.Tensor | None, gradient: torch.Tensor, dimensions: int
) -> list[torch.Tensor | None]:
    scaled = x * torch.rsqrt(x.pow(2).mean(tuple(range(-dimensions, 0)), keepdim=True) + 1e-6)
    sources = [tensor for tensor in (x, weight) if tensor is not None and tensor.requires_grad]
    result = scaled if weight is None else scaled * weight
    found = iter(torch.autograd.grad(result, sources, gradient, create_graph=True))
    return [next(found) if t is not None and t.requires_grad else None for t in (x, weight)]


def _rms_norm(
    journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    bound = {**dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)), **kwargs}
    x, weight = under_autocast((bound["input"], bound.get("weight")), torch.float32)
    shape: Sequence[int] = bound["normalized_shape"]
    fits = tuple(x.shape[-len(shape) :]) == tuple(shape)
    if not fits or not _runs_fused(x, weight):
        return function(*args, **kwargs)
    journal.rules.setdefault(NAME)
    return _FusedRmsNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call]


def _runs_fused(x: torch.Tensor, weight: torch.Tensor | None) -> bool:
    if not x.is_floating_point() or (weight is not None and weight.dtype is not x.dtype):
        return False
    if is_transformed(x, *(() if weight is None else (weight,))):
        return False
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return layout is None or x.is_contiguous() or not x.is_contiguous(memory_format=layout)


RMS_NORM: dict[Any, Substitute] = {torch.nn.functional.rms_norm: _rms_norm, torch.rms_norm: _rms_norm}
