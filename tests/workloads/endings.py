"""A workload that ends in every way a trial can end, each on request."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tuner import Loaders, Minimize, Workload

CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Endings(Workload):
    objective = Minimize("loss")
    epochs = 1

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"ending": trial.suggest_categorical("ending", ["completes"])}

    def setup(self, params: dict[str, Any], device: torch.device) -> dict[str, Any]:
        model = nn.Linear(4, 1).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer, "ending": params["ending"]}

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        return torch.empty(4, 4, device=device)

    def train_step(self, state: dict[str, Any], batch: Any) -> dict[str, torch.Tensor]:
        end(state["ending"])
        loss = state["model"](batch).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        return {"loss": loss}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        workers = 1 if params["ending"].startswith("a loader worker") else 0
        return Loaders(DataLoader(Rows(params["ending"]), batch_size=4, num_workers=workers))


class Rows(Dataset[torch.Tensor]):
    def __init__(self, ending: str) -> None:
        self.ending = ending

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.ending == "a loader worker is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.ending == "a loader worker has a bus error":
            os.kill(os.getpid(), signal.SIGBUS)
        if self.ending == "a loader worker crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.ending == "a loader worker raises":
            raise ValueError("this row is bad")
        if self.ending == "a loader worker has no memory":
            torch.empty(1 << 40)
        if self.ending == "a loader worker takes 600 MiB":
            torch.ones(150 << 20)
        return torch.ones(4)


def end(how: str) -> None:
    if how in ENDINGS:
        ENDINGS[how]()


def hoard() -> None:
    held = []
    while True:
        held.append(torch.ones(1 << 22))  # 16 MiB each, in use


def in_thread() -> None:
    def fail() -> None:
        raise ValueError("in a thread")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


def recurse() -> None:
    recurse()


def close_output() -> None:
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # the second step finds them closed
            os.close(descriptor)


def throw(error: BaseException) -> None:
    raise error


ENDINGS = {
    "the allocator has no memory": hoard,
    "MemoryError": lambda: bytearray(1 << 60),
    "torch.OutOfMemoryError by hand": lambda: throw(torch.OutOfMemoryError("CUDA out of memory.")),
    "cuBLAS": lambda: throw(RuntimeError(CUBLAS)),
    "invalid configuration": lambda: throw(RuntimeError("CUDA error: invalid configuration argument")),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
    "exit 1": lambda: os._exit(1),
    "exit 0": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(),
    "sys.exit with text": lambda: sys.exit("no data today"),
    "KeyboardInterrupt": lambda: throw(KeyboardInterrupt()),
    "unprintable": lambda: throw(Unprintable()),
    "10 MB of text": lambda: throw(ValueError("x" * 10_000_000)),
    "text no database takes": lambda: throw(ValueError("nul \0 and half a pair \ud800")),
    "endless recursion": recurse,
    "a thread raises": in_thread,
    "output closed": close_output,
    "100 MB of output": lambda: os.write(1, b"y" * 100_000_000),
}
