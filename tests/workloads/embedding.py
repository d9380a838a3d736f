"""A table with one row per feature: its rows and its width decide, the batch does not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tuner import Minimize, Workload


class Embedding(Workload):
    objective = Minimize("loss")
    memory_free = ("learning_rate",)

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {
            "rows": trial.suggest_int("rows", 100_000, 2_000_000, step=100_000),
            "width": trial.suggest_categorical("width", [64, 128, 256, 512]),
            "batch_size": trial.suggest_categorical("batch_size", [8, 16, 32, 64]),
            "optimizer": trial.suggest_categorical("optimizer", ["adam", "sgd"]),
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        }

    def setup(self, params: dict[str, Any], device: torch.device) -> dict[str, Any]:
        table = nn.Embedding(params["rows"], params["width"])
        model = nn.ModuleDict({"table": table, "head": nn.Linear(params["width"], 1)}).to(device)
        kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[params["optimizer"]]
        return {"model": model, "optimizer": kind(model.parameters(), lr=params["learning_rate"])}

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(params["batch_size"], 64, dtype=torch.long, device=device)

    def train_step(self, state: dict[str, Any], batch: Any) -> None:
        loss = state["model"]["head"](state["model"]["table"](batch).mean(1)).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()

    def loaders(self, params: dict[str, Any]) -> Any:
        return [torch.zeros(params["batch_size"], 64, dtype=torch.long)], None
