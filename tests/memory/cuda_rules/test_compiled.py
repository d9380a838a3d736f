"""Compiled steps are traced as they were written; nothing is compiled, and the trace says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.memory.cuda_rules.tracing import observed, peak_bytes, traced
from tuner.errors import Untraceable
from tuner.memory.rules import COMPILED

# Importing Inductor, as the first `torch.compile` does, warns of PyTorch's own use of TorchScript.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _plain(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x).square()


@functools.cache
def decorated() -> Any:
    """Return a function and a module class whose methods were compiled where they are defined."""

    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return _plain(x)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        @torch.compile
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).relu()

    return function, Layer


def step_of(make: Callable[[], Callable[[torch.Tensor], torch.Tensor]]) -> Callable[[], Callable[[], None]]:
    def making() -> Callable[[], None]:
        function = make()
        return lambda: function(torch.randn(32, 64, requires_grad=True)).sum().backward()

    return making


def _module_compiled_in_place() -> nn.Module:
    module = nn.Linear(64, 64)
    module.compile()
    return module


@pytest.mark.parametrize(
    ("compiled", "eager"),
    [
        (lambda: torch.compile(_plain), lambda: _plain),
        (lambda: torch.compile(_plain, fullgraph=True, mode="max-autotune"), lambda: _plain),
        (lambda: decorated()[0], lambda: _plain),
        (lambda: torch.compile(nn.Linear(64, 64)), lambda: nn.Linear(64, 64)),
        (_module_compiled_in_place, lambda: nn.Linear(64, 64)),
        (lambda: decorated()[1](), lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU())),
    ],
    ids=["function", "options", "decorator", "module", "in place", "method"],
)
def test_it_is_traced_like_its_source_and_noticed(compiled: Any, eager: Any) -> None:
    with_compile, without = (traced(step_of(make), steps=2) for make in (compiled, eager))
    assert COMPILED in with_compile.rules
    assert COMPILED not in without.rules
    assert peak_bytes(with_compile) == peak_bytes(without)


def test_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo counts no frames, and Inductor writes nothing to its cache."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    before = {name: dict(count) for name, count in counters.items()}
    trace = traced(step_of(lambda: torch.compile(nn.Linear(64, 64))), steps=2)
    assert COMPILED in trace.rules
    assert {name: dict(count) for name, count in counters.items()} == before
    assert list(tmp_path.iterdir()) == []


def test_the_stance_and_the_hook_are_restored() -> None:
    from torch._dynamo import eval_frame

    def fails() -> None:
        decorated()[0](torch.randn(4, 4))
        raise ValueError("in the middle")

    before = eval_frame._callback_from_stance, eval_frame._stance.stance
    observed(lambda: decorated()[0](torch.randn(4, 4)))
    with pytest.raises(Untraceable, match="in the middle"):
        observed(fails)
    assert (eval_frame._callback_from_stance, eval_frame._stance.stance) == before
