"""A workload that leaves its model and more behind in a module-level list (case D19)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tuner import Loaders, Minimize, Workload

MIB = 1 << 20
LEFT_BEHIND: list[Any] = []


class Leaky(Workload):
    """A square linear layer; `leak_mib` more stay behind, and `hungry` asks for what nobody has."""

    objective = Minimize("loss")
    epochs = 1

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {
            "width": trial.suggest_int("width", 16, 4096),
            "leak_mib": trial.suggest_int("leak_mib", 0, 300),
            "hungry": False,
        }

    def setup(self, params: dict[str, Any], device: torch.device) -> dict[str, Any]:
        model = nn.Linear(params["width"], params["width"]).to(device)
        state = {"model": model, "optimizer": torch.optim.Adam(model.parameters()), **params}
        LEFT_BEHIND.append((state, torch.ones(params["leak_mib"] * MIB // 4, device=device)))
        return state

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(8, params["width"], device=device)

    def train_step(self, state: dict[str, Any], batch: Any) -> dict[str, torch.Tensor]:
        if state["hungry"]:
            torch.empty(1 << 40)
        loss = state["model"](batch).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return {"loss": loss}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        return Loaders([torch.ones(8, params["width"]) for _ in range(2)])
