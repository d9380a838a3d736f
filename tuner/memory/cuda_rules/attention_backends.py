"""Which attention backend PyTorch chooses on a GPU.

Source: `select_sdp_backend` and `can_use_*_attention` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_*` in transformers/sdp_utils_cpp.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from tuner.memory.cuda_rules.device import CudaDevice

_HALVES = (torch.float16, torch.bfloat16)
# From here on the efficient backend takes grouped heads, and all take one head of keys and values for
# many of queries without being told (pull request 191085; sdp_utils_cpp.h of 2.13 and 2.14).
_ONE_FOR_MANY = torch.__version__ >= "2.14"
_NEWEST = (12, 1)  # compute capability up to which the fused kernels were written


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
