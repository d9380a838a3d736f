"""RMSNorm on CUDA is one kernel: it saves its input and a statistic a row (derivatives.yaml)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.memory.cuda_rules.tracing import observed, peak_bytes, saved_bytes, traced
from tuner.memory.cuda_rules import norms

ROWS, WIDTH = 1024, 256
half, bf16 = torch.float16, torch.bfloat16


def _step(
    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32
) -> Any:
    def make() -> Callable[[], None]:
        x = torch.randn(ROWS, WIDTH, dtype=dtype, requires_grad=True)
        weight = torch.randn(WIDTH, dtype=dtype, requires_grad=True)

        def step() -> None:
            out = run(x, weight)
            out.backward(out.detach())

        return step

    return traced(make)


@pytest.mark.parametrize("dtype", [torch.float32, half, bf16])
def test_forward_keeps_one_fp32_statistic_a_row(dtype: torch.dtype) -> None:
    """By hand: input, output, weight, and 4 bytes a row; backward adds the two gradients."""
    trace = _step(lambda x, weight: F.rms_norm(x, (WIDTH,), weight), dtype)
    matrix, vector = ROWS * WIDTH * dtype.itemsize, WIDTH * dtype.itemsize
    assert saved_bytes(trace) == 2 * matrix + vector + 4 * ROWS
    assert peak_bytes(trace) == 3 * matrix + 2 * vector + 4 * ROWS
    assert norms.NAME in trace.rules


def test_every_way_to_call_it_is_the_kernel() -> None:
    layer = _step(lambda x, weight: torch.rms_norm(x, (WIDTH,), weight))
    assert saved_bytes(layer) == saved_bytes(_step(lambda x, weight: F.rms_norm(x, (WIDTH,), weight=weight)))

    def make() -> Callable[[], None]:
        model, x = nn.RMSNorm(WIDTH), torch.randn(ROWS, WIDTH)
        return lambda: model(x).sum().backward()

    trace = traced(make)
    assert norms.NAME in trace.rules
    assert [tuple(b.bytes for b in trace.blocks if b.category == "gradients")] == [(WIDTH * 4,)]


def test_a_weight_of_another_type_is_composed_as_on_a_cpu() -> None:
    trace = _step(lambda x, weight: F.rms_norm(x, (WIDTH,), weight.float()), bf16)
    assert norms.NAME not in trace.rules


def test_autocast_runs_it_in_fp32() -> None:
    """`rms_norm` is on AT_FORALL_FP32: half input is converted, and that copy is what is saved."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda"):
            out = F.rms_norm(x, (WIDTH,), weight)
        assert out.dtype is torch.float32
        return out

    trace = _step(run, half)
    assert norms.NAME in trace.rules
    matrix = ROWS * WIDTH
    assert saved_bytes(trace) == 2 * matrix + 4 * matrix + 4 * matrix + 4 * ROWS + (2 + 4) * WIDTH


def test_nothing_is_kept_without_gradients() -> None:
    def make() -> Callable[[], None]:
        x = torch.randn(ROWS, WIDTH)

        def step() -> None:
            with torch.no_grad():
                F.rms_norm(x, (WIDTH,))
            torch.empty(1)

        return step

    trace = traced(make)
    assert peak_bytes(trace) == 2 * ROWS * WIDTH * 4 + ROWS * 4


def test_results_are_those_of_pytorch_afterwards() -> None:
    before = F.rms_norm
    observed(lambda: F.rms_norm(torch.randn(4, 8), (8,)))
    assert F.rms_norm is before
    x = torch.randn(4, 8)
    expected = x / x.square().mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(F.rms_norm(x, (8,)), expected, rtol=1e-4, atol=1e-4)
