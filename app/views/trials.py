"""All trials of a study, with filters and CSV."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app.loaders import load_trials, table_of
from app.selection import chosen


def render() -> None:
    """Draw the page."""
    database, study = chosen()
    st.title("Trials")
    st.text(study.name)
    trials, front = load_trials(database, study)
    if not trials:
        st.info("The study has no trials yet.")
        return
    table = _filtered(table_of(study, trials, front))
    st.caption(f"{len(table)} of {len(trials)} trials")
    st.dataframe(table, width="stretch", hide_index=True)
    st.download_button(
        "Download as CSV",
        table.to_csv(index=False),
        file_name="trials.csv",
        mime="text/csv",
        icon=":material/download:",
    )


def _filtered(table: pd.DataFrame) -> pd.DataFrame:
    left, middle, right = st.columns([2, 2, 1])
    outcomes = sorted(table["outcome"].unique())
    wanted = left.multiselect("Outcomes", outcomes, placeholder="all")
    text = middle.text_input("Search", placeholder="any text in a row, such as adam")
    only_front = right.toggle("Only the front")
    if wanted:
        table = table[table["outcome"].isin(wanted)]
    if only_front:
        table = table[table["on front"]]
    if text:
        found = table.astype(str).apply(lambda column: column.str.contains(text, case=False, regex=False))
        table = table[found.any(axis=1)]
    return table
