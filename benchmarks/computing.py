"""A workload that computes all the time; for benchmarks/throughput.py.

Its operations are small, as those of many studies on a CPU are: PyTorch shares none of them among
threads (25 ms a step with one thread, 28 ms with two). A workload that it does share among threads
gains less from two trials at once: two threads do then what two trials would.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tuner import Loaders, Minimize, Workload

BATCH, LENGTH, FEATURES = 32, 64, 32


class Classifier(nn.Module):
    """An LSTM and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(FEATURES, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits of a batch of sequences, (batch, length, features)."""
        logits: torch.Tensor = self.head(self.recurrent(x)[0][:, -1])
        return logits


class Computing(Workload):
    """Trains on noise for `COMPUTING_STEPS` (600 by default) steps of 32 sequences."""

    objective = Minimize("loss")
    default_budget = "1GiB"
    epochs = 1

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw what does not change memory: every trial is of one size."""
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return network and optimizer."""
        model = Classifier().to(device)
        return model, torch.optim.SGD(model.parameters(), lr=params["learning_rate"])

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return sequences and labels."""
        x = torch.empty(BATCH, LENGTH, FEATURES, device=device)
        return x, torch.empty(BATCH, dtype=torch.long, device=device)

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
        """Return one sequence again and again: reading must not cost anything."""
        count = BATCH * int(os.environ.get("COMPUTING_STEPS", "600"))
        sequences = torch.randn(1, LENGTH, FEATURES).expand(count, -1, -1)
        return Loaders(DataLoader(TensorDataset(sequences, torch.zeros(count).long()), batch_size=BATCH))
