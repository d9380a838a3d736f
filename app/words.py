"""Sentences on a page; what a user named is shown as text, never as Markdown."""

from __future__ import annotations

import re

import streamlit as st

from tuner.errors import TunerError


def plain(text: str) -> str:
    """Return a text such that Streamlit's Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]<>$:~#&])", r"\\\1", text)


def explain(error: TunerError) -> None:
    """Say what is wrong and what to do about it."""
    st.warning(plain(f"{error.message[:1].upper()}{error.message[1:]}."))
    if error.hint is not None:
        st.caption(plain(error.hint))
