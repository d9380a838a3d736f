"""A workload that computes all the time; for benchmarks/throughput.py."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tuner import Loaders, Minimize, Workload


class Computing(Workload):
    """A convolution network on noise, for `COMPUTING_STEPS` (80 by default) steps of 32 images."""

    objective = Minimize("loss")
    default_budget = "1GiB"
    epochs = 1

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw what does not change memory: every trial is of one size."""
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return network and optimizer."""
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        ).to(device)
        return model, torch.optim.SGD(model.parameters(), lr=params["learning_rate"])

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return 32 images of 32 × 32."""
        return torch.empty(32, 3, 32, 32, device=device), torch.empty(32, dtype=torch.long, device=device)

    def train_step(self, state: Any, batch: Any) -> dict[str, Any]:
        """Train on one batch."""
        model, optimizer = state
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        """Return the same few images again and again: reading them must not cost anything."""
        count = 32 * int(os.environ.get("COMPUTING_STEPS", "80"))
        data = TensorDataset(torch.randn(1, 3, 32, 32).expand(count, -1, -1, -1), torch.zeros(count).long())
        return Loaders(DataLoader(data, batch_size=32))
