"""CUDA's autocast on CPU fakes, against the lists in PyTorch's own header and its documented behaviour."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.memory.cuda_rules.tracing import observed, saved_bytes, sizes_of, traced
from tuner.errors import Untraceable
from tuner.memory.cuda_rules import autocast

HEADER = Path(torch.__path__[0], "include", "ATen", "autocast_mode.h").read_text(encoding="utf-8")
half, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32


def listed(macro: str) -> set[str]:
    """Return the operators of `AT_FORALL_<macro>`, as `name` or `name.overload`."""
    body = HEADER.split(f"#define AT_FORALL_{macro}(_)", 1)[1]
    lines = []
    for line in body.splitlines():
        lines.append(line)
        if not line.rstrip().endswith("\\"):
            break
    found = re.findall(r"_\(\s*(\w+)(?:,\s*(\w+))?\s*\)", "\n".join(lines))
    return {f"{name}.{overload}" if overload else name for name, overload in found}


def test_the_lists_are_those_of_the_header() -> None:
    assert set(autocast._FP32) == listed("FP32")
    assert set(autocast._FP32_OUTPUT) == listed("FP32_SET_OPT_DTYPE")
    assert set(autocast._PROMOTE) == listed("PROMOTE")
    other = HEADER.split("#define AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(_)", 1)[1].split("#define")[0]
    assert set(autocast._FP32_APPENDED) == set(re.findall(r'"(norm\.\w+)"', other))


def test_what_cuda_runs_in_lower_precision_is_cast_by_the_cpu_or_by_us() -> None:
    cpu = {
        name
        for name in listed("LOWER_PRECISION_FP")
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
    }
    dropped = {f"aten::{name}" for name in autocast._only_on_the_cpu()}
    assert listed("LOWER_PRECISION_FP") - cpu <= set(autocast._LOWER)
    assert not {f"aten::{name}" for name in cpu - set(autocast._LOWER)} & dropped


def dtype_of(function: Callable[..., torch.Tensor], *tensors: torch.Tensor, to: torch.dtype = half) -> Any:
    def step() -> torch.dtype:
        with torch.autocast("cuda", dtype=to):
            return function(*(torch.randn(t.shape, dtype=t.dtype) for t in tensors)).dtype

    return observed(step)


MATRIX, IMAGE = torch.empty(8, 8), torch.empty(2, 3, 8, 8)
HALF_MATRIX = torch.empty(8, 8, dtype=half)
IN_FP32: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "pow": lambda x: x.pow(2),
    "rsqrt": torch.rsqrt,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "sum": torch.sum,
    "sum of a dimension": lambda x: x.sum(0),
    "cumsum": lambda x: x.cumsum(0),
    "prod": torch.prod,
    "norm": torch.norm,
    "norm, as C++ calls it": lambda x: torch.ops.aten.norm(x, 2),
    "norm of a dimension, as C++ calls it": lambda x: torch.ops.aten.norm(x, 2, [0]),
    "mse": lambda x: F.mse_loss(x, x),
    "cross entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.long)),
    "bce with logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "logsumexp": lambda x: x.logsumexp(0),
}
IN_HALF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv2d": lambda x: F.conv2d(x.view(1, 1, 8, 8), x.view(1, 1, 8, 8)),
    "prelu": lambda x: F.prelu(x, torch.ones(1)),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
}


@pytest.mark.parametrize("name", list(IN_FP32))
def test_half_becomes_fp32_where_cuda_lists_it(name: str) -> None:
    """Baseline: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE."""
    assert dtype_of(IN_FP32[name], HALF_MATRIX) is fp32


@pytest.mark.parametrize("name", list(IN_HALF))
@pytest.mark.parametrize("to", [half, bf16])
def test_fp32_becomes_half_where_cuda_lists_it(name: str, to: torch.dtype) -> None:
    """Baseline: AT_FORALL_LOWER_PRECISION_FP."""
    assert dtype_of(IN_HALF[name], MATRIX, to=to) is to


@pytest.mark.parametrize(
    "function",
    [
        torch.trace,  # the CPU casts these two to fp32, CUDA leaves them alone
        lambda x: F.avg_pool3d(x.view(1, 1, 4, 4, 4), 2),
        torch.relu,
        torch.tanh,
        lambda x: x.mean(),
    ],
)
def test_what_only_the_cpu_lists_is_left_alone(function: Any) -> None:
    assert dtype_of(function, HALF_MATRIX) is half


def test_wider_operands_decide_where_cuda_promotes() -> None:
    assert dtype_of(lambda x, y: torch.addcmul(x, x, y), HALF_MATRIX, MATRIX) is fp32
    assert dtype_of(lambda x, y: torch.addcmul(x, x, y), HALF_MATRIX, HALF_MATRIX) is half
    assert dtype_of(lambda x, y: torch.cat([x, y]), HALF_MATRIX, MATRIX) is fp32  # the operator's own way


def test_a_type_that_the_caller_gives_is_kept() -> None:
    assert dtype_of(lambda x: x.sum(dtype=torch.float64), HALF_MATRIX) is torch.float64
    assert dtype_of(lambda x: F.softmax(x, -1, dtype=half), HALF_MATRIX) is half
    assert dtype_of(lambda x: torch.softmax(x, -1, half), HALF_MATRIX) is half
    assert dtype_of(lambda x: torch.softmax(x, -1, None), HALF_MATRIX) is fp32
    assert dtype_of(lambda x: x.cumsum(0, dtype=half), HALF_MATRIX) is half
    assert dtype_of(torch.exp, MATRIX.double()) is torch.float64
    assert observed(lambda: _summed(torch.ones(4, dtype=torch.long))) is torch.int64


def _summed(tensor: torch.Tensor) -> torch.dtype:
    with torch.autocast("cuda"):
        return tensor.sum().dtype


@pytest.mark.parametrize(("dtype", "copies"), [(half, 0), (bf16, 1)])
def test_softmax_of_fp16_makes_no_fp32_copy_of_its_input(dtype: torch.dtype, copies: int) -> None:
    """`softmax` in SoftMax.cpp: fp16 goes to the kernel as it is; bf16 is converted first."""

    def make() -> Callable[[], None]:
        x = torch.randn(64, 64, dtype=dtype, requires_grad=True)

        def step() -> None:
            with torch.autocast("cuda", dtype=dtype):
                F.softmax(x, -1).sum().backward()

        return step

    forward = [
        block for block in traced(make).blocks if block.phase == "forward" and block.bytes == 64 * 64 * 4
    ]
    assert len(forward) == 1 + copies


def _twice(*, cache: bool, contexts: int = 1, layer: str = "linear") -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        weight = torch.randn(64, 64, requires_grad=True)
        x = torch.randn(16, 64)
        run = {"linear": F.linear, "mv": lambda a, w: torch.mv(w, a[0])}[layer]

        def step() -> None:
            for _ in range(contexts):
                with torch.autocast("cuda", cache_enabled=cache):
                    total = run(x, weight).sum() + run(x, weight).sum()
                total.backward()

        return step

    return make


@pytest.mark.parametrize("layer", ["linear", "mv"])
def test_a_weight_is_copied_once_until_the_outermost_context_ends(layer: str) -> None:
    """`cached_cast` in autocast_mode.cpp; `mv` is on CUDA's list alone, `linear` on the CPU's too."""

    def copies(**options: Any) -> int:
        made = traced(_twice(layer=layer, **options)).blocks
        return sum(b.bytes == 64 * 64 * 2 and b.phase == "forward" for b in made)

    assert copies(cache=True) == 1
    assert copies(cache=True, contexts=2) == 2
    assert copies(cache=False) == 2


def test_weights_of_a_cell_are_copied_once_for_all_steps() -> None:
    """`lstm_cell` is on CUDA's list alone: two weights and two biases, ten calls."""

    def make() -> Callable[[], None]:
        cell, x = nn.LSTMCell(32, 64), torch.randn(4, 32)

        def step() -> None:
            with torch.autocast("cuda"):
                state = cell(x)
                for _ in range(9):
                    state = cell(x, state)
            state[0].float().sum().backward()

        return step

    made = [b.bytes for b in traced(make).blocks if b.phase == "forward" and "_to_copy" in b.operator]
    assert [made.count(2 * 256 * inputs) for inputs in (32, 64)] == [1, 1]


def test_the_older_spelling_is_seen_too() -> None:
    def step() -> torch.dtype:
        with torch.cuda.amp.autocast(dtype=bf16):
            return (torch.randn(8, 8) @ torch.randn(8, 8)).dtype

    assert observed(step) is bf16


def test_half_weights_live_until_the_context_ends() -> None:
    """Nothing saves the copy under no_grad, but the cache holds it: 64 × 64 × 2 B."""

    def make() -> Callable[[], None]:
        weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(16, 64)

        def step() -> None:
            with torch.autocast("cuda"):
                F.linear(x, weight)
                torch.empty(7)
            torch.empty(11)

        return step

    trace = traced(make)
    order = [b.bytes for b in trace.blocks]
    copy, inside, outside = order.index(8192), order.index(28), order.index(44)
    assert trace.events.index(inside) < trace.events.index(~copy) < trace.events.index(outside)


def test_nested_contexts_can_switch_it_off_and_on() -> None:
    def step() -> list[torch.dtype]:
        x, found = torch.randn(8, 8), []
        with torch.autocast("cuda", dtype=bf16):
            found.append((x @ x).dtype)
            with torch.autocast("cuda", enabled=False):
                found.append((x @ x).dtype)
                with torch.autocast("cuda", dtype=half):
                    found.append((x @ x).dtype)
            with torch.autocast("cuda"):
                found.append((x @ x).dtype)  # the type that is in force
        return [*found, (x @ x).dtype]

    assert observed(step) == [bf16, fp32, half, bf16, fp32]


def test_the_default_type_is_half() -> None:
    def step() -> tuple[Any, ...]:
        outside = torch.is_autocast_enabled(), torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda"):
            inside = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        with torch.autocast("cuda", dtype=bf16):
            other = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
        return outside, inside, other

    assert observed(step) == ((False, half), (True, half), (True, bf16))


class _Casting(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=fp32)
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.seen = x.dtype, torch.is_autocast_enabled("cuda")
        return x.clone()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        seen.append((*ctx.seen, torch.is_autocast_enabled("cuda")))
        return gradient.clone()


seen: list[Any] = []


def test_custom_functions_cast_their_inputs_and_run_outside_autocast() -> None:
    def step() -> None:
        with torch.autocast("cuda"):
            x = torch.randn(4, 4, dtype=half, requires_grad=True)
            _Casting.apply(x).sum().backward()

    seen.clear()
    observed(step)
    assert seen == [(fp32, False, False)]


def test_a_gradient_scaler_runs_its_whole_cycle() -> None:
    """Scale, unscale, clip, step and update; backward's gradients stay fp32 of 64 × 64 floats."""

    def make() -> Callable[[], None]:
        model = nn.Linear(64, 64)
        optimizer, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cuda")

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = model(torch.randn(16, 64)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()

        return step

    trace = traced(make, steps=3)
    assert [b.bytes for b in trace.blocks if b.category == "gradients"].count(64 * 64 * 4) == 3
    assert sum(b.category == "optimizer_state" and b.bytes == 64 * 64 * 4 for b in trace.blocks) == 2


def test_activations_of_a_perceptron_are_saved_in_half() -> None:
    """By hand, in half: the input's copy, relu's output, the output; the second weight for its gradient."""

    def make() -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        x = torch.randn(1024, 256)

        def step() -> None:
            with torch.autocast("cuda", dtype=bf16):
                out = model(x)
            out.backward(out.detach())

        return step

    trace = traced(make)
    parameters = (256 * 512 + 512 + 512 * 256 + 256) * 4
    halves = 2 * (1024 * 256 + 1024 * 512 + 1024 * 256 + 256 * 512)
    assert saved_bytes(trace) == parameters + 1024 * 256 * 4 + halves


def _cpu_types() -> list[torch.dtype]:
    x = torch.randn(8, 8, dtype=bf16)
    functions = (torch.exp, torch.sum, lambda t: F.softmax(t, -1), lambda t: F.avg_pool2d(t[None], 2))
    with torch.autocast("cpu"):
        return [function(x).dtype for function in functions] + [(x.float() @ x.float()).dtype]


def _fails() -> None:
    with torch.autocast("cuda"):
        F.softmax(torch.randn(4, 4) @ torch.randn(4, 4), -1)
        raise ValueError("in the middle")


def test_everything_is_as_before_after_a_trace_and_after_a_failed_one() -> None:
    patched = [
        (torch.amp.autocast_mode.autocast, "__init__"),
        (torch.amp.autocast_mode, "_cast"),
        (torch.cuda.amp.common, "amp_definitely_not_available"),
        (torch, "is_autocast_enabled"),
        (torch, "get_autocast_dtype"),
        (torch, "get_autocast_gpu_dtype"),
        (torch, "clear_autocast_cache"),
    ]
    before = [getattr(owner, name) for owner, name in patched], _cpu_types()
    assert before[1] == [bf16, bf16, bf16, bf16, bf16] or before[1][-1] is bf16
    observed(lambda: _cpu_types() and dtype_in_context())
    with pytest.raises(Untraceable, match="in the middle"):
        observed(_fails)
    assert ([getattr(owner, name) for owner, name in patched], _cpu_types()) == before
    assert not torch.is_autocast_enabled("cpu")


def dtype_in_context() -> torch.dtype:
    with torch.autocast("cuda"):
        return torch.exp(torch.randn(4, dtype=half)).dtype


def test_a_step_without_a_context_is_no_autocast() -> None:
    trace = traced(lambda: lambda: torch.randn(4, 4).exp())
    assert autocast.NAME not in trace.rules
    assert sizes_of(trace, "exp") == [64]
