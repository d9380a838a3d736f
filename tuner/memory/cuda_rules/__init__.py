"""Where CUDA does otherwise than the CPU fakes that a step is traced on.

Four kinds of rules: what is patched while tracing (`optimizers`, `autocast`), functions that CUDA
runs in another way (`dropout`, `attention`, `norms`, `recurrent`), what kernels allocate inside
themselves (`kernels`), and what the tracer does on every target (the recorder, `compiled`).
`CATALOGUE` lists every rule with its effect, its source and its limits; `docs/memory-model.md`
shows it.
"""

from __future__ import annotations

from tuner.memory.cuda_rules.catalogue import CATALOGUE, Rule
from tuner.memory.cuda_rules.device import CudaDevice
from tuner.memory.cuda_rules.together import cuda_rules

__all__ = ["CATALOGUE", "CudaDevice", "Rule", "cuda_rules"]
