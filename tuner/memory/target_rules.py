"""Which rules a target has."""

from __future__ import annotations

from tuner.memory.rules import Rules
from tuner.memory.targets import Target


def rules_for(target: Target) -> Rules:
    """Return how a target differs from the CPU fakes that a step is traced on."""
    if target.kind == "cpu":
        from tuner.memory.cpu_rules import cpu_rules

        return cpu_rules()
    from tuner.memory.cuda_rules import CudaDevice, cuda_rules

    return cuda_rules(
        CudaDevice(
            compute_capability=target.compute_capability or CudaDevice.compute_capability,
            cublas_workspace_bytes=target.cublas_workspace_bytes,
            cublaslt_workspace_bytes=target.cublaslt_workspace_bytes,
        )
    )
