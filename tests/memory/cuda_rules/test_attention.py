"""What each attention backend saves and takes, by hand from attention.cpp and flash_api.cpp."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tests.memory.cuda_rules.tracing import AMPERE, observed, peak_bytes, saved_bytes, sizes_of, traced
from tuner.errors import Untraceable
from tuner.memory.cuda_rules import CudaDevice

bf16, fp32 = torch.bfloat16, torch.float32
FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
N, H, L, E = 2, 4, 256, 64
ELEMENTS, SCORES, LOG_SUMS = N * H * L * E, N * H * L * L, N * H * L * 4


def step_with(
    dtype: torch.dtype = fp32,
    *,
    mask: Callable[[], torch.Tensor] | None = None,
    key_heads: int = H,
    kernel: Any = None,
    function: Any = F.scaled_dot_product_attention,
    **options: Any,
) -> Callable[[], Callable[[], None]]:
    def make() -> Callable[[], None]:
        query = torch.randn(N, H, L, E, dtype=dtype, requires_grad=True)
        key, value = (torch.randn(N, key_heads, L, E, dtype=dtype, requires_grad=True) for _ in range(2))
        bias = None if mask is None else mask()

        def step() -> None:
            with ExitStack() as stack:
                if kernel is not None:
                    stack.enter_context(sdpa_kernel(kernel))
                out = function(query, key, value, bias, **options)
            out.backward(out.detach())

        return step

    return make


def beyond(trace: Any, dtype: torch.dtype = fp32, *, of: Any = saved_bytes) -> int:
    """Return what a trace holds beside query, key, value and output."""
    return int(of(trace)) - 4 * ELEMENTS * dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "device", "note"),
    [(bf16, AMPERE, "flash"), (fp32, AMPERE, "efficient"), (bf16, CudaDevice((9, 0), 0), "cudnn")],
)
def test_fused_backends_save_the_log_sums_alone(dtype: torch.dtype, device: CudaDevice, note: str) -> None:
    """By hand: an fp32 a row and head, and up to 64 bytes of random state."""
    trace = traced(step_with(dtype), device)
    assert trace.notes == (f"attention runs on PyTorch's {note} backend",)
    assert 0 <= beyond(trace, dtype) - LOG_SUMS <= 64


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_the_math_backend_saves_scores(dtype: torch.dtype) -> None:
    """By hand: scaled query and key and the weights, in fp32; half input also a copy of the value.

    `_scaled_dot_product_attention_math` in attention.cpp, and what `_safe_softmax` keeps.
    """
    trace = traced(step_with(dtype, kernel=MATH))
    copies = 2 if dtype is fp32 else 3
    assert beyond(trace, dtype) == pytest.approx(4 * (SCORES + copies * ELEMENTS), rel=0.01)


def test_dropout_of_the_math_backend_has_a_byte_mask() -> None:
    """Beside the softmax's weights: the dropped ones, 4 bytes, and a mask of 1 byte; a CPU's is 4."""
    without, with_dropout = (traced(step_with(kernel=MATH, dropout_p=p)) for p in (0.0, 0.1))
    assert saved_bytes(with_dropout) - saved_bytes(without) == SCORES * (4 + 1)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
@pytest.mark.parametrize("key_heads", [H, 1])
def test_the_math_backend_with_dropout_differs_from_pytorchs_by_the_mask_alone(
    options: Any, key_heads: int
) -> None:
    """Baseline: PyTorch's own composition without dropout; at the forward peak too."""
    more = {**options, "enable_gqa": key_heads < H, "key_heads": key_heads, "kernel": MATH}
    plain, dropped = (traced(step_with(dropout_p=p, **more)) for p in (0.0, 0.1))
    assert saved_bytes(dropped) - saved_bytes(plain) == SCORES * 5


def test_backward_accumulates_in_fp32() -> None:
    """flash_api.cpp: dq_accum [N, H, L, E] and a sum a row, in fp32, beside three gradients."""
    trace = traced(step_with(bf16))
    gradients = 3 * ELEMENTS * 2
    assert beyond(trace, bf16, of=peak_bytes) == pytest.approx(
        gradients + ELEMENTS * 4 + 2 * LOG_SUMS, rel=0.001
    )


@pytest.mark.parametrize(("head", "rounded"), [(40, 64), (160, 160), (200, 256)])
def test_the_accumulator_is_rounded_up(head: int, rounded: int) -> None:
    """flash_api.cpp: rows to 128, the head to 32, above 192 to 256."""

    def make() -> Callable[[], None]:
        tensors = [torch.randn(2, 4, 100, head, dtype=bf16, requires_grad=True) for _ in range(3)]
        return lambda: F.scaled_dot_product_attention(*tensors).sum().backward()

    inside = [b.bytes for b in traced(make).blocks if b.category == "workspace"]
    assert inside == [2 * 4 * 128 * 4, 2 * 4 * 128 * rounded * 4]


def test_grouped_heads_of_flash_attention_are_expanded_in_backward_alone() -> None:
    """flash_api.cpp: dk and dv of every query head, then summed."""
    trace = traced(step_with(bf16, key_heads=1, enable_gqa=True))
    saved = 2 * ELEMENTS * 2 + 2 * (ELEMENTS // H) * 2 + LOG_SUMS
    assert saved_bytes(trace) == pytest.approx(saved, abs=64)
    backward = ELEMENTS * 2 + 2 * (ELEMENTS // H) * 2 + ELEMENTS * 4 + LOG_SUMS + 2 * ELEMENTS * 2
    assert peak_bytes(trace) == pytest.approx(saved + backward, abs=64)


def test_head_sizes_are_padded_to_eight_for_flash_attention() -> None:
    """attention.cpp, `pad_last_dim<8>`: a head of 60 is copied to 64, three times, and saved so."""

    def make() -> Callable[[], None]:
        tensors = [torch.randn(N, H, L, 60, dtype=bf16, requires_grad=True) for _ in range(3)]

        def step() -> None:
            out = F.scaled_dot_product_attention(*tensors)
            out.backward(out.detach())

        return step

    expected = 3 * (N * H * L * 60 * 2) + 4 * (N * H * L * 64 * 2) + LOG_SUMS
    assert saved_bytes(traced(make)) == pytest.approx(expected, abs=64)


@pytest.mark.parametrize(
    ("shape", "taken"),
    [
        ((L, L), 0),  # aligned: used as it is, broadcast without a copy
        ((N, 1, 1, L), 0),
        ((N, H, L, L), 0),
        ((L, L - 6), L * L),  # 250 columns are padded to 256
    ],
)
def test_masks_of_any_shape_broadcast_without_a_copy(shape: tuple[int, ...], taken: int) -> None:
    """`preprocess_mask` in attention.cpp: padded to 16 columns where strides are not aligned."""

    def make() -> Callable[[], None]:
        query = torch.randn(N, H, L, E, requires_grad=True)
        key, value = (torch.randn(N, H, shape[-1], E, requires_grad=True) for _ in range(2))
        mask = torch.zeros(shape)

        def step() -> None:
            out = F.scaled_dot_product_attention(query, key, value, mask)
            out.backward(out.detach())

        return step

    trace = traced(make)
    tensors = (2 * L + 2 * shape[-1]) * N * H * E
    expected = 4 * (tensors + torch.Size(shape).numel() + taken) + LOG_SUMS
    assert saved_bytes(trace) == pytest.approx(expected, abs=64)


def test_a_slice_of_an_aligned_buffer_is_not_padded() -> None:
    """`aligned_tensor` looks at strides: 250 columns of a buffer of 1,024 need no copy."""

    def make() -> Callable[[], None]:
        tensors = [torch.randn(1, H, 250, E) for _ in range(3)]
        buffer = torch.zeros(1024, 1024)

        def step() -> None:
            F.scaled_dot_product_attention(*tensors, buffer[:250, :250])

        return step

    assert not sizes_of(traced(make), "constant_pad")


def test_boolean_masks_become_additive_ones_of_the_querys_type() -> None:
    trace = traced(step_with(bf16, mask=lambda: torch.ones(L, L, dtype=torch.bool)))
    assert 0 <= beyond(trace, bf16) - (L * L + 2 * L * L + LOG_SUMS) <= 64


def test_masks_that_are_trained_get_a_gradient() -> None:
    def make() -> Callable[[], None]:
        tensors = [torch.randn(N, H, L, E, requires_grad=True) for _ in range(3)]
        mask = torch.randn(L, L, requires_grad=True)

        def step() -> None:
            F.scaled_dot_product_attention(*tensors, mask).sum().backward()
            assert mask.grad is not None
            assert mask.grad.shape == (L, L)

        return step

    assert "efficient" in traced(make).notes[0]


def test_autocast_casts_the_inputs_and_the_mask() -> None:
    def step() -> torch.dtype:
        tensors = [torch.randn(1, 4, 16, 64) for _ in range(3)]
        with torch.autocast("cuda", dtype=bf16):
            return F.scaled_dot_product_attention(*tensors, torch.zeros(16, 16)).dtype

    assert observed(step) is bf16


def test_the_math_backend_stays_in_fp32_inside_under_autocast() -> None:
    """Autocast is off below the operator: its products run in fp32, on copies of half inputs."""

    def make() -> Callable[[], None]:
        tensors = [torch.randn(N, H, L, E, requires_grad=True) for _ in range(3)]

        def step() -> None:
            with torch.autocast("cuda", dtype=bf16), sdpa_kernel(MATH):
                F.scaled_dot_product_attention(*tensors)

        return step

    assert sizes_of(traced(make), "bmm")[0] == 4 * SCORES


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, scaled_dot_product_attention])
def test_every_way_to_call_it_is_seen(function: Any) -> None:
    trace = traced(step_with(bf16, function=function))
    assert "attention backends" in trace.rules


def test_multi_head_attention_calls_it_from_within_pytorch() -> None:
    def make() -> Callable[[], None]:
        layer = nn.MultiheadAttention(64, 4, batch_first=True, dtype=bf16)
        x = torch.randn(2, 128, 64, dtype=bf16)
        return lambda: layer(x, x, x, need_weights=False)[0].sum().backward()

    assert traced(make).notes == ("attention runs on PyTorch's flash backend",)


def test_the_function_is_restored() -> None:
    before = F.scaled_dot_product_attention
    traced(step_with())
    x = torch.randn(1, 2, 8, 4)
    expected = torch.softmax(x @ x.transpose(-1, -2) / 2, -1) @ x
    assert F.scaled_dot_product_attention is before
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), expected)


def test_a_step_that_no_backend_can_run_is_named() -> None:
    def step() -> None:
        x = torch.randn(1, 4, 16, 64)
        with sdpa_kernel(FLASH):
            F.scaled_dot_product_attention(x, x, x)

    with pytest.raises(Untraceable, match="No available kernel"):
        observed(step)
