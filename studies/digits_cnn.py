"""Classify 8×8 handwritten digits with a small convolutional network.

Data: scikit-learn's digits, 1,797 images, which ship inside the package. Large widths with large
batches do not fit the default budget on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tuner import Loaders, Maximize, Workload

TRAIN_IMAGES = 1437  # four fifths; the rest evaluates
OPTIMIZERS = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}


@dataclass
class State:
    """A model and what trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def block(inputs: int, outputs: int) -> nn.Sequential:
    """Return a depthwise and a pointwise convolution, each normalised and activated."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, kernel_size=3, padding=1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.SiLU(),
        nn.Conv2d(inputs, outputs, kernel_size=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.SiLU(),
    )


class DigitsCNN(Workload):
    """Width, depth, batch size, optimizer and learning rate of a digit classifier."""

    objective = Maximize("accuracy")
    default_budget = "700MiB"
    epochs = 3
    memory_free = ("learning_rate",)

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {
            "width": trial.suggest_int("width", 16, 96, step=16),
            "depth": trial.suggest_int("depth", 1, 6),
            "batch_size": trial.suggest_categorical("batch_size", [64, 512, 1024, TRAIN_IMAGES]),
            "optimizer": trial.suggest_categorical("optimizer", list(OPTIMIZERS)),
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
        }

    def setup(self, params: dict[str, Any], device: torch.device) -> State:
        widths = [1] + [params["width"]] * params["depth"]
        blocks = [block(inputs, outputs) for inputs, outputs in zip(widths, widths[1:], strict=False)]
        head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * params["width"], 10)]
        model = nn.Sequential(*blocks, *head).to(device)
        optimizer = OPTIMIZERS[params["optimizer"]](model.parameters(), lr=params["learning_rate"])
        return State(model, optimizer)

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        images = min(params["batch_size"], TRAIN_IMAGES)
        return torch.empty(images, 1, 8, 8, device=device), torch.empty(
            images, dtype=torch.long, device=device
        )

    def train_step(self, state: State, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        loss = nn.functional.cross_entropy(state.model(images), labels)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        return {"loss": loss.detach()}

    def eval_step(self, state: State, batch: Any) -> dict[str, torch.Tensor]:
        images, labels = batch
        return {"accuracy": (state.model(images).argmax(1) == labels).float().mean()}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, held_out = order[:TRAIN_IMAGES], order[TRAIN_IMAGES:]
        return Loaders(
            train=DataLoader(
                TensorDataset(images[train], labels[train]), batch_size=params["batch_size"], shuffle=True
            ),
            eval=DataLoader(
                TensorDataset(images[held_out], labels[held_out]), batch_size=params["batch_size"]
            ),
        )
