"""Optuna's side of a study, told more than once."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from tuner.records import Outcome
from tuner.search.optuna_study import MEMORY, OptunaStudy
from tuner.store.engine import parse_url
from tuner.units import MIB


@pytest.mark.parametrize("half", [True, False], ids=["its constraint alone", "all of it"])
def test_a_trial_told_twice_stays_as_it_was_first_and_nobody_is_warned(half: bool, tmp_path: Path) -> None:
    """Warnings are errors here; a driver may be killed between the constraint and the state."""
    url = f"sqlite:///{tmp_path / 'tuner.db'}"
    study = OptunaStudy(parse_url(url), "s", maximize=True, single=False, seed=1, budget_bytes=10 * MIB)
    trial = study.ask()
    trial.suggest_float("lr", 0, 1)
    if half:
        trial.set_constraint(MEMORY, -0.5)
    else:
        study.tell(trial.number, Outcome.COMPLETED, value=0.5, memory_bytes=5 * MIB, budget_bytes=10 * MIB)

    study.tell(trial.number, Outcome.COMPLETED, value=0.7, memory_bytes=6 * MIB, budget_bytes=10 * MIB)

    study.close()
    (told,) = optuna.load_study(study_name="s", storage=url).get_trials(deepcopy=False)
    assert told.values == ([0.7, 6 * MIB] if half else [0.5, 5 * MIB])
    assert told.constraints == {MEMORY: -0.5}
