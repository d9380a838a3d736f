"""Attention backends, against a table worked out from PyTorch's sdp_utils.cpp and sdp_utils_cpp.h."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
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
from tuner.memory.cuda_rules.attention import Attention, choose_backend

half, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
P100, T4, A100, RTX_3090, H100, B200, RTX_5090 = (6, 0), (7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)
FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH,
)  # fmt: skip


def chosen(
    dtype: torch.dtype = bf16,
    capability: tuple[int, int] = A100,
    *,
    head: int = 64,
    value_head: int | None = None,
    heads: tuple[int, int] = (8, 8),
    lengths: tuple[int, int] = (128, 128),
    mask: torch.Tensor | None = None,
    gradient: bool = True,
    strided: bool = False,
    **options: Any,
) -> str:
    """Return the backend chosen for query [2, heads, L, head] and key, value [2, heads, S, head]."""
    make = partial(torch.empty, dtype=dtype, device="meta", requires_grad=gradient)
    query = make(2, heads[0], lengths[0], head)
    key, value = make(2, heads[1], lengths[1], head), make(2, heads[1], lengths[1], value_head or head)
    if strided:
        query = make(2, heads[0], head, lengths[0]).transpose(-1, -2)
    call = Attention(query, key, value, None if mask is None else mask.to("meta"), **options)
    return choose_backend(call, CudaDevice(compute_capability=capability))


def mask_of(*shape: int, dtype: torch.dtype = bf16, **options: Any) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta", **options)


@pytest.mark.parametrize(
    ("backend", "dtype", "capability"),
    [
        # check_dtypes_low_precision, check_flash_attention_hardware_support, use_tensor_cores
        ("efficient", half, P100), ("math", bf16, P100), ("efficient", fp32, P100),
        ("math", torch.float64, P100),
        ("efficient", half, T4), ("math", bf16, T4), ("efficient", fp32, T4),
        ("flash", half, A100), ("flash", bf16, A100), ("efficient", fp32, A100),
        ("math", torch.float64, A100),
        ("flash", bf16, RTX_3090), ("efficient", fp32, RTX_3090),
        # check_prefer_cudnn_attention: first on 9.x and 10.x
        ("cudnn", bf16, H100), ("cudnn", half, B200), ("efficient", fp32, H100), ("flash", bf16, RTX_5090),
        # beyond sm_121 no fused kernel is known
        ("math", bf16, (13, 0)),
    ],
)  # fmt: skip
def test_type_and_compute_capability_decide(
    backend: str, dtype: torch.dtype, capability: tuple[int, int]
) -> None:
    assert chosen(dtype, capability) == backend


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        # check_head_dim_size_flash, check_head_dim_size_mem_efficient, minimum_gemm_alignment
        ("flash", {"head": 256}), ("efficient", {"head": 264}), ("math", {"head": 260}),
        ("flash", {"head": 50}), ("math", {"dtype": fp32, "head": 50}),
        ("efficient", {"dtype": fp32, "head": 52}),
        ("math", {"dtype": half, "capability": T4, "head": 50}),
        ("efficient", {"dtype": fp32, "capability": P100, "head": 50}),
        ("efficient", {"head": 192, "value_head": 128}), ("math", {"head": 192, "value_head": 100}),
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        ("efficient", {"capability": RTX_3090, "head": 200}),
        ("flash", {"capability": RTX_3090, "head": 200, "gradient": False}),
        ("flash", {"capability": RTX_3090, "head": 256}),
        ("efficient", {"capability": RTX_3090, "head": 256, "dropout_p": 0.1}),
        ("efficient", {"capability": RTX_5090, "head": 224}), ("flash", {"capability": A100, "head": 200}),
        # check_cudnn_tensor_shapes, check_cudnn_dropout
        ("flash", {"capability": H100, "head": 136}), ("cudnn", {"capability": H100, "head": 128}),
        ("cudnn", {"capability": H100, "head": 192, "value_head": 128}),
        ("flash", {"capability": H100, "head": 60}), ("flash", {"capability": H100, "dropout_p": 0.1}),
        ("cudnn", {"capability": H100, "dropout_p": 0.125}),
        ("flash", {"capability": H100, "lengths": (128, 1)}),
        ("flash", {"capability": H100, "lengths": (1, 128), "dropout_p": 0.125}),
        # check_flash_causal_non_square_seqlens
        ("flash", {"is_causal": True}), ("efficient", {"is_causal": True, "lengths": (64, 128)}),
        # check_for_attn_mask, check_attn_mask_shape, check_last_dim_stride_equals_1_dense
        ("efficient", {"mask": mask_of(128, 128)}), ("efficient", {"mask": mask_of(2, 1, 1, 128)}),
        ("efficient", {"mask": mask_of(128, 128, dtype=torch.bool)}),
        ("efficient", {"mask": mask_of(128, 128, requires_grad=True)}),
        ("math", {"mask": mask_of(128, 1).expand(128, 128)}),
        ("cudnn", {"capability": H100, "mask": mask_of(2, 1, 1, 128)}),
        ("cudnn", {"capability": H100, "mask": mask_of(128, 128)}),
        ("efficient", {"capability": H100, "mask": mask_of(8, 128, 128)}),
        ("efficient", {"capability": H100, "mask": mask_of(128, 128, requires_grad=True)}),
        # check_batch_size_and_num_heads_dense
        ("flash", {"heads": (8, 2), "enable_gqa": True}), ("math", {"heads": (8, 2)}),
        ("cudnn", {"capability": H100, "heads": (8, 2), "enable_gqa": True, "mask": mask_of(128, 128)}),
        ("math", {"heads": (8, 3), "enable_gqa": True}),
        # check_nonzero_sequence_lengths_dense, check_last_dim_stride_equals_1_dense
        ("math", {"lengths": (0, 128)}), ("math", {"strided": True}),
    ],
)  # fmt: skip
def test_shapes_masks_and_heads_decide(backend: str, case: dict[str, Any]) -> None:
    assert chosen(**case) == backend


@pytest.mark.parametrize(
    ("before", "since", "case"),
    [
        ("math", "efficient", {"dtype": fp32, "heads": (8, 2), "enable_gqa": True}),
        ("math", "efficient", {"heads": (8, 2), "enable_gqa": True, "mask": mask_of(128, 128)}),
        ("math", "flash", {"heads": (8, 1)}),
        ("math", "efficient", {"dtype": fp32, "heads": (8, 1)}),
        ("math", "cudnn", {"capability": H100, "heads": (8, 1)}),
        ("math", "math", {"heads": (8, 2)}),
    ],
)
def test_grouped_heads_run_on_more_backends_since_2_14(
    before: str, since: str, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Baseline: `check_batch_size_and_num_heads_dense` in sdp_utils_cpp.h of 2.13 and of 2.14."""
    for newer, backend in ((False, before), (True, since)):
        monkeypatch.setattr("tuner.memory.cuda_rules.attention._ONE_FOR_MANY", newer)
        assert chosen(**case) == backend


@pytest.mark.parametrize(
    ("backends", "dtype", "capability", "priority", "backend"),
    [
        ([MATH], bf16, A100, False, "math"),
        ([EFFICIENT, MATH], bf16, A100, False, "efficient"),
        ([CUDNN], bf16, A100, False, "cudnn"),
        ([CUDNN, MATH], bf16, A100, False, "math"),  # math comes before cuDNN where that is not preferred
        ([CUDNN, FLASH], bf16, A100, True, "cudnn"),
        ([FLASH, EFFICIENT], fp32, A100, False, "efficient"),
        ([FLASH], bf16, H100, False, "flash"),
        ([EFFICIENT, CUDNN], bf16, H100, True, "efficient"),
        ([FLASH], fp32, A100, False, None),
        ([CUDNN], bf16, T4, False, None),
    ],
)
def test_what_the_user_forces_is_respected(
    backends: Any, dtype: torch.dtype, capability: tuple[int, int], priority: bool, backend: str | None
) -> None:
    """Baseline: `select_sdp_backend`, `sdp_priority_order` in ATen/Context.h; None: no kernel is left."""
    with sdpa_kernel(backends, set_priority=priority), ExitStack() as raises:
        if backend is None:
            raises.enter_context(pytest.raises(RuntimeError, match="No available kernel"))
        assert chosen(dtype, capability) == backend


def test_deterministic_algorithms_rule_out_cudnn() -> None:
    """`check_cudnn_deterministic`: not where a warning is all that was asked for."""
    try:
        torch.use_deterministic_algorithms(True)
        assert chosen(bf16, H100) == "flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert chosen(bf16, H100) == "cudnn"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_step_that_no_backend_can_run_is_named() -> None:
    def step() -> None:
        x = torch.randn(1, 4, 16, 64)
        with sdpa_kernel(FLASH):
            F.scaled_dot_product_attention(x, x, x)

    with pytest.raises(Untraceable, match="No available kernel"):
        observed(step)


def test_3d_inputs_take_the_math_backend() -> None:
    x = torch.empty(8, 128, 64, dtype=bf16, device="meta")
    assert choose_backend(Attention(x, x, x), AMPERE) == "math"


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
