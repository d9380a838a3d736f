"""Goes through draws until one fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tuner.search.sampling.history import Forecast, History, Rejection
from tuner.search.sampling.rehearsal import Draw
from tuner.search.sampling.sources import Source

MOST_REJECTIONS = 200
MOST_REPEATS = 8  # in a row: a sampler that has found its optimum draws it again and again

Found = tuple[Draw, Forecast]


@dataclass(frozen=True)
class Rehearsal:
    """How one trial's configuration was found.

    Attributes:
        draw: The configuration; None when everything that was drawn had been tried before.
        forecast: What is known of its memory; it does not fit when nothing that was drawn does.
        rejections: What does not fit, in order; the configuration itself, where nothing fits.
        draws: How many draws there were, this one included.
        seconds: How long it took, forecasts included.
        forecast_seconds: How long forecasts took.
        given: Whether some of its values were: what was drawn says nothing about the space.
    """

    draw: Draw | None
    forecast: Forecast | None
    rejections: tuple[Rejection, ...]
    draws: int
    seconds: float
    forecast_seconds: float
    given: bool = False


class Finder:
    """Finds one trial's configuration.

    Args:
        history: What is known; it grows.
        forecast: What is known of a configuration's memory.
        tried: Keys of what was tried before, and is not tried again.
        on_turned_away: Told how many draws were turned away so far.
    """

    def __init__(
        self,
        history: History,
        forecast: Callable[[Any], Forecast],
        *,
        tried: set[str],
        on_turned_away: Callable[[int], None],
    ) -> None:
        self._history, self._forecast, self._tried = history, forecast, tried
        self._on_turned_away = on_turned_away
        self._started = time.perf_counter()
        self._forecast_seconds = 0.0
        self._draws = 0
        self._rejections: list[Rejection] = []
        self._doubtful: dict[str, Found] = {}  # less likely to fit than not

    def find(self, sources: Iterable[Source]) -> Rehearsal:
        """Return the first draw that is likely to fit; else the likeliest; else the smallest.

        After MOST_REJECTIONS the smallest of them is taken: it does not fit, but says most.
        """
        found: Found | None = None
        for source in sources:
            found = self._first_likely(source) or self._likeliest()
            if found is not None:
                break
        draw, forecast = found or self._smallest()
        if draw is not None and forecast is not None:
            self._history.keep(draw, forecast)
        return Rehearsal(
            draw=draw,
            forecast=forecast,
            rejections=tuple(self._rejections),
            draws=self._draws,
            seconds=time.perf_counter() - self._started,
            forecast_seconds=self._forecast_seconds,
        )

    def _first_likely(self, source: Source) -> Found | None:
        repeats = 0
        while len(self._rejections) < MOST_REJECTIONS and repeats < MOST_REPEATS:
            if (draw := source.draw()) is None:
                break
            self._draws += 1
            if self._is_known(draw):
                repeats += 1
                continue
            repeats = 0
            forecast = self._forecast_of(draw)
            if not forecast.fits:
                self._history.keep(draw, forecast)
                self._rejections.append(Rejection(draw, forecast))
                self._on_turned_away(len(self._rejections))
            elif forecast.is_doubtful:
                self._doubtful[draw.key] = (draw, forecast)
            elif source.takes(draw, forecast):
                return draw, forecast
        return None

    def _is_known(self, draw: Draw) -> bool:
        """Whether it was drawn before; one without answers depends on what we do not see."""
        known = draw.key in self._tried or draw.key in self._history.rejected or draw.key in self._doubtful
        return known and bool(draw.answers)

    def _forecast_of(self, draw: Draw) -> Forecast:
        before = time.perf_counter()
        forecast = self._forecast(draw.params)
        self._forecast_seconds += time.perf_counter() - before
        return forecast

    def _likeliest(self) -> Found | None:
        return max(self._doubtful.values(), key=lambda pair: pair[1].fits_probability or 0.0, default=None)

    def _smallest(self) -> Found | tuple[None, None]:
        if not self._rejections:
            return None, None
        sizes = [one.forecast.memory_bytes or math.inf for one in self._rejections]
        smallest = self._rejections[sizes.index(min(sizes))]
        return smallest.draw, smallest.forecast
