"""A workload that waits most of its time, as one on a slow loader does; for benchmarks/throughput.py."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tuner import Loaders, Minimize, Workload

SAMPLES = 32


class SlowRows(Dataset[torch.Tensor]):
    """Rows that take `WAITING_SECONDS` (8 by default) together."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a row, after a while."""
        time.sleep(float(os.environ.get("WAITING_SECONDS", "8")) / SAMPLES)
        return torch.full((256,), index / SAMPLES)


class Waiting(Workload):
    """A small network on slow data."""

    objective = Minimize("loss")
    default_budget = "1GiB"
    epochs = 1

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw what does not change memory: every trial is of one size."""
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return about 50 MiB of network and momentum."""
        model = nn.Sequential(nn.Linear(256, 6400), nn.ReLU(), nn.Linear(6400, 512)).to(device)
        return model, torch.optim.SGD(model.parameters(), lr=params["learning_rate"], momentum=0.9)

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return eight rows."""
        return torch.empty(8, 256, device=device)

    def train_step(self, state: Any, batch: Any) -> dict[str, Any]:
        """Make the output small."""
        model, optimizer = state
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return {"loss": loss.detach()}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        """Return the slow rows."""
        return Loaders(DataLoader(SlowRows(), batch_size=8))
