"""Temporaries and state of every optimizer's paths on CUDA, by PyTorch's source and by real CPU runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

from tests.memory.cuda_rules.tracing import traced
from tuner.memory.cuda_rules import optimizers
from tuner.memory.trace import HOST, Trace
from tuner.profiling import profiled_peak

COUNT, WEIGHT = 16, 256 * 256 * 4
SET = COUNT * WEIGHT  # the bytes of all parameters together


def updating(kind: Any, **options: Any) -> Callable[[], Callable[[], None]]:
    """Return a maker of a step that only makes gradients and updates 16 parameters."""

    def make() -> Callable[[], None]:
        parameters = [torch.zeros(256, 256, requires_grad=True) for _ in range(COUNT)]
        optimizer = kind(parameters, lr=0.01, **options)

        def step() -> None:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()

        step.optimizer = optimizer  # type: ignore[attr-defined]
        return step

    return make


def temporary_sets(trace: Trace) -> float:
    """Return what the last update holds at its peak beyond what was there, in sets of parameters."""
    last = max(block.step for block in trace.blocks)
    live, before, peak = 0, None, 0
    for event in trace.events:
        block = trace.blocks[max(event, ~event)]
        updating_now = block.step == last and block.phase == "optimizer"
        if event >= 0 and updating_now and before is None:
            before = live
        live += block.bytes if event >= 0 else -block.bytes
        if before is not None and updating_now:
            peak = max(peak, live - before)
    return peak / SET


def state_sets(trace: Trace) -> float:
    return sum(block.bytes for block in trace.blocks if block.category == "optimizer_state") / SET


# (optimizer, options, sets of state, sets of temporaries at the peak of its `_multi_tensor_…` function)
MULTI_TENSOR: list[tuple[Any, dict[str, Any], int, int]] = [
    (optim.SGD, {}, 0, 0),  # _foreach_add_ in place
    (optim.SGD, {"weight_decay": 0.1}, 0, 1),  # grads + weight_decay · params
    (optim.SGD, {"maximize": True}, 0, 1),  # _foreach_neg
    (optim.SGD, {"momentum": 0.9}, 1, 0),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}, 1, 0),  # into the gradients
    (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, 1, 1),
    (optim.Adam, {}, 2, 1),  # exp_avg_sq_sqrt
    (optim.Adam, {"amsgrad": True}, 3, 1),
    (optim.Adam, {"weight_decay": 0.1}, 2, 1),  # its gradients are deleted before the square root
    (optim.Adam, {"maximize": True}, 2, 1),
    (optim.AdamW, {}, 2, 1),  # decay is in place
    (optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}, 3, 1),
    (optim.RMSprop, {}, 1, 1),  # avg
    (optim.RMSprop, {"weight_decay": 0.1}, 1, 2),
    (optim.RMSprop, {"momentum": 0.9}, 2, 1),
    (optim.RMSprop, {"centered": True}, 2, 1),
    (optim.Adagrad, {}, 1, 2),  # std and numerator
    (optim.Adagrad, {"weight_decay": 0.1}, 1, 2),  # std, and the gradients that become the numerator
    (optim.NAdam, {}, 2, 1),
    (optim.NAdam, {"weight_decay": 0.1}, 2, 2),
    (optim.RAdam, {}, 2, 1),
    (optim.Adadelta, {}, 2, 2),  # std and deltas
    (optim.Adadelta, {"weight_decay": 0.1}, 2, 3),
    (optim.Adamax, {}, 2, 1),
    (optim.ASGD, {}, 1, 1),
]
CAPTURABLE = [(optim.Adam, 1), (optim.AdamW, 1), (optim.RMSprop, 1), (optim.NAdam, 2), (optim.Adamax, 2)]
FUSED = [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad]
FOR_LOOP = [optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam, optim.Adadelta,
            optim.Rprop, optim.Adamax, optim.ASGD]  # fmt: skip


def _name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else "-".join(value) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("kind", "options", "state", "temporaries"), MULTI_TENSOR, ids=_name)
def test_cuda_updates_all_parameters_at_once(
    kind: Any, options: dict[str, Any], state: int, temporaries: int
) -> None:
    """Baseline: the lists that live together in torch/optim; tolerance 1 % of the parameters."""
    trace = traced(updating(kind, **options), steps=3)
    assert optimizers.NAME in trace.rules
    assert temporary_sets(trace) == pytest.approx(temporaries, abs=0.01)
    assert state_sets(trace) == pytest.approx(state, abs=0.01)


@pytest.mark.parametrize("kind", FOR_LOOP, ids=_name)
def test_one_parameter_at_a_time_where_the_user_says_so(kind: Any) -> None:
    """At most four temporaries of one parameter, 4/16 of a set."""
    trace = traced(updating(kind, foreach=False), steps=3)
    assert optimizers.NAME not in trace.rules
    assert temporary_sets(trace) <= 4 / COUNT


@pytest.mark.parametrize("kind", FUSED, ids=_name)
def test_fused_updates_take_no_temporaries(kind: Any) -> None:
    trace = traced(updating(kind, fused=True), steps=3)
    assert temporary_sets(trace) == 0


@pytest.mark.parametrize(("kind", "temporaries"), CAPTURABLE, ids=_name)
def test_capturable_updates_run_and_keep_their_counters_on_the_device(kind: Any, temporaries: int) -> None:
    trace = traced(updating(kind, capturable=True), steps=3)
    assert temporary_sets(trace) == pytest.approx(temporaries, abs=0.01)
    assert not [block for block in trace.blocks if block.category == HOST]


def test_step_counters_are_on_the_host_unless_fused_or_capturable() -> None:
    """`_init_group` in adam.py: `device=p.device if capturable or fused`; they are no events then."""
    plain, fused = (traced(updating(optim.Adam, **options), steps=2) for options in ({}, {"fused": True}))
    on_host = [index for index, block in enumerate(plain.blocks) if block.category == HOST]
    assert len(on_host) == COUNT
    assert not set(on_host) & {max(event, ~event) for event in plain.events}
    assert sum(block.category == "optimizer_state" and block.bytes == 4 for block in fused.blocks) == COUNT


def test_differentiable_updates_are_not_multi_tensor() -> None:
    """`_default_to_fused_or_foreach` answers no for both; SGD alone does not tell it."""

    def make() -> Callable[[], None]:
        parameter = torch.zeros(8)
        parameter.grad = torch.zeros(8)
        return optim.Adam([parameter], differentiable=True).step  # type: ignore[return-value]

    assert optimizers.NAME not in traced(make).rules


def test_adafactor_and_muon_update_one_parameter_at_a_time() -> None:
    """`foreach=None` means no for Adafactor (_adafactor.py); Muon has no other path (_muon.py)."""
    for kind in (optim.Adafactor, optim.Muon):
        assert temporary_sets(traced(updating(kind), steps=3)) <= 4 / COUNT


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.Adam, {"foreach": True}),
        (optim.AdamW, {"foreach": True, "amsgrad": True}),
        (optim.Adagrad, {"foreach": True}),
        (optim.RMSprop, {"foreach": True, "centered": True, "momentum": 0.9}),
        (optim.NAdam, {"foreach": True, "weight_decay": 0.1}),
        (optim.RAdam, {"foreach": True}),
        (optim.Adadelta, {"foreach": True, "weight_decay": 0.1}),
        (optim.SGD, {"foreach": True, "weight_decay": 0.1, "momentum": 0.9}),
        (optim.Adam, {"fused": True}),
        (optim.Rprop, {"foreach": False}),
        (optim.Adafactor, {}),
    ],
    ids=_name,
)
def test_peaks_are_those_of_a_real_run_of_the_same_path(kind: Any, options: dict[str, Any]) -> None:
    """Baseline: the profiler on the CPU, which runs the path asked for; the trace chooses it. 1 %."""
    make = updating(kind, **options)
    with profiled_peak() as real:
        step = make()
        for _ in range(3):
            step()
    asked = {name: value for name, value in options.items() if name != "foreach" or value is False}
    trace = traced(updating(kind, **asked), steps=3)
    live = peak = 0
    for event in trace.events:
        live += trace.blocks[event].bytes if event >= 0 else -trace.blocks[~event].bytes
        peak = max(peak, live)
    assert peak == pytest.approx(real.bytes, rel=0.01)


def test_functions_are_restored() -> None:
    from torch.optim import adam, optimizer
    from torch.utils import _foreach_utils

    names = [
        (adam, "_default_to_fused_or_foreach"),
        (optimizer, "_get_capturable_supported_devices"),
        (_foreach_utils, "_has_foreach_support"),
    ]
    before = [getattr(owner, name) for owner, name in names]
    traced(updating(optim.Adam))
    assert [getattr(owner, name) for owner, name in names] == before
    parameter = torch.zeros(2, requires_grad=True)
    assert adam._default_to_fused_or_foreach([parameter], differentiable=False) == (False, False)
