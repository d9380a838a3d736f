"""A decoder of 124 M parameters as a workload, for the benchmark of prediction speed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tuner import Loaders, Maximize, Workload

VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH = 50_257, 768, 12, 12, 512


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, L, WIDTH] through the block."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        result: torch.Tensor = x + self.dropout(self.feed(self.norm2(x)))
        return result


class GPT(Workload):
    """Next-token prediction on tokens without meaning."""

    objective = Maximize("accuracy")
    memory_free = ("learning_rate",)

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Return a batch size and a learning rate."""
        return {
            "batch_size": trial.suggest_int("batch_size", 1, 64),
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True),
        }

    def setup(self, params: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Return model and optimizer; the output layer is tied to the embedding."""
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH),
            *(Block() for _ in range(LAYERS)),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
        )
        model[-1].weight = model[0].weight
        model.to(device)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), params["learning_rate"])}

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return tokens and targets [B, L]."""
        shape = (params["batch_size"], LENGTH)
        return torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)

    def train_step(self, state: Any, batch: Any) -> None:
        """Run forward, backward and update."""
        state["optimizer"].zero_grad()
        logits = state["model"](batch[0])
        F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()).backward()
        state["optimizer"].step()

    def eval_step(self, state: Any, batch: Any) -> dict[str, Any]:
        """Return the accuracy."""
        return {"accuracy": (state["model"](batch[0]).argmax(-1) == batch[1]).float().mean()}

    def loaders(self, params: dict[str, Any]) -> Loaders:
        """Return one batch of each kind."""
        batch = self.example_batch(params, torch.device("cpu"))
        return Loaders([batch], [batch])
