"""Cases D02, D06 and D09 of real users: attention and autocast; tensors alone, no workspaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.memory.tracing import estimated, mib_of_steps, tensors_on_cuda
from tests.models import Build
from tuner.memory.prediction import Estimate
from tuner.units import GIB, KIB, MIB

# Batch, length, width; absolute allocated peak in MiB, with all binary digits.
PLAIN_ATTENTION = [
    ((1, 128, 16), 0.1494140625),
    ((1, 127, 32), 0.171875),
    ((1, 512, 16), 2.0947265625),
    ((1, 513, 32), 2.19873046875),
    ((1, 1024, 16), 8.1884765625),
    ((8, 127, 16), 1.17236328125),
]


@pytest.mark.parametrize(("shape", "measured_mib"), PLAIN_ATTENTION)
def test_plain_attention_to_the_byte(shape: tuple[int, int, int], measured_mib: float) -> None:
    """Case D02: the absolute peaks of a published benchmark; within 1 KiB, which its harness holds."""

    def build(device: torch.device) -> Callable[[], torch.Tensor]:
        inputs, leftover = (torch.empty(shape, device=device) for _ in range(2))

        @torch.no_grad()
        def step() -> torch.Tensor:
            query = inputs / math.sqrt(shape[-1])
            weights = query @ inputs.transpose(-2, -1)
            weights = weights.softmax(-1)
            return weights @ inputs

        step.held = leftover  # type: ignore[attr-defined]
        return step

    found = estimated(tensors_on_cuda(build, 1)).allocated_bytes or 0

    assert abs(found - measured_mib * MIB) <= KIB


def attention(backend: SDPBackend) -> Estimate:
    """Run attention forward on three fp16 tensors of (1, 32, 4096, 128) with gradients."""

    def build(device: torch.device) -> Callable[[], torch.Tensor]:
        query, key, value = (
            torch.empty(1, 32, 4096, 128, dtype=torch.half, device=device, requires_grad=True)
            for _ in range(3)
        )

        def step() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value)

        return step

    return estimated(tensors_on_cuda(build, 1))


@pytest.mark.parametrize(
    ("backend", "name", "low", "high"),
    [
        (SDPBackend.MATH, "math", 3.1 * GIB, 6 * GIB),
        (SDPBackend.FLASH_ATTENTION, "flash", 0, 0.2 * GIB),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient", 0, 0.2 * GIB),
    ],
)
def test_attention_differs_by_backend_and_says_which(
    backend: SDPBackend, name: str, low: float, high: float
) -> None:
    """Case D06: at least 3.1 GiB for math, under 0.2 GiB for a fused backend."""
    found = attention(backend)

    assert low <= (found.allocated_bytes or 0) < high
    assert f"attention runs on PyTorch's {name} backend" in found.notes


def test_math_attention_in_half_precision_holds_two_and_a_half_score_matrices() -> None:
    """Case D06, as the report ran it, with reduced-precision math allowed.

    2.1 held 2 matrices of 1,024 MiB, 2.6 held 3.5: result, mask of a byte, masked result. Since pull
    request 139613 the result is reused. Query, key, value and two scaled ones are 160 MiB; 1 MiB.
    """
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        found = attention(SDPBackend.MATH)
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
    assert found.allocated_bytes == pytest.approx((2.5 * 1024 + 160) * MIB, abs=MIB)


def recipe(*, dtype: torch.dtype | None, set_to_none: bool = True) -> Build:
    """Build the official recipe: three wide linears, 50 batches of inputs and targets on the device."""

    def build(device: torch.device) -> Callable[[], None]:
        layers = [nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype is not None)
        inputs, targets = ([torch.empty(512, 4096, device=device) for _ in range(50)] for _ in range(2))

        def step() -> None:
            with torch.autocast("cuda", dtype, enabled=dtype is not None):
                output = model(inputs[0])  # alive until the step ends, as in the script
                loss = F.mse_loss(output, targets[0])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)

        return step

    return build


@pytest.mark.parametrize(
    ("options", "floor_mib"),
    [
        ({"dtype": None}, 1200.1),
        ({"dtype": torch.float16}, 1220.1),
        ({"dtype": torch.bfloat16}, 1220.1),
        ({"dtype": None, "set_to_none": False}, 1288.1),
    ],
)
def test_autocast_needs_more_where_weights_outweigh_activations(
    options: dict[str, Any], floor_mib: float
) -> None:
    """Case D09: computed allocated peaks without workspaces; tolerance 0.1 MiB."""
    assert mib_of_steps(tensors_on_cuda(recipe(**options)))[-1] == pytest.approx(floor_mib, abs=0.1)
