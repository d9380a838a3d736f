"""The rows of nvml_rows.csv: whole trainings of torchvision and transformers models, by NVML.

A row's value is the device's used bytes, largest minus first sample: reserved bytes and what
libraries load lazily, without the context. Built as nvml_rows_HOW.md says; needs torchvision and
transformers (`make bench-accuracy`).
"""

from __future__ import annotations

import csv
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.reference.replaying import Build
from benchmarks.reference.scores import Scored
from tuner.memory.calibration import Calibration, Measured
from tuner.memory.cuda_rules import CudaDevice, cuda_rules
from tuner.memory.prediction import Estimate, estimate, predict
from tuner.memory.targets import Target, resolve_target
from tuner.memory.trace import trace_build

MIB = 2**20
ITERATIONS = 4
DRAWS = 5
_LONGEST = 128
LARGEST_READING_BYTES = {"RTX 3060": 11_764 * MIB, "RTX 4060": 7_820 * MIB}
CUBLAS_WORKSPACE_BYTES = 8_519_680
LAZILY_LOADED_BYTES = {"RTX 3060": 18 * MIB, "RTX 4060": 14 * MIB}  # nvml_rows_HOW.md
CNNS = (
    "ConvNeXtTiny", "ConvNeXtBase", "ResNet101", "MobileNetV2", "MobileNetV3Large", "MobileNetV3Small",
    "MnasNet", "RegNetX400MF", "RegNetY400MF", "VGG16",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One measured training.

    Attributes:
        model, optimizer, batch_size, gpu: What was trained, where.
        zero_grad: `start`, `before_backward` or `after_step` of an iteration.
        cublas_workspaces: Whether cuBLAS had its default workspaces.
        measured_bytes: The largest NVML reading; for a run that died, before it did.
        out_of_memory: Whether it died of CUDA out of memory.
        capped_bytes: The same under a cap near a prediction, or None.
        published: Other estimators' predictions by name, bytes.
    """

    model: str
    optimizer: str
    batch_size: int
    gpu: str
    zero_grad: str
    cublas_workspaces: bool
    measured_bytes: float
    out_of_memory: bool
    capped_bytes: float | None
    published: dict[str, float]

    @property
    def is_convolutional(self) -> bool:
        """Whether it is a torchvision model."""
        return self.model in CNNS


def rows(folder: Path) -> list[Row]:
    """Return every row of nvml_rows.csv."""
    return list(_rows((folder / "nvml_rows.csv").read_text()))


def _rows(text: str) -> Iterator[Row]:
    # Rows that do not say: `start`. With `before_backward`, one row's allocated bytes alone would
    # exceed what was measured (ConvNeXtBase, RMSprop, batch 200: 6,859 against 6,726 MiB).
    modes = {"": "start", "0": "start", "1": "before_backward", "2": "after_step"}
    for r in csv.DictReader(text.splitlines()):
        yield Row(
            model=r["model"],
            optimizer=r["optimizer"],
            batch_size=int(float(r["batch_size"])),
            gpu=r["gpu_name"].removeprefix("NVIDIA GeForce "),
            zero_grad=modes[r["zero_grad_mode"]],
            cublas_workspaces=r["zero_grad_mode"] != "",
            measured_bytes=float(r["ground_mib"]) * MIB,
            out_of_memory=r["real_oom"] == "1",
            capped_bytes=float(r["ground2_mib_reconstructed"]) * MIB
            if r["ground2_mib_reconstructed"]
            else None,
            published={
                name: float(r[f"{name}_pred_bytes"])
                for name in ("xmem", "dnnmem", "schedtune", "llmem")
                if r[f"{name}_pred_bytes"]
            },
        )


def lengths_of(row: Row) -> list[tuple[int, ...]]:
    """Return the padded lengths of the four batches, as often as they are uncertain.

    Batches of 16 and more always hold a sentence of 128 tokens. Below, lengths are not published:
    they are drawn from sentences of which 24 % have 128 tokens or more (so that four batches of 16
    all reach 128 with 95 %), the others 10 to 127; `DRAWS` times, with a fixed seed.
    """
    full = (_LONGEST,) * ITERATIONS
    if row.is_convolutional or row.batch_size >= 16:
        return [full]
    rng = random.Random(row.batch_size)

    def sentence() -> int:
        return _LONGEST if rng.random() < 0.24 else rng.randint(10, _LONGEST - 1)

    return [
        tuple(max(sentence() for _ in range(row.batch_size)) for _ in range(ITERATIONS)) for _ in range(DRAWS)
    ]


def build(row: Row, lengths: tuple[int, ...] = ()) -> Build:
    """Return what makes the row's training step; `lengths` are those of its batches."""
    return _convolutional(row) if row.is_convolutional else _language(row, lengths or lengths_of(row)[0])


def _optimizer(row: Row, model: nn.Module) -> torch.optim.Optimizer:
    return getattr(torch.optim, row.optimizer)(model.parameters(), lr=1e-3)  # type: ignore[no-any-return]


def _convolutional(row: Row) -> Build:
    import torchvision.models as models

    makers: dict[str, Callable[[], nn.Module]] = {
        "ConvNeXtTiny": models.convnext_tiny,
        "ConvNeXtBase": models.convnext_base,
        "ResNet101": models.resnet101,
        "MobileNetV2": models.mobilenet_v2,
        "MobileNetV3Large": lambda: models.mobilenet_v3_large(num_classes=10),
        "MobileNetV3Small": lambda: models.mobilenet_v3_small(num_classes=10),
        "MnasNet": lambda: models.MNASNet(alpha=1.0, num_classes=10),
        "RegNetX400MF": models.regnet_x_400mf,
        "RegNetY400MF": models.regnet_y_400mf,
        "VGG16": models.vgg16,
    }

    def build(device: torch.device) -> Callable[[], None]:
        model = makers[row.model]().to(device)
        optimizer, criterion = _optimizer(row, model), nn.CrossEntropyLoss()
        kept: dict[str, Any] = {}

        def step() -> None:
            if row.zero_grad == "start":
                optimizer.zero_grad()
            kept["inputs"] = torch.empty(row.batch_size, 3, 86, 86, device=device)
            kept["labels"] = torch.zeros(row.batch_size, dtype=torch.long, device=device)
            kept["outputs"] = model(kept["inputs"])
            kept["loss"] = criterion(kept["outputs"], kept["labels"])
            if row.zero_grad == "before_backward":
                optimizer.zero_grad()
            kept["loss"].backward()
            optimizer.step()
            kept["predictions"] = torch.max(kept["outputs"], 1)
            if row.zero_grad == "after_step":
                optimizer.zero_grad()

        step.model, step.optimizer = model, optimizer  # type: ignore[attr-defined]
        return step

    return build


def _language(row: Row, padded: tuple[int, ...]) -> Build:
    def build(device: torch.device) -> Callable[[], None]:
        model = _language_model(row.model).to(device)
        model.train()
        optimizer = _optimizer(row, model)
        kept: dict[str, Any] = {}
        lengths = iter(padded)

        def step() -> None:
            if row.zero_grad == "start":
                optimizer.zero_grad()
            shape = (row.batch_size, next(lengths))
            batch = {
                name: torch.ones(shape, dtype=torch.long, device=device)
                for name in ("input_ids", "attention_mask", "labels")
            }
            kept["batch"] = batch
            kept["outputs"] = model(**batch)
            if row.zero_grad == "before_backward":
                optimizer.zero_grad()
            kept["outputs"].loss.backward()
            optimizer.step()
            if row.zero_grad == "after_step":
                optimizer.zero_grad()

        step.model, step.optimizer = model, optimizer  # type: ignore[attr-defined]
        return step

    return build


def _language_model(name: str) -> Any:
    import transformers as t

    gpt2 = {"vocab_size": 50257, "n_embd": 768, "n_head": 12, "n_inner": 3072}
    if name == "openai-community/gpt2":
        config: Any = t.GPT2Config(n_positions=1024, n_layer=12, **gpt2)
    elif name == "distilbert/distilgpt2":
        config = t.GPT2Config(n_positions=1024, n_layer=6, **gpt2)
    elif name == "cerebras/Cerebras-GPT-111M":
        config = t.GPT2Config(
            n_positions=2048, n_layer=10, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            activation_function="gelu", **gpt2,
        )  # fmt: skip
    elif name == "EleutherAI/gpt-neo-125M":
        config = t.GPTNeoConfig(
            vocab_size=50257, max_position_embeddings=2048, hidden_size=768, num_layers=12, num_heads=12,
            intermediate_size=3072, window_size=256, attention_types=[[["global", "local"], 6]],
            resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
        )  # fmt: skip
    elif name == "facebook/opt-125m":
        config = t.OPTConfig(
            vocab_size=50272, max_position_embeddings=2048, hidden_size=768, num_hidden_layers=12,
            num_attention_heads=12, ffn_dim=3072, activation_function="relu", dropout=0.1,
            attention_dropout=0.0,
            word_embed_proj_dim=768, do_layer_norm_before=True,
        )  # fmt: skip
    else:
        config = t.T5Config(
            vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_decoder_layers=6,
            num_heads=8,
            feed_forward_proj="relu", dropout_rate=0.1, decoder_start_token_id=0,
        )  # fmt: skip
        return t.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
    eager = name == "EleutherAI/gpt-neo-125M"
    return t.AutoModelForCausalLM.from_config(config, attn_implementation="eager" if eager else "sdpa")


def target_of(row: Row) -> Target:
    """Return the row's card, as the figures are counted: without the context, which is in neither.

    What a run can reach is the largest reading on that card, of runs that died.
    """
    profile = resolve_target(row.gpu)
    return replace(
        profile,
        capacity_bytes=LARGEST_READING_BYTES[row.gpu],
        context_bytes=LAZILY_LOADED_BYTES[row.gpu],
        context_spread_bytes=0,
    )


def estimates(row: Row) -> list[Estimate]:
    """Trace a row, once for each draw of its batches' lengths."""
    target = target_of(row)
    assert target.compute_capability is not None
    device = CudaDevice(
        compute_capability=target.compute_capability,
        cublas_workspace_bytes=CUBLAS_WORKSPACE_BYTES if row.cublas_workspaces else 0,
        cublaslt_workspace_bytes=MIB,  # torch 2.6 takes one of its own
    )
    rules = cuda_rules(device)
    return [
        estimate(trace_build(build(row, lengths), rules, ITERATIONS), target) for lengths in lengths_of(row)
    ]


def score(row: Row, found: list[Estimate], calibration: Calibration, seconds: float) -> Scored:
    """Predict a row from its estimates; several draws give the median, and the widest band."""
    target = target_of(row)
    predictions = [
        predict(one, target, calibration, context_bytes=None, budget_bytes=target.capacity_bytes)
        for one in found
    ]
    devices = [prediction.device for prediction in predictions if prediction.device is not None]
    required = statistics.median(p.required.expected for p in predictions if p.required is not None)
    return Scored(
        name=f"{row.model} {row.optimizer} batch {row.batch_size} {row.gpu}",
        family=row.model,
        measured_bytes=row.measured_bytes,
        predicted_bytes=statistics.median(band.expected for band in devices),
        low_bytes=min(band.low for band in devices),
        high_bytes=max(band.high for band in devices),
        out_of_memory=row.out_of_memory,
        fits_probability=statistics.mean(p.fits_probability or 0.0 for p in predictions),
        seconds=seconds / len(found),
        published=row.published,
        extra={"required_bytes": required, "capped_bytes": row.capped_bytes},
    )


def measured(row: Row, found: list[Estimate]) -> Measured:
    """Return what a row teaches a calibration."""
    reserved_bytes = round(statistics.median(one.reserved_bytes or 0 for one in found))
    return Measured(
        context_bytes=LAZILY_LOADED_BYTES[row.gpu],
        allocator_bytes=reserved_bytes,
        device_bytes=round(row.measured_bytes),
        mix=found[0].mix,
    )
