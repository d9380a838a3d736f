"""Choices that are tuples, lists or dictionaries (case D27): Optuna stores text for them.

Optuna's storage turns a tuple into a list, and a study whose choices are lists one day and tuples the
next is refused by it. So each such choice has a label, its JSON, and the workload gets the choice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_PLAIN = (str, int, float, bool, type(None))


class PlainChoices:
    """A trial whose categorical choices may be anything that JSON can hold.

    Args:
        trial: A trial of Optuna's, or one that is rehearsed.
    """

    def __init__(self, trial: Any) -> None:
        self._trial = trial

    def __getattr__(self, name: str) -> Any:
        """Return what the trial has."""
        return getattr(self._trial, name)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Return one of the choices, as it was given."""
        if all(isinstance(choice, _PLAIN) for choice in choices):
            return self._trial.suggest_categorical(name, choices)
        labels = [json.dumps(choice) for choice in choices]
        return choices[labels.index(self._trial.suggest_categorical(name, labels))]
