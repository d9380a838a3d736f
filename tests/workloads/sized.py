"""A workload whose trials hold as much as their number says, and take their time."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tuner import Loaders, Minimize, Workload


class Sized(Workload):
    """Holds `SIZED_MIB` (a list, one size per trial) for `SIZED_SECONDS`."""

    objective = Minimize("loss")
    epochs = 1

    def suggest(self, trial: Any) -> dict[str, Any]:
        sizes = [int(size) for size in os.environ.get("SIZED_MIB", "64").split(",")]
        return {"mib": sizes[trial.number % len(sizes)]}

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        model = nn.Linear(4, 1)
        held = torch.ones(params["mib"] << 18, device=device)
        return {"model": model, "held": held, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(4, 4)

    def train_step(self, state: Any, batch: Any) -> dict[str, Any]:
        if type(batch) is torch.Tensor:
            time.sleep(float(os.environ.get("SIZED_SECONDS", "0")) / 4)
        loss = state["model"](batch).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return {"loss": loss.detach()}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        rows: Any = torch.ones(16, 4)
        return Loaders(DataLoader(rows, batch_size=4))
