"""One trial: params, prediction beside measurement, metrics, outcome, log."""

from __future__ import annotations

import shlex

import pandas as pd
import streamlit as st

from app.live import chart
from app.loaders import load_log, load_trial
from app.reading import StudyReading
from app.selection import chosen, wanted_number
from app.trial_charts import category_figure, metrics_figure, timeline_figure
from app.words import plain
from tuner.store.overview import Overview, TrialFilter
from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord
from tuner.units import format_bytes, format_seconds


def render() -> None:
    """Draw the page."""
    database, study = chosen()
    read = StudyReading(database, study)
    st.title("Trial")
    numbers = read(Overview, Overview.numbers)
    if not numbers:
        st.info("The study has no trials yet.")
        return
    front, _ = read.frame(Overview, Overview.front, budget_bytes=study.budget_bytes)
    best = int(front["number"].iloc[-1]) if len(front) else None
    first = best if best is not None and "trial" not in st.query_params else wanted_number(numbers)
    number = st.selectbox(f"Trial of {plain(study.name)}", numbers, index=numbers.index(first))
    st.query_params["trial"] = str(number)
    trial, metrics = load_trial(database, study, number)
    beside = _beside(read, trial, best)
    _outcome(study, trial)
    left, right = st.columns(2)
    with left:
        st.subheader("Memory")
        chart(category_figure(trial), "categories", "Predicted memory by category beside the measured peak")
        st.dataframe(_memory_table(study, trial), width="stretch", hide_index=True, placeholder="")
    with right:
        st.subheader("Parameters")
        st.dataframe(_params_table(trial, beside), width="stretch", hide_index=True, placeholder="")
        _metrics(metrics)
    if trial.timeline is not None:
        st.subheader("Memory over time")
        chart(timeline_figure(trial, study), "timeline", "Device memory over time, by phase")
    st.subheader("Again")
    st.code(f"tuner rerun {shlex.quote(study.name)} {trial.number}", language="shell")
    _details(trial)


def _beside(read: StudyReading, trial: TrialRecord, best: int | None) -> dict[str, TrialRecord]:
    """Return the trials that this one is compared with: the best, and the one that it runs again."""
    wanted = {"best": best, "repeated": trial.repeats}
    numbers = tuple(number for number in wanted.values() if number not in (None, trial.number))
    found = {one.number: one for one in read(Overview, Overview.trials, TrialFilter(numbers=numbers))}
    return {
        f"{name}: {number}": found[number]
        for name, number in wanted.items()
        if number is not None and number in found
    }


def _params_table(trial: TrialRecord, beside: dict[str, TrialRecord]) -> pd.DataFrame:
    columns = {"value": trial, **beside}
    params = {
        title: one.params if isinstance(one.params, dict) else {"params": one.params}
        for title, one in columns.items()
    }
    names = list(dict.fromkeys(name for row in params.values() for name in row))
    shown = {
        title: [str(row[name]) if name in row else "" for name in names] for title, row in params.items()
    }
    return pd.DataFrame({"parameter": names, **shown})


def _outcome(study: StudyRecord, trial: TrialRecord) -> None:
    value = "–" if trial.value is None else f"{trial.value:.6g}"
    columns = st.columns(4)
    columns[0].metric("outcome", trial.outcome.replace("_", " "))
    columns[1].metric(plain(study.metric), value)
    columns[2].metric("peak", format_bytes(trial.peak_bytes))
    columns[3].metric("took", format_seconds(trial.seconds))
    if trial.reason is not None:
        st.text(f"Reason: {trial.reason}")
    for warning in trial.warnings:
        st.text(f"Warning: {warning}")


def _memory_table(study: StudyRecord, trial: TrialRecord) -> pd.DataFrame:
    band = f"{format_bytes(trial.predicted_low_bytes)} to {format_bytes(trial.predicted_high_bytes)}"
    failure = trial.failure or {}
    rows = [
        ("budget", format_bytes(study.budget_bytes)),
        ("predicted device bytes", f"{format_bytes(trial.predicted_bytes)} ({band})"),
        (
            "measured device bytes",
            f"{format_bytes(trial.peak_bytes)} ({trial.peak_source or 'not measured'})",
        ),
        ("predicted allocated", format_bytes(trial.predicted_allocated_bytes)),
        ("measured allocated", format_bytes(trial.allocated_bytes)),
        ("baseline", format_bytes(trial.baseline_bytes)),
        *((f"peak in {phase}", format_bytes(size)) for phase, size in trial.phases.items()),
        *(
            (f"failed request: {name.removesuffix('_bytes')}", format_bytes(failure[name]))
            for name in ("requested_bytes", "allocated_bytes", "reserved_bytes", "free_bytes")
            if failure.get(name) is not None
        ),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value"])


def _metrics(metrics: list[MetricRecord]) -> None:
    st.subheader("Metrics")
    if metrics:
        chart(metrics_figure(metrics), "metrics", "Metrics over epochs")
    else:
        st.caption("nothing was reported")


def _details(trial: TrialRecord) -> None:
    if trial.failure is not None and trial.failure.get("traceback"):
        with st.expander("Traceback"):
            st.code(trial.failure["traceback"], language="text")
    with st.expander("Log", expanded=False):
        st.code(load_log(trial) or "the log is empty, or not on this host", language="text")
    with st.expander("Environment"):
        st.json(trial.environment)
    if trial.prediction is not None and trial.prediction.assumptions:
        with st.expander("What the prediction assumed"):
            for sentence in trial.prediction.assumptions:
                st.text(f"• {sentence}")
