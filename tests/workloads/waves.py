"""A step that touches as much memory as its epoch says, and gives it back."""

from __future__ import annotations

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
    steps: int = 0


class Waves(Workload):
    """`mib`: how much the steps of each epoch touch; `pause`: how long each step takes, in seconds."""

    objective = Maximize("score")
    epochs = 3
    steps = 4

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"mib": [8, 64, 16], "pause": trial.suggest_categorical("pause", [0.0])}

    def setup(self, params: dict[str, Any], device: torch.device) -> State:
        self.params = params
        return State(nn.Linear(4, 4))

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(1, 4)

    def train_step(self, state: State, batch: Any) -> dict[str, Any]:
        touched = torch.ones(self.params["mib"][state.steps // self.steps % self.epochs] << 18)
        state.steps += 1
        time.sleep(self.params["pause"])
        return {"score": float(touched[0])}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        return Loaders(DataLoader(TensorDataset(torch.zeros(self.steps, 4)), batch_size=1), None)
