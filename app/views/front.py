"""The front: metric against peak memory, with the budget."""

from __future__ import annotations

from collections import Counter

import streamlit as st

from app.charts import front_figure
from app.loaders import FRESH_SECONDS, load_trials, table_of
from app.selection import chosen
from app.words import explain, plain
from tuner.errors import TunerError
from tuner.units import format_bytes


def render() -> None:
    """Draw the page."""
    _, study = chosen()
    st.title("Front")
    st.text(f"{study.name}: {study.metric} ({study.direction}) against peak memory on {study.device_name}")
    _live()


@st.fragment(run_every=FRESH_SECONDS)
def _live() -> None:
    """Draw what changes while a study runs; runs again by itself, outside of main()."""
    database, study = chosen()
    try:
        trials, front = load_trials(database, study)
    except TunerError as error:
        explain(error)
        return
    counts = Counter(trial.outcome for trial in trials)
    on_front = [trial for trial in trials if trial.number in set(front)]
    values = [trial.value for trial in on_front if trial.value is not None]
    best = (max if study.maximize else min)(values) if values else None
    columns = st.columns(5)
    columns[0].metric(f"best {plain(study.metric)}", "–" if best is None else f"{best:.4g}")
    columns[1].metric("budget", format_bytes(study.budget_bytes))
    columns[2].metric("completed", counts["completed"])
    columns[3].metric("pruned before launch", counts["pruned_memory"])
    columns[4].metric("out of memory", counts["out_of_memory"])
    if not trials:
        st.info("The study has no trials yet.")
        return
    st.plotly_chart(front_figure(study, trials, front), width="stretch", key="front_chart")
    if not on_front:
        st.info("The front is empty: no completed trial fits the budget and has a finite value.")
        return
    st.subheader("On the front")
    table = table_of(study, on_front, front).drop(columns=["outcome", "on front", "reason"])
    st.dataframe(table.sort_values("peak MiB"), width="stretch", hide_index=True)
