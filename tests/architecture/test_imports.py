"""Walls that the import graph alone does not show."""

from __future__ import annotations

import subprocess
import sys

import pytest


def imported(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has after a statement."""
    code = f"{statement}; import sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import tuner", {"torch", "optuna", "sqlalchemy", "streamlit"}),
        ("import tuner.cli.main", {"torch", "optuna", "sqlalchemy", "streamlit", "rich"}),
        ("import tuner.store.reader", {"torch", "optuna", "streamlit"}),
        ("import tuner.memory.trace, tuner.execution.worker", {"optuna", "sqlalchemy", "click", "rich"}),
        ("from tuner import Maximize, Workload", {"torch", "optuna", "sqlalchemy"}),
    ],
)
def test_what_an_import_pulls_in(statement: str, absent: set[str]) -> None:
    assert imported(statement) & absent == set()


def test_public_names_are_there() -> None:
    import tuner

    assert all(getattr(tuner, name) is not None for name in tuner.__all__)
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = tuner.nothing_of_the_kind  # type: ignore[attr-defined]
