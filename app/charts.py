"""The figures, as functions of plain data. No Streamlit in here."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord

MIB = 1 << 20
# Colours that people with colour-blindness tell apart (Okabe and Ito, 2008), and a mark each.
_FEASIBLE = {"color": "#0072B2", "symbol": "circle"}
_INFEASIBLE = {"color": "#D55E00", "symbol": "x"}
_FRONT = "#009E73"
_STRIP = {
    "pruned_memory": {"color": "#999999", "symbol": "triangle-left"},
    "out_of_memory": {"color": "#D55E00", "symbol": "x"},
    "pruned_metric": {"color": "#56B4E9", "symbol": "diamond"},
}
_OTHER = {"color": "#CC79A7", "symbol": "square"}


def front_figure(study: StudyRecord, trials: Sequence[TrialRecord], front: Sequence[int]) -> go.Figure:
    """Return metric against peak memory, with the front and the budget.

    Above: completed trials, within and beyond the budget, and the front as a staircase. Below, on
    the same memory axis: trials without a value, by outcome, at what was measured or predicted.
    """
    completed = [trial for trial in trials if trial.outcome == "completed" and _is_shown(trial)]
    others = [
        trial
        for trial in trials
        if trial.outcome not in ("completed", "running") and _memory(trial) is not None
    ]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.78, 0.22], vertical_spacing=0.04)
    fits = [trial for trial in completed if (trial.peak_bytes or 0) <= study.budget_bytes]
    over = [trial for trial in completed if (trial.peak_bytes or 0) > study.budget_bytes]
    for name, group, mark in (("fits the budget", fits, _FEASIBLE), ("over the budget", over, _INFEASIBLE)):
        if group:
            figure.add_trace(_points(name, group, mark, study), row=1, col=1)
    if front:
        figure.add_trace(_staircase(study, fits, front), row=1, col=1)
    for outcome in dict.fromkeys(trial.outcome for trial in others):
        group = [trial for trial in others if trial.outcome == outcome]
        figure.add_trace(_strip(outcome, group), row=2, col=1)
    budget_mib = study.budget_bytes / MIB
    figure.add_vline(x=budget_mib, line={"dash": "dash", "color": "#D55E00", "width": 2})
    figure.add_annotation(
        x=budget_mib, y=1.0, yref="paper", text="budget", showarrow=False, xanchor="left", yanchor="top"
    )
    figure.update_yaxes(title_text=html.escape(study.metric), row=1, col=1)
    figure.update_xaxes(
        title_text="peak device memory (MiB); predicted where nothing was launched", row=2, col=1
    )
    figure.update_layout(
        height=560,
        margin={"l": 10, "r": 10, "t": 30, "b": 10},
        legend={"orientation": "h", "y": -0.14, "yanchor": "top"},
        hovermode="closest",
    )
    return figure


def category_figure(trial: TrialRecord) -> go.Figure:
    """Return the prediction by category as one bar, beside the measured peak."""
    figure = go.Figure()
    categories = trial.prediction.categories if trial.prediction is not None else {}
    for name, size_bytes in sorted(categories.items(), key=lambda item: -item[1]):
        if size_bytes:
            figure.add_trace(
                go.Bar(
                    name=name.replace("_", " "),
                    x=["predicted"],
                    y=[size_bytes / MIB],
                    hovertemplate="%{y:.1f} MiB",
                )
            )
    if trial.peak_bytes is not None:
        figure.add_trace(
            go.Bar(
                name="measured",
                x=["measured"],
                y=[trial.peak_bytes / MIB],
                marker_color="#0072B2",
                hovertemplate="%{y:.1f} MiB",
            )
        )
    figure.update_layout(
        barmode="stack",
        height=380,
        yaxis_title="peak device memory (MiB)",
        margin={"l": 10, "r": 10, "t": 20, "b": 10},
    )
    return figure


def metrics_figure(metrics: Sequence[MetricRecord]) -> go.Figure:
    """Return each metric over the epochs."""
    figure = go.Figure()
    for name in dict.fromkeys(metric.name for metric in metrics):
        points = [metric for metric in metrics if metric.name == name]
        figure.add_trace(
            go.Scatter(
                name=html.escape(name),
                x=[point.epoch for point in points],
                y=[point.value for point in points],
                mode="lines+markers",
            )
        )
    figure.update_layout(
        height=320, xaxis={"title": "epoch", "dtick": 1}, margin={"l": 10, "r": 10, "t": 20, "b": 10}
    )
    return figure


def _is_shown(trial: TrialRecord) -> bool:
    return trial.value is not None and math.isfinite(trial.value) and trial.peak_bytes is not None


def _memory(trial: TrialRecord) -> int | None:
    """Return what was measured, else what was predicted."""
    return (
        trial.predicted_bytes
        if trial.outcome == "pruned_memory"
        else trial.peak_bytes or trial.predicted_bytes
    )


def _points(name: str, trials: Sequence[TrialRecord], mark: dict[str, str], study: StudyRecord) -> Any:
    return go.Scatter(
        name=name,
        x=[(trial.peak_bytes or 0) / MIB for trial in trials],
        y=[trial.value for trial in trials],
        mode="markers",
        marker={**mark, "size": 9, "opacity": 0.8},
        customdata=[[trial.number, _text(trial)] for trial in trials],
        hovertemplate=_hover("trial", study),
    )


def _staircase(study: StudyRecord, trials: Sequence[TrialRecord], front: Sequence[int]) -> Any:
    on_front = set(front)
    points = sorted((trial for trial in trials if trial.number in on_front), key=lambda t: t.peak_bytes or 0)
    return go.Scatter(
        name="front",
        x=[(trial.peak_bytes or 0) / MIB for trial in points],
        y=[trial.value for trial in points],
        mode="lines+markers",
        line={"color": _FRONT, "width": 2, "shape": "hv"},
        marker={"color": _FRONT, "size": 12, "symbol": "circle-open", "line": {"width": 2}},
        customdata=[[trial.number, _text(trial)] for trial in points],
        hovertemplate=_hover("front: trial", study),
    )


def _strip(outcome: str, trials: Sequence[TrialRecord]) -> Any:
    return go.Scatter(
        name=outcome.replace("_", " "),
        x=[(_memory(trial) or 0) / MIB for trial in trials],
        y=[outcome.replace("_", " ")] * len(trials),
        mode="markers",
        marker={**_STRIP.get(outcome, _OTHER), "size": 9},
        customdata=[[trial.number, _text(trial)] for trial in trials],
        hovertemplate="trial %{customdata[0]}<br>%{x:.1f} MiB<br>%{customdata[1]}<extra></extra>",
    )


def _hover(title: str, study: StudyRecord) -> str:
    metric = html.escape(study.metric).replace("%", "")
    point = f"{title} %{{customdata[0]}}<br>{metric} %{{y:.4g}}, %{{x:.1f}} MiB"
    return f"{point}<br>%{{customdata[1]}}<extra></extra>"


def _text(trial: TrialRecord) -> str:
    def shown(value: Any) -> str:
        return html.escape(f"{value:.3g}" if isinstance(value, float) else str(value))

    return "<br>".join(f"{shown(name)} = {shown(value)}" for name, value in trial.params.items())
