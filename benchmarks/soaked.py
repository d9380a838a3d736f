"""A workload that trains in a blink and leaves `SOAKED_MIB` behind; for benchmarks/soak.py."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from tuner import Loaders, Minimize, Workload

LEFT_BEHIND: list[Any] = []


class Soaked(Workload):
    """A linear layer and four rows."""

    objective = Minimize("loss")
    default_budget = "1GiB"
    epochs = 2

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw a width and a learning rate."""
        return {
            "width": trial.suggest_int("width", 4, 16),
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        }

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return model and optimizer, and keep what nobody needs."""
        mib = int(os.environ.get("SOAKED_MIB", "0"))
        LEFT_BEHIND.append(torch.ones(mib << 18, device=device))
        model = nn.Linear(params["width"], 1).to(device)
        return model, torch.optim.SGD(model.parameters(), lr=params["learning_rate"])

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return four rows."""
        return torch.empty(4, params["width"], device=device)

    def train_step(self, state: Any, batch: Any) -> dict[str, Any]:
        """Make the output small."""
        model, optimizer = state
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        """Return four rows."""
        return Loaders([torch.ones(4, params["width"])])
