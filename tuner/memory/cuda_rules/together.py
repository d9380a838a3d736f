"""All rules of a CUDA target, put together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tuner.memory.compiled import compiled_runs_eagerly
from tuner.memory.cuda_rules.attention import attention_substitutes
from tuner.memory.cuda_rules.autocast import cuda_autocast
from tuner.memory.cuda_rules.device import CudaDevice
from tuner.memory.cuda_rules.dropout import DROPOUT
from tuner.memory.cuda_rules.host import HOST_COPIES
from tuner.memory.cuda_rules.kernels import CudaKernels
from tuner.memory.cuda_rules.norms import RMS_NORM
from tuner.memory.cuda_rules.optimizers import cuda_optimizers
from tuner.memory.cuda_rules.recurrent import RECURRENT
from tuner.memory.cuda_rules.runtime import silent_runtime
from tuner.memory.rules import Journal, Rules


def cuda_rules(device: CudaDevice) -> Rules:
    """Return the rules for a GPU."""

    @contextlib.contextmanager
    def patches(journal: Journal) -> Iterator[None]:
        with (
            cuda_optimizers(journal),
            cuda_autocast(journal),
            compiled_runs_eagerly(journal),
            silent_runtime(),
        ):
            yield

    return Rules(
        device="cuda",
        kernels=CudaKernels(device),
        substitutes={**DROPOUT, **HOST_COPIES, **RECURRENT, **RMS_NORM, **attention_substitutes(device)},
        patches=patches,
    )
