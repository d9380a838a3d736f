"""What CUDA kernels allocate beside their outputs, in the caching allocator.

Every rule is a function from a call to `KernelMemory`, entered in `_KERNELS` by operator. Sources
are the files below aten/src/ATen/native; the figures each was checked against are in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.memory.cuda_rules.device import CudaDevice
from tuner.memory.matrices import BATCHED_PRODUCTS, PRODUCTS, copied_bytes
from tuner.memory.rules import KernelCall, KernelMemory

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_INT64 = 8
_FLOAT = 4
Kernel = Callable[[KernelCall, CudaDevice], KernelMemory | None]


class CudaKernels:
    """The memory of CUDA's kernels on one device."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def memory_of(self, call: KernelCall) -> KernelMemory | None:
        """Return what a call takes beyond its fake outputs; None where there is nothing."""
        kernel = _KERNELS.get(call.operator)
        return None if kernel is None else kernel(call, self._device)


def _matrix_product(call: KernelCall, device: CudaDevice) -> KernelMemory | None:
    """CuBLAS keeps a workspace for each thread that multiplies; the engine's thread is another.

    `getCurrentCUDABlasHandle` in ATen/cuda/CublasHandlePool.cpp. A bias that is fused into the
    product (`addmm` with one dimension) goes through cuBLASLt, which takes a workspace meanwhile:
    ATen/native/cuda/Blas.cpp.
    """
    thread = "backward" if call.in_backward else "forward"
    kept = ((f"cublas {thread}", device.cublas_workspace_bytes),) if device.cublas_workspace_bytes else ()
    copies = copied_bytes(call, _PRODUCTS)
    fused = call.operator is _aten.addmm.default and call.arguments[0].dim() == 1
    fused_bytes = (device.cublaslt_workspace_bytes,) if fused and device.cublaslt_workspace_bytes else ()
    if copies:
        return KernelMemory(scratch_bytes=copies + fused_bytes, kept_bytes=kept, rule="matrix copies")
    if kept or fused_bytes:
        return KernelMemory(scratch_bytes=fused_bytes, kept_bytes=kept, rule="cuBLAS workspaces")
    return None


def _softmax_backward(call: KernelCall, device: CudaDevice) -> KernelMemory:
    """`softmax_backward_cuda_out` builds gradient × output first (cuda/SoftMax.cu)."""
    gradient = call.arguments[0]
    return KernelMemory((_bytes(gradient),), rule="softmax backward")


def _safe_softmax(call: KernelCall, device: CudaDevice) -> KernelMemory:
    """The math path marks masked scores, a byte each, to find rows without any (attention.cpp)."""
    scores, dimension = call.arguments[:2]
    rows = scores.numel() // max(1, scores.size(dimension))
    return KernelMemory((scores.numel(), rows), rule="attention backends")


_SMALL_EMBEDDING = 3072  # indices, up to which a kernel without scratch runs


def _embedding_backward(call: KernelCall, device: CudaDevice) -> KernelMemory | None:
    """Indices are sorted and partial sums built beside the dense gradient (cuda/Embedding.cu).

    n indices: three arrays of n; s = min(n, rows) and n // 10 + s bound the segments and their
    parts; partial sums in fp32 for each part (EmbeddingBackwardKernel.cu).
    """
    gradient, indices, rows = call.arguments[:3]
    count = indices.numel()
    if count <= _SMALL_EMBEDDING:
        return None
    segments = min(count, rows)
    parts = count // 10 + segments
    scratch = [count * indices.element_size()] * 3 + [segments * _INT64] * 2
    scratch += [parts * _INT64, parts * gradient.size(-1) * _FLOAT, _INT64, _INT64]
    return KernelMemory(tuple(scratch), rule="embedding backward")


def _index_put(call: KernelCall, device: CudaDevice) -> KernelMemory | None:
    """Adding at indices sorts them first (cuda/Indexing.cu, `index_put_with_sort_kernel`)."""
    accumulate = call.arguments[3] if len(call.arguments) > 3 else call.options.get("accumulate", False)
    if not accumulate:
        return None
    indices = [index for index in call.arguments[1] if index is not None]
    count = torch.broadcast_shapes(*(index.shape for index in indices)).numel()  # type: ignore[no-untyped-call]
    return KernelMemory((count * _INT64,) * 4, rule="index backward") if count else None


def _layer_norm(call: KernelCall, device: CudaDevice) -> KernelMemory | None:
    """Statistics are fp32 for half-precision input (cuda/layer_norm_kernel.cu)."""
    if call.arguments[0].dtype not in _HALVES:
        return None
    out, mean, deviation = call.outputs
    statistics = (mean.numel() * _FLOAT, deviation.numel() * _FLOAT)
    return KernelMemory(output_bytes=(_bytes(out), *statistics), rule="layer norm statistics")


def _flash_backward(call: KernelCall, device: CudaDevice) -> KernelMemory:
    """An fp32 accumulator of the query's gradient, and a sum per row (flash_attn/flash_api.cpp).

    Rows are rounded up to 128, the head size to 32, above 192 to 256. With deterministic algorithms
    there are more accumulators: not seen.
    """
    query, key = call.arguments[1:3]
    batch, heads, rows, head = query.shape
    rows, head = -(-rows // 128) * 128, -(-head // 32) * 32 if head <= 192 else 256
    scratch = [batch * heads * rows * _FLOAT, batch * heads * rows * head * _FLOAT]
    if key.size(1) != heads:  # grouped heads: gradients of every query head, summed afterwards
        scratch += [batch * heads * key.size(2) * head * query.element_size()] * 2
    return KernelMemory(tuple(scratch), rule="attention backends")


def _efficient_backward(call: KernelCall, device: CudaDevice) -> KernelMemory:
    """Half precision accumulates in fp32; fp32 builds gradient × output for its row sums.

    transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h
    (`kNeedsAccumGradQ`, `kKernelComputesDelta`).
    """
    query, key, value = call.arguments[1:4]
    batch, heads, rows, head = query.shape
    scratch = [batch * heads * rows * _FLOAT, batch * heads * rows * head * _FLOAT]
    if query.dtype in _HALVES and head > 128:
        scratch += [key.numel() * _FLOAT, value.numel() * _FLOAT]
    if key.size(1) != heads:  # as for flash attention
        scratch += [_bytes(part) // part.size(1) * heads for part in (key, value)]
    return KernelMemory(tuple(scratch), rule="attention backends")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


_PRODUCTS = {**PRODUCTS, **BATCHED_PRODUCTS}
_KERNELS: dict[Any, Kernel] = {
    **dict.fromkeys((*_PRODUCTS, _aten.mv.default, _aten.addmv.default, _aten.dot.default), _matrix_product),
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._safe_softmax.default: _safe_softmax,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    _aten._index_put_impl_.default: _index_put,
    _aten._unsafe_index_put.default: _index_put,
    _aten.native_layer_norm.default: _layer_norm,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
