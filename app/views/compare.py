"""Several studies side by side: fronts, progress, what differs."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import streamlit as st

from app.live import chart
from app.loaders import load_studies
from app.progress import hypervolume_so_far, launches_of, thinned
from app.reading import StudyReading
from app.selection import chosen
from app.study_charts import fronts_figure, progress_figure
from tuner.store.insights import Insights
from tuner.store.overview import Overview
from tuner.store.rows import StudyRecord
from tuner.units import format_bytes

_MOST = 5  # four statements each


def render() -> None:
    """Draw the page."""
    database, study = chosen()
    st.title("Compare")
    studies = {one.name: one for one in load_studies(database)}
    names = st.multiselect(
        "Studies",
        list(studies),
        default=[study.name],
        max_selections=_MOST,
        key="studies",
        bind="query-params",
        help=f"At most {_MOST}.",
    )
    reads = [StudyReading(database, studies[name]) for name in names]
    if len(reads) < 2:
        st.info("Choose a second study to compare with.")
    if not reads:
        return
    if len({(read.study.metric, read.study.direction) for read in reads}) > 1:
        st.warning("These studies have different metrics: their values cannot be compared.")
    fronts = {read.study.name: _front(read) for read in reads}
    st.subheader("Fronts")
    chart(fronts_figure(fronts, reads[0].study.metric), "fronts", "Fronts of the studies")
    _hypervolumes(reads)
    _differences([read.study for read in reads])


def _front(read: StudyReading) -> pd.DataFrame:
    found, _ = read.frame(Overview, Overview.front, budget_bytes=read.study.budget_bytes)
    return found.drop_duplicates(["memory_bytes", "value"])


def _hypervolumes(reads: list[StudyReading]) -> None:
    """Draw hypervolumes with one reference point, as shares of the largest."""
    runs = {
        read.study.name: launches_of(read.study, read.frame(Insights, Insights.progress)[0]) for read in reads
    }
    budget = max(read.study.budget_bytes for read in reads)
    finite = np.concatenate([scores[np.isfinite(scores)] for _, scores in runs.values()])
    if not len(finite):
        st.info("No trial that fits has completed yet.")
        return
    curves = {}
    for name, (memory, scores) in runs.items():
        volume = hypervolume_so_far(memory, scores, budget=budget, worst=float(finite.min()))
        curves[name] = (thinned(len(volume)) + 1, volume[thinned(len(volume))])
    largest = max((float(values[-1]) for _, values in curves.values() if len(values)), default=0.0) or 1.0
    st.subheader("Feasible hypervolume")
    chart(
        progress_figure(
            {name: (launches, 100 * values / largest) for name, (launches, values) in curves.items()},
            "share of the largest (%)",
        ),
        "hypervolumes",
        "Feasible hypervolume of the studies over launches",
    )
    st.caption("Reference point: the largest budget, and the worst value that fits one.")


def _differences(studies: list[StudyRecord]) -> None:
    rows = {study.name: _settings(study) for study in studies}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = pd.DataFrame(
        {study: [row.get(name, "–") for name in names] for study, row in rows.items()}, index=names
    )
    differ = table[table.nunique(axis=1) > 1]
    st.subheader("What differs")
    if not len(differ):
        st.caption("No setting differs.")
        return
    st.dataframe(
        differ.rename_axis("setting").reset_index(), width="stretch", hide_index=True, placeholder=""
    )


def _settings(study: StudyRecord) -> dict[str, str]:
    """Return what a study was created with, as text."""
    plain = {
        "workload": study.workload,
        "workload digest": study.workload_digest[:12],
        "target": study.target,
        "device": study.device_name or "–",
        "budget": format_bytes(study.budget_bytes),
        "metric": f"{study.metric} ({study.direction})",
        "objectives": "1" if study.single else "2",
        "seed": str(study.seed),
        "version": study.tuner_version,
    }
    given = {
        name: setting.get("value") if isinstance(setting, dict) else setting
        for name, setting in study.settings.items()
    }
    return plain | {
        f"setting {name}": json.dumps(value, default=str)
        for name, value in given.items()
        if name not in plain
    }
