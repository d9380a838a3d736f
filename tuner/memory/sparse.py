"""Sparse COO tensors among fakes, so that the values of a sparse gradient are counted.

PyTorch's fakes of sparse operators come out without entries, or run the real kernel on zeros of the
full size. Those that sparse gradients meet (accumulation, `SGD`, `SparseAdam`) are answered here,
with as many entries as there may be at most.

Not seen: that coalescing joins equal indices (all are taken as distinct); the entries of a second
micro-batch, added to a gradient in place; compressed layouts; further operators on sparse tensors;
what sparse kernels allocate inside themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

_aten = torch.ops.aten
# Sparse tensors out of sparse ones, or out of a dense one and the entries of a sparse one.
_MAKES_SPARSE = {
    _aten.clone.default,
    _aten._coalesce.default,
    _aten.sparse_mask.default,
    _aten.neg.default,
    _aten.mul.Tensor,
    _aten.div.Tensor,
    _aten.add.Tensor,
}


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what holds a tensor's memory: itself, or the indices and values of a COO tensor."""
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield _aten._indices.default(tensor)
        yield _aten._values.default(tensor)


def sparse_answer(func: Any, args: tuple[Any, ...], node: Any) -> torch.Tensor | None:
    """Return what an operator gives for sparse fakes, or None where it has none or is not known here.

    Args:
        func: The operator.
        args: Its positional arguments.
        node: The autograd node that calls it, or None.
    """
    if func is _aten.add_.Tensor and _is_sparse(args[1]) and not _is_sparse(args[0]):
        return args[0]  # type: ignore[no-any-return]
    if func not in _MAKES_SPARSE:
        return None
    sources = [argument for argument in args if _is_sparse(argument)]
    if not sources or (func is _aten.add.Tensor and len(sources) == 1):
        return None  # a dense tensor plus a sparse one is dense
    indices, values = (list(parts) for parts in zip(*map(parts_of, sources), strict=True))
    if func is _aten.clone.default and node is not None and "AccumulateGrad" in node.name():
        return _coo(sources[0], indices[0], values[0])  # taken over; only subclasses are cloned
    found = _coo(sources[0], torch.cat(indices, 1), torch.cat(values))
    coalesced: torch.Tensor = _aten._coalesced_.default(found, func is _aten._coalesce.default)
    return coalesced


def _is_sparse(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo


def _coo(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _aten._sparse_coo_tensor_with_dims_and_tensors.default(
        like.sparse_dim(), like.dense_dim(), like.shape, indices, values,
        dtype=values.dtype, layout=torch.sparse_coo, device=values.device,
    )  # fmt: skip
    return made
