"""65 samples and batch normalisation: where a last batch of one is left over, training fails."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tuner import Loaders, Minimize, Workload


class LastBatch(Workload):
    objective = Minimize("loss")
    epochs = 1

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"batch_size": trial.suggest_categorical("batch_size", [8, 13, 16, 32, 64])}

    def setup(self, params: dict[str, Any], device: torch.device) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)).to(device)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return (torch.empty(params["batch_size"], 4, device=device),)

    def train_step(self, state: dict[str, Any], batch: Any) -> dict[str, torch.Tensor]:
        loss = state["model"](batch[0]).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return {"loss": loss}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        data = TensorDataset(torch.ones(65, 4))
        return Loaders(DataLoader(data, batch_size=params["batch_size"]))
