"""The app on one of its pages, pointed to a new database, with nothing cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash

from tests.conftest import ROOT

MAIN = ROOT / "app" / "main.py"
PAGES = ("front", "trials", "trial", "predictions", "devices", "search", "compare")


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    st.cache_data.clear()
    st.cache_resource.clear()
    yield
    st.cache_data.clear()
    st.cache_resource.clear()


@pytest.fixture
def url(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a database that is not there yet, which the app is pointed to."""
    monkeypatch.setenv("TUNER_STORAGE", sqlite_url)
    return sqlite_url


def page(name: str = "front", **query: str) -> AppTest:
    """Run the app on one of its pages, with what stands in the address."""
    app = AppTest.from_file(str(MAIN), default_timeout=60)
    for key, value in query.items():
        app.query_params[key] = value
    # AppTest.switch_page() knows pages by their files; ours are functions, known by their address.
    app._page_hash = "" if name == "front" else calc_hash(name)
    return app.run()


def said(app: AppTest) -> str:
    """All the text that a page shows, but for its tables."""
    assert not app.exception, app.exception[0].value
    elements = [*app.title, *app.text, *app.info, *app.warning, *app.error, *app.caption, *app.markdown]
    return "\n".join([*(str(element.value) for element in elements), *(m.label for m in app.metric)])


def path_of(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))
