"""Which attention backend is chosen, by a table worked out from sdp_utils.cpp and sdp_utils_cpp.h."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.memory.cuda_rules.tracing import AMPERE
from tuner.memory.cuda_rules import CudaDevice
from tuner.memory.cuda_rules.attention_backends import Attention, choose_backend

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
        monkeypatch.setattr("tuner.memory.cuda_rules.attention_backends._ONE_FOR_MANY", newer)
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


def test_3d_inputs_take_the_math_backend() -> None:
    x = torch.empty(8, 128, 64, dtype=bf16, device="meta")
    assert choose_backend(Attention(x, x, x), AMPERE) == "math"
