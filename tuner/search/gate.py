"""`tuner.MemoryGate`: the core for people with an Optuna script of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import optuna

from tuner.memory.peak import predict_peak
from tuner.memory.targets import resolve_target
from tuner.records import Prediction, Verdict
from tuner.search.optuna_study import MEMORY
from tuner.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch


class MemoryGate:
    """Prunes a trial of any Optuna study whose configuration surely does not fit a budget.

    Args:
        budget: Device bytes one trial may take, such as `"8GiB"`, or a number of bytes.
        target: The device that trials run on.

    Raises:
        UsageError: Budget or target cannot be understood.

    Example::

        gate = tuner.MemoryGate(budget="8GiB", target="cuda")

        def objective(trial):
            width = trial.suggest_int("width", 64, 4096)
            gate.check(trial, lambda device: make_step(width, device))
            ...
    """

    def __init__(self, budget: str | int, target: str = "cuda") -> None:
        self.budget_bytes = parse_bytes(budget) if isinstance(budget, str) else budget
        self.target = resolve_target(target).name

    def check(
        self, trial: optuna.Trial, build: Callable[[torch.device], Callable[[], Any]], steps: int = 3
    ) -> Prediction:
        """Predict the trial's peak; return the prediction, or prune the trial.

        The prediction becomes the user attribute `tuner_prediction`. A pruned trial gets the
        constraint `memory` = (bytes − budget) / budget, from which samplers learn. Code that
        cannot be traced is never pruned.

        Args:
            trial: The running trial.
            build: `build(device)` returns a function that performs one training step.
            steps: Training steps to trace.

        Raises:
            TrialPruned: The configuration surely does not fit; the message is the reason.
        """
        prediction = predict_peak(build, self.target, steps, budget=self.budget_bytes)
        trial.set_user_attr("tuner_prediction", prediction.to_json())
        if prediction.verdict is Verdict.PRUNE and prediction.required is not None:
            required_bytes = prediction.required.expected
            trial.set_constraint(MEMORY, (required_bytes - self.budget_bytes) / self.budget_bytes)
            raise optuna.TrialPruned(
                f"needs {format_bytes(required_bytes)} on {self.target}, "
                f"the budget is {format_bytes(self.budget_bytes)}"
            )
        return prediction
