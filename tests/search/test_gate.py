"""`MemoryGate` in an Optuna script of one's own, and `predict_peak`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn

import tuner
from tuner.errors import UsageError
from tuner.units import MIB


def model_of(width: int) -> Callable[[torch.device], Callable[[], Any]]:
    def build(device: torch.device) -> Callable[[], Any]:
        model = nn.Linear(width, width, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, width, device=device)).sum().backward()
            optimizer.step()

        return step

    return build


def test_a_trial_that_cannot_fit_is_pruned_and_teaches_the_sampler() -> None:
    """Weight and gradient of 16,384² floats are 2 GiB; of 64² nothing."""
    gate = tuner.MemoryGate(budget="1GiB", target="cuda")

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_categorical("width", [64, 16384])
        gate.check(trial, model_of(width))
        return 0.0

    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"width": [64, 16384]}))
    study.optimize(objective, n_trials=2)
    by_width = {trial.params["width"]: trial for trial in study.trials}
    assert by_width[64].state is TrialState.COMPLETE
    assert by_width[64].user_attrs["tuner_prediction"]["verdict"] == "launch"
    assert by_width[16384].state is TrialState.PRUNED
    assert by_width[16384].constraints["memory"] > 1


def test_code_that_cannot_be_traced_is_let_through() -> None:
    gate = tuner.MemoryGate(budget="1MiB", target="cuda")
    trial = optuna.create_study().ask()
    prediction = gate.check(trial, lambda device: lambda: torch.randn(4)[torch.randn(4) > 0])
    assert (prediction.verdict, prediction.method) == ("try", "untraceable")
    assert "cannot be traced" in prediction.assumptions[0]


def test_predict_peak_gives_the_documented_json() -> None:
    prediction = tuner.predict_peak(model_of(1024), target="cpu", steps=3, budget="4GiB")
    fields = prediction.to_json()
    for name in ("allocated_bytes", "reserved_bytes", "fits_probability", "verdict", "method", "seconds"):
        assert fields[name] is not None
    for name in ("device_bytes", "required_bytes"):
        assert set(fields[name]) == {"low", "expected", "high"}
    assert set(fields["categories"]) == {
        *("parameters", "buffers", "gradients", "optimizer_state", "activations", "temporaries", "inputs"),
        *("workspace", "context"),
    }
    assert set(fields["peak_at"]) == {"phase", "step", "module"}
    assert 2 * 4 * MIB <= fields["allocated_bytes"] < 2.1 * 4 * MIB
    assert sum(fields["categories"].values()) == pytest.approx(fields["device_bytes"]["expected"], abs=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"target": "b9000"}, "there is no target 'b9000'"),
        ({"budget": "6XB"}, "'6XB' is not a size"),
        ({"steps": 0}, "at least one step"),
    ],
)
def test_bad_arguments_are_said(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tuner.predict_peak(model_of(8), **arguments)
