"""Optuna's tables in our database."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import optuna
from optuna.trial import FrozenTrial

import tuner.search.quiet  # noqa: F401 - for its effect
from tuner.store.engine import URL, connect_args, prepare_sqlite


@contextlib.contextmanager
def optuna_storage(url: URL) -> Iterator[optuna.storages.RDBStorage]:
    """Open Optuna's storage in our database while the body runs."""
    storage = open_storage(url)
    try:
        yield storage
    finally:
        close(storage)


def optuna_trials(url: URL, name: str) -> list[FrozenTrial]:
    """Return another study's trials, as Optuna keeps them."""
    with optuna_storage(url) as storage:
        return optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)


def close(storage: optuna.storages.RDBStorage) -> None:
    """Close the connections of a storage."""
    storage.remove_session()
    storage.engine.dispose()


def open_storage(url: URL) -> optuna.storages.RDBStorage:
    """Return Optuna's storage in our database; its tables are created where missing."""
    storage = optuna.storages.RDBStorage(
        url.render_as_string(hide_password=False),
        engine_kwargs={"connect_args": connect_args(url), "pool_pre_ping": True},
    )
    prepare_sqlite(storage.engine)
    return storage


def delete_study(url: URL, name: str) -> None:
    """Delete a study on Optuna's side, if it is there."""
    with optuna_storage(url) as storage, contextlib.suppress(KeyError):
        optuna.delete_study(study_name=name, storage=storage)
