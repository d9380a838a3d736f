"""The figures of one trial, as functions of plain data. No Streamlit in here."""

from __future__ import annotations

import html
from collections.abc import Sequence

import plotly.graph_objects as go

from app.marks import BLUE, COLORS, GREEN, ORANGE
from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord
from tuner.units import MIB


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
                marker_color=BLUE,
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


def timeline_figure(trial: TrialRecord, study: StudyRecord) -> go.Figure:
    """Return device memory over time, a colour per phase, with what was predicted, reserved and allowed."""
    timeline = trial.timeline or {"phases": [], "points": []}
    figure = go.Figure()
    points = timeline["points"]
    for place, phase in enumerate(timeline["phases"]):
        # A point belongs to its phase, and joins it to the one before.
        xs = [point[0] for point in points]
        ys = [point[1] / MIB if point[2] == place else None for point in points]
        figure.add_trace(
            go.Scatter(
                name=html.escape(str(phase)),
                x=xs,
                y=ys,
                mode="lines+markers",
                marker={"size": 4},
                line={"color": COLORS[place % len(COLORS)]},
                hovertemplate="%{x:.1f} s<br>%{y:.1f} MiB",
            )
        )
    band = trial.predicted_low_bytes, trial.predicted_high_bytes
    if band[0] is not None and band[1] is not None:
        figure.add_hrect(y0=band[0] / MIB, y1=band[1] / MIB, fillcolor=GREEN, opacity=0.15, line_width=0)
    for name, size_bytes, dash in (
        ("predicted peak", trial.predicted_bytes, "dot"),
        ("reserved", trial.reservation_bytes, "dashdot"),
        ("budget", study.budget_bytes, "dash"),
    ):
        if size_bytes is not None:
            figure.add_hline(
                y=size_bytes / MIB,
                line={"dash": dash, "color": ORANGE if name == "budget" else GREEN, "width": 1.5},
                annotation_text=name,
                annotation_position="top left",
            )
    figure.update_layout(
        height=380,
        xaxis_title="seconds since the baseline",
        yaxis_title="device memory (MiB)",
        margin={"l": 10, "r": 10, "t": 20, "b": 10},
    )
    return figure
