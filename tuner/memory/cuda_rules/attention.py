"""Scaled-dot-product attention: the backend that PyTorch would choose on the GPU, and its memory.

::

    flash       half precision, no mask, compute capability >= 8.0
    efficient   fp32 or a mask (bf16 from 8.0 on); keeps the log-sum-exp alone
    cuDNN       preferred on 9.0 and 10.x with cuDNN > 9.15
    math        what is left: whole score matrices

What the user switched off (`sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`) is respected, and the
backend assumed is noted. The chosen operator runs on the fakes; buffers inside its kernels are in
`kernels.py`. Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`can_use_*_attention`),
transformers/attention.cpp (padding, masks, the math path).

Not seen: nested tensors, attention on more than one stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tuner.memory.cuda_rules.device import CudaDevice
from tuner.memory.rules import Journal, Substitute

NAME = "attention backends"
_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_EFFICIENT_MASK_ALIGNMENT = 16  # elements; preprocess_mask pads a mask's last dimension to it


@dataclass(frozen=True)
class Attention:
    """The arguments of one call; query [N, …, H, L, E], key and value [N, …, H, S, E]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def needs_gradient(self) -> bool:
        """Whether a backward pass may follow."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def attention_substitutes(device: CudaDevice) -> dict[Any, Substitute]:
    """Return the stand-in for `scaled_dot_product_attention` on a GPU."""

    def attend(
        journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = _under_autocast(Attention(*args, **kwargs))
        backend = choose_backend(call, device)
        journal.rules.setdefault(NAME)
        journal.notes[f"attention runs on PyTorch's {backend} backend"] = None
        return _RUN[backend](call)

    return {torch.nn.functional.scaled_dot_product_attention: attend}


def choose_backend(call: Attention, device: CudaDevice) -> str:
    """Return `flash`, `efficient`, `cudnn` or `math`, as PyTorch chooses.

    The order is PyTorch's: cuDNN comes first where it is preferred, else last, after math: it is
    reached where math is switched off.
    """
    order = [("flash", _flash_can), ("efficient", _efficient_can)]
    if device.compute_capability[0] in (9, 10):
        order.insert(0, ("cudnn", _cudnn_can))
    elif device.compute_capability >= (8, 0) and not _is_enabled("math"):
        order.append(("cudnn", _cudnn_can))
    for name, can in order:
        if can(call, device.compute_capability):
            return name
    return "math"


def _is_enabled(backend: str) -> bool:
    return bool(getattr(torch.backends.cuda, f"{backend}_sdp_enabled")())


def _flash_can(call: Attention, capability: tuple[int, int]) -> bool:
    head = call.query.size(-1)
    if not _is_enabled("flash") or call.attn_mask is not None or call.query.dim() != 4:
        return False
    if capability < (8, 0) or call.query.dtype not in _HALVES or head > 256:
        return False
    if not head == call.key.size(-1) == call.value.size(-1):
        return False
    small_shared_memory = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    if small_shared_memory and call.needs_gradient and head > 192 and (call.dropout_p > 0 or head <= 224):
        return False
    return not call.is_causal or call.query.size(-2) == call.key.size(-2)


def _efficient_can(call: Attention, capability: tuple[int, int]) -> bool:
    dtype = call.query.dtype
    if not _is_enabled("mem_efficient") or call.query.dim() != 4:
        return False
    if dtype not in (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ())):
        return False
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and dtype in _HALVES):  # tensor cores
        alignment = max(alignment, 16 // call.query.element_size())
    query, key, value = call.query.size(-1), call.key.size(-1), call.value.size(-1)
    return query == key and query % alignment == 0 and value % alignment == 0


def _cudnn_can(call: Attention, capability: tuple[int, int]) -> bool:
    if not _is_enabled("cudnn") or call.query.dim() != 4:
        return False
    if call.query.dtype not in _HALVES or (call.dropout_p * 16) % 1:
        return False
    heads = (call.query.size(-1), call.value.size(-1))
    if any(head > 128 or head % 8 for head in heads) or call.key.size(-2) == 1:
        return False
    return not torch.are_deterministic_algorithms_enabled()


def _under_autocast(call: Attention) -> Attention:
    """Cast as autocast does: the operator is on its lower-precision list."""
    if not torch.is_autocast_enabled("cpu"):
        return call
    dtype = torch.get_autocast_dtype("cpu")

    def cast(tensor: torch.Tensor | None) -> Any:
        return tensor.to(dtype) if tensor is not None and tensor.dtype is torch.float32 else tensor

    return Attention(
        cast(call.query), cast(call.key), cast(call.value), cast(call.attn_mask),
        call.dropout_p, call.is_causal, call.scale, call.enable_gqa,
    )  # fmt: skip


def _flash(call: Attention) -> torch.Tensor:
    head = call.query.size(-1)
    scale = call.scale if call.scale is not None else head**-0.5
    query, key, value = (_padded(tensor, 8) for tensor in (call.query, call.key, call.value))
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return out if out.size(-1) == head else out.narrow(-1, 0, head)


def _efficient(call: Attention) -> torch.Tensor:
    key, value = _repeated_heads(call)
    bias = _float_mask(call.attn_mask, call.query.dtype)
    if bias is not None:
        bias = _padded(bias, _EFFICIENT_MASK_ALIGNMENT)[..., : key.size(-2)]
        bias = bias.expand(*call.query.shape[:-1], key.size(-2))
    out: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        call.query, key, value, bias, call.needs_gradient, call.dropout_p, call.is_causal, scale=call.scale
    )[0]
    return out


def _cudnn(call: Attention) -> torch.Tensor:
    bias = _float_mask(call.attn_mask, call.query.dtype)
    out: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(
        call.query, call.key, call.value, bias, call.needs_gradient, call.dropout_p, call.is_causal,
        scale=call.scale,
    )[0]  # fmt: skip
    return out


def _math(call: Attention) -> torch.Tensor:
    mask = _float_mask(call.attn_mask, call.query.dtype)
    out: torch.Tensor = _aten._scaled_dot_product_attention_math(
        call.query, call.key, call.value, mask, call.dropout_p, call.is_causal, scale=call.scale,
        enable_gqa=call.enable_gqa,
    )[0]  # fmt: skip
    return out


_RUN = {"flash": _flash, "efficient": _efficient, "cudnn": _cudnn, "math": _math}


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.size(-1) % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _float_mask(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a mask that is added to the scores; a boolean one is converted, a new tensor."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), float("-inf"), dtype=dtype))


def _repeated_heads(call: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    if not call.enable_gqa or call.query.size(-3) == call.key.size(-3):
        return call.key, call.value
    repeats = call.query.size(-3) // call.key.size(-3)
    return call.key.repeat_interleave(repeats, -3), call.value.repeat_interleave(repeats, -3)
