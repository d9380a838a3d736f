"""All trials of a study: filters in the database, the params that differ, export of what is shown."""

from __future__ import annotations

import functools
import io

import pandas as pd
import streamlit as st

from app.live import say_when
from app.loaders import engine_of, table_of
from app.reading import StudyReading
from app.selection import chosen
from tuner.store.engine import parse_url, store_errors
from tuner.store.exports import rows_of, write
from tuner.store.overview import ORDERS, Overview, TrialFilter
from tuner.store.reader import Reader
from tuner.store.rows import TrialRecord

_AT_ONCE = 500  # trials in the table
_FORMS = {"CSV": ("csv", "text/csv"), "JSON": ("json", "application/json"), "Parquet": ("parquet", None)}
_TITLES = {
    "number": "trial",
    "value": "metric",
    "peak_bytes": "peak",
    "predicted_bytes": "predicted",
    "seconds": "duration",
}
_BEST = "best"


def render() -> None:
    """Draw the page."""
    read = StudyReading(*chosen())
    st.title("Trials")
    st.text(read.study.name)
    counts = read(Reader, Reader.outcomes)
    if not counts:
        st.info("The study has no trials yet.")
        return
    say_when(counts.get("running", 0))
    wanted = _filter(sorted(counts))
    total, found = sum(counts.values()), read(Overview, Overview.count, wanted)
    trials = _page(read, wanted, found)
    table = _table(read, trials)
    cut = f", {len(trials)} of them on this page" if found > _AT_ONCE else ""
    st.caption(f"{found:,} of {total:,} trials{cut}")
    st.dataframe(table, width="stretch", hide_index=True, placeholder="", key="trials")
    _downloads(read, wanted)


def _filter(outcomes: list[str]) -> TrialFilter:
    left, middle, right = st.columns([2, 2, 1])
    chosen_outcomes = left.multiselect(
        "Outcomes", outcomes, placeholder="all", key="outcomes", bind="query-params"
    )
    search = middle.text_input(
        "Search", placeholder="text in params, outcome or reason", key="search", bind="query-params"
    )
    only_front = right.toggle("Only the front", key="only_front", bind="query-params")
    return TrialFilter(tuple(chosen_outcomes), search or "", only_front)


def _page(read: StudyReading, wanted: TrialFilter, found: int) -> list[TrialRecord]:
    left, middle, right = st.columns([2, 1, 1])
    order = left.selectbox(
        "Order", ORDERS, format_func=lambda name: _TITLES[name], key="order", bind="query-params"
    )
    descending = middle.toggle("Largest first", key="descending", bind="query-params")
    pages = max(1, -(-found // _AT_ONCE))
    page = 1
    if pages > 1:
        page = int(right.number_input("Page", 1, pages, 1, key="page", bind="query-params"))
    return read(
        Overview,
        Overview.trials,
        wanted,
        order=order,
        descending=descending,
        limit=_AT_ONCE,
        offset=(page - 1) * _AT_ONCE,
    )


def _table(read: StudyReading, trials: list[TrialRecord]) -> pd.DataFrame:
    """Return what is shown: params that differ, and the metric that is asked for."""
    front, _ = read.frame(Overview, Overview.front, budget_bytes=read.study.budget_bytes)
    table = table_of(read.study, trials, [int(number) for number in front["number"]])
    fixed = table.attrs["params"]
    same = [name for name in fixed if len(table) > 1 and table[name].nunique(dropna=False) <= 1]
    left, middle, right = st.columns([1, 1, 2])
    if left.toggle("Only params that differ", value=True, key="differing", bind="query-params"):
        table = table.drop(columns=same)
    when = middle.selectbox(
        "Metrics at", [_BEST, "last epoch", "epoch"], key="metric_at", bind="query-params"
    )
    if when != _BEST:
        epoch = None
        if when == "epoch":
            epoch = int(middle.number_input("Epoch", 1, 1_000_000, 1, key="epoch", bind="query-params"))
        numbers = tuple(trial.number for trial in trials)
        for name, values in read(Overview, Overview.metrics_at, numbers, epoch).items():
            title = f"{name}, {'last' if epoch is None else f'epoch {epoch}'}"
            table[title] = [values.get(number) for number in numbers]
    hidden = right.multiselect("Hide columns", list(table.columns), placeholder="none", key="hidden")
    return table.drop(columns=hidden)


def _downloads(read: StudyReading, wanted: TrialFilter) -> None:
    """Offer every trial that the filters leave, not only those on the page."""
    url_text, study = read.database.url_text, read.study

    def exported(form: str) -> bytes:
        file = io.BytesIO()
        with store_errors(parse_url(url_text)):
            trials = Overview(engine_of(url_text)).trials(study.id, wanted)
        write(rows_of(study, trials), file, form)
        return file.getvalue()

    for column, (title, (form, mime)) in zip(st.columns(len(_FORMS)), _FORMS.items(), strict=True):
        column.download_button(
            f"Download as {title}",
            functools.partial(exported, form),
            file_name=f"trials.{form}",
            mime=mime or "application/octet-stream",
            icon=":material/download:",
            on_click="ignore",
            key=f"download_{form}",
        )
