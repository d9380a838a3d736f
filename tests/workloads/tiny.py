"""A workload that trains in a blink, with params that make it fail in every way a test needs."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tuner import Loaders, Maximize, Workload


@dataclass
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    mode: str


class Tiny(Workload):
    objective = Maximize("score")
    default_budget = "2GiB"
    epochs = 2

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {
            "width": trial.suggest_int("width", 8, 4096, log=True),
            "batch_size": trial.suggest_categorical("batch_size", [16, 64]),
            "mode": trial.suggest_categorical("mode", os.environ.get("TINY_MODES", "fine").split(",")),
        }

    def setup(self, params: dict[str, Any], device: torch.device) -> State:
        width = params["width"]
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 2))
        return State(model.to(device), torch.optim.Adam(model.parameters()), params["mode"])

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        size = params["batch_size"]
        return torch.empty(size, 64, device=device), torch.empty(size, dtype=torch.long, device=device)

    def train_step(self, state: State, batch: Any) -> dict[str, torch.Tensor]:
        x, y = batch
        if state.mode == "slow":
            time.sleep(float(os.environ.get("TINY_SLEEP", "60")))
        if state.mode == "raises":
            raise ValueError("this mode raises")
        if state.mode == "hungry" and not _is_fake(x):
            self.hoard = torch.ones(1 << 40)
        if state.mode == "segfault" and not _is_fake(x):
            import ctypes

            ctypes.string_at(0)
        if state.mode == "exits" and not _is_fake(x):
            os._exit(3)
        loss = nn.functional.cross_entropy(state.model(x), y)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        return {"loss": loss.detach()}

    def eval_step(self, state: State, batch: Any) -> dict[str, Any]:
        x, y = batch
        accuracy = (state.model(x).argmax(1) == y).float().mean()
        return {"score": accuracy * float("nan") if state.mode == "nan" else accuracy}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(128, 64, generator=generator)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        return Loaders(
            DataLoader(data, batch_size=params["batch_size"], shuffle=True),
            DataLoader(data, batch_size=params["batch_size"]),
        )


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor
