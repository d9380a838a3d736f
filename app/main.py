"""The entry of the app: `tuner app`, or `streamlit run app/main.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

# Streamlit puts this folder first on the path; the package `app` lies one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app.loaders import open_database
from app.selection import choose_study
from app.views import compare, devices, front, predictions, search, trial, trials
from app.words import explain
from tuner.errors import TunerError

_PAGES = {
    "front": (front, ":material/show_chart:"),
    "trials": (trials, ":material/table:"),
    "trial": (trial, ":material/biotech:"),
    "predictions": (predictions, ":material/target:"),
    "devices": (devices, ":material/memory:"),
    "search": (search, ":material/travel_explore:"),
    "compare": (compare, ":material/compare_arrows:"),
}


def main() -> None:
    """Draw the chosen page, or say in a sentence why there is nothing to draw."""
    st.set_page_config(page_title="vram-tuner", layout="wide")
    pages = {
        name: st.Page(view.render, title=name.capitalize(), icon=icon, url_path=name, default=name == "front")
        for name, (view, icon) in _PAGES.items()
    }
    page = st.navigation(list(pages.values()))
    st.session_state["pages"] = pages
    try:
        database = open_database()
        chosen = choose_study(database)
        if chosen is not None:
            st.session_state["database"], st.session_state["study"] = database, chosen
            page.run()
    except TunerError as error:
        explain(error)


main()
