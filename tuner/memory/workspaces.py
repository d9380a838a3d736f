"""How much memory cuBLAS takes inside the caching allocator, by GPU and by environment.

A workspace is taken by each thread that multiplies matrices (a training process has two: forward,
and autograd's for the backward), for each stream, and stays. The rules are those of PyTorch's
`aten/src/ATen/cuda/CublasHandlePool.cpp` (2.11 to 2.14). What they do not see: sizes set by the
workload itself with `torch.backends.cuda.cublas_workspace_size`, and later versions that give the
workspace back after each product unless `TORCH_CUBLAS_WORKSPACE_CACHE=1` (pull request 194311).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tuner.units import KIB, MIB

_DEFAULT_BYTES = (4096 * 2 + 16 * 8) * KIB  # ":4096:2:16:8", 8,519,680 B
# NVIDIA recommends 32 MiB for Hopper; PyTorch gives it to major 9, since pull request 175344
# (February 2026) to 10 and 12, since 189312 to 11.
_FROM_HOPPER_BYTES = 32 * MIB
_CUBLASLT_DEFAULT_KIB = 1024  # pytorch issue 73328


def cublas_workspace_bytes(
    compute_capability: tuple[int, int] | None, environment: Mapping[str, str] = os.environ
) -> int:
    """Return the workspace of one thread and stream.

    Args:
        compute_capability: Of the GPU; None (unknown) counts as below 9.0.
        environment: `CUBLAS_WORKSPACE_CONFIG` in it, as `:4096:2:16:8` (pairs of KiB and count),
            takes precedence; `:0:0` means none. As in PyTorch, text without a pair is ignored.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(kib) * KIB * int(count) for kib, count in pairs)
    return _FROM_HOPPER_BYTES if compute_capability and compute_capability >= (9, 0) else _DEFAULT_BYTES


def cublaslt_workspace_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return what one cuBLASLt product (a linear layer with bias) allocates for itself meanwhile.

    PyTorch takes it from the cuBLAS workspace of the same thread, so nothing; with
    `TORCH_CUBLASLT_UNIFIED_WORKSPACE=0` it is an allocation of its own.

    Args:
        environment: `CUBLASLT_WORKSPACE_SIZE` in it is a number of KiB; 1 MiB without.
    """
    if environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") != "0":
        return 0
    match = re.match(r"\s*\+?([0-9]+)", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return (int(match[1]) if match else _CUBLASLT_DEFAULT_KIB) * KIB
