"""A character language model on English prose: the text of Python's own `pydoc_data.topics`.

The text (about 465,000 characters) ships with Python. Long contexts with wide models and large
batches do not fit the default budget on a CPU: attention scores and logits grow with all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tuner import Loaders, Minimize, Workload

VOCABULARY = 128  # ASCII; other characters become '?'
TRAIN_WINDOWS = 384
EVAL_WINDOWS = 64


@dataclass
class State:
    """A model and what trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


class Windows(Dataset[torch.Tensor]):
    """`count` windows of `length` + 1 characters, spread evenly over a text."""

    def __init__(self, text: torch.Tensor, length: int, count: int) -> None:
        self.text, self.length, self.count = text, length, count
        self.stride = (len(text) - length - 1) // count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.stride
        return self.text[start : start + self.length + 1]


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        joined = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(self, width: int, layers: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        return self.output(self.norm(self.blocks(self.characters(text) + self.positions(places))))


class CharGPT(Workload):
    """Width, layers, heads, context length, batch size and dropout of a character model."""

    objective = Minimize("loss")
    default_budget = "900MiB"
    epochs = 2
    memory_free = ("learning_rate",)

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {
            "heads": trial.suggest_categorical("heads", [2, 4, 8]),
            "width": trial.suggest_int("width", 32, 256, step=32),
            "layers": trial.suggest_int("layers", 1, 6),
            "context": trial.suggest_categorical("context", [64, 128, 256]),
            "batch_size": trial.suggest_categorical("batch_size", [8, 16, 32, 64, 128]),
            "dropout": trial.suggest_float("dropout", 0.0, 0.3),
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True),
        }

    def setup(self, params: dict[str, Any], device: torch.device) -> State:
        model = GPT(params["width"], params["layers"], params["heads"], params["context"], params["dropout"])
        model = model.to(device)
        return State(model, torch.optim.AdamW(model.parameters(), lr=params["learning_rate"]))

    def example_batch(self, params: dict[str, Any], device: torch.device) -> torch.Tensor:
        windows = min(params["batch_size"], TRAIN_WINDOWS)
        return torch.empty(windows, params["context"] + 1, dtype=torch.long, device=device)

    def train_step(self, state: State, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self._loss(state.model, batch)
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        return {"train_loss": loss.detach()}

    def eval_step(self, state: State, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self._loss(state.model, batch)}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        prose = "\n".join(text for _, text in sorted(topics.topics.items()))
        text = torch.frombuffer(bytearray(prose.encode("ascii", "replace")), dtype=torch.uint8).long()
        split = len(text) * 9 // 10
        train = Windows(text[:split], params["context"], TRAIN_WINDOWS)
        held_out = Windows(text[split:], params["context"], EVAL_WINDOWS)
        return Loaders(
            train=DataLoader(train, batch_size=params["batch_size"], shuffle=True),
            eval=DataLoader(held_out, batch_size=params["batch_size"]),
        )

    @staticmethod
    def _loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
