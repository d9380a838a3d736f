"""How much each parameter matters, for the metric and for memory, as Optuna computes it."""

from __future__ import annotations

import warnings
from typing import Any

import optuna
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

import tuner.search.quiet  # noqa: F401 - for its effect
from tuner.errors import UsageError
from tuner.search.optuna_storage import optuna_trials
from tuner.store.engine import URL
from tuner.store.rows import StudyRecord, TrialRecord

LEAST_TRIALS = 4  # completed ones, each with another configuration: below, chance alone speaks
_SEED = 0  # of the trees: the same trials give the same figures


def importances(
    url: URL, study: StudyRecord, trials: list[TrialRecord]
) -> tuple[dict[str, dict[str, float]], int]:
    """Return the share of what varies that each parameter explains, by `value` and `memory`.

    fANOVA (Hutter, Hoos and Leyton-Brown, 2014) over the completed trials with a finite value. A
    parameter that not all of them have (a conditional one) is left out: its share is unknown.

    Args:
        url: The database, which holds Optuna's trials.
        study: The study.
        trials: Its trials as we recorded them.

    Returns:
        Importance by objective and parameter, and the number of trials it was computed from.

    Raises:
        UsageError: Too few trials are completed.
    """
    measured = {
        trial.number: (trial.value, trial.peak_bytes)
        for trial in trials
        if trial.outcome == "completed" and trial.value is not None and trial.peak_bytes is not None
    }
    known = [trial for trial in optuna_trials(url, study.name) if trial.number in measured]
    known = [trial for trial in known if abs(measured[trial.number][0] or 0.0) < float("inf")]
    if len(known) < LEAST_TRIALS:
        raise UsageError(
            f"study '{study.name}' has {len(known)} completed trials: importance needs {LEAST_TRIALS}"
        )
    found = {}
    for place, objective in enumerate(("value", "memory")):
        values = {number: float(both[place] or 0.0) for number, both in measured.items()}
        found[objective] = _of(known, values)
    return found, len(known)


def _of(trials: list[FrozenTrial], values: dict[int, float]) -> dict[str, float]:
    """Return the importances for one value of each trial; empty where it does not vary."""
    if len({values[trial.number] for trial in trials}) < 2:
        return {}
    study = optuna.create_study()
    study.add_trials([_with_value(trial, values[trial.number]) for trial in trials])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        found: dict[str, Any] = get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=_SEED))
    return {name: float(share) for name, share in found.items()}


def _with_value(trial: FrozenTrial, value: float) -> FrozenTrial:
    return optuna.trial.create_trial(
        state=TrialState.COMPLETE, params=trial.params, distributions=trial.distributions, value=value
    )
