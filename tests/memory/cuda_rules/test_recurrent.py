"""Recurrent layers through cuDNN: shapes as on a CPU, memory by hand from cudnn/RNN.cpp."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.memory.cuda_rules.tracing import observed, peak_bytes, saved_bytes, sizes_of, traced
from tuner.errors import Untraceable
from tuner.memory.cuda_rules import recurrent

T, B, IN, H = 20, 8, 32, 64
KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "dropout": 0.1},
    {"bidirectional": True},
    {"batch_first": True, "num_layers": 2, "bidirectional": True},
    {"bias": False},
]
bf16 = torch.bfloat16


def shapes_of(result: Any) -> list[tuple[int, ...]]:
    output, state = result
    return [tuple(t.shape) for t in (output, *(state if isinstance(state, tuple) else (state,)))]


def forward_and_backward(kind: Any, **options: Any) -> tuple[Any, ...]:
    layer = kind(IN, H, **options)
    x = torch.randn(T, B, IN, requires_grad=True)
    result = layer(x)
    result[0].sum().backward()
    gradients = [None if p.grad is None else tuple(p.grad.shape) for p in layer.parameters()]
    return shapes_of(result), result[0].stride(), gradients, tuple(x.grad.shape)  # type: ignore[union-attr]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("kind", list(KINDS))
def test_outputs_and_gradients_have_the_shapes_of_a_real_run(kind: str, options: dict[str, Any]) -> None:
    """Baseline: the same layer on the CPU, without the rule."""
    traced_shapes = observed(lambda: forward_and_backward(KINDS[kind], **options))
    real = forward_and_backward(KINDS[kind], **options)
    assert traced_shapes[0] == real[0]
    assert traced_shapes[2:] == real[2:]
    assert None not in real[2]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_projections_make_outputs_and_states_smaller() -> None:
    options = {"proj_size": 16, "num_layers": 2, "bidirectional": True}
    traced_shapes = observed(lambda: forward_and_backward(nn.LSTM, **options))
    real = forward_and_backward(nn.LSTM, **options)
    assert (traced_shapes[0], traced_shapes[2]) == (real[0], real[2])


@pytest.mark.parametrize("kind", list(KINDS))
def test_packed_sequences_give_the_shapes_of_a_real_run(kind: str) -> None:
    """Ten steps of sequences of 5, 3 and 2; the batch of the states depends on values, and is not seen."""

    def run(sizes: torch.Tensor) -> tuple[Any, ...]:
        layer = KINDS[kind](IN, H, num_layers=2, bidirectional=True)
        out, state = layer(nn.utils.rnn.PackedSequence(torch.randn(10, IN), sizes))
        out.data.sum().backward()
        states = state if isinstance(state, tuple) else (state,)
        gradients = [tuple(p.grad.shape) for p in layer.parameters()]
        return tuple(out.data.shape), [(t.size(0), t.size(2)) for t in states], gradients

    assert observed(lambda: run(torch.tensor([3, 3, 2, 1, 1]))) == run(torch.tensor([3, 3, 2, 1, 1]))


def trained(kind: Any = nn.LSTM, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    def make() -> Callable[[], None]:
        layer = kind(IN, H, dtype=dtype, **options)
        x = torch.randn(T, B, IN, dtype=dtype, requires_grad=True)

        def step() -> None:
            out = layer(x)[0]
            out.backward(torch.empty(out.shape, dtype=dtype))

        return step

    return traced(make)


@pytest.mark.parametrize(
    ("kind", "gates", "units", "states"), [(nn.LSTM, 4, 6, 2), (nn.GRU, 3, 5, 1), (nn.RNN, 1, 1, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, bf16])
def test_what_is_saved_and_taken_by_hand(
    kind: Any, gates: int, units: int, states: int, dtype: torch.dtype
) -> None:
    """Per layer: weights; x; output and its gradient; first states; reserve of `units` · T · B · H.

    Backward adds the gradients of x, of the first states and of the weights, and a workspace of the
    gates twice, not at once.
    """
    trace = trained(kind, dtype)
    size = dtype.itemsize
    weights = gates * H * (IN + H + 2) * size
    held = weights + size * (T * B * IN + 2 * T * B * H + states * B * H + units * T * B * H)
    assert saved_bytes(trace) == pytest.approx(held, rel=0.01)
    backward = weights + size * (T * B * IN + states * B * H + gates * T * B * H)
    assert peak_bytes(trace) == pytest.approx(held + backward, rel=0.01)


def test_workspace_and_reserve_live_together_in_forward() -> None:
    """`_cudnn_rnn` takes both before it runs: 4 and 6 units for an LSTM."""

    def make() -> Callable[[], None]:
        layer, x = nn.LSTM(IN, H), torch.randn(T, B, IN)

        def step() -> None:
            layer(x)

        return step

    unit = T * B * H * 4
    weights, small = 4 * H * (IN + H + 2) * 4, (T * B * IN + 4 * B * H) * 4
    assert peak_bytes(traced(make)) == pytest.approx((4 + 6 + 1) * unit + weights + small, rel=0.01)


def test_batch_first_input_and_gradients_are_copied() -> None:
    """`input.contiguous()` of a transposed batch, forward and backward, and of the output's gradient."""
    plain, first = (trained(num_layers=1, batch_first=batch_first) for batch_first in (False, True))
    assert len(sizes_of(first, "clone")) - len(sizes_of(plain, "clone")) == 3


def test_evaluation_keeps_no_reserve() -> None:
    def make() -> Callable[[], None]:
        layer, x = nn.GRU(IN, H).eval(), torch.randn(T, B, IN)

        def step() -> None:
            with torch.no_grad():
                layer(x)

        return step

    sizes = [block.bytes for block in traced(make).blocks]
    assert recurrent.RESERVE_UNITS["gru"] * T * B * H * 4 not in sizes


def test_backward_in_evaluation_mode_fails_as_on_cuda() -> None:
    def step() -> None:
        nn.LSTM(IN, H).eval()(torch.randn(T, B, IN))[0].sum().backward()

    with pytest.raises(Untraceable, match="can only be called in training mode"):
        observed(step)


def test_weight_gradients_are_views_of_one_buffer() -> None:
    def step() -> int:
        layer = nn.LSTM(IN, H, num_layers=2)
        layer(torch.randn(T, B, IN))[0].sum().backward()
        return len({p.grad.untyped_storage()._cdata for p in layer.parameters() if p.grad is not None})

    assert observed(step) == 1


def test_autocast_runs_layers_in_half_on_copies_of_the_weights() -> None:
    """AutocastRNN.cpp: input, states and weights are cast; gradients of weights come back in fp32."""

    def step() -> Any:
        layer = nn.LSTM(IN, H)
        with torch.autocast("cuda", dtype=bf16):
            out, (hidden, cell) = layer(torch.randn(T, B, IN))
        out.float().sum().backward()
        return out.dtype, hidden.dtype, cell.dtype, {p.grad.dtype for p in layer.parameters()}  # type: ignore[union-attr]

    assert observed(step) == (bf16, bf16, bf16, {torch.float32})


def test_without_cudnn_the_rule_does_not_apply() -> None:
    def step() -> None:
        with torch.backends.cudnn.flags(enabled=False):
            nn.GRU(IN, H)(torch.randn(T, B, IN))[0].sum().backward()

    assert recurrent.NAME not in traced(lambda: step).rules
    assert recurrent.NAME in trained().rules
    assert any("not published" in note for note in trained().notes)


def test_cells_are_no_layers() -> None:
    def step() -> None:
        cell, x = nn.LSTMCell(IN, H), torch.randn(B, IN)
        state = cell(x)
        cell(x, state)[0].sum().backward()

    assert recurrent.NAME not in traced(lambda: step).rules
