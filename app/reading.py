"""Reading of a whole study, once for as long as none of its trials begins, is launched or ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, tzinfo
from typing import Any, Concatenate, ParamSpec, TypeVar
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pandas as pd
import streamlit as st

from app.loaders import Database, engine_of
from tuner.store.engine import parse_url, store_errors
from tuner.store.overview import Overview, Table
from tuner.store.rows import StudyRecord
from tuner.store.transactions import Transactional

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
Reader = TypeVar("Reader", bound=Transactional)
_KEPT = 200  # results, over all who look


@dataclass(frozen=True)
class StudyReading:
    """Reads one study as it is at one moment of the page.

    Args:
        database: Where it is.
        study: Which.
    """

    database: Database
    study: StudyRecord

    def __call__(
        self,
        reader: type[Reader],
        method: Callable[Concatenate[Reader, int, Arguments], Value],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Value:
        """Return what a method of a reader returns for this study, read anew when the study has changed."""
        with store_errors(parse_url(self.database.url_text)):
            key = (
                self.database.url_text,
                self.study.id,
                self.study.created_at.isoformat(),  # a study that was made anew may have the same id
                self.stamp(),
                method.__qualname__,
                repr((args, sorted(kwargs.items()))),
            )
            engine = engine_of(self.database.url_text)
            found: Value = _kept(key, lambda: method(reader(engine), self.study.id, *args, **kwargs))
            return found

    def frame(
        self,
        reader: type[Reader],
        method: Callable[Concatenate[Reader, int, Arguments], Table],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> tuple[pd.DataFrame, int]:
        """Return the same as a data frame, and how many rows there were before thinning."""
        table = self(reader, method, *args, **kwargs)
        return pd.DataFrame(dict(table.columns)), table.total

    def stamp(self) -> str:
        """Return a text that changes when the study does."""
        key = (self.database.url_text, self.study.id)
        return _stamp(key, lambda: Overview(engine_of(key[0])).stamp(self.study.id))


@st.cache_data(max_entries=_KEPT, show_spinner=False)
def _kept(key: tuple[Any, ...], _read: Callable[[], Any]) -> Any:
    return _read()


@st.cache_data(ttl=1, show_spinner=False)
def _stamp(key: tuple[Any, ...], _read: Callable[[], str]) -> str:
    return _read()


def time_zone() -> tzinfo:
    """Return the visitor's time zone, UTC where the browser does not tell."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return UTC
