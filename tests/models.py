"""Well-known models in plain PyTorch, as torchvision and Transformers build them.

What decides memory is kept: which operators run, in place or not, and what autograd saves. The
number of parameters of each is asserted where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Build = Callable[[torch.device], Callable[[], Any]]


def count(model: nn.Module, *, trainable: bool = False) -> int:
    """Return the number of parameters, or of those that are trained."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def training(
    make_model: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], torch.Tensor],
    make_optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer],
    *,
    set_to_none: bool = True,
) -> Build:
    """Return a builder of plain training steps: clear gradients, forward, backward, update."""

    def build(device: torch.device) -> Callable[[], None]:
        model = make_model().to(device)
        optimizer = make_optimizer(model.parameters())

        def step() -> None:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model).backward()
            optimizer.step()

        return step

    return build


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1×1, 3×3, 1×1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet50(classes: int) -> nn.Sequential:
    """ResNet-50 for images [B, 3, H, W]."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for width, blocks, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(blocks):
            layers.append(Bottleneck(inputs, width, 1 if index else first_stride))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Adapter(nn.Module):
    """A low-rank path beside a frozen convolution: dropout, convolution to `rank` channels, 1×1."""

    def __init__(self, base: nn.Conv2d, rank: int, dropout: float) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        size, stride, padding = base.kernel_size, base.stride, base.padding
        self.down = nn.Conv2d(base.in_channels, rank, size, stride, padding, bias=False)  # type: ignore[arg-type]
        self.up = nn.Conv2d(rank, base.out_channels, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        return result + self.up(self.down(self.dropout(x))) * 2.0


def with_adapters(model: nn.Module, rank: int, dropout: float) -> nn.Module:
    """Freeze a model and put an adapter beside each of its convolutions."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                setattr(parent, name, Adapter(child, rank, dropout))
    return model


def vgg16(classes: int = 1000) -> nn.Sequential:
    """VGG-16 for images [B, 3, 224, 224]."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2, 2))
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for features in (512 * 49, 4096):
        layers += [nn.Linear(features, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


class VisionBlock(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """ViT-L/16 for images [B, 3, 224, 224]."""

    def __init__(self, width: int = 1024, layers: int = 24, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 14 * 14 + 1, width))
        self.blocks = nn.Sequential(*(VisionBlock(width, 16, 4 * width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        logits: torch.Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


class SoftmaxOf2021(torch.autograd.Function):
    """Softmax over the last dimension as PyTorch had it until 1.10: the scores are saved too.

    Since pull request 65242 the result alone is saved (pytorch issue 64000).
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        out = scores.softmax(-1)
        ctx.save_for_backward(scores, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        scores, out = ctx.saved_tensors
        result: torch.Tensor = torch.ops.aten._softmax_backward_data(gradient, out, -1, scores.dtype)
        return result


class BertLayer(nn.Module):
    """Unfused attention and an MLP, each before a norm, as Transformers had it in 2021."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return x [B, L, width] through the layer; mask [B, 1, 1, L] is added to the scores."""
        query, key, value = (
            part(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2)
        scores = scores / math.sqrt(query.size(-1))
        scores = scores + mask
        weights: torch.Tensor = SoftmaxOf2021.apply(scores)
        weights = F.dropout(weights, 0.1, self.training)
        mixed = (weights @ value).transpose(1, 2).reshape(x.shape)
        x = self.norm1(F.dropout(self.out(mixed), 0.1, self.training) + x)
        return self.norm2(F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training) + x)


class Bert(nn.Module):
    """BERT-large with a pooled classifier, or with one of `classes` for each token.

    Args:
        classes: Labels.
        per_token: Whether every token gets one.
        checkpointed: Whether each layer is run again in backward (the re-entrant variant).
    """

    def __init__(
        self, classes: int = 2, *, width: int = 1024, layers: int = 24, per_token: bool = False,
        checkpointed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.per_token, self.checkpointed = per_token, checkpointed
        self.words, self.kinds = nn.Embedding(30522, width), nn.Embedding(2, width)
        self.positions, self.norm = nn.Embedding(512, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(BertLayer(width, width // 64) for _ in range(layers))
        self.pooler = None if per_token else nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, classes], or [B, L, classes] per token, of tokens [B, L]."""
        x = self.words(tokens) + self.kinds(torch.zeros_like(tokens))
        x = x + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        x = F.dropout(self.norm(x), 0.1, self.training)
        mask = torch.zeros(len(tokens), 1, 1, tokens.size(1), device=tokens.device)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, use_reentrant=True) if self.checkpointed else layer(x, mask)
        if self.pooler is not None:
            x = F.dropout(torch.tanh(self.pooler(x[:, 0])), 0.1, self.training)
        logits: torch.Tensor = self.head(x)
        return logits
