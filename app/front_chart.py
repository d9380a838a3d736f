"""The figure of the front, as a function of plain data. No Streamlit in here."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.marks import BLUE, COLORS, GREEN, GREY, ORANGE, scatter
from tuner.store.rows import StudyRecord
from tuner.units import MIB

_FITS, _OVER = {"color": BLUE, "symbol": "circle"}, {"color": ORANGE, "symbol": "x"}
_STRIP = {
    "pruned_memory": {"color": GREY, "symbol": "triangle-left"},
    "out_of_memory": {"color": ORANGE, "symbol": "x"},
    "pruned_metric": {"color": "#56B4E9", "symbol": "diamond"},
}
_OTHER = {"color": "#CC79A7", "symbol": "square"}
_MOST_BANDS = 300  # more bands lie on one another
_MOST_TEXTS = len(COLORS)  # values of a param that is no number, each with a colour


@dataclass(frozen=True)
class FrontView:
    """How the front is looked at.

    Attributes:
        budget_bytes: Where the line is.
        memory: `peak`, `allocated` or `reserved`.
        param: Which param colours the points; None for whether they fit.
        log_memory, log_value: Whether an axis is logarithmic.
    """

    budget_bytes: int
    memory: str = "peak"
    param: str | None = None
    log_memory: bool = False
    log_value: bool = False


def front_figure(study: StudyRecord, points: pd.DataFrame, front: pd.DataFrame, view: FrontView) -> go.Figure:
    """Return metric against memory, with the front and the budget.

    Above: completed trials, within and beyond the budget, and the front as a staircase. Below, on
    the same memory axis: trials without a value, by outcome, at what was measured, or predicted with
    its band where nothing was launched.

    Args:
        study: The study.
        points: As `Overview.points` gives them.
        front: As `Overview.front` gives it for the view's budget.
        view: How to look at it.
    """
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.78, 0.22], vertical_spacing=0.04)
    count = len(points)
    done = points[points["outcome"] == "completed"]
    done = done[done["memory_bytes"].notna() & np.isfinite(done["value"].astype(float))]
    fits = done["memory_bytes"] <= view.budget_bytes
    for trace in _colored(study, done, view, count) if view.param else _by_fit(study, done, fits, count):
        figure.add_trace(trace, row=1, col=1)
    if len(front):
        figure.add_trace(_staircase(study, front, view.budget_bytes), row=1, col=1)
    others = points[~points["outcome"].isin(["completed", "running"])].copy()
    others["shown_bytes"] = others["memory_bytes"].where(
        (others["outcome"] != "pruned_memory") & others["memory_bytes"].notna(), others["predicted_bytes"]
    )
    for outcome, group in others[others["shown_bytes"].notna()].groupby("outcome"):
        figure.add_trace(_strip(str(outcome), group, count), row=2, col=1)
    _lay_out(figure, study, view)
    return figure


def _lay_out(figure: go.Figure, study: StudyRecord, view: FrontView) -> None:
    budget_mib = view.budget_bytes / MIB
    figure.add_vline(x=budget_mib, line={"dash": "dash", "color": ORANGE, "width": 2})
    figure.add_annotation(
        x=np.log10(budget_mib) if view.log_memory else budget_mib,
        y=1.0,
        yref="paper",
        text="budget" if view.budget_bytes == study.budget_bytes else "what if",
        showarrow=False,
        xanchor="left",
        yanchor="top",
    )
    figure.update_yaxes(title_text=html.escape(study.metric), row=1, col=1)
    figure.update_yaxes(type="log" if view.log_value else "linear", row=1, col=1)
    figure.update_xaxes(type="log" if view.log_memory else "linear")
    name = {"peak": "device"}.get(view.memory, view.memory)
    figure.update_xaxes(
        title_text=f"peak {name} memory (MiB); predicted where nothing was launched", row=2, col=1
    )
    figure.update_layout(
        height=560,
        margin={"l": 10, "r": 10, "t": 30, "b": 10},
        legend={"orientation": "h", "y": -0.14, "yanchor": "top"},
        hovermode="closest",
        dragmode="select",
        uirevision=f"{study.id} {view.memory} {view.log_memory} {view.log_value}",
    )


def _by_fit(study: StudyRecord, done: pd.DataFrame, fits: pd.Series, count: int) -> Any:
    for name, group, mark in (
        ("fits the budget", done[fits], _FITS),
        ("over the budget", done[~fits], _OVER),
    ):
        if len(group):
            yield _points(study, group, count, name=name, marker={**mark, "size": 9, "opacity": 0.8})


def _colored(study: StudyRecord, done: pd.DataFrame, view: FrontView, count: int) -> Any:
    """Yield points coloured by a param: on a scale where it is a number, else a colour per value."""
    given = done["param"]
    numbers = pd.to_numeric(
        given.where(given.map(lambda value: not isinstance(value, bool))), errors="coerce"
    )
    if numbers.notna().any() and (numbers.notna() | given.isna()).all():
        scale = {"color": numbers, "colorscale": "Viridis", "showscale": True, "size": 9, "opacity": 0.8}
        bar = {"title": {"text": html.escape(str(view.param)), "side": "right"}, "thickness": 12}
        yield _points(study, done, count, name="completed", marker={**scale, "colorbar": bar})
        return
    texts = given.map(lambda value: "–" if value is None or value != value else str(value))
    common = list(texts.value_counts().index[: _MOST_TEXTS - 1])
    texts = texts.where(texts.isin(common), "others")
    for color, (text, group) in zip(COLORS, done.groupby(texts), strict=False):
        yield _points(
            study, group, count, name=html.escape(str(text))[:40], marker={"color": color, "size": 9}
        )


def _points(study: StudyRecord, group: pd.DataFrame, count: int, **style: Any) -> Any:
    return scatter(
        count,
        x=group["memory_bytes"] / MIB,
        y=group["value"],
        mode="markers",
        customdata=group[["number"]],
        hovertemplate=_hover("trial", study),
        **style,
    )


def _staircase(study: StudyRecord, front: pd.DataFrame, budget_bytes: int) -> Any:
    """Return the front; of trials that tie, the first."""
    points = front.drop_duplicates(["memory_bytes", "value"])
    return go.Scatter(
        name="front",
        x=points["memory_bytes"] / MIB,
        y=points["value"],
        mode="lines+markers",
        line={"color": GREEN, "width": 2, "shape": "hv"},
        marker={"color": GREEN, "size": 12, "symbol": "circle-open", "line": {"width": 2}},
        customdata=points[["number"]],
        hovertemplate=_hover("front: trial", study),
    )


def _strip(outcome: str, group: pd.DataFrame, count: int) -> Any:
    name = outcome.replace("_", " ")
    band = None
    if outcome == "pruned_memory" and len(group) <= _MOST_BANDS:
        band = {
            "type": "data",
            "symmetric": False,
            "array": (group["predicted_high_bytes"] - group["predicted_bytes"]) / MIB,
            "arrayminus": (group["predicted_bytes"] - group["predicted_low_bytes"]) / MIB,
            "thickness": 1,
            "width": 0,
        }
    return scatter(
        count,
        name=name,
        x=group["shown_bytes"] / MIB,
        y=[name] * len(group),
        error_x=band,
        mode="markers",
        marker={**_STRIP.get(outcome, _OTHER), "size": 9},
        customdata=group[["number"]],
        hovertemplate=f"trial %{{customdata[0]}}<br>%{{x:.1f}} MiB<br>{name}<extra></extra>",
    )


def _hover(title: str, study: StudyRecord) -> str:
    metric = html.escape(study.metric).replace("%", "")
    return f"{title} %{{customdata[0]}}<br>{metric} %{{y:.4g}}, %{{x:.1f}} MiB<extra></extra>"
