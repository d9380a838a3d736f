"""Copies that a matrix product makes of operands that BLAS cannot read as they lie.

BLAS takes matrices whose rows or columns are contiguous. Others (an expanded gradient, as the sum of a
layer's output sends back; every second column) are copied for the time of the call.

Source: `prepare_matrix_for_cublas` in aten/src/ATen/native/cuda/Blas.cpp, `addmm_impl_cpu_` in
aten/src/ATen/native/LinearAlgebra.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory.rules import KernelCall

_aten = torch.ops.aten
# Where the two matrices are among the arguments.
PRODUCTS: dict[Any, tuple[int, int]] = {
    _aten.mm.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten._addmm_activation.default: (1, 2),
}
BATCHED_PRODUCTS: dict[Any, tuple[int, int]] = {
    _aten.bmm.default: (0, 1),
    _aten.baddbmm.default: (1, 2),
    _aten.addbmm.default: (1, 2),
}


def copied_bytes(call: KernelCall, products: dict[Any, tuple[int, int]]) -> tuple[int, ...]:
    """Return the sizes of the copies that a product among `products` makes of its operands."""
    operands = (call.arguments[place] for place in products.get(call.operator, ()))
    return tuple(m.numel() * m.element_size() for m in operands if m.numel() and not _is_readable(m))


def _is_readable(matrix: torch.Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    row_stride, column_stride = matrix.stride()[-2:]
    if rows == 1 or columns == 1:
        return True
    return (column_stride == 1 and row_stride >= columns) or (row_stride == 1 and column_stride >= rows)
