"""What CUDA kernels allocate beside their outputs, by hand from the sources that the rules name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.memory.cuda_rules.tracing import traced
from tuner.memory.cuda_rules import CudaDevice
from tuner.memory.target_rules import rules_for
from tuner.memory.targets import resolve_target
from tuner.memory.trace import Trace, trace_build

bf16, half = torch.bfloat16, torch.float16


def inside(trace: Trace, operator: str) -> list[int]:
    """Return the sizes of what an operator took for itself, in order."""
    return [b.bytes for b in trace.blocks if b.category == "workspace" and operator in b.operator]


def once(run: Callable[[], Any]) -> Trace:
    return traced(lambda: run)


@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_softmax_backward_builds_gradient_times_output(dtype: torch.dtype) -> None:
    def step() -> None:
        out = torch.randn(64, 128, dtype=dtype, requires_grad=True).softmax(-1)
        out.backward(torch.empty_like(out))

    assert inside(once(step), "_softmax_backward") == [64 * 128 * dtype.itemsize]


def test_softmax_from_half_to_float_builds_it_in_fp32() -> None:
    """`grad * output` in SoftMax.cu, both fp32, where the input was fp16."""

    def step() -> None:
        with torch.autocast("cuda"):
            out = F.softmax(torch.randn(64, 128, dtype=half, requires_grad=True), -1)
        out.backward(torch.empty_like(out))

    assert inside(once(step), "_softmax_backward") == [64 * 128 * 4]


def test_log_softmax_backward_takes_nothing() -> None:
    """`log_softmax_backward_cuda_out` works on the gradient itself."""
    trace = once(lambda: torch.randn(64, 128, requires_grad=True).log_softmax(-1).sum().backward())
    assert not [b for b in trace.blocks if b.category == "workspace"]


def embedding(count: int, rows: int, width: int) -> Trace:
    def step() -> None:
        table = torch.randn(rows, width, requires_grad=True)
        F.embedding(torch.zeros(count, dtype=torch.long), table).sum().backward()

    return once(step)


@pytest.mark.parametrize(("rows", "width"), [(1000, 32), (50_000, 16)])
def test_embedding_gradients_sort_above_3072_indices(rows: int, width: int) -> None:
    """By hand: three arrays of n; two of s = min(n, rows); p = n // 10 + s parts, fp32 sums; two scalars."""
    assert inside(embedding(3072, rows, width), "embedding") == []
    count = 3073
    segments = min(count, rows)
    parts = count // 10 + segments
    expected = [8 * count] * 3 + [8 * segments] * 2 + [8 * parts, 4 * parts * width, 8, 8]
    assert sorted(inside(embedding(count, rows, width), "embedding")) == sorted(expected)


def test_adding_at_indices_sorts_them() -> None:
    """`index_put_with_sort_kernel`: linear and original indices, sorted and not: 4 · n · 8 bytes."""

    def step() -> None:
        x = torch.randn(100, 16, requires_grad=True)
        x[torch.zeros(500, dtype=torch.long)].sum().backward()

    assert inside(once(step), "index_put") == [500 * 8] * 4


def test_writing_at_indices_does_not() -> None:
    def step() -> None:
        x = torch.zeros(100, 16)
        x[torch.zeros(500, dtype=torch.long)] = 1.0
        x.index_put_((torch.zeros(5, dtype=torch.long),), torch.ones(16))

    trace = once(step)
    assert inside(trace, "index_put") == []
    assert "index backward" not in trace.rules


def test_indices_broadcast_before_they_are_counted() -> None:
    def step() -> None:
        x = torch.randn(10, 20, 4, requires_grad=True)
        x[torch.zeros(7, 1, dtype=torch.long), torch.zeros(9, dtype=torch.long)].sum().backward()

    assert inside(once(step), "index_put") == [7 * 9 * 8] * 4


@pytest.mark.parametrize(("dtype", "statistic"), [(torch.float32, 4), (bf16, 4), (half, 4)])
def test_layer_norm_statistics_are_fp32(dtype: torch.dtype, statistic: int) -> None:
    trace = once(lambda: F.layer_norm(torch.randn(512, 64, dtype=dtype), (64,)))
    sizes = [b.bytes for b in trace.blocks if "layer_norm" in b.operator]
    assert sizes == [512 * 64 * dtype.itemsize, 512 * statistic, 512 * statistic]


WORKSPACE = 1 << 20
DEVICE = CudaDevice(cublas_workspace_bytes=WORKSPACE, cublaslt_workspace_bytes=1 << 16)


def workspaces(make: Callable[[], Callable[[], Any]]) -> list[int]:
    trace = traced(make, DEVICE, steps=3)
    freed = {~event for event in trace.events if event < 0}
    return [b.bytes for i, b in enumerate(trace.blocks) if b.category == "workspace" and i not in freed]


def _linear(*, backward: bool) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        model = nn.Linear(8, 8, bias=False)

        def step() -> None:
            out = model(torch.randn(4, 8))
            if backward:
                out.sum().backward()

        return step

    return make


def _convolution() -> Callable[[], None]:
    model = nn.Conv2d(3, 4, 3)
    return lambda: model(torch.randn(2, 3, 8, 8)).sum().backward()


def test_each_thread_that_multiplies_keeps_one_workspace() -> None:
    """CublasHandlePool.cpp: the forward's thread and the engine's; steps share them; convolutions none."""
    assert workspaces(_linear(backward=False)) == [WORKSPACE]
    assert workspaces(_linear(backward=True)) == [WORKSPACE] * 2
    assert workspaces(_convolution) == []


@pytest.mark.parametrize(
    "product",
    [
        lambda x: x @ x,
        lambda x: torch.bmm(x[None], x[None]),
        lambda x: torch.addmm(x, x, x),
        lambda x: torch.mv(x, x[0]),
        lambda x: torch.einsum("ij,jk->ik", x, x),
        lambda x: F.linear(x, x, x[0]),
        lambda x: torch.dot(x[0], x[0]),
    ],
)
def test_every_product_goes_through_cublas(product: Any) -> None:
    assert workspaces(lambda: lambda: product(torch.randn(8, 8))) == [WORKSPACE]


def test_a_fused_bias_takes_a_cublaslt_workspace_meanwhile() -> None:
    def make() -> Callable[[], None]:
        model, plain = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        return lambda: (model(torch.randn(4, 8)), plain(torch.randn(4, 8)))  # type: ignore[func-returns-value]

    assert [b.bytes for b in traced(make, DEVICE).blocks if b.category == "workspace"] == [WORKSPACE, 1 << 16]


def test_no_workspace_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """`:0:0` in CUBLAS_WORKSPACE_CONFIG, and PyTorch's default for an A100 without it."""

    def kept() -> list[int]:
        rules = rules_for(resolve_target("a100-40gb"))
        trace = trace_build(lambda device: _linear(backward=True)(), rules, 2)
        return [b.bytes for b in trace.blocks if b.category == "workspace" and b.bytes > 512]  # no copies

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert kept() == [8_519_680] * 2
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    assert kept() == []
