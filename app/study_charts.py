"""The figures of pages about a whole study, as functions of plain data. No Streamlit in here."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.marks import COLORS, GREY, ORANGE, scatter
from tuner.store.insights import ImportanceRecord
from tuner.store.rows import StudyRecord
from tuner.units import GIB, MIB

_MARGIN = {"l": 10, "r": 10, "t": 30, "b": 10}
_LEGEND = {"orientation": "h", "y": -0.28, "yanchor": "top"}
_MOST_AXES = 12  # of parallel coordinates; more cannot be read


def predicted_figure(errors: pd.DataFrame) -> go.Figure:
    """Return predicted against measured device bytes, by mix of operators, with the diagonal."""
    figure = go.Figure()
    for color, (mix, group) in zip(COLORS, errors.groupby("mix", dropna=False), strict=False):
        figure.add_trace(
            scatter(
                len(errors),
                name=html.escape(str(mix)),
                x=group["peak_bytes"] / MIB,
                y=group["predicted_bytes"] / MIB,
                mode="markers",
                marker={"color": color, "size": 7, "opacity": 0.7},
                customdata=np.column_stack([group["number"], 100 * group["error"]]),
                hovertemplate="trial %{customdata[0]}<br>measured %{x:.1f} MiB<br>predicted %{y:.1f} MiB"
                "<br>%{customdata[1]:+.2f} %<extra></extra>",
            )
        )
    ends = [errors[["peak_bytes", "predicted_bytes"]].min().min() / MIB] if len(errors) else [0]
    ends.append(errors[["peak_bytes", "predicted_bytes"]].max().max() / MIB if len(errors) else 1)
    figure.add_trace(
        go.Scatter(
            name="predicted = measured", x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dash"}
        )
    )
    return _laid_out(figure, "measured peak (MiB)", "predicted (MiB)", height=420)


def error_figure(over_time: pd.DataFrame) -> go.Figure:
    """Return the mean absolute error over the trials, in percent."""
    figure = go.Figure(
        go.Scatter(
            x=over_time["number"],
            y=100 * over_time["mean_absolute_error"],
            mode="lines+markers",
            line={"color": COLORS[0]},
            customdata=np.column_stack([over_time["trials"], 100 * over_time["coverage"]]),
            hovertemplate="from trial %{x}, %{customdata[0]} trials<br>mean error %{y:.2f} %"
            "<br>in the band %{customdata[1]:.0f} %<extra></extra>",
        )
    )
    figure.update_yaxes(rangemode="tozero")
    return _laid_out(figure, "trial", "mean absolute error (%)", height=320)


def device_figure(launches: pd.DataFrame, zone: Any, now: datetime) -> go.Figure:
    """Return who held how much of one device when: a box per launch, as high as its reservation.

    Boxes are stacked where they overlap in time; the line is the sum of what was measured.
    """
    figure = go.Figure()
    rows = launches.sort_values("started_at")
    placed = list(_stacked(rows, now))
    for color, outcome in zip(_cycle(rows["outcome"]), dict.fromkeys(rows["outcome"]), strict=False):
        xs, ys, texts = [], [], []
        for row, bottom, end in placed:
            if row.outcome == outcome:
                start, stop = (moment.astimezone(zone) for moment in (row.started_at, end))
                top = bottom + (row.reservation_bytes or 0) / GIB
                xs += [start, stop, stop, start, start, None]
                ys += [bottom, bottom, top, top, bottom, None]
                texts += [f"{html.escape(row.study)} {row.number}: {outcome.replace('_', ' ')}"] * 5 + [""]
        figure.add_trace(
            go.Scatter(
                name=outcome.replace("_", " "),
                x=xs,
                y=ys,
                mode="lines",
                fill="toself",
                line={"color": color, "width": 1},
                opacity=0.75,
                text=texts,
                hovertemplate="%{text}<br>%{y:.2f} GiB<extra></extra>",
            )
        )
    moments, held = _held(rows, now)
    figure.add_trace(
        go.Scatter(
            name="measured, summed",
            x=[moment.astimezone(zone) for moment in moments],
            y=held,
            mode="lines",
            line={"color": "#000000", "width": 1.5, "shape": "hv"},
            hovertemplate="%{y:.2f} GiB measured<extra></extra>",
        )
    )
    return _laid_out(figure, f"time ({zone})", "held (GiB)", height=380)


def progress_figure(curves: Mapping[str, tuple[Any, Any]], title: str) -> go.Figure:
    """Return lines over launches: name to launches and values."""
    figure = go.Figure()
    for color, (name, (launches, values)) in zip(_cycle(curves), curves.items(), strict=False):
        figure.add_trace(
            go.Scatter(
                name=html.escape(name),
                x=launches,
                y=values,
                mode="lines",
                line={"color": color, "shape": "hv", "width": 2},
            )
        )
    return _laid_out(figure, "launches", title, height=340)


def importance_figure(records: Sequence[ImportanceRecord], study: StudyRecord) -> go.Figure:
    """Return how much each parameter matters, for the metric and for memory."""
    figure = go.Figure()
    for color, objective, name in ((COLORS[0], "value", study.metric), (ORANGE, "memory", "peak memory")):
        found = [record for record in records if record.objective == objective][::-1]
        figure.add_trace(
            go.Bar(
                name=html.escape(name),
                x=[100 * record.importance for record in found],
                y=[html.escape(record.name) for record in found],
                orientation="h",
                marker_color=color,
                hovertemplate="%{y}: %{x:.1f} %<extra></extra>",
            )
        )
    return _laid_out(figure, "share of what varies (%)", "", height=max(240, 36 * len(records)))


def parallel_figure(trials: pd.DataFrame, params: pd.DataFrame, study: StudyRecord) -> go.Figure:
    """Return parallel coordinates of params, memory and metric; the color is the metric."""
    axes = [_axis(str(name), params[name]) for name in list(params.columns)[:_MOST_AXES]]
    axes.append({"label": "peak MiB", "values": trials["memory_bytes"] / MIB})
    axes.append({"label": html.escape(study.metric), "values": trials["value"]})
    figure = go.Figure(
        go.Parcoords(
            dimensions=axes,
            line={"color": trials["value"], "colorscale": "Viridis", "reversescale": not study.maximize},
        )
    )
    figure.update_layout(height=420, margin={"l": 60, "r": 40, "t": 60, "b": 20})
    return figure


def rejections_figure(
    rejected: pd.DataFrame, launched: pd.DataFrame, x: str, y: str, budget_bytes: int
) -> go.Figure:
    """Return what was turned away over two params, with what was launched."""
    figure = go.Figure()
    count = len(rejected) + len(launched)
    figure.add_trace(
        scatter(
            count,
            name="launched",
            x=_plotted(launched.get(x)),
            y=_plotted(launched.get(y)),
            mode="markers",
            marker={"color": COLORS[0], "size": 6, "opacity": 0.5},
        )
    )
    over = 100 * (pd.to_numeric(rejected["predicted_bytes"]) / budget_bytes - 1)
    figure.add_trace(
        scatter(
            count,
            name="turned away",
            x=_plotted(rejected.get(x)),
            y=_plotted(rejected.get(y)),
            mode="markers",
            marker={"color": ORANGE, "size": 7, "symbol": "x", "opacity": 0.6},
            customdata=over,
            hovertemplate="%{x}, %{y}<br>%{customdata:+.0f} % of the budget<extra></extra>",
        )
    )
    return _laid_out(figure, html.escape(x), html.escape(y), height=420)


def fronts_figure(fronts: Mapping[str, pd.DataFrame], metric: str) -> go.Figure:
    """Return the fronts of several studies."""
    figure = go.Figure()
    for color, (name, front) in zip(_cycle(fronts), fronts.items(), strict=False):
        figure.add_trace(
            go.Scatter(
                name=html.escape(name),
                x=front["memory_bytes"] / MIB,
                y=front["value"],
                mode="lines+markers",
                line={"color": color, "shape": "hv", "width": 2},
                customdata=front["number"],
                hovertemplate="trial %{customdata}<br>%{y:.4g}, %{x:.1f} MiB",
            )
        )
    return _laid_out(figure, "peak device memory (MiB)", html.escape(metric), height=420)


def _laid_out(figure: go.Figure, x: str, y: str, *, height: int) -> go.Figure:
    figure.update_layout(
        height=height, margin=_MARGIN, legend=_LEGEND, xaxis_title=x, yaxis_title=y, uirevision="kept"
    )
    return figure


def _cycle(names: Any) -> list[str]:
    count = len(list(dict.fromkeys(names)))
    return [COLORS[place % len(COLORS)] for place in range(count)]


def _axis(name: str, values: pd.Series) -> dict[str, Any]:
    """Return an axis of parallel coordinates: numbers as they are, else a place per text."""
    numbers = pd.to_numeric(values, errors="coerce")
    label = html.escape(name)
    if numbers.notna().all():
        return {"label": label, "values": numbers}
    codes, texts = pd.factorize(values.map(lambda value: "–" if value is None else str(value)), sort=True)
    return {
        "label": label,
        "values": codes,
        "tickvals": list(range(len(texts))),
        "ticktext": [html.escape(str(text))[:20] for text in texts],
    }


def _plotted(values: pd.Series | None) -> Any:
    """Return numbers as they are; what is of several types, as text."""
    if values is None:
        return []
    numbers = pd.to_numeric(values, errors="coerce")
    return numbers if (numbers.notna() | values.isna()).all() else values.astype(str).map(html.escape)


def _stacked(rows: pd.DataFrame, now: datetime) -> Any:
    """Yield each launch with the bottom of its box, in GiB, and its end."""
    living: list[tuple[datetime, float, float]] = []  # end, bottom, top
    for row in rows.itertuples():
        end = row.ended_at if isinstance(row.ended_at, datetime) and row.ended_at == row.ended_at else now
        living = sorted((one for one in living if one[0] > row.started_at), key=lambda one: one[1])
        height, bottom = (row.reservation_bytes or 0) / GIB, 0.0
        for _, low, high in living:
            if low - bottom >= height:
                break
            bottom = max(bottom, high)
        living.append((end, bottom, bottom + height))
        yield row, bottom, end


def _held(rows: pd.DataFrame, now: datetime) -> tuple[list[datetime], list[float]]:
    """Return the sum of measured peaks over time."""
    changes: list[tuple[datetime, float]] = []
    for row in rows.itertuples():
        size = 0.0 if pd.isna(row.peak_bytes) else row.peak_bytes / GIB
        end = row.ended_at if isinstance(row.ended_at, datetime) and row.ended_at == row.ended_at else now
        changes += [(row.started_at, size), (end, -size)]
    changes.sort(key=lambda change: change[0])
    return [moment for moment, _ in changes], list(np.cumsum([size for _, size in changes]))
