"""Dropout on CUDA keeps a byte an element (`native_dropout` in cuda/Dropout.cu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.memory.cuda_rules.tracing import observed, saved_bytes, traced
from tuner.memory.cuda_rules import dropout

COUNT = 1 << 16
FLOATS = 4 * COUNT


def _saved(run: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> int:
    """Return what is saved for backward of one function, its input and output left out."""

    def make() -> Callable[[], None]:
        x = torch.randn(COUNT, dtype=dtype, requires_grad=True)

        def step() -> None:
            out = run(x)
            out.backward(out.detach())

        return step

    return saved_bytes(traced(make)) - 2 * COUNT * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_keeps_one_byte_an_element(dtype: torch.dtype) -> None:
    assert _saved(lambda x: F.dropout(x, 0.1), dtype) == COUNT
    assert _saved(nn.Dropout(0.5), dtype) == COUNT
    assert _saved(lambda x: torch.dropout(x, 0.5, train=True), dtype) == COUNT


def test_nothing_is_kept_where_nothing_is_dropped() -> None:
    """The output is the input: one tensor less than two."""
    assert _saved(lambda x: F.dropout(x, 0.5, training=False)) == -FLOATS
    assert _saved(nn.Dropout(0.5).eval()) == -FLOATS
    assert _saved(lambda x: F.dropout(x, 0.0)) == -FLOATS


def test_everything_dropped_is_a_product_with_zero() -> None:
    """`_dropout_impl` in Dropout.cpp: p = 1 multiplies by a zero of 4 bytes, which is saved."""
    assert _saved(lambda x: F.dropout(x, 1.0)) == 4


def test_in_place_dropout_runs_as_on_a_cpu() -> None:
    """`dropout_` multiplies by a noise tensor of the input's type: 4 bytes an element."""

    def make() -> Callable[[], None]:
        x = torch.randn(COUNT, requires_grad=True)

        def step() -> None:
            out = F.dropout(x * 1, 0.1, inplace=True)
            out.backward(out.detach())

        return step

    trace = traced(make)
    assert saved_bytes(trace) == 3 * FLOATS
    assert dropout.NAME not in trace.rules


def test_attention_weights_are_dropped_with_a_byte_mask() -> None:
    """`F.multi_head_attention_forward` calls `dropout` inside PyTorch: B · H · L · S bytes."""

    def make_with(p: float) -> Callable[[], Any]:
        def make() -> Callable[[], None]:
            attention = nn.MultiheadAttention(32, 4, dropout=p, batch_first=True)
            x = torch.randn(2, 128, 32)
            return lambda: attention(x, x, x, need_weights=True)[0].sum().backward()

        return make

    scores = 2 * 4 * 128 * 128
    without, with_dropout = (saved_bytes(traced(make_with(p))) for p in (0.0, 0.1))
    assert (
        with_dropout - without == scores + 4 * scores
    )  # the mask, and the dropped weights beside the softmax's


def test_functions_are_restored() -> None:
    before = torch.dropout, torch._VF.dropout, F.dropout
    observed(lambda: F.dropout(torch.randn(8), 0.5))
    assert (torch.dropout, torch._VF.dropout, F.dropout) == before
    assert F.dropout(torch.ones(1000), 0.5).eq(0).any()
