"""What the rules need to know of a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CudaDevice:
    """The properties of a GPU that decide which kernels run and what they take.

    Attributes:
        compute_capability: (major, minor); Ampere where nobody knows.
        cublas_workspace_bytes: What one thread's cuBLAS handle keeps in the allocator.
        cublaslt_workspace_bytes: What a product with a fused bias allocates for itself meanwhile.
    """

    compute_capability: tuple[int, int] = (8, 0)
    cublas_workspace_bytes: int = 8_519_680
    cublaslt_workspace_bytes: int = 0
