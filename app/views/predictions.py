"""How good predictions are, and what pruning saved."""

from __future__ import annotations

import streamlit as st

from app.live import chart, live
from app.reading import StudyReading
from app.selection import chosen
from app.study_charts import error_figure, predicted_figure
from tuner.store.insights import Insights, Savings
from tuner.units import format_seconds

_TITLES = {
    "mix": "mix of operators",
    "trials": "trials",
    "mean_absolute_error": "mean absolute error %",
    "mean_error": "mean error %",
    "worst_error": "worst error %",
    "coverage": "in the band %",
    "band_width": "band's width %",
}


def render() -> None:
    """Draw the page."""
    _, study = chosen()
    st.title("Predictions")
    st.text(f"{study.name}: peak device memory, predicted before launch against measured")
    live(_draw)


def _draw(read: StudyReading) -> None:
    _saved(read(Insights, Insights.savings))
    quality, _ = read.frame(Insights, Insights.quality)
    if not len(quality):
        st.info("No trial with a prediction has run to its end yet: there is nothing to compare.")
        return
    errors, total = read.frame(Insights, Insights.errors)
    over_time, _ = read.frame(Insights, Insights.error_over_time)
    chart(predicted_figure(errors), "predicted", "Predicted against measured peak memory")
    if len(errors) < total:
        st.caption(f"{len(errors):,} of {total:,} trials are drawn.")
    st.subheader("Error over time")
    chart(error_figure(over_time), "error", "Mean error over the trials")
    st.subheader("By mix of operators")
    shares = [name for name in quality.columns if name not in ("mix", "trials")]
    quality[shares] = 100 * quality[shares].astype(float)
    st.dataframe(
        quality.rename(columns=_TITLES),
        width="stretch",
        hide_index=True,
        placeholder="",
        column_config={_TITLES[name]: st.column_config.NumberColumn(format="%.2f") for name in shares},
    )
    st.caption("Trials that completed or were stopped early; the band is to hold 95 % of them.")


def _saved(savings: Savings) -> None:
    columns = st.columns(4)
    columns[0].metric("launches saved", f"{savings.pruned:,}")
    hours = None if savings.median_seconds is None else savings.pruned * savings.median_seconds
    columns[1].metric(
        "device time saved, at most",
        format_seconds(hours),
        help="At the median time of its launches; one that runs out of memory ends earlier.",
    )
    columns[2].metric(
        "wrongly pruned",
        "not audited" if not savings.audits else f"{savings.wrong_audits} of {savings.audits}",
        help="Of pruned configurations that were launched all the same: tuner run --audit SHARE.",
    )
    columns[3].metric("doubtful ones that did fit", f"{savings.fitting_tries} of {savings.tries}")
