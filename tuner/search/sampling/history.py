"""What a study knows of configurations: what was tried, what runs, what was turned away."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import optuna
from optuna.trial import FrozenTrial, TrialState

from tuner.records import Verdict
from tuner.search.sampling.rehearsal import Draw, key_of
from tuner.store.rows import RejectionRecord, TrialRecord

WARM = "tuner_warm_start"  # user attribute: the study and the trial that this one was taken from
_DOUBTFUL = 0.5
_MOST_FORECASTS = 1000  # more than models look at
_TRIED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


@dataclass(frozen=True)
class Forecast:
    """What is known of a configuration's memory before it runs.

    Attributes:
        memory_bytes: What it is expected to take; None when that cannot be told.
        fits: False when it surely does not fit: only a trace may say that.
        fits_probability: P(it fits), where that is known.
        reason: Why it does not fit.
    """

    memory_bytes: int | None
    fits: bool
    fits_probability: float | None = None
    reason: str = ""

    @property
    def is_doubtful(self) -> bool:
        """Whether it is less likely to fit than not, and yet may."""
        return self.fits and self.fits_probability is not None and self.fits_probability < _DOUBTFUL


@dataclass(frozen=True)
class Rejection:
    """A draw that was turned away."""

    draw: Draw
    forecast: Forecast


@dataclass
class History:
    """Configurations by key.

    Attributes:
        forecasts: What was traced last, launched or not.
        rejected: Keys of what surely does not fit.
    """

    forecasts: dict[str, tuple[Draw, Forecast]] = field(default_factory=dict)
    rejected: set[str] = field(default_factory=set)
    _finished: dict[int, str] = field(default_factory=dict)

    def keep(self, draw: Draw, forecast: Forecast) -> None:
        """Remember what was traced."""
        self.forecasts[draw.key] = (draw, forecast)
        if len(self.forecasts) > _MOST_FORECASTS:
            del self.forecasts[next(iter(self.forecasts))]
        if not forecast.fits:
            self.rejected.add(draw.key)

    def tried(self, study: optuna.Study, number: int) -> set[str]:
        """Return the keys of what was tried or runs in this study, trial `number` left out.

        A trial that failed may be drawn again: what failed may have been the machine.
        """
        running = set()
        for trial in study.get_trials(deepcopy=False, states=_TRIED):
            if trial.number == number or trial.number in self._finished or WARM in trial.user_attrs:
                continue
            if trial.state is TrialState.RUNNING:
                running.add(key_of(trial.params))
            else:
                self._finished[trial.number] = key_of(trial.params)
        return running | set(self._finished.values())


def draw_of(trial: FrozenTrial) -> Draw:
    """Return an Optuna trial as a draw."""
    return Draw(trial.params, trial.params, trial.distributions)


def given_values(trial: FrozenTrial) -> dict[str, object]:
    """Return the values that an enqueued trial came with."""
    return dict(trial.system_attrs.get("fixed_params", {}))


def remember(history: History, trials: Iterable[TrialRecord], rejections: Iterable[RejectionRecord]) -> None:
    """Take in what earlier sessions learned, in the order in which they did."""
    known: list[tuple[tuple[float, float], Draw, Forecast]] = []
    for one in rejections:
        draw = Draw(one.params, one.answers or one.params, {})
        known.append(((one.number, one.place), draw, Forecast(one.predicted_bytes, fits=False)))
    for trial in trials:
        if trial.verdict is not None and trial.repeats is None:
            forecast = Forecast(trial.predicted_bytes, fits=trial.verdict != Verdict.PRUNE)
            known.append(((trial.number, math.inf), Draw(trial.params, trial.params, {}), forecast))
    for _, draw, forecast in sorted(known, key=lambda one: one[0]):
        history.keep(draw, forecast)
