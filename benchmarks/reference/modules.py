"""The rows of modules.csv: single modules, forward and backward, in the steady state.

A row's value is the peak of the third call and later: gradients of leaves are kept from call to
call. What is alive during the calls (unused modules, fixed gradients) follows modules_HOW.md.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.reference.replaying import A100, H100, Build, allocated_of_last_step
from tuner.memory.cuda_rules import CudaDevice

# Memory of other work that is in the rows of a group, a constant: judged by differences.
WITH_LEFTOVERS = ("embedding", "distill_jsd_loss")
_VOCABULARIES = {
    "llama_2_7b": 32_000, "llama_3_8b": 128_256, "qwen2.5_7b": 152_064, "qwen2.5_14b": 152_064,
    "qwen2.5_72b": 152_064, "deepseek_v2_lite": 102_400, "deepseek_v3": 129_280,
}  # fmt: skip
bf16 = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """One measured module.

    Attributes:
        kernel, provider, mode: What was run.
        x_name: What `x` is: `V`, `BT`, `N`, `T`, `H`, `ffn_local`, `model_config`.
        x: Its value, as text.
        config: Everything else.
        gpu: Where it ran.
        measured_bytes: `max_memory_allocated`.
    """

    kernel: str
    provider: str
    mode: str
    x_name: str
    x: str
    config: dict[str, Any]
    gpu: str
    measured_bytes: float

    @property
    def device(self) -> CudaDevice:
        """The GPU's properties."""
        return H100 if "H100" in self.gpu or "B200" in self.gpu else A100

    @property
    def size(self) -> int:
        """`x` as a number."""
        return int(float(self.x))

    @property
    def group(self) -> tuple[str, str]:
        """Rows that share a constant of other work."""
        return self.kernel, str(self.config.get("D", ""))


def rows(folder: Path) -> list[Row]:
    """Return every row of modules.csv."""
    return [
        Row(
            r["kernel_name"], r["kernel_provider"], r["kernel_operation_mode"], r["x_name"],
            r["x_value"],
            json.loads(r["extra_benchmark_config_str"]), r["gpu_name"], float(r["y_value_50"]) * 2**20,
        )
        for r in csv.DictReader((folder / "modules.csv").read_text().splitlines())
    ]  # fmt: skip


def predicted_bytes(row: Row) -> int:
    """Return the predicted peak of one row."""
    return allocated_of_last_step(_RECIPES[row.kernel](row), row.device, cached_bytes=_cached_bytes(row))


def _cached_bytes(row: Row) -> tuple[int, ...]:
    """Return what ran in the process before, in turn: it leaves free segments behind.

    Where the fused kernel ran first, it held one logits matrix at a time, of every length.
    """
    if (row.kernel, row.x_name) not in (("cross_entropy", "BT"), ("distill_jsd_loss", "BT")):
        return ()
    vocabulary = row.config.get("vocab_size") or row.config["V"]
    return tuple(length * vocabulary * 4 for length in (1024, 2048, 4096, 8192))


def _with_random_gradient(output: torch.Tensor) -> None:
    output.backward(torch.randn_like(output), retain_graph=True)


def _cross_entropy(row: Row) -> Build:
    retain = row.x_name != "V"
    if row.x_name == "V":
        count, vocabulary = row.config["B"] * row.config["T"], row.size
    elif row.x_name == "BT":
        count, vocabulary = row.size, row.config["vocab_size"]
    else:
        count, vocabulary = row.config["bsz"] * row.config["seq_len"], _VOCABULARIES[row.x]

    def build(device: torch.device) -> Callable[[], None]:
        logits = torch.randn(count, vocabulary, device=device, requires_grad=True)
        target = torch.zeros(count, dtype=torch.long, device=device)

        def call() -> None:
            loss = F.cross_entropy(logits, target)
            if retain:
                _with_random_gradient(loss)
            else:
                loss.backward()

        return call

    return build


def _embedding(row: Row) -> Build:
    batch, length, width = (row.config[key] for key in ("B", "T", "D"))

    def build(device: torch.device) -> Callable[[], None]:
        own, other = (nn.Embedding(row.size, width, device=device) for _ in range(2))
        tokens = torch.zeros(batch, length, dtype=torch.long, device=device)

        def call() -> None:
            output = own(tokens)
            output.backward(torch.randn_like(output))
            del output

        call.other = other  # type: ignore[attr-defined]
        return call

    return build


def _fused_linear_cross_entropy(row: Row) -> Build:
    hidden, vocabulary = row.config["H"], row.config["V"]

    def build(device: torch.device) -> Callable[[], None]:
        options = {"bias": False, "dtype": bf16, "device": device}
        own, other = (nn.Linear(hidden, vocabulary, **options) for _ in range(2))
        x = torch.randn(row.size, hidden, dtype=bf16, device=device, requires_grad=True)
        target = torch.zeros(row.size, dtype=torch.long, device=device)

        def call() -> None:
            F.cross_entropy(own(x), target).backward()

        call.other = other  # type: ignore[attr-defined]
        return call

    return build


def _geglu(row: Row) -> Build:
    hidden, inner = row.config["hidden_size"], row.config["intermediate_size"]

    def build(device: torch.device) -> Callable[[], None]:
        options = {"bias": False, "dtype": bf16, "device": device}
        gate, up = (nn.Linear(hidden, inner, **options) for _ in range(2))
        down = nn.Linear(inner, hidden, **options)
        x = torch.randn(row.config["bsz"], row.size, hidden, dtype=bf16, device=device, requires_grad=True)

        def forward() -> torch.Tensor:
            result: torch.Tensor = down(F.gelu(gate(x), approximate="tanh") * up(x))
            return result

        if row.mode == "full":
            return lambda: _with_random_gradient(forward())
        if row.mode == "backward":
            once = forward()
            gradient = torch.randn_like(once)
            return lambda: once.backward(gradient, retain_graph=True)
        forward().sum().backward()  # backward's thread has its workspace before forward is measured
        for leaf in (x, *gate.parameters(), *up.parameters(), *down.parameters()):
            leaf.grad = None

        def call() -> None:
            forward()

        return call

    return build


def _layer_norm(row: Row) -> Build:
    new = row.x_name == "T"
    shape = (row.size, row.config["hidden_size"]) if new else (row.config["M"], row.size)
    dtype = bf16 if new else torch.float32

    def build(device: torch.device) -> Callable[[], None]:
        own = nn.LayerNorm(shape[1], eps=1e-6, dtype=dtype, device=device)
        x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        if new:
            return lambda: _with_random_gradient(own(x))
        other = nn.LayerNorm(shape[1], eps=1e-6, dtype=dtype, device=device)
        gradient = torch.randn_like(x)

        def call() -> None:
            own(x).backward(gradient, retain_graph=True)

        call.other = other  # type: ignore[attr-defined]
        return call

    return build


def _rms_norm(row: Row) -> Build:
    def build(device: torch.device) -> Callable[[], None]:
        own, other = (torch.ones(row.size, device=device, requires_grad=True) for _ in range(2))
        x = torch.randn(row.config["M"], row.size, dtype=bf16, device=device, requires_grad=True)
        gradient = torch.randn(row.config["M"], row.size, dtype=bf16, device=device)

        def norm(hidden: torch.Tensor) -> torch.Tensor:
            dtype = hidden.dtype
            hidden = hidden.to(torch.float32)
            variance = hidden.pow(2).mean(-1, keepdim=True)
            hidden = hidden * torch.rsqrt(variance + 1e-6)
            return own * hidden.to(dtype)

        def call() -> None:
            norm(x).backward(gradient, retain_graph=True)

        call.other = other  # type: ignore[attr-defined]
        return call

    return build


def _rope(row: Row) -> Build:
    new = "num_attention_heads" in row.config
    hidden = row.size if row.x_name == "H" else row.config["hidden_size"]
    length = row.config["seq_len"] if row.x_name == "H" else row.size
    head = hidden // 32

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., : head // 2], x[..., head // 2 :]
        return torch.cat((-second, first), dim=-1)

    def rotate(q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + turned(q) * sin, k * cos + turned(k) * sin

    def tables(device: torch.device, keep: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = torch.randn(head // 2, device=device)
        positions = torch.zeros(1, length, dtype=torch.long, device=device)
        with torch.no_grad():
            product = (frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
            both = torch.cat((product, product), dim=-1)
            cos, sin = both.cos().to(bf16), both.sin().to(bf16)
        keep += [] if new else [frequencies, positions]
        return cos, sin

    def pair(device: torch.device, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            torch.randn(1, length, heads, head, dtype=bf16, device=device, **options).transpose(1, 2)
            for heads in (32, 8)
        )  # type: ignore[return-value]

    def build(device: torch.device) -> Callable[[], None]:
        keep: list[Any] = []
        q, k = pair(device, requires_grad=True)
        gradients = () if new else pair(device)
        cos, sin = tables(device, keep)

        def call() -> None:
            if new:
                _with_random_gradient(rotate(q, k, cos, sin)[0])
            else:
                outputs = rotate(q, k, cos, sin)
                torch.autograd.grad(outputs, (q, k), gradients, retain_graph=True)

        call.keep = keep  # type: ignore[attr-defined]
        return call

    return build


def _kl_div(row: Row) -> Build:
    new = row.x_name == "BT"
    count = row.size if new else row.config["B"] * row.config["T"]
    vocabulary = row.config["vocab_size"] if new else row.size

    def build(device: torch.device) -> Callable[[], None]:
        first = torch.randn(count, vocabulary, device=device, requires_grad=True).log_softmax(dim=-1)
        second = torch.randn(count, vocabulary, device=device).softmax(dim=-1)

        def call() -> None:
            loss = F.kl_div(first, second, reduction="batchmean")
            if new:
                _with_random_gradient(loss)
            else:
                loss.backward(retain_graph=True)

        return call

    return build


def _tvd(row: Row) -> Build:
    count = row.config["B"] * row.config["T"]

    def build(device: torch.device) -> Callable[[], None]:
        first = torch.randn(count, row.size, device=device, requires_grad=True).softmax(dim=-1)
        second = torch.randn(count, row.size, device=device).softmax(dim=-1)

        def call() -> None:
            ((torch.abs(first - second) / 2.0).sum() / count).backward(retain_graph=True)

        return call

    return build


def _softmax(row: Row) -> Build:
    new = row.x_name == "BT"
    shape = (row.size, row.config["hidden_size"]) if new else (row.size,)
    dtype = bf16 if row.config["dtype"] == "torch.bfloat16" else torch.float32

    def build(device: torch.device) -> Callable[[], None]:
        x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

        def call() -> None:
            output = F.softmax(x, dim=-1)
            output.backward(torch.ones_like(output), retain_graph=True)

        return call

    return build


def _relu_squared(row: Row) -> Build:
    def build(device: torch.device) -> Callable[[], None]:
        x = torch.randn(row.size, dtype=bf16, device=device, requires_grad=True)

        def call() -> None:
            output = F.relu(x).square()
            output.backward(torch.ones_like(output), retain_graph=True)

        return call

    return build


class _FusedSwiglu(torch.autograd.Function):
    """One kernel with one output and one input gradient, as a compiler makes it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty((*x.shape[:-1], x.size(-1) // 2))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _megatron_swiglu(row: Row) -> Build:
    def build(device: torch.device) -> Callable[[], None]:
        shape = (row.config["S"], row.config["B"], 2 * row.size)
        x = torch.randn(shape, dtype=bf16, device=device, requires_grad=True)

        def eager(value: torch.Tensor) -> torch.Tensor:
            first, second = value.chunk(2, dim=-1)
            return F.silu(first) * second

        def call() -> None:
            x.grad = None
            output = (eager if row.provider == "torch" else _FusedSwiglu.apply)(x)
            output.sum().backward()

        return call

    return build


def _distill_jsd_loss(row: Row) -> Build:
    hidden, vocabulary = row.config["H"], row.config["V"]

    def build(device: torch.device) -> Callable[[], None]:
        options = {"bias": False, "dtype": bf16, "device": device}
        students = [nn.Linear(hidden // 2, vocabulary, **options) for _ in range(2)]
        teachers = [nn.Linear(hidden, vocabulary, **options) for _ in range(2)]
        base = torch.randn(row.size, hidden // 2, dtype=bf16, device=device)
        x, unused = (base.detach().clone().requires_grad_() for _ in range(2))
        teacher_input = torch.randn(row.size, hidden, dtype=bf16, device=device)
        target = torch.zeros(row.size, dtype=torch.long, device=device)

        def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            student = students[0](x)
            with torch.no_grad():
                teacher = teachers[0](teacher_input)
            student, teacher = student.float(), teacher.float()
            target.eq(-100)
            return student, teacher, F.cross_entropy(student, target)

        def divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            student_scaled, teacher_scaled = student / 1.0, teacher / 1.0
            p, q = F.softmax(student_scaled, dim=-1), F.softmax(teacher_scaled, dim=-1)
            mean = torch.log((p + q) / 2)
            first = F.kl_div(mean, torch.log(p), reduction="batchmean", log_target=True)
            second = F.kl_div(mean, torch.log(q), reduction="batchmean", log_target=True)
            return (first + second) / 2

        def call() -> None:
            student, teacher, hard = logits()
            loss = 0.5 * hard + 0.5 * divergence(student, teacher)
            loss.backward()

        call.keep = (students, teachers, base, unused)  # type: ignore[attr-defined]
        return call

    return build


_RECIPES: dict[str, Callable[[Row], Build]] = {
    "cross_entropy": _cross_entropy,
    "embedding": _embedding,
    "fused_linear_cross_entropy": _fused_linear_cross_entropy,
    "geglu": _geglu,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "kl_div": _kl_div,
    "tvd": _tvd,
    "softmax": _softmax,
    "relu_squared": _relu_squared,
    "megatron_swiglu": _megatron_swiglu,
    "distill_jsd_loss": _distill_jsd_loss,
}
