"""How the search went: progress, what matters, what was turned away."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from app.live import chart, live, say_when
from app.progress import Floats, best_so_far, hypervolume_so_far, launches_of, thinned
from app.reading import StudyReading
from app.selection import chosen
from app.study_charts import importance_figure, parallel_figure, progress_figure, rejections_figure
from app.words import plain
from tuner.store.insights import Insights
from tuner.store.reader import Reader
from tuner.store.rows import StudyRecord

_MOST_LINES = 1_000  # of parallel coordinates, and of points over two params; more lie on one another


def render() -> None:
    """Draw the page."""
    _, study = chosen()
    st.title("Search")
    st.text(f"{study.name}: {study.metric} ({study.direction})")
    live(_draw)


def _draw(read: StudyReading) -> None:
    say_when(read(Reader, Reader.outcomes).get("running", 0))
    progress, _ = read.frame(Insights, Insights.progress)
    completed, total = read.frame(Insights, Insights.completed, most=_MOST_LINES)
    if len(completed):
        _progress(read.study, progress)
    else:
        st.info("No trial has completed yet.")
    _importance(read)
    if len(completed):
        _parallel(read.study, completed, total)
    _rejections(read, completed)


def _progress(study: StudyRecord, progress: pd.DataFrame) -> None:
    left, right = st.columns(2)
    best, volume = progress_of(study, progress)
    shown = thinned(len(progress))
    launches = shown + 1
    with left:
        st.subheader(f"Best {plain(study.metric)} that fits")
        chart(
            progress_figure({study.name: (launches, best[shown])}, study.metric.replace("<", "&lt;")),
            "best",
            "Best value that fits over launches",
        )
    with right:
        st.subheader("Feasible hypervolume")
        chart(
            progress_figure({study.name: (launches, 100 * volume[shown])}, "share of the last (%)"),
            "hypervolume",
            "Feasible hypervolume over launches",
        )
        st.caption("Reference point: the budget, and the worst value that fits.")


def progress_of(study: StudyRecord, progress: pd.DataFrame) -> tuple[Floats, Floats]:
    """Return the best value that fits and the hypervolume's share of its last, launch by launch.

    The reference point is the budget, and the worst value that fits.

    Args:
        study: The study.
        progress: As `Insights.progress` gives it.
    """
    memory, scores = launches_of(study, progress)
    finite = scores[np.isfinite(scores)]
    worst = float(finite.min()) if len(finite) else 0.0
    volume = hypervolume_so_far(memory, scores, budget=study.budget_bytes, worst=worst)
    last = volume[-1] if len(volume) and volume[-1] > 0 else 1.0
    best = best_so_far(scores)
    return best if study.maximize else -best, volume / last


def _importance(read: StudyReading) -> None:
    st.subheader("What matters")
    records = read(Insights, Insights.importance)
    if not records:
        st.caption(f"Not computed yet: tuner importance {plain(read.study.name)}")
        return
    chart(importance_figure(records, read.study), "importance", "Importance of parameters")
    st.caption(
        f"fANOVA over {records[0].trials} completed trials, "
        f"computed {records[0].computed_at:%Y-%m-%d %H:%M} UTC."
    )


def _parallel(study: StudyRecord, completed: pd.DataFrame, total: int) -> None:
    finite = completed[np.isfinite(completed["value"].astype(float)) & completed["memory_bytes"].notna()]
    params = _params_of(finite)
    if not len(finite) or not len(params.columns):
        return
    st.subheader("Parallel coordinates")
    chart(
        parallel_figure(finite.reset_index(drop=True), params, study),
        "parallel",
        "Parallel coordinates of params, peak memory and metric",
    )
    if len(completed) < total:
        st.caption(f"{len(completed):,} of {total:,} completed trials are drawn.")


def _rejections(read: StudyReading, completed: pd.DataFrame) -> None:
    st.subheader("Turned away before launch")
    rejected, total = read.frame(Insights, Insights.rejections, most=_MOST_LINES)
    if not len(rejected):
        st.caption("Nothing was turned away.")
        return
    params = _params_of(rejected)
    params["predicted_bytes"] = rejected["predicted_bytes"]
    names = [str(name) for name in params.columns if name != "predicted_bytes"]
    if not names:
        st.caption(f"{total:,} configurations.")
        return
    left, right = st.columns(2)
    x = left.selectbox("Across", names, key="x", bind="query-params")
    y = right.selectbox("Up", names, index=min(1, len(names) - 1), key="y", bind="query-params")
    launched = _params_of(completed)
    chart(
        rejections_figure(params, launched, x, y, read.study.budget_bytes),
        "rejections",
        f"What was turned away over {x} and {y}",
    )
    st.caption(f"{total:,} configurations were turned away; {len(rejected):,} are drawn.")


def _params_of(trials: pd.DataFrame) -> pd.DataFrame:
    """Return params as columns; a workload whose params are no dictionary has none."""
    return pd.DataFrame([value if isinstance(value, dict) else {} for value in trials.get("params", [])])
