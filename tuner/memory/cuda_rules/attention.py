"""Scaled-dot-product attention: the backend that PyTorch would choose on the GPU, and its memory.

::

    flash       half precision, no mask, compute capability >= 8.0
    efficient   fp32 or a mask (bf16 from 8.0 on); keeps the log-sum-exp alone
    cuDNN       preferred on 9.0 and 10.x with cuDNN > 9.15
    math        what is left: whole score matrices

What the user switched off or put first (`sdpa_kernel`, `torch.backends.cuda.enable_*_sdp`) is
respected, and the backend assumed is noted. The chosen operator runs on the fakes; buffers inside its
kernels are in `kernels.py`. Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
(`can_use_*_attention`), transformers/sdp_utils_cpp.h (`check_*`), transformers/attention.cpp (padding,
masks, the math path).

Not seen: nested tensors, attention on more than one stream, cuDNN older than 9.15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from tuner.memory.cuda_rules.casting import under_autocast, without_autocast
from tuner.memory.cuda_rules.device import CudaDevice
from tuner.memory.rules import Journal, Substitute

NAME = "attention backends"
_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
# From here on the efficient backend takes grouped heads, and all take one head of keys and values for
# many of queries without being told (pull request 191085; sdp_utils_cpp.h of 2.13 and 2.14).
_ONE_FOR_MANY = torch.__version__ >= "2.14"
_NEWEST = (12, 1)  # compute capability up to which the fused kernels were written
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
        with without_autocast():
            return _RUN[backend](call)

    return {torch.nn.functional.scaled_dot_product_attention: attend}


def choose_backend(call: Attention, device: CudaDevice) -> str:
    """Return `flash`, `efficient`, `cudnn` or `math`, as PyTorch chooses.

    Raises:
        RuntimeError: The user left no backend on that can run the call; CUDA raises the same.
    """
    can = {"flash": _flash_can, "efficient": _efficient_can, "cudnn": _cudnn_can}
    for name in _order(device):
        if not _is_enabled(name):
            continue
        if name == "math" or (_is_fusible(call) and can[name](call, device.compute_capability)):
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(device: CudaDevice) -> list[str]:
    """Return the backends in the order they are tried: cuDNN comes first on 9.x and 10.x."""
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
    }
    rank = torch._C._get_sdp_priority_order().index
    order = sorted(backends, key=lambda name: rank(backends[name].value))
    if order == list(backends) and device.compute_capability[0] in (9, 10):
        order = ["cudnn", *order[:-1]]
    return order


def _is_enabled(backend: str) -> bool:
    name = {"efficient": "mem_efficient"}.get(backend, backend)
    return bool(getattr(torch.backends.cuda, f"{name}_sdp_enabled")())


def _is_fusible(call: Attention) -> bool:
    """Whether shapes, types and strides are those that every fused kernel asks for."""
    query, key, value = tensors = (call.query, call.key, call.value)
    if any(tensor.dim() != 4 for tensor in tensors) or query.dtype != key.dtype or query.dtype != value.dtype:
        return False
    if not query.size(0) == key.size(0) == value.size(0) or 0 in (query.size(2), key.size(2)):
        return False
    if call.attn_mask is not None and call.attn_mask.stride(-1) != 1:
        return False
    return query.size(-1) == 1 or all(tensor.stride(-1) == 1 for tensor in tensors)


def _heads_agree(call: Attention, *, grouped: bool, alike: bool = True) -> bool:
    """Whether a kernel takes these heads; `grouped`: fewer for keys, `alike`: as many for values."""
    query, key, value = call.query.size(1), call.key.size(1), call.value.size(1)
    if not (call.enable_gqa and grouped):
        return query == key == value or (_ONE_FOR_MANY and key == value == 1)
    return query % key == 0 and query % value == 0 and (key == value or not alike)


def _flash_can(call: Attention, capability: tuple[int, int]) -> bool:
    head = call.query.size(-1)
    if call.attn_mask is not None or not _heads_agree(call, grouped=True):
        return False
    if not (8, 0) <= capability <= _NEWEST or call.query.dtype not in _HALVES or head > 256:
        return False
    if not head == call.key.size(-1) == call.value.size(-1):
        return False
    small_shared_memory = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    if small_shared_memory and call.needs_gradient and head > 192 and (call.dropout_p > 0 or head <= 224):
        return False
    return not call.is_causal or call.query.size(-2) == call.key.size(-2)


def _efficient_can(call: Attention, capability: tuple[int, int]) -> bool:
    dtype = call.query.dtype
    if capability > _NEWEST or not _heads_agree(call, grouped=_ONE_FOR_MANY):
        return False
    if dtype not in (torch.float16, torch.float32, *((torch.bfloat16,) if capability >= (8, 0) else ())):
        return False
    if any(tensor.stride(-1) != 1 for tensor in (call.query, call.key, call.value)):
        return False
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and dtype in _HALVES):  # tensor cores
        alignment = max(alignment, 16 // call.query.element_size())
    query, key, value = call.query.size(-1), call.key.size(-1), call.value.size(-1)
    return query == key and query % alignment == 0 and value % alignment == 0 and min(query, value) > 0


def _cudnn_can(call: Attention, capability: tuple[int, int]) -> bool:
    if not (8, 0) <= capability <= _NEWEST or not _heads_agree(call, grouped=True, alike=False):
        return False
    if call.query.dtype not in _HALVES or (call.dropout_p * 16) % 1:
        return False
    heads = (call.query.size(-1), call.value.size(-1))
    most = 192 if heads == (192, 128) and capability[0] in (9, 10) else 128
    if max(heads) > most or any(head % 8 for head in heads) or call.key.size(-2) == 1:
        return False
    if call.dropout_p and call.query.size(-2) == 1:
        return False
    deterministic = torch.are_deterministic_algorithms_enabled()
    return _cudnn_takes_mask(call) and (
        not deterministic or torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _cudnn_takes_mask(call: Attention) -> bool:
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (*call.query.shape[:-1], call.key.size(-2))
    return all(size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(full), strict=False))


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
    out: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        call.query, call.key, call.value, bias, call.needs_gradient, call.dropout_p, call.is_causal,
        scale=call.scale,
    )[0]  # fmt: skip
    return out


def _cudnn(call: Attention) -> torch.Tensor:
    bias = _float_mask(call.attn_mask, call.query.dtype)
    out: torch.Tensor = _aten._scaled_dot_product_cudnn_attention(
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
