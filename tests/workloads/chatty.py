"""A workload of 200 short epochs, each reported."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tuner import Loaders, Minimize, Workload

EPOCHS = 200


class Chatty(Workload):
    objective = Minimize("loss")
    epochs = EPOCHS
    default_budget = "1GiB"

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 8, 64)}

    def setup(self, params: dict[str, Any], device: torch.device) -> dict[str, Any]:
        model = nn.Linear(params["width"], 1).to(device)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(8, params["width"], device=device)

    def train_step(self, state: dict[str, Any], batch: Any) -> dict[str, torch.Tensor]:
        loss = state["model"](batch).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return {"loss": loss}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        return Loaders([torch.ones(8, params["width"])])
