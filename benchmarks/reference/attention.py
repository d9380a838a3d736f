"""The rows of attention.csv: attention written out by hand, what is alive before backward.

Two score matrices stay (the exponentials and the weights), the maximum's indices and the row sums;
queries, keys and values have gradients of earlier calls. The output is not kept.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.reference.replaying import H100, live_before_backward
from tuner.memory.cuda_rules import cuda_rules
from tuner.memory.trace import trace_build


class Row(NamedTuple):
    """One measured call: sequence length, width, batch, whether it was compiled."""

    length: int
    width: int
    batch: int
    compiled: bool
    measured_bytes: float


def rows(folder: Path) -> list[Row]:
    """Return every row of attention.csv."""
    return [
        Row(int(r["seq_len"]), int(r["d_model"]), int(r["batch_size"]), r["backend"] == "compile",
            float(r["activation_mib"]) * 2**20)
        for r in csv.DictReader((folder / "attention.csv").read_text().splitlines())
    ]  # fmt: skip


def predicted_bytes(row: Row) -> int:
    """Return the predicted bytes alive before backward; a compiled row is traced eagerly."""

    def build(device: torch.device) -> Callable[[], None]:
        shape = (row.batch, row.length, row.width)
        q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))

        def weights() -> torch.Tensor:
            scores = q @ k.transpose(-2, -1) / math.sqrt(row.width)
            exponentials = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
            return exponentials / exponentials.sum(dim=-1, keepdim=True)

        return lambda: (weights() @ v).sum().backward()

    return live_before_backward(trace_build(build, cuda_rules(H100)))
