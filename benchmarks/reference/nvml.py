"""The rows of nvml_rows.csv: whole trainings of torchvision and transformers models, by NVML.

A row's value is the device's used bytes, largest minus first sample: reserved bytes and what
libraries load lazily, without the context. Built as nvml_rows_HOW.md says; needs torchvision and
transformers (`make bench-accuracy`).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.reference.replaying import Build

MIB = 2**20
ITERATIONS = 4
CAPACITY_BYTES = {"RTX 3060": 12_622_168_064, "RTX 4060": 8_318_222_336}
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


def build(row: Row) -> Build:
    """Return what makes the row's training step."""
    return _convolutional(row) if row.is_convolutional else _language(row)


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


def _lengths(row: Row) -> list[int]:
    """Return the padded lengths of the four batches: large batches hold a sentence of 128."""
    return [128] * ITERATIONS


def _language(row: Row) -> Build:
    def build(device: torch.device) -> Callable[[], None]:
        model = _language_model(row.model).to(device)
        model.train()
        optimizer = _optimizer(row, model)
        kept: dict[str, Any] = {}
        lengths = iter(_lengths(row))

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
