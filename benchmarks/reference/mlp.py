"""Rows of mlp_a100.csv: random multi-layer perceptrons on an A100, by nvidia-smi.

Most of each value is a floor of 1,443 to 1,453 MiB, context and libraries; the target profile
`a100-40gb` brings it. Adam, fp32, softmax at the end, cross entropy (binary when there is one output).
"""

from __future__ import annotations

import ast
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.reference.scores import Scored
from tuner.memory.calibration import Calibration
from tuner.memory.prediction import estimate, predict
from tuner.memory.target_rules import rules_for
from tuner.memory.targets import resolve_target
from tuner.memory.trace import trace_build


def scored(folder: Path, count: int) -> Iterator[Scored]:
    """Score `count` rows, evenly spread over the file."""
    table = list(csv.DictReader((folder / "mlp_a100.csv").read_text().splitlines()))
    target = resolve_target("a100-40gb")
    rules, calibration = rules_for(target), Calibration.prior("cuda")
    for row in table[:: max(1, len(table) // count)]:
        start = time.perf_counter()
        found = estimate(trace_build(_build(row), rules), target)
        prediction = predict(found, target, calibration, context_bytes=None, budget_bytes=None)
        band = prediction.device
        assert band is not None
        yield Scored(
            row["Filename"].removesuffix(".out"),
            row["Activation Function"],
            float(row["Max GPU Memory (MiB)"]) * 2**20,
            band.expected,
            low_bytes=band.low,
            high_bytes=band.high,
            seconds=time.perf_counter() - start,
        )


def _build(row: dict[str, str]) -> Callable[[torch.device], Callable[[], None]]:
    parts = dict(part.split(":") for part in row["Filename"].removesuffix(".out").split("_"))
    layers: list[tuple[str, int, int]] = ast.literal_eval(row["Activations-Params"])
    width, batch = int(parts["input"]), int(row["Batch Size"])

    def build(device: torch.device) -> Callable[[], None]:
        modules: list[nn.Module] = []
        inputs = width
        for kind, size, _ in layers:
            modules.append(nn.Linear(inputs, size) if kind == "linear" else nn.ReLU())
            inputs = size
        model = nn.Sequential(*modules).to(device)
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            output: Any = model(torch.empty(batch, width, device=device))
            if inputs == 1:
                loss = F.binary_cross_entropy_with_logits(output, torch.empty(batch, 1, device=device))
            else:
                target = torch.zeros(batch, dtype=torch.long, device=device)
                loss = F.cross_entropy(F.softmax(output, dim=1), target)
            loss.backward()
            optimizer.step()

        return step

    return build
