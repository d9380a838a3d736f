"""What is selected: kept in the address, so that a view can be shared."""

from __future__ import annotations

import streamlit as st

from app.loaders import Database, load_studies
from app.words import plain
from tuner.store.rows import StudyRecord

_SELECTED = "selected"  # numbers of brushed trials, with commas


def choose_study(database: Database) -> StudyRecord | None:
    """Let the user choose a study; return it, or None when there is none."""
    studies = load_studies(database)
    if not studies:
        st.info(f"There are no studies in {plain(database.place)} yet.")
        st.caption("start one: tuner run studies/digits_cnn.py")
        return None
    names = [study.name for study in studies]
    wanted = st.query_params.get("study", st.session_state.get("study_name", names[0]))
    if wanted not in names:
        st.warning("There is no study of that name here; showing the newest one.")
        wanted = names[0]
    name = st.sidebar.selectbox("Study", names, index=names.index(wanted), key="study_choice")
    if name != st.session_state.get("study_name", name):
        keep_selected([])  # the other study's numbers mean other trials
    st.session_state["study_name"] = name
    st.query_params["study"] = name
    st.sidebar.caption(f"database: {plain(database.place)}")
    return next(study for study in studies if study.name == name)


def chosen() -> tuple[Database, StudyRecord]:
    """Return the database and study of this run of the script."""
    return st.session_state["database"], st.session_state["study"]


def wanted_number(numbers: list[int]) -> int:
    """Return the trial number in the address if it is one of `numbers`, else the first."""
    text = st.query_params.get("trial", "")
    known = {str(number): number for number in numbers}
    if text in known:
        return known[text]
    if text:
        st.warning("There is no trial of that number in this study.")
    return numbers[0]


def keep_selected(numbers: list[int]) -> None:
    """Put the numbers of brushed trials into the address; none of them takes them out."""
    if numbers:
        st.query_params[_SELECTED] = ",".join(map(str, numbers))
    else:
        st.query_params.pop(_SELECTED, None)


def selected_numbers() -> list[int]:
    """Return the numbers in the address; what is no number is passed over."""
    texts = st.query_params.get(_SELECTED, "").split(",")[:1000]
    return [int(text) for text in texts if text.isascii() and text.isdigit() and len(text) < 10]
