"""The models of `gpu_configurations.py`, written as people write them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

MakeBatch = Callable[[], tuple[torch.Tensor, torch.Tensor]]
CLASSES = 10


def batches_of(
    shape: tuple[int, ...],
    device: torch.device,
    memory_format: torch.memory_format = torch.contiguous_format,
    *,
    dtype: torch.dtype = torch.float32,
    per_position: bool = False,
) -> MakeBatch:
    """Return a maker of random inputs of a shape, with a label for each row (or each position)."""
    labels = shape[:2] if per_position else shape[:1]

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(shape, device=device, dtype=dtype)
        return x.contiguous(memory_format=memory_format), torch.randint(CLASSES, labels, device=device)

    return make


def tokens_of(
    batch: int, lengths: Sequence[int], vocabulary: int, device: torch.device, *, classes: int | None = None
) -> MakeBatch:
    """Return a maker of token ids [batch, length] and labels of that shape; lengths are taken in turn."""
    in_turn = itertools.cycle(lengths)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (batch, next(in_turn))
        x = torch.randint(vocabulary, shape, device=device)
        return x, torch.randint(classes or vocabulary, shape, device=device)

    return make


def _convolution(inputs: int, outputs: int, side: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, side, stride, side // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = _convolution(inputs, outputs, 3, stride)
        self.body = nn.Sequential(first, nn.ReLU(inplace=True), _convolution(outputs, outputs))
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def _pooled(features: nn.Sequential, channels: int) -> nn.Module:
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def resnet(*, large: bool) -> nn.Module:
    """ResNet-18's layout; a quarter of its widths and half of its blocks where not `large`."""
    width, repeats = (64, 2) if large else (16, 1)
    features = nn.Sequential(_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage in range(4):
        outputs = width << stage
        for block in range(repeats):
            features.append(_Residual(channels, outputs, 2 if stage and not block else 1))
            channels = outputs
    return _pooled(features, channels)


def vgg(*, large: bool) -> nn.Module:
    """VGG-11's layout with a pooled 4 × 4 before its linear layers; narrow where not `large`."""
    width, hidden = (64, 4096) if large else (16, 128)
    features, channels = nn.Sequential(), 3
    for outputs, convolutions in ((width, 1), (2 * width, 1), (4 * width, 2), (8 * width, 2), (8 * width, 2)):
        for _ in range(convolutions):
            features.extend([nn.Conv2d(channels, outputs, 3, padding=1), nn.ReLU(inplace=True)])
            channels = outputs
        features.append(nn.MaxPool2d(2))
    linear = (nn.Linear(16 * channels, hidden), nn.ReLU(inplace=True), nn.Dropout(0.5))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(4), nn.Flatten(), *linear, nn.Linear(hidden, CLASSES))


class _Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 6 * inputs
        self.body = nn.Sequential(
            _convolution(inputs, wide, 1),
            nn.ReLU6(inplace=True),
            _convolution(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(inplace=True),
            _convolution(wide, outputs, 1),
        )
        self.adds = inputs == outputs and stride == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.adds else self.body(x)


def depthwise(*, large: bool) -> nn.Module:
    """Inverted residuals, as in MobileNetV2; narrow where not `large`."""
    width = 24 if large else 8
    features, channels = nn.Sequential(_convolution(3, width, 3, 2), nn.ReLU6(inplace=True)), width
    for outputs, stride in ((width, 1), (width, 1), (2 * width, 2), (2 * width, 1), (4 * width, 2)):
        features.append(_Inverted(channels, outputs, stride))
        channels = outputs
    return _pooled(features, channels)


class Attention(nn.Module):
    """One layer of attention; width 64 a head.

    Args:
        width: Of the model.
        backend: The backend that is forced, or None.
        causal: Whether the operator is told so.
        masked_length: Length of a boolean mask that is given; 0 for none.
    """

    def __init__(
        self, width: int, backend: SDPBackend | None, *, causal: bool, masked_length: int = 0
    ) -> None:
        super().__init__()
        self.joined, self.head = nn.Linear(width, 3 * width), nn.Linear(width, CLASSES)
        self.backend, self.causal, self.heads = backend, causal, max(1, width // 64)
        mask = torch.ones(masked_length, masked_length).tril().bool() if masked_length else None
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, classes]."""
        forced = contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)
        with forced:
            mixed = _attend(self.joined(x), self.heads, self.mask, causal=self.causal)
        logits: torch.Tensor = self.head(mixed.mean(1))
        return logits


def _attend(
    joined: torch.Tensor, heads: int, mask: Any = None, *, causal: bool, p: float = 0.0
) -> torch.Tensor:
    batch, length, width = joined.shape
    parts = (
        part.view(batch, length, heads, width // 3 // heads).transpose(1, 2) for part in joined.chunk(3, -1)
    )
    mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=p, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joined, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop, self.heads = nn.Dropout(dropout), max(1, width // 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.drop.p if self.training else 0.0
        x = x + self.drop(self.out(_attend(self.joined(self.first(x)), self.heads, causal=True, p=p)))
        return x + self.drop(self.mlp(self.second(x)))


class Gpt(nn.Module):
    """A decoder with learned positions.

    Args:
        width: Of the model; 64 a head.
        layers: How many blocks.
        vocabulary: How many tokens there are.
        longest: The longest sequence.
        dropout: Of attention, and after each part of a block.
        checkpointing: `reentrant`, `non-reentrant`, or none.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        vocabulary: int,
        *,
        longest: int,
        dropout: float = 0.0,
        checkpointing: str = "",
    ) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(_Block(width, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.checkpointing = checkpointing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, length, vocabulary]."""
        x = self.table(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class _Masked(nn.Module):
    def __init__(self, encoder: nn.TransformerEncoder, width: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        padding[:, -x.shape[1] // 4 :] = True
        logits: torch.Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
        return logits


def encoder_with_mask(width: int, layers: int) -> nn.Module:
    """Return PyTorch's own encoder, told that the last quarter of each sequence is padding."""
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, batch_first=True)
    return _Masked(nn.TransformerEncoder(layer, layers), width)


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last step."""

    def __init__(self, cell: nn.RNNBase, outputs: int) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(outputs, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [batch, classes]."""
        logits: torch.Tensor = self.head(self.cell(x)[0][:, -1])
        return logits


class _Gathered(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.zeros(rows, width)), nn.Linear(width, CLASSES)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table[indices])
        return logits


def gathered_rows(rows: int, width: int) -> nn.Module:
    """Return a table that is read by indexing, not by an embedding."""
    return _Gathered(rows, width)


def mlp(width: int, layers: int) -> nn.Module:
    """Return linear layers of one width with ReLU between."""
    model = nn.Sequential()
    for _ in range(layers):
        model.extend([nn.Linear(width, width), nn.ReLU()])
    return model.append(nn.Linear(width, CLASSES))
