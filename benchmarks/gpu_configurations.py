"""The training programs of `gpu_check.py`, each measured on a GPU and predicted without it.

A program is `build(device) -> step`. On a GPU it takes a few hundred MiB to 4 GiB, so that a card
with 8 GiB runs them all; on a CPU the same code runs at a few MiB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.nn.attention import SDPBackend

from benchmarks.gpu_models import (
    Attention,
    Gpt,
    Recurrent,
    batches_of,
    depthwise,
    encoder_with_mask,
    gathered_rows,
    mlp,
    resnet,
    tokens_of,
    vgg,
)

Step = Callable[[], None]
Build = Callable[[torch.device], Step]


@dataclass(frozen=True)
class Configuration:
    """A program to predict and to measure.

    Attributes:
        about: One line for people.
        build: Makes model and optimizer on a device and returns its training step.
        steps: How many steps are run.
        quick: Whether `--quick` includes it.
        cuda_only: Whether PyTorch runs it on GPUs alone.
        capability: The lowest compute capability that runs it.
        capped: Whether the smallest cap under which it runs is looked for.
        warm: Whether the process warms up first, as a trial's does.
    """

    about: str
    build: Build
    steps: int = 3
    quick: bool = False
    cuda_only: bool = False
    capability: tuple[int, int] = (0, 0)
    capped: bool = False
    warm: bool = False


@dataclass(frozen=True)
class How:
    """How a model is trained.

    Attributes:
        optimizer: Makes the optimizer of parameters.
        autocast: The lower precision, or None; float16 comes with a gradient scaler.
        accumulate: Batches to each optimizer step.
        set_to_none: Of `zero_grad`.
        clip: Whether the norm of the gradients is clipped.
    """

    optimizer: Callable[[Any], optim.Optimizer] = optim.AdamW
    autocast: torch.dtype | None = None
    accumulate: int = 1
    set_to_none: bool = True
    clip: bool = False


def trained(model: nn.Module, make_batch: Callable[[], Any], device: torch.device, how: How) -> Step:
    """Return a step of cross entropy that trains a model on new batches."""
    model.to(device)
    optimizer = how.optimizer(model.parameters())
    scaler = torch.amp.GradScaler(device.type) if how.autocast is torch.float16 else None

    def lower_precision() -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if how.autocast is None else torch.autocast(device.type, how.autocast)

    def step() -> None:
        optimizer.zero_grad(set_to_none=how.set_to_none)
        for _ in range(how.accumulate):
            x, y = make_batch()
            with lower_precision():
                loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
            (loss if scaler is None else scaler.scale(loss)).backward()
        if how.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()

    return step


_MOMENTUM = partial(optim.SGD, lr=0.01, momentum=0.9)


def _images(
    make: Callable[..., nn.Module],
    on_gpu: tuple[int, int],
    how: How = How(optimizer=_MOMENTUM),
    *,
    channels_last: bool = False,
    benchmark: bool = False,
) -> Build:
    """Return a program on (batch, side) images; 8 of 64 pixels on a CPU."""

    def build(device: torch.device) -> Step:
        torch.backends.cudnn.benchmark = benchmark
        batch, side = on_gpu if device.type == "cuda" else (8, 64)
        form = torch.channels_last if channels_last else torch.contiguous_format
        model: Any = make(large=device.type == "cuda")
        make_batch = batches_of((batch, 3, side, side), device, form)
        return trained(model.to(memory_format=form), make_batch, device, how)

    return build


def _gpt(how: How = How(), *, dropout: float = 0.0, checkpointing: str = "", cpu_batch: int = 4) -> Build:
    def build(device: torch.device) -> Step:
        width, layers, batch, length = (768, 6, 8, 512) if device.type == "cuda" else (64, 2, cpu_batch, 64)
        vocabulary = 16 * width
        model = Gpt(width, layers, vocabulary, longest=length, dropout=dropout, checkpointing=checkpointing)
        return trained(model, tokens_of(batch, [length], vocabulary, device), device, how)

    return build


def _varying(device: torch.device) -> Step:
    lengths = [48, 320, 96, 512, 208, 64, 448, 144, 384, 80, 272, 512]
    width, layers, divisor = (512, 6, 1) if device.type == "cuda" else (64, 2, 4)
    model = Gpt(width, layers, 8192 // divisor, longest=512 // divisor)
    make_batch = tokens_of(4, [length // divisor for length in lengths], 8192 // divisor, device)
    return trained(model, make_batch, device, How())


def _encoder(device: torch.device) -> Step:
    width, layers, batch, length = (512, 6, 16, 384) if device.type == "cuda" else (128, 2, 8, 48)
    model = encoder_with_mask(width, layers)
    return trained(model, batches_of((batch, length, width), device, per_position=True), device, How())


def _recurrent(kind: type[nn.RNNBase], layers: int = 1, **options: Any) -> Build:
    def build(device: torch.device) -> Step:
        hidden, batch, length = (1024, 64, 200) if device.type == "cuda" else (64, 32, 40)
        cell = kind(hidden // 2, hidden, layers, batch_first=True, **options)  # type: ignore[arg-type]
        model = Recurrent(cell, hidden * (2 if cell.bidirectional else 1))
        return trained(model, batches_of((batch, length, hidden // 2), device), device, How())

    return build


def _attention(
    dtype: torch.dtype, backend: SDPBackend | None = None, *, masked: bool = False, causal: bool = True
) -> Build:
    def build(device: torch.device) -> Step:
        width, batch, length = (1024, 8, 1024) if device.type == "cuda" else (128, 4, 128)
        model = Attention(width, backend, causal=causal, masked_length=length if masked else 0).to(dtype)
        return trained(model, batches_of((batch, length, width), device, dtype=dtype), device, How(_MOMENTUM))

    return build


def _mlp(how: How) -> Build:
    def build(device: torch.device) -> Step:
        width, batch = (2048, 256) if device.type == "cuda" else (256, 64)
        return trained(mlp(width, layers=8), batches_of((batch, width), device), device, how)

    return build


def _embedding(device: torch.device) -> Step:
    rows, width, batch, length = (100_000, 256, 64, 1024) if device.type == "cuda" else (5000, 64, 32, 128)
    model = nn.Sequential(nn.Embedding(rows, width), nn.Linear(width, 10))
    return trained(model, tokens_of(batch, [length], rows, device, classes=10), device, How(_MOMENTUM))


def _index_put(device: torch.device) -> Step:
    rows, width, count = (100_000, 256, 65_536) if device.type == "cuda" else (5000, 64, 4096)
    return trained(
        gathered_rows(rows, width),
        tokens_of(count, [1], rows, device, classes=10),
        device,
        How(_MOMENTUM),
    )


def _vocabulary(device: torch.device) -> Step:
    words, width, batch, length = (50_257, 256, 6, 512) if device.type == "cuda" else (5000, 64, 4, 32)
    model = nn.Sequential(nn.Embedding(words, width), nn.LayerNorm(width), nn.Linear(width, words))
    return trained(model, tokens_of(batch, [length], words, device), device, How())


_HALF, _BRAIN, _FULL = torch.float16, torch.bfloat16, torch.float32
_resnet = partial(_images, resnet, (64, 160))
_vgg = partial(_images, vgg, (32, 128))
_only = partial(Configuration, cuda_only=True)
_AMPERE = (8, 0)

_MODELS = {
    "resnet": Configuration("residual CNN with BatchNorm, SGD with momentum", _resnet(), quick=True),
    "resnet_channels_last": Configuration("the same, channels_last", _resnet(channels_last=True)),
    "resnet_benchmark": Configuration("the same with cudnn.benchmark", _resnet(benchmark=True)),
    "resnet_bf16": Configuration(
        "the same, channels_last under bf16 autocast",
        _resnet(How(_MOMENTUM, autocast=_BRAIN), channels_last=True),
        capability=_AMPERE,
    ),
    "vgg": Configuration("plain convolutions and large linear layers", _vgg(), quick=True),
    "depthwise": Configuration("inverted residuals", _images(depthwise, (64, 128))),
    "transformer_fp32": Configuration("decoder, AdamW", _gpt(), quick=True),
    "transformer_dropout": Configuration("the same with dropout", _gpt(dropout=0.1)),
    "transformer_bf16": Configuration(
        "the same under bf16 autocast", _gpt(How(autocast=_BRAIN)), quick=True, capability=_AMPERE
    ),
    "transformer_fp16": Configuration("the same, fp16 and a gradient scaler", _gpt(How(autocast=_HALF))),
    "encoder_mask": Configuration("nn.TransformerEncoder with a padding mask", _encoder, quick=True),
    "lstm": Configuration("one layer", _recurrent(nn.LSTM), quick=True),
    "lstm_bidirectional": Configuration(
        "two layers, both directions, dropout", _recurrent(nn.LSTM, 2, bidirectional=True, dropout=0.2)
    ),
    "gru": Configuration("one layer", _recurrent(nn.GRU)),
}
_ATTENTION = {
    "sdpa_fp32": Configuration("attention as PyTorch chooses, fp32", _attention(_FULL)),
    "sdpa_bf16": Configuration("the same in bf16", _attention(_BRAIN), quick=True, capability=_AMPERE),
    "sdpa_mask": Configuration(
        "bf16 with a boolean mask", _attention(_BRAIN, masked=True, causal=False), capability=_AMPERE
    ),
    "sdpa_math": Configuration(
        "fp32, the math backend forced", _attention(_FULL, SDPBackend.MATH), quick=True
    ),
    "sdpa_flash": Configuration(
        "bf16, flash forced", _attention(_BRAIN, SDPBackend.FLASH_ATTENTION), capability=_AMPERE
    ),
    "sdpa_efficient": _only(
        "bf16, memory-efficient forced",
        _attention(_BRAIN, SDPBackend.EFFICIENT_ATTENTION),
        capability=_AMPERE,
    ),
    "sdpa_cudnn": _only(
        "bf16, cuDNN forced", _attention(_BRAIN, SDPBackend.CUDNN_ATTENTION), capability=_AMPERE
    ),
}
_OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": partial(optim.SGD, lr=0.01),
    "sgd_momentum": _MOMENTUM,
    "adam": optim.Adam,
    "adam_foreach": partial(optim.Adam, foreach=True),
    "adam_for_loop": partial(optim.Adam, foreach=False),
    "adam_fused": partial(optim.Adam, fused=True),
    "adam_capturable": partial(optim.Adam, capturable=True),
    "adamw": optim.AdamW,
    "rmsprop": optim.RMSprop,
    "adagrad": optim.Adagrad,
    "adafactor": optim.Adafactor,
    "nadam": optim.NAdam,
}
_STEPS = {
    "accumulation": Configuration("four batches to an optimizer step", _mlp(How(accumulate=4)), quick=True),
    "gradients_kept": Configuration("zero_grad(set_to_none=False)", _mlp(How(set_to_none=False))),
    "clipping": Configuration("clip_grad_norm_", _mlp(How(clip=True))),
    "checkpointing": Configuration(
        "non-reentrant, of each block", _gpt(checkpointing="non-reentrant"), quick=True
    ),
    "checkpointing_reentrant": Configuration("reentrant", _gpt(checkpointing="reentrant")),
    "embedding_sort": Configuration(
        "many indices into a table, which backward sorts", _embedding, quick=True
    ),
    "index_put": Configuration("rows gathered by index, which backward adds up", _index_put),
    "large_vocabulary": Configuration("cross entropy over many words", _vocabulary, quick=True),
    "varying_length": Configuration("small batches of 12 lengths: fragmentation", _varying, 12, quick=True),
    "after_warm_up": _only("adam after a warm-up, as in a trial", _mlp(How(optim.Adam)), warm=True),
}
_CAPPED = {
    "transformer_cap": Configuration(
        "the smallest cap that transformer_fp32 runs under", _gpt(cpu_batch=128), capped=True, quick=True
    ),
    "vgg_cap": _only("the same of vgg: cuDNN makes do with less", _vgg(), capped=True),
}

CONFIGURATIONS: dict[str, Configuration] = {
    **_MODELS,
    **_ATTENTION,
    **{
        name: Configuration(
            f"MLP, torch.optim, {name.replace('_', ' ')}",
            _mlp(How(optimizer)),
            quick=name in ("adam", "adam_fused", "sgd_momentum"),
            cuda_only=name == "adam_capturable",
        )
        for name, optimizer in _OPTIMIZERS.items()
    },
    **_STEPS,
    **_CAPPED,
}
