"""The rows of steps.csv: one training step of a decoder of 423 M parameters, all written by hand.

Attention, softmax, RMSNorm, rotary positions, SwiGLU, cross entropy and AdamW are spelled out, so
that each operator's outputs count. Five batches and the optimizer's state are alive at the start.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.reference.replaying import A100, peaks_of_last_step
from tuner.memory.cuda_rules import cuda_rules
from tuner.memory.trace import trace_build

VOCABULARY, WIDTH, LAYERS, HEADS, INNER, BATCH, BATCHES = 10_000, 1024, 24, 16, 4096, 4, 5


class Row(NamedTuple):
    """One measured step."""

    name: str
    length: int
    autocast: bool
    allocated_bytes: float
    reserved_bytes: float


def rows(folder: Path) -> list[Row]:
    """Return every row of steps.csv."""
    mib = 2**20
    return [
        Row(r["name"], int(r["context_length"]), r["precision"] == "amp-bf16",
            float(r["peak_allocated_mib"]) * mib, float(r["peak_reserved_mib"]) * mib)
        for r in csv.DictReader((folder / "steps.csv").read_text().splitlines())
    ]  # fmt: skip


def predicted_bytes(row: Row) -> tuple[int, int]:
    """Return the predicted (allocated, reserved) peaks of the step after a warm-up step."""

    def build(device: torch.device) -> Callable[[], None]:
        model = Decoder(row.length).to(device)
        optimizer = AdamW(list(model.parameters()))
        shape = (BATCH, row.length)
        batches = [
            tuple(torch.zeros(shape, dtype=torch.long, device=device) for _ in range(2))
            for _ in range(BATCHES)
        ]

        def step() -> None:
            tokens, targets = batches[0]
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=row.autocast):
                logits = model(tokens)
                loss = cross_entropy(logits, targets)
            loss.backward()
            optimizer.step()
            optimizer.clear()

        step.batches = batches  # type: ignore[attr-defined]
        return step

    return peaks_of_last_step(trace_build(build, cuda_rules(A100), steps=2))


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension, in steps."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    exponentials = torch.exp(shifted)
    return exponentials / torch.sum(exponentials, dim=-1, keepdim=True)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of logits [..., V] and targets [...], in steps."""
    shifted = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    log_sums = torch.log(torch.sum(torch.exp(shifted), dim=-1))
    chosen = shifted.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (log_sums - chosen).mean()


class Linear(nn.Module):
    """A product without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., inputs] times the weight."""
        return x @ self.weight.T


class RMSNorm(nn.Module):
    """Root-mean-square norm in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., WIDTH], normed and scaled."""
        dtype = x.dtype
        x = x.to(torch.float32)
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * scale
        return (self.weight * x).to(dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("table", torch.zeros(2, length, WIDTH // HEADS // 2))

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., ::2], x[..., 1::2]
        cos, sin = self.table[0], self.table[1]
        turned = (cos * first - sin * second, sin * first + cos * second)
        return torch.stack(turned, dim=-1).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return attention over x [B, L, WIDTH]."""
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, HEADS, -1).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = self._rotated(q), self._rotated(k)
        positions = torch.arange(length, device=x.device)
        mask = positions[:, None] >= positions[None, :]
        mixed = _attend(q, k, v, mask)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return result


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return weights @ v


class Layer(nn.Module):
    """Attention and a gated feed-forward part, each after a norm."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(length), RMSNorm(), RMSNorm()
        self.up, self.gate, self.down = Linear(WIDTH, INNER), Linear(WIDTH, INNER), Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [B, L, WIDTH] through the layer."""
        x = x + self.attention(self.norm1(x))
        return x + self._feed_forward(self.norm2(x))

    def _feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x)
        result: torch.Tensor = self.down(up * torch.sigmoid(up) * self.gate(x))
        return result


class Decoder(nn.Module):
    """The language model of steps.csv."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.layers = nn.ModuleList(Layer(length) for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, L, VOCABULARY] of tokens [B, L]."""
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class AdamW:
    """AdamW, one parameter at a time, every temporary on its own."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        for index, (parameter, gradient) in enumerate(self._with_gradients()):
            first, second = self.moments[index]
            first = 0.9 * first + 0.1 * gradient
            second = 0.95 * second + 0.05 * gradient**2
            parameter -= 1e-3 * first / (torch.sqrt(second) + 1e-8)
            parameter -= 1e-5 * parameter
            self.moments[index] = (first, second)

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def _with_gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        for parameter in self.parameters:
            assert parameter.grad is not None
            yield parameter, parameter.grad
