"""One trial: params, prediction beside measurement, metrics, outcome, log."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app.charts import category_figure, metrics_figure
from app.loaders import load_log, load_trial, load_trials
from app.selection import chosen, wanted_number
from app.words import plain
from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord
from tuner.units import format_bytes, format_seconds


def render() -> None:
    """Draw the page."""
    database, study = chosen()
    st.title("Trial")
    trials, front = load_trials(database, study)
    if not trials:
        st.info("The study has no trials yet.")
        return
    numbers = [trial.number for trial in trials]
    first = front[-1] if front and "trial" not in st.query_params else wanted_number(numbers)
    number = st.selectbox(f"Trial of {plain(study.name)}", numbers, index=numbers.index(first))
    st.query_params["trial"] = str(number)
    trial, metrics = load_trial(database, study, number)
    _outcome(study, trial)
    left, right = st.columns(2)
    with left:
        st.subheader("Memory")
        st.plotly_chart(category_figure(trial), width="stretch", key="categories")
        st.dataframe(_memory_table(study, trial), width="stretch", hide_index=True)
    with right:
        st.subheader("Parameters")
        params = {"parameter": list(trial.params), "value": [str(value) for value in trial.params.values()]}
        st.dataframe(pd.DataFrame(params), width="stretch", hide_index=True)
        _metrics(metrics)
    _details(trial)


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
        st.plotly_chart(metrics_figure(metrics), width="stretch", key="metrics")
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
