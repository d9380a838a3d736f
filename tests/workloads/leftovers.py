"""A workload that hangs with loader workers of every stubborn kind (case D17)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tuner import Loaders, Minimize, Workload

KINDS = ("waits", "sleeps", "ignores", "daemon")


class Stubborn(Dataset[torch.Tensor]):
    """Each of four workers says who it is in a folder, then sleeps as long as any test."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        assert info is not None
        kind = KINDS[info.id]
        if kind == "ignores":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        if kind == "daemon" and os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            self._here("grandchild")
            time.sleep(600)
        self._here(kind)
        time.sleep(0 if kind == "waits" else 600)
        return torch.ones(4)

    def _here(self, kind: str) -> None:
        aside = self.folder / f"{kind}~"
        aside.write_text(str(os.getpid()))
        aside.rename(self.folder / kind)


class Leftovers(Workload):
    objective = Minimize("loss")

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"folder": trial.suggest_categorical("folder", ["."])}

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        return nn.Linear(4, 1)

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(1, 4)

    def train_step(self, state: Any, batch: Any) -> None:
        state(batch).sum().backward()

    def loaders(self, params: dict[str, Any]) -> Loaders:
        return Loaders(DataLoader(Stubborn(params["folder"]), batch_size=1, num_workers=4))
