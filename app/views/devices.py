"""Who held which share of which device, and who waited."""

from __future__ import annotations

from datetime import UTC, datetime

import streamlit as st

from app.live import chart, live, say_when
from app.reading import StudyReading, time_zone
from app.selection import chosen
from app.study_charts import device_figure
from app.words import plain
from tuner.store.insights import MOST_BARS, Insights
from tuner.units import GIB

_MOST_DEVICES = 8  # charts on one page


def render() -> None:
    """Draw the page."""
    _, study = chosen()
    st.title("Devices")
    st.text(f"{study.name}: launches on the devices that it used, other studies' included")
    live(_draw)


def _draw(read: StudyReading) -> None:
    launches, _ = read.frame(Insights, Insights.launches)
    say_when(int((launches["outcome"] == "running").sum()) if len(launches) else 0)
    if not len(launches):
        st.info("Nothing has been launched yet.")
        return
    zone, now = time_zone(), datetime.now(UTC)
    for place, (device, group) in enumerate(launches.groupby("device")):
        if place == _MOST_DEVICES:
            st.caption(f"{launches['device'].nunique() - _MOST_DEVICES} more devices are in the table.")
            break
        st.subheader(plain(str(device)))
        chart(device_figure(group, zone, now), f"device_{place}", f"Reservations on {device} over time")
    if len(launches) == MOST_BARS:
        st.caption(f"The latest {MOST_BARS} launches; all of them are in the view tuner_devices.")
    st.subheader("Waiting and use")
    waiting, _ = read.frame(Insights, Insights.waiting)
    for name in ("largest_reservation", "largest_peak"):
        waiting[f"{name} GiB"] = waiting.pop(f"{name}_bytes").astype(float) / GIB
    waiting["mean_share_used"] = 100 * waiting["mean_share_used"].astype(float)
    waiting.columns = [str(name).replace("_", " ") for name in waiting.columns]
    waiting = waiting.rename(columns={"mean share used": "mean share used %"})
    st.dataframe(
        waiting,
        width="stretch",
        hide_index=True,
        placeholder="",
        column_config={name: st.column_config.NumberColumn(format="%.2f") for name in waiting.columns[2:]},
    )
