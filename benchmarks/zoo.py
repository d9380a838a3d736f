"""A zoo of small models, each a training step, on which traces are compared with real runs.

Each entry is `build(device) -> step`, as `tuner.predict_peak` takes it: the same code is traced on
fake tensors and run for real below PyTorch's profiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Step = Callable[[], None]
Build = Callable[[torch.device], Step]
ZOO: dict[str, Build] = {}


def in_zoo(build: Build) -> Build:
    """Add a builder to the zoo under its name."""
    ZOO[build.__name__] = build
    return build


def trained(
    model: nn.Module,
    make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """Return a step of cross entropy on new batches."""
    optimizer = optimizer or torch.optim.Adam(model.parameters())

    def step() -> None:
        x, y = make_batch()
        optimizer.zero_grad()
        logits = model(x)
        F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        optimizer.step()

    return step


def batches(*shape: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return a maker of random inputs of a shape, with labels."""
    return lambda: (torch.randn(*shape), torch.zeros(shape[0], dtype=torch.long))


def tokens(batch: int, length: int, *, per_token: bool) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return a maker of token ids, with a label per token or per row."""
    labels = (batch, length) if per_token else (batch,)
    return lambda: (torch.zeros(batch, length, dtype=torch.long), torch.zeros(labels, dtype=torch.long))


def pooled(*layers: nn.Module, channels: int, classes: int = 10) -> nn.Sequential:
    """Return layers with global average pooling and a linear head."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Through(nn.Module):
    """A model from a function of its input; submodules are given by name."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        return self.function(self, x)


@in_zoo
def mlp(device: torch.device) -> Step:
    layers = (nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    return trained(nn.Sequential(*layers).to(device), batches(512, 256))


@in_zoo
def mlp_dropout_momentum(device: torch.device) -> Step:
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Dropout(0.1), nn.Linear(1024, 10))
    return trained(model, batches(512, 256), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@in_zoo
def cnn(device: torch.device) -> Step:
    first = (nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    return trained(
        pooled(*first, nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), channels=64), batches(64, 3, 32, 32)
    )


@in_zoo
def cnn_batchnorm(device: torch.device) -> Step:
    first = (nn.Conv2d(1, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU())
    second = (nn.Conv2d(48, 48, 3, padding=1), nn.BatchNorm2d(48), nn.ReLU(), nn.MaxPool2d(2))
    return trained(pooled(*first, *second, channels=48), batches(128, 1, 16, 16))


@in_zoo
def residual(device: torch.device) -> Step:
    def block() -> nn.Module:
        inner = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
        return Through(lambda self, x: F.relu(x + self.inner(x)), inner=inner)

    blocks = (block(), block(), block())
    return trained(pooled(nn.Conv2d(3, 64, 3, padding=1), *blocks, channels=64), batches(32, 3, 32, 32))


@in_zoo
def depthwise(device: torch.device) -> Step:
    first = (nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.BatchNorm2d(64), nn.ReLU6())
    return trained(pooled(*first, nn.Conv2d(64, 96, 1), nn.Hardswish(), channels=96), batches(64, 3, 32, 32))


@in_zoo
def upsampling(device: torch.device) -> Step:
    down = (nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.LeakyReLU())
    up = (nn.ConvTranspose2d(32, 16, 2, stride=2), nn.Upsample(scale_factor=2))
    return trained(pooled(*down, *up, channels=16), batches(32, 3, 32, 32))


@in_zoo
def conv1d(device: torch.device) -> Step:
    first = (nn.Conv1d(16, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, 64, 5, padding=2, stride=2), nn.ReLU())
    head = (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10))
    return trained(nn.Sequential(*first, *head), batches(64, 16, 256))


@in_zoo
def two_heads(device: torch.device) -> Step:
    """One wide tensor feeds two consumers: its gradients are added in place."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = self.trunk(x)
        return self.left(wide) + self.right(wide)

    heads = {"left": nn.Linear(2048, 10), "right": nn.Linear(2048, 10)}
    return trained(Through(forward, trunk=nn.Linear(64, 2048), **heads), batches(2048, 64))


@in_zoo
def embedding(device: torch.device) -> Step:
    model = Through(
        lambda self, x: self.head(self.table(x).mean(1)),
        table=nn.Embedding(20000, 128),
        head=nn.Linear(128, 10),
    )
    return trained(model, tokens(256, 64, per_token=False))


@in_zoo
def transformer_encoder(device: torch.device) -> Step:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 2)
    return trained(nn.Sequential(encoder, nn.Flatten(), nn.Linear(128 * 64, 10)), batches(32, 64, 128))


@in_zoo
def transformer_decoder(device: torch.device) -> Step:
    layer = nn.TransformerDecoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.head(self.decoder(h, h, tgt_mask=mask, tgt_is_causal=True))

    parts = {
        "table": nn.Embedding(500, 128),
        "decoder": nn.TransformerDecoder(layer, 2),
        "head": nn.Linear(128, 500),
    }
    return trained(Through(forward, **parts), tokens(16, 64, per_token=True))


@in_zoo
def attention_by_hand(device: torch.device) -> Step:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.joined(self.norm(x)).chunk(3, -1)
        return self.head((torch.softmax(query @ key.transpose(-1, -2) / 11, -1) @ value).mean(1))

    parts = {"norm": nn.LayerNorm(128), "joined": nn.Linear(128, 384), "head": nn.Linear(128, 10)}
    return trained(Through(forward, **parts), batches(32, 128, 128))


@in_zoo
def attention_fused(device: torch.device) -> Step:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        parts = (part.view(x.shape[0], -1, 4, 32).transpose(1, 2) for part in self.joined(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))

    return trained(
        Through(forward, joined=nn.Linear(128, 384), head=nn.Linear(128, 10)), batches(32, 256, 128)
    )


def _recurrent(cell: nn.Module, outputs: int) -> nn.Module:
    return Through(lambda self, x: self.head(self.cell(x)[0][:, -1]), cell=cell, head=nn.Linear(outputs, 10))


@in_zoo
def lstm(device: torch.device) -> Step:
    return trained(_recurrent(nn.LSTM(64, 128, 2, batch_first=True), 128), batches(64, 50, 64))


@in_zoo
def lstm_bidirectional(device: torch.device) -> Step:
    cell = nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True, dropout=0.1)
    return trained(_recurrent(cell, 256), batches(64, 50, 64))


@in_zoo
def gru(device: torch.device) -> Step:
    return trained(_recurrent(nn.GRU(64, 128, batch_first=True), 128), batches(64, 30, 64))


@in_zoo
def rnn(device: torch.device) -> Step:
    return trained(_recurrent(nn.RNN(64, 128, batch_first=True), 128), batches(64, 30, 64))


@in_zoo
def gradient_accumulation(device: torch.device) -> Step:
    model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 10))
    optimizer, make_batch = torch.optim.AdamW(model.parameters()), batches(128, 256)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(4):
            x, y = make_batch()
            (F.cross_entropy(model(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _checkpointed(*, use_reentrant: bool) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=use_reentrant)
        return self.head(x)

    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
    )
    return Through(forward, layers=layers, head=nn.Linear(256, 10))


@in_zoo
def checkpointing(device: torch.device) -> Step:
    return trained(_checkpointed(use_reentrant=False), batches(1024, 256))


@in_zoo
def checkpointing_reentrant(device: torch.device) -> Step:
    def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batches(1024, 256)()
        return x.requires_grad_(), y

    return trained(_checkpointed(use_reentrant=True), make_batch)


@in_zoo
def shared_weights(device: torch.device) -> Step:
    table, output = nn.Embedding(5000, 128), nn.Linear(128, 5000, bias=False)
    output.weight = table.weight
    model = Through(
        lambda self, x: self.output(F.gelu(self.middle(self.table(x)))),
        table=table,
        middle=nn.Linear(128, 128),
        output=output,
    )
    return trained(model, tokens(8, 64, per_token=True))


@in_zoo
def sizes_from_tensors(device: torch.device) -> Step:
    """A constructor that reads tensors: its `setup` must run on real ones."""
    widths = (torch.linspace(1, 4, 4) * 64).round().int().tolist()
    model = nn.Sequential()
    for inputs, outputs in zip([64, *widths], widths, strict=False):
        model.append(nn.Linear(inputs, outputs)).append(nn.SiLU())
    model.append(nn.Linear(widths[-1], 10))
    nn.init.trunc_normal_(model[0].weight, std=0.02)
    return trained(model, batches(1024, 64))


@in_zoo
def pooling_channels_last(device: torch.device) -> Step:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3), nn.AvgPool2d(2)
    ).to(memory_format=torch.channels_last)

    def step() -> None:
        images = torch.randn(64, 3, 64, 64).to(memory_format=torch.channels_last)
        model(images).pow(2).mean().backward()

    return step


@in_zoo
def attention_mask(device: torch.device) -> Step:
    projection = nn.Linear(64, 192)
    mask = torch.ones(128, 128, dtype=torch.bool).tril()

    def step() -> None:
        qkv = projection(torch.randn(64, 128, 64)).view(64, 128, 3, 4, 16)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask).pow(2).mean().backward()

    return step
