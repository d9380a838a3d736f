"""What has happened in a study so far, counted and in words."""

from __future__ import annotations

import time
from collections import Counter

from tuner.cli.output import short_params
from tuner.records import Outcome
from tuner.search.events import Ended, Goal
from tuner.search.session import Session
from tuner.search.told import counts_as_launch
from tuner.units import format_bytes


class Score:
    """Counts what has happened, earlier sessions included."""

    def __init__(self, session: Session, goal: Goal) -> None:
        self.goal = goal
        self.metric = session.study.metric
        self._maximize = session.study.maximize
        self._budget_bytes = session.study.budget_bytes
        self._started = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.best: float | None = None
        self.launched = 0
        for trial in session.reader.trials(session.study.id):
            if not trial.is_running:
                self._count(trial.outcome, trial.value, trial.peak_bytes, audit=trial.audit)
        self._launched_before = self.launched

    def add(self, trial: Ended) -> None:
        """Count a trial that has ended."""
        result = trial.result
        self._count(result.outcome, result.value, result.peaks.device_bytes, audit=trial.audit)

    def seconds_left(self) -> float | None:
        """Return a guess from the pace of this session."""
        done = self.launched - self._launched_before
        if done == 0:
            return None
        return (time.monotonic() - self._started) / done * max(0, self.goal.trials - self.launched)

    def summary(self) -> str:
        """Return counts by outcome and the best value."""
        counts = " ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        best = "" if self.best is None else f" · best {self.metric} {self.best:.4g}"
        return f"{counts}{best}"

    def _count(self, outcome: str, value: float | None, peak_bytes: int | None, *, audit: bool) -> None:
        self.outcomes[str(outcome)] += 1
        self.launched += counts_as_launch(outcome, audit=audit)
        if outcome == Outcome.COMPLETED and value is not None and (peak_bytes or 0) <= self._budget_bytes:
            better = self.best is None or (value > self.best if self._maximize else value < self.best)
            self.best = value if better else self.best


def describe(trial: Ended) -> str:
    """Return a trial on one line."""
    result, prediction = trial.result, trial.prediction
    expected = None if prediction.device is None else prediction.device.expected
    parts = [f"trial {trial.number} {'audit: ' if trial.audit else ''}{result.outcome}"]
    if result.value is not None and result.outcome is Outcome.COMPLETED:
        parts.append(f"{result.value:.4g}")
    measured = format_bytes(result.peaks.device_bytes) if result.peaks.device_bytes else ""
    if expected is None:
        parts.append(f"{measured}, not predicted" if measured else "not predicted")
    else:
        parts.append(f"{measured}{' of ' if measured else ''}{format_bytes(expected)} predicted")
    if result.outcome not in (Outcome.COMPLETED, Outcome.PRUNED_MEMORY) and result.failure is not None:
        parts.append(result.failure.reason)
    parts.extend(f"warning: {warning}" for warning in result.warnings[:1])
    parts.append(short_params(trial.params))
    return " · ".join(parts)


def turned_away_so_far(count: int) -> str:
    """Return, of a trial, that its configuration is still looked for."""
    return f"is looked for: {count} configurations did not fit so far"
