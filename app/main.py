"""The entry of the app: `tuner app`, or `streamlit run app/main.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import streamlit as st

# Streamlit puts this folder first on the path; the package `app` lies one above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from app.loaders import open_database
from app.selection import choose_study
from app.views import front, trial, trials
from app.words import explain
from tuner.errors import TunerError


def main() -> None:
    """Draw the chosen page, or say in a sentence why there is nothing to draw."""
    st.set_page_config(page_title="vram-tuner", layout="wide")
    page = st.navigation(
        [
            st.Page(
                front.render, title="Front", icon=":material/show_chart:", url_path="front", default=True
            ),
            st.Page(trials.render, title="Trials", icon=":material/table:", url_path="trials"),
            st.Page(trial.render, title="Trial", icon=":material/biotech:", url_path="trial"),
        ]
    )
    try:
        database = open_database()
        chosen = choose_study(database)
        if chosen is not None:
            st.session_state["database"], st.session_state["study"] = database, chosen
            page.run()
    except TunerError as error:
        explain(error)


main()
