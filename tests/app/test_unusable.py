"""A database that cannot be read: each page says so in a sentence, and nothing secret."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from tests.app import data
from tests.app.conftest import PAGES, page, path_of, said
from tuner.store import migrations
from tuner.store.engine import open_engine, parse_url
from tuner.store.schema import VERSION_TABLE

SECRET = "s3cr3t-pw"


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Hold a database so that nobody can read it: outside WAL mode, which lets readers in."""
    with closing(sqlite3.connect(path_of(url), isolation_level=None)) as connection:
        assert connection.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")


@pytest.mark.parametrize("name", PAGES)
def test_missing_file(url: str, name: str) -> None:
    text = said(page(name))
    assert "There is no database" in text
    assert "start a study" in text
    assert not path_of(url).exists()


@pytest.mark.parametrize("name", PAGES)
def test_database_without_tables(url: str, name: str) -> None:
    with closing(sqlite3.connect(path_of(url))) as connection:
        connection.execute("CREATE TABLE theirs (id INTEGER)")
    assert "The database holds no studies of tuner yet" in said(page(name))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"", "The database holds no studies"), (b"this is no database" * 100, "file is not a database")],
)
def test_file_that_is_no_database(url: str, content: bytes, sentence: str) -> None:
    path_of(url).write_bytes(content)
    assert sentence in said(page())
    assert path_of(url).read_bytes() == content


def test_database_without_studies(url: str) -> None:
    engine = open_engine(parse_url(url))
    migrations.upgrade(engine)
    engine.dispose()
    assert "There are no studies in" in said(page())


@pytest.mark.parametrize("name", PAGES)
def test_unknown_schema(url: str, name: str) -> None:
    data.fill(url, numbers=range(3))
    with closing(sqlite3.connect(path_of(url))) as connection, connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    text = said(page(name))
    assert "schema 9999" in text
    assert "is unknown to this version" in text


def test_older_schema(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data.fill(url, numbers=range(3))
    monkeypatch.setattr(migrations, "head_revision", lambda: "0009")
    text = said(page())
    assert "this version needs 0009" in text
    assert "tuner db upgrade" in text


@pytest.mark.parametrize("name", PAGES)
def test_locked_database(url: str, name: str) -> None:
    data.fill(url, numbers=range(3))
    with locked(url):
        assert "is locked by another program" in said(page(name))
    assert "is locked" not in said(page(name))


def test_locked_between_two_looks_at_the_front(url: str) -> None:
    """The part that runs again by itself does so outside of main(), which explains errors."""
    data.fill(url, numbers=range(3))
    with locked(url):
        pass  # it has left WAL mode now, which is not possible beside an open connection

    def rerun() -> None:
        import streamlit

        from app.loaders import load_studies, open_database
        from app.views import front

        if "study" not in streamlit.session_state:
            database = open_database()
            streamlit.session_state["database"] = database
            streamlit.session_state["study"] = load_studies(database)[0]
        front.live(front._draw)

    app = AppTest.from_function(rerun, default_timeout=60).run()
    assert len(app.metric) == 5
    st.cache_data.clear()
    with locked(url):
        assert "is locked by another program" in said(app.run())


def test_log_that_cannot_be_read(url: str) -> None:
    data.fill(url, numbers=range(3))
    (path_of(url).parent / "runs" / "0" / "log.txt").mkdir(parents=True)
    app = page("trial", trial="0")
    assert not app.exception
    assert any("not on this host" in code.value for code in app.code)


@pytest.mark.parametrize(
    "url_text",
    [
        f"postgresql://user:{SECRET}@127.0.0.1:1/tuner",
        f"postgresql://user@127.0.0.1:1/tuner?password={SECRET}",
        f"postgresql://user:{SECRET}/x@127.0.0.1:1/tuner",
        f"mysql://user:{SECRET}@127.0.0.1:1/tuner",
        f"{SECRET}",
    ],
)
def test_password_is_never_shown(monkeypatch: pytest.MonkeyPatch, url_text: str) -> None:
    monkeypatch.setenv("TUNER_STORAGE", url_text)
    app = page()
    assert len(said(app)) > 20
    assert SECRET not in f"{app.main}{app.sidebar}{app.query_params}"
