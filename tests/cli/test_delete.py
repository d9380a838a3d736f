"""`tuner delete`: a study that somebody drives stays whole, whenever they came."""

from __future__ import annotations

from typing import Any

import click
import optuna
import pytest
from click.testing import CliRunner

from tests.store.conftest import Store
from tuner.cli.delete import command
from tuner.errors import StudyBusy
from tuner.processes import this_process
from tuner.search.optuna_storage import optuna_storage
from tuner.store.engine import parse_url


def test_a_driver_that_comes_while_the_question_is_open_keeps_its_study(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(parse_url(sqlite_url))
    study_id = store.study()
    with optuna_storage(store.url) as storage:
        optuna.create_study(storage=storage, study_name="plain")
    joined = []

    def confirm(*args: Any, **kwargs: Any) -> None:
        joined.append(store.drivers.join(study_id, this_process()))

    monkeypatch.setattr(click, "confirm", confirm)
    arguments = ["plain", "--storage", sqlite_url]
    done = CliRunner().invoke(command, arguments)
    assert isinstance(done.exception, StudyBusy)
    assert names(store) == (["plain"], ["plain"])
    store.drivers.leave(joined[0], "done")
    assert CliRunner().invoke(command, [*arguments, "--yes"]).exit_code == 0
    assert names(store) == ([], [])
    store.engine.dispose()


def names(store: Store) -> tuple[list[str], list[str]]:
    """Return the studies on our side and on Optuna's."""
    with optuna_storage(store.url) as storage:
        theirs = [study.study_name for study in storage.get_all_studies()]
    return [study.name for study in store.reader.studies()], theirs
