"""`torch.compile`: the step is traced eagerly, and the prediction says that this is no evidence.

A compiled step fuses operators and chooses anew what to keep for backward: its peak may be lower or
higher than the eager one (case D10). Nothing is compiled while tracing; that something would have
been is noted, and widens the band.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tuner.memory.patches import replaced
from tuner.memory.rules import COMPILED, Journal

NOTE = (
    "the step is compiled: it was traced as written, which is no evidence for what the compiler makes of it"
)


@contextlib.contextmanager
def compiled_runs_eagerly(journal: Journal) -> Iterator[None]:
    """Run compiled functions and modules as they were written."""
    from torch._dynamo import eval_frame

    original = eval_frame._callback_from_stance

    def noticed(callback: Any) -> Any:
        if callable(callback):
            journal.rules.setdefault(COMPILED)
            journal.notes[NOTE] = None
        return original(callback)

    with replaced(eval_frame, "_callback_from_stance", noticed), torch.compiler.set_stance("force_eager"):
        yield
