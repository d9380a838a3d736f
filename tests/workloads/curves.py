"""A workload whose learning curves are given: `skill` is what it comes to, half the way with each epoch.

Its parameters take `width` MiB. The first `silent` epochs give no number; none of the others is better
than the first where `CURVES_PATIENCE` says how many such epochs end a trial.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from tuner import Loaders, Maximize, Workload


class Curves(Workload):
    objective = Maximize("score")
    default_budget = "2GiB"
    epochs = 4
    patience = int(os.environ["CURVES_PATIENCE"]) if "CURVES_PATIENCE" in os.environ else None

    def suggest(self, trial: Any) -> dict[str, Any]:
        skill = (
            trial.suggest_float("skill", 0.9, 1.0)
            if trial.number < 2
            else trial.suggest_float("skill", 0, 0.1)
        )
        return {"width": trial.suggest_int("width", 1, 1), "skill": skill}

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        module = nn.Linear(512, 512 * params["width"], device=device)
        return {"module": module, "epoch": 0, "skill": params["skill"], "silent": params.get("silent", 0)}

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(1, 512, device=device)

    def train_step(self, state: Any, batch: Any) -> None:
        state["module"](batch).sum().backward()
        state["epoch"] += 1

    def eval_step(self, state: Any, batch: Any) -> dict[str, Any]:
        if state["epoch"] <= state["silent"]:
            return {"score": torch.tensor(float("nan"))}
        epoch = state["epoch"] if self.patience is None else 1
        return {"score": torch.tensor(state["skill"] * (1 - 0.5**epoch))}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        return Loaders([torch.zeros(1, 512)], [torch.zeros(1, 512)])
