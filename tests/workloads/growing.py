"""A small MLP whose state may keep something of every training step (case D18)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tuner import Loaders, Minimize, Workload

BATCH = 8


@dataclass
class State:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    total: Any = 0.0
    kept: list[torch.Tensor] = field(default_factory=list)


class Growing(Workload):
    """`keeps`: the loss itself (its graph stays), its value, nothing, or `kept_bytes` of tensors."""

    objective = Minimize("loss")
    default_budget = "2GiB"
    epochs = 1

    def suggest(self, trial: Any) -> dict[str, Any]:
        keeps = trial.suggest_categorical("keeps", ["loss", "value", "tensors"])
        return {"keeps": keeps, "steps": 1000, "kept_bytes": 0}

    def setup(self, params: dict[str, Any], device: torch.device) -> State:
        self.keeps, self.kept_bytes = params["keeps"], params["kept_bytes"]
        return make_state(device)

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(BATCH, 64, device=device), torch.empty(BATCH, dtype=torch.long, device=device)

    def train_step(self, state: State, batch: Any) -> dict[str, torch.Tensor]:
        loss = train(state, batch)
        if self.keeps == "loss":
            state.total += loss
        elif self.keeps == "value":
            state.total += loss.item()
        elif self.keeps == "tensors":
            state.kept.append(torch.ones(self.kept_bytes // 4))
        return {"loss": loss.detach()}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        data = TensorDataset(
            torch.randn(BATCH * params["steps"], 64), torch.zeros(BATCH * params["steps"]).long()
        )
        return Loaders(DataLoader(data, batch_size=BATCH), None)


def make_state(device: torch.device) -> State:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).to(
        device
    )
    return State(model, torch.optim.Adam(model.parameters()))


def train(state: State, batch: Any) -> torch.Tensor:
    x, y = batch
    loss = nn.functional.cross_entropy(state.model(x), y)
    state.optimizer.zero_grad()
    loss.backward()
    state.optimizer.step()
    return loss
