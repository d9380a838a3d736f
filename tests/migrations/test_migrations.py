"""Upgrades: from nothing, beside Optuna, by several processes at once, or not at all (case D30)."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import optuna
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import URL

from tests.migrations.databases import contents, opened, sql, upgraded
from tuner.errors import SchemaError, StoreError
from tuner.store import migrations
from tuner.store.engine import open_engine, parse_url, store_errors
from tuner.store.schema import VERSION_TABLE, metadata
from tuner.store.views import VIEWS

SCRIPTS = Path(__file__).resolve().parents[2] / "alembic"
OURS = {*metadata.tables, VERSION_TABLE}
UPGRADE = """
import sys
from tuner.store import migrations
from tuner.store.engine import open_engine, parse_url, store_errors
url = parse_url(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
with store_errors(url):
    engine = open_engine(url)
    print(migrations.upgrade(engine))
    engine.dispose()
"""


def new_optuna_study(storage: str, name: str) -> str:
    """Let Optuna create its tables where they are missing, and work; return the revision it is at."""
    theirs = optuna.storages.RDBStorage(parse_url(storage).render_as_string(hide_password=False))
    study = optuna.create_study(storage=theirs, study_name=name)
    study.optimize(lambda trial: trial.suggest_float("x", 0.5, 0.5), n_trials=1)
    assert study.best_value == 0.5
    theirs.remove_session()
    theirs.engine.dispose()
    return theirs.get_head_version()


def check(storage: str) -> None:
    """Run `alembic check` with our env.py: models and migrations must agree."""
    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(SCRIPTS))
    with opened(storage) as engine, engine.connect() as connection:
        config.attributes["connection"] = connection
        command.check(config)


def test_an_upgrade_from_nothing_creates_tables_and_views_once(storage: str) -> None:
    with opened(storage) as engine, pytest.raises(SchemaError, match="holds no studies of tuner yet"):
        migrations.require_current(engine)
    assert contents(storage) == {}
    assert upgraded(storage)
    created = contents(storage)
    assert set(created) == OURS | set(VIEWS)
    assert sql(storage, f"SELECT version_num FROM {VERSION_TABLE}") == [(migrations.head_revision(),)]
    assert [sql(storage, f"SELECT * FROM {view}") for view in VIEWS] == [[]] * len(VIEWS)
    assert not upgraded(storage)
    assert contents(storage) == created
    with opened(storage) as engine:
        migrations.require_current(engine)


def test_models_and_migrations_agree_also_beside_optunas_tables(storage: str) -> None:
    upgraded(storage)
    new_optuna_study(storage, "theirs")
    check(storage)
    options = {
        "version_table": VERSION_TABLE,
        "compare_server_default": True,
        "include_name": lambda name, kind, _: (
            kind != "table" or (name.startswith("tuner_") and name not in VIEWS)
        ),
    }
    with opened(storage) as engine, engine.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []
    sql(storage, "ALTER TABLE tuner_study ADD COLUMN extra INTEGER")  # the baseline: it does see a difference
    with pytest.raises(CommandError, match="extra"):
        check(storage)


def test_tables_that_optuna_made_before_stay_as_they_are(storage: str) -> None:
    new_optuna_study(storage, "first")
    theirs = contents(storage)
    assert "alembic_version" in theirs
    assert upgraded(storage)
    after = contents(storage)
    assert {name: after[name] for name in theirs} == theirs
    assert set(after) - set(theirs) == OURS | set(VIEWS)
    new_optuna_study(storage, "second")


def test_tables_that_optuna_makes_afterwards_are_its_own(storage: str) -> None:
    upgraded(storage)
    ours = contents(storage)
    head = new_optuna_study(storage, "first")
    both = contents(storage)
    assert {name: both[name] for name in ours} == ours
    assert sql(storage, "SELECT version_num FROM alembic_version") == [(head,)]
    assert not upgraded(storage)
    assert contents(storage) == both


def test_another_applications_alembic_version_is_left_alone(storage: str) -> None:
    sql(
        storage,
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)",
        "INSERT INTO alembic_version VALUES ('feedc0ffee')",
        "CREATE TABLE study (n INTEGER)",
    )
    theirs = contents(storage)
    assert upgraded(storage)
    after = contents(storage)
    assert {name: after[name] for name in theirs} == theirs


@pytest.mark.parametrize("with_tables", [True, False])
def test_an_unknown_revision_is_refused_and_nothing_changes(storage: str, *, with_tables: bool) -> None:
    if with_tables:
        upgraded(storage)
        sql(storage, f"UPDATE {VERSION_TABLE} SET version_num = 'feedc0ffee'")
    else:
        sql(
            storage,
            f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL)",
            f"INSERT INTO {VERSION_TABLE} VALUES ('feedc0ffee')",
        )
    before = contents(storage)
    for refused in (migrations.upgrade, migrations.require_current):
        with opened(storage) as engine, pytest.raises(SchemaError, match=rf"feedc0ffee.*{VERSION_TABLE}"):
            refused(engine)
    assert contents(storage) == before


@pytest.mark.parametrize("broken", ["CREATE VIEW tuner_broken AS SELEC 1", "SELECT * FROM nowhere"])
def test_a_failure_in_the_middle_leaves_nothing_behind(
    storage: str, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(migrations, "VIEWS", {**VIEWS, "tuner_broken": broken})
    with pytest.raises(StoreError), store_errors(parse_url(storage)):
        upgraded(storage)
    assert contents(storage) == {}
    monkeypatch.undo()
    assert upgraded(storage)


def test_a_failure_over_existing_tables_keeps_them_and_their_views(storage: str) -> None:
    upgraded(storage)
    sql(storage, f"DELETE FROM {VERSION_TABLE}")  # so that the first revision runs again, into its own tables
    before = contents(storage)
    with pytest.raises(StoreError, match="already exists"), store_errors(parse_url(storage)):
        upgraded(storage)
    assert contents(storage) == before


def test_processes_upgrade_one_new_database_at_once(storage: str) -> None:
    count = 8 if storage.startswith("sqlite") else 3
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", UPGRADE, storage],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(count)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = [process.communicate() for process in processes]
    assert [(process.returncode, error) for process, (_, error) in zip(processes, said, strict=True)] == [
        (0, "")
    ] * count
    assert sorted(output.strip() for output, _ in said) == ["False"] * (count - 1) + ["True"]
    assert set(contents(storage)) == OURS | set(VIEWS)


def test_the_folder_keeps_only_the_database_and_its_companions(tmp_path: Path) -> None:
    folder = tmp_path / "100% of #1, why? é"
    folder.mkdir()
    url = URL.create("sqlite", database=f"{folder}/my %20 tuner.db")
    engine = open_engine(url)
    assert migrations.upgrade(engine)
    engine.dispose()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert {path.name.removeprefix("my %20 tuner.db") for path in folder.iterdir()} <= {
        "", "-wal", "-shm", ".migration.lock"
    }  # fmt: skip
