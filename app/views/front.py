"""The front: metric against memory, with a budget that can be moved."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import streamlit as st

from app.front_chart import FrontView, front_figure
from app.gpus import smallest_gpu
from app.live import live, say_when
from app.loaders import table_of
from app.reading import StudyReading
from app.selection import chosen, keep_selected, selected_numbers
from app.words import plain
from tuner.store.overview import MEMORY, Overview, TrialFilter
from tuner.store.reader import Reader
from tuner.store.rows import StudyRecord
from tuner.units import MIB, format_bytes

_MOST_LISTED = 200  # trials in the table of a selection
_CLEARED = "selections_cleared"  # how often: a chart keeps its selection for as long as it has its key


def render() -> None:
    """Draw the page."""
    _, study = chosen()
    st.title("Front")
    st.text(f"{study.name}: {study.metric} ({study.direction}) against peak memory on {study.device_name}")
    live(_draw)


def _draw(read: StudyReading) -> None:
    study = read.study
    counts = read(Reader, Reader.outcomes)
    say_when(counts.get("running", 0))
    if not counts:
        st.info("The study has no trials yet.")
        return
    view = _controls(read)
    points, total = read.frame(Overview, Overview.points, memory=view.memory, param=view.param)
    front, _ = read.frame(Overview, Overview.front, memory=view.memory, budget_bytes=view.budget_bytes)
    _figures(study, view, counts, front)
    event = st.plotly_chart(
        front_figure(study, points, front, view),
        width="stretch",
        key=f"front_chart_{st.session_state.get(_CLEARED, 0)}",
        on_select="rerun",
        alt=f"{study.metric} against peak memory: {len(front)} trials on the front",
    )
    if len(points) < total:
        st.caption(f"{len(points):,} of {total:,} trials are drawn; the front is whole.")
    _selection(read, event)
    if not len(front):
        st.info("The front is empty: no completed trial fits the budget and has a finite value.")
        return
    st.subheader("On the front")
    _table(read, [int(number) for number in front["number"]], order="peak_bytes")


def _controls(read: StudyReading) -> FrontView:
    """Let the user choose how to look; all of it is in the address."""
    study = read.study
    left, middle, right = st.columns([2, 2, 2])
    memory = left.segmented_control(
        "Memory", list(MEMORY), default="peak", required=True, key="memory", bind="query-params",
        help="Peak: all the trial takes on the device. Allocated: live blocks. Reserved: segments, on CUDA.",
    )  # fmt: skip
    names = ["fits or not", *read(Overview, Overview.param_names)]
    color = middle.selectbox("Colour", names, key="color", bind="query-params")
    with right:
        log_memory = st.toggle("Logarithmic memory", key="log_memory", bind="query-params")
        log_value = st.toggle("Logarithmic metric", key="log_metric", bind="query-params")
    budget_mib = math.ceil(study.budget_bytes / MIB)
    chosen_mib = st.slider(
        "What if the budget were … (MiB)",
        min_value=1,
        max_value=max(4 * budget_mib, 1024),
        value=budget_mib,
        key="budget_mib",
        bind="query-params",
        help=f"The study's own is {format_bytes(study.budget_bytes)}. A trial that was pruned is not known.",
    )
    own = chosen_mib == budget_mib
    return FrontView(
        budget_bytes=study.budget_bytes if own else chosen_mib * MIB,
        memory=memory or "peak",
        param=None if color == names[0] else color,
        log_memory=log_memory,
        log_value=log_value,
    )


def _figures(study: StudyRecord, view: FrontView, counts: dict[str, int], front: pd.DataFrame) -> None:
    """Show the figures above the chart."""
    best = front.iloc[-1] if len(front) else None  # the front grows with memory
    columns = st.columns(5)
    columns[0].metric(f"best {plain(study.metric)}", "–" if best is None else f"{best['value']:.4g}")
    columns[1].metric("budget", format_bytes(view.budget_bytes))
    columns[2].metric("completed", counts.get("completed", 0))
    columns[3].metric("pruned before launch", counts.get("pruned_memory", 0))
    columns[4].metric("out of memory", counts.get("out_of_memory", 0))
    if best is not None:
        held = smallest_gpu(study, view.memory, int(best["memory_bytes"]))
        st.caption(
            f"The best is trial {int(best['number'])}, {format_bytes(int(best['memory_bytes']))}. {held}"
        )


def _selection(read: StudyReading, event: object) -> None:
    """Show the trials that were brushed; one that was clicked is one."""
    picked = getattr(event, "selection", None) or {}
    drawn = picked.get("points", [])
    numbers = sorted({_number_of(point) for point in drawn if point.get("customdata")})
    if numbers:
        keep_selected(numbers[:_MOST_LISTED])
    elif not (numbers := selected_numbers()):
        return
    clicked = len(numbers) == 1 and not picked.get("box") and not picked.get("lasso")
    if clicked and drawn:
        st.switch_page(
            st.session_state["pages"]["trial"],
            query_params={"study": read.study.name, "trial": str(numbers[0])},
        )
    st.subheader(f"Selected: {len(numbers)} trials")
    _table(read, numbers[:_MOST_LISTED], order="number")
    if st.button("Clear the selection", icon=":material/close:"):
        keep_selected([])
        st.session_state[_CLEARED] = st.session_state.get(_CLEARED, 0) + 1
        st.rerun(scope="fragment")


def _number_of(point: dict[str, Any]) -> int:
    """Return the trial's number: the browser sends a list, or what a list is to JavaScript."""
    sent = point["customdata"]
    return int(next(iter(sent.values())) if isinstance(sent, dict) else sent[0])


def _table(read: StudyReading, numbers: list[int], *, order: str) -> None:
    wanted = TrialFilter(numbers=tuple(numbers))
    found = read(Overview, Overview.trials, wanted, order=order, limit=_MOST_LISTED)
    if not found:
        st.caption("None of them is in this study.")
        return
    table = table_of(read.study, found, numbers).drop(columns=["on front", "reason"])
    st.dataframe(table, width="stretch", hide_index=True, placeholder="")
