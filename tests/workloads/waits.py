"""A workload that is stopped at every moment: it trains, hangs or is traced for as long as it is told.

`WAITS` says where it waits: `train` (a step), `hang` (a step, and no request to stop is seen), `trace`
(`setup`, as long as it is traced), `nowhere`. `WAITS_SECONDS` says how long. `WAITS_WORKERS` is the
number of data-loading processes.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tuner import Loaders, Maximize, Workload


class Waits(Workload):
    objective = Maximize("score")
    default_budget = "1GiB"
    epochs = 2

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 8, 64)}

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        model = nn.Sequential(nn.Linear(16, params["width"]), nn.Linear(params["width"], 2))
        if _is_fake(torch.empty(1)):
            _wait("trace")
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(16, 16), torch.empty(16, dtype=torch.long)

    def train_step(self, state: Any, batch: Any) -> None:
        x, y = batch
        if not _is_fake(x):
            _wait("train")
            _wait("hang")
        loss = nn.functional.cross_entropy(state["model"](x), y)
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()

    def eval_step(self, state: Any, batch: Any) -> dict[str, Any]:
        x, y = batch
        return {"score": (state["model"](x).argmax(1) == y).float().mean()}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(32, 16, generator=generator)
        data = TensorDataset(x, (x[:, 0] > 0).long())
        workers = int(os.environ.get("WAITS_WORKERS", "0"))
        return Loaders(DataLoader(data, batch_size=16, num_workers=workers), DataLoader(data, batch_size=16))


def _wait(where: str) -> None:
    if os.environ.get("WAITS") == where:
        time.sleep(float(os.environ.get("WAITS_SECONDS", "600")))


def _is_fake(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor
