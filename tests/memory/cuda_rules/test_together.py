"""Whole steps for CUDA where no rule of CUDA's applies: the real CPU run is the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo import ZOO, batches, trained
from tests.memory.cuda_rules.tracing import AMPERE, observed, peak_bytes, traced
from tuner.memory.cpu_rules import cpu_rules
from tuner.memory.cuda_rules import cuda_rules
from tuner.memory.trace import trace_build
from tuner.profiling import profiled_peak

Step = Callable[[], None]


def _model() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(4)]
    return nn.Sequential(*layers)


def accumulated(*, set_to_none: bool) -> Step:
    """Four backward passes to one update, on gradients that are kept or dropped."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        for _ in range(4):
            model(torch.randn(128, 256)).square().mean().backward()
        optimizer.step()

    return step


def clipped(clip: Callable[[Any], Any]) -> Step:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(128, 256)).square().mean().backward()
        clip(model.parameters())
        optimizer.step()

    return step


def checkpointed(*, use_reentrant: bool) -> Step:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(2048, 256, requires_grad=True)
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        x.square().mean().backward()
        optimizer.step()

    return step


STEPS: dict[str, Callable[[], Step]] = {
    "accumulation": lambda: accumulated(set_to_none=True),
    "accumulation on kept gradients": lambda: accumulated(set_to_none=False),
    "clip_grad_norm_": lambda: clipped(lambda p: nn.utils.clip_grad_norm_(p, 1.0, foreach=False)),
    "clip_grad_norm_ foreach": lambda: clipped(lambda p: nn.utils.clip_grad_norm_(p, 1.0, foreach=True)),
    "clip_grad_value_": lambda: clipped(lambda p: nn.utils.clip_grad_value_(p, 1.0, foreach=False)),
    "checkpointing": lambda: checkpointed(use_reentrant=False),
    "checkpointing, reentrant": lambda: checkpointed(use_reentrant=True),
}


@pytest.mark.parametrize("name", list(STEPS))
def test_a_step_for_cuda_peaks_where_a_real_one_does(name: str) -> None:
    """Baseline: the profiler over three real steps on the CPU; tolerance 0.5 %."""
    with profiled_peak() as real:
        step = STEPS[name]()
        for _ in range(3):
            step()
    assert peak_bytes(traced(STEPS[name], steps=3)) == pytest.approx(real.bytes, rel=0.005)


def test_checkpointing_saves_memory_and_says_so_both_ways() -> None:
    def without() -> Step:
        model = _model()
        return lambda: model(torch.randn(2048, 256, requires_grad=True)).square().mean().backward()

    both = [peak_bytes(traced(STEPS[name])) for name in ("checkpointing", "checkpointing, reentrant")]
    assert max(both) < 0.75 * peak_bytes(traced(without))


@pytest.mark.parametrize("name", ["mlp", "two_heads", "embedding", "shared_weights", "attention_by_hand"])
def test_models_of_the_zoo_differ_from_a_cpu_by_kernels_alone(name: str) -> None:
    """Baseline: the CPU's trace, which the profiler confirms; with the for-loop optimizer and no workspaces.

    `embedding` has the sort's scratch, `attention_by_hand` softmax's, `mlp` the multi-tensor update.
    """
    cuda = trace_build(ZOO[name], cuda_rules(AMPERE), 2)
    cpu = trace_build(ZOO[name], cpu_rules(), 2)
    own = [b for b in cuda.blocks if b.category != "workspace" and b.phase != "optimizer"]
    others = [b for b in cpu.blocks if b.category != "workspace" and b.phase != "optimizer"]
    assert [(b.operator, b.bytes) for b in own] == [(b.operator, b.bytes) for b in others]


def test_an_optimizer_for_cuda_takes_one_set_more_than_on_a_cpu() -> None:
    def make() -> Step:
        model = _model()
        return trained(model, batches(4, 256), torch.optim.Adam(model.parameters()))

    size = sum(p.numel() for p in _model().parameters()) * 4
    cuda, cpu = (
        peak_bytes(trace_build(lambda device: make(), rules)) for rules in (cuda_rules(AMPERE), cpu_rules())
    )
    assert cuda - cpu == pytest.approx(size * 7 / 8, rel=0.15)  # a CPU has one parameter's of eight


def test_functional_transforms_see_the_rules_too() -> None:
    """`vmap` and `grad` of torch.func run below the patched functions, and results are restored."""

    def step() -> tuple[int, ...]:
        x, weight = torch.randn(4, 8, 16), torch.randn(16, 16)
        out = torch.func.vmap(lambda row: F.dropout(row @ weight, 0.0))(x)
        gradient = torch.func.grad(lambda w: F.softmax(x @ w, -1).sum())(weight)
        return (*out.shape, *gradient.shape)

    assert observed(step) == (4, 8, 16, 16, 16)


def test_attention_and_norms_under_vmap() -> None:
    def step() -> tuple[int, ...]:
        x = torch.randn(3, 2, 4, 32, 16)
        out = torch.func.vmap(lambda part: F.scaled_dot_product_attention(part, part, part))(x)
        return tuple(torch.func.vmap(lambda part: F.rms_norm(part, (16,)))(out).shape)

    assert observed(step) == (3, 2, 4, 32, 16)
