"""Scaled-dot-product attention: the backend that PyTorch would choose on the GPU, and its memory.

::

    flash       half precision, no mask, compute capability >= 8.0
    efficient   fp32 or a mask (bf16 from 8.0 on); keeps the log-sum-exp alone
    cuDNN       preferred on 9.0 and 10.x with cuDNN > 9.15
    math        what is left: whole score matrices

What the user switched off or put first (`sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`) is
respected (`attention_backends`), and the backend assumed is noted. The chosen operator runs on the
fakes; buffers inside its kernels are in `kernels`. Source: padding, masks and the math path in
aten/src/ATen/native/transformers/attention.cpp.

Not seen: nested tensors, attention on more than one stream, cuDNN older than 9.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tuner.memory.cuda_rules.attention_backends import Attention, choose_backend
from tuner.memory.cuda_rules.casting import under_autocast, without_autocast
from tuner.memory.cuda_rules.device import CudaDevice
from tuner.memory.rules import Journal, Substitute

NAME = "attention backends"
_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_EFFICIENT_MASK_ALIGNMENT = 16  # elements; preprocess_mask pads a mask's last dimension to it


def attention_substitutes(device: CudaDevice) -> dict[Any, Substitute]:
    """Return the stand-in for `scaled_dot_product_attention` on a GPU."""

    def attend(
        journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = _under_autocast(Attention(*args, **kwargs))
        backend = choose_backend(call, device)
        journal.rules.setdefault(NAME)
        journal.notes[f"attention runs on PyTorch's {backend} backend"] = None
        with without_autocast():
            return _RUN[backend](call)

    return {torch.nn.functional.scaled_dot_product_attention: attend}


def _under_autocast(call: Attention) -> Attention:
    """Cast as autocast does: the operator is on its lower-precision list."""
    query, key, value, mask = under_autocast((call.query, call.key, call.value, call.attn_mask))
    return replace(call, query=query, key=key, value=value, attn_mask=mask)


def _flash(call: Attention) -> torch.Tensor:
    head = call.query.size(-1)
    scale = call.scale if call.scale is not None else head**-0.5
    query, key, value = (_padded(tensor, 8) for tensor in (call.query, call.key, call.value))
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return out if out.size(-1) == head else out.narrow(-1, 0, head)


def _efficient(call: Attention) -> torch.Tensor:
    bias = _float_mask(call.attn_mask, call.query.dtype)
    if bias is not None:
        bias = _aligned(bias).expand(*call.query.shape[:-1], call.key.size(-2))
    return _biased(_aten._scaled_dot_product_efficient_attention, call, bias)


def _cudnn(call: Attention) -> torch.Tensor:
    bias = _float_mask(call.attn_mask, call.query.dtype)
    return _biased(_aten._scaled_dot_product_cudnn_attention, call, bias)


def _biased(operator: Any, call: Attention, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = operator(
        call.query, call.key, call.value, bias, call.needs_gradient, call.dropout_p, call.is_causal,
        scale=call.scale,
    )[0]  # fmt: skip
    return out


def _math(call: Attention) -> torch.Tensor:
    """Run the composition; dropout is CUDA's, which the CPU's would be in the operator."""
    mask = _float_mask(call.attn_mask, call.query.dtype)
    if not 0 < call.dropout_p < 1:
        out: torch.Tensor = _aten._scaled_dot_product_attention_math(
            call.query, call.key, call.value, mask, call.dropout_p, call.is_causal, scale=call.scale,
            enable_gqa=call.enable_gqa,
        )[0]  # fmt: skip
        return out
    dtype = call.query.dtype
    in_fp32 = dtype in _HALVES and not torch._C._get_math_sdp_allow_fp16_bf16_reduction()
    query, key, value = (
        tensor.float() if in_fp32 else tensor for tensor in (call.query, call.key, call.value)
    )
    root = (call.scale if call.scale is not None else query.size(-1) ** -0.5) ** 0.5
    query = query * root
    if call.is_causal:
        lower = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        mask = _float_mask(lower, query.dtype)
    if call.enable_gqa and query.size(-3) != key.size(-3):
        key, value = (part.repeat_interleave(query.size(-3) // part.size(-3), -3) for part in (key, value))
    weights = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        weights += mask
    weights = torch._safe_softmax(weights, -1)
    weights = torch.native_dropout(weights, call.dropout_p, train=True)[0]
    return (weights @ value).to(dtype)


_RUN = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.size(-1) % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """Pad a mask's rows in memory unless its strides are aligned, as `preprocess_mask` does."""
    if all(stride % _EFFICIENT_MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]):
        return mask
    size = mask.size(-1)
    missing = _EFFICIENT_MASK_ALIGNMENT - size % _EFFICIENT_MASK_ALIGNMENT
    return torch.nn.functional.pad(mask, (0, missing))[..., :size]


def _float_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask that is added to the scores; a boolean one is converted, a new tensor."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), float("-inf"), dtype=dtype))
