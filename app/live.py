"""Pages that look again by themselves while a study runs, and how they draw."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import plotly.graph_objects as go
import streamlit as st

from app.loaders import FRESH_SECONDS
from app.reading import StudyReading, time_zone
from app.selection import chosen
from app.words import explain
from tuner.errors import TunerError


def live(draw: Callable[[StudyReading], None]) -> None:
    """Draw, and again every few seconds, without the rest of the page; say what is wrong in a sentence."""

    @st.fragment(run_every=FRESH_SECONDS)
    def again() -> None:
        try:
            draw(StudyReading(*chosen()))
        except TunerError as error:
            explain(error)

    again()


def say_when(running: int) -> None:
    """Say as of when a page is, and whether it will change."""
    now = datetime.now(time_zone())
    state = f"{running} running" if running else "nothing is running"
    st.caption(f"Updated at {now:%H:%M:%S} ({now.tzname()}), looks again every {FRESH_SECONDS} s: {state}.")


def chart(figure: go.Figure, key: str, says: str) -> None:
    """Draw a figure as wide as there is room; `says` is for who cannot see it."""
    st.plotly_chart(figure, width="stretch", key=key, alt=says)
