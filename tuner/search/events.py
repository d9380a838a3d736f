"""What a study is asked to do, and what it tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tuner.records import Prediction, TrialResult


@dataclass(frozen=True)
class Goal:
    """When a study is done.

    Attributes:
        trials: Launched trials in the study, of all drivers and sessions, audits not.
        max_failures: Failed launches that stop it; None: the first three, or 20 % of `trials`.
        trial_timeout_seconds: What one trial may take, or None.
        timeout_seconds: After this no further trial is started, or None.
        audit_share: Share of the pruned configurations to launch all the same.
    """

    trials: int
    max_failures: int | None = None
    trial_timeout_seconds: float | None = None
    timeout_seconds: float | None = None
    audit_share: float = 0.0


@dataclass(frozen=True)
class Launched:
    """A trial that starts, for an observer.

    Attributes:
        device: What a person calls its device: `cuda:0`, `cpu`.
        attempt: From 1; a second one has the whole budget.
    """

    number: int
    params: dict[str, Any]
    prediction: Prediction
    reservation_bytes: int
    device: str
    attempt: int


@dataclass(frozen=True)
class Ended:
    """A trial that has ended, for an observer."""

    number: int
    params: dict[str, Any]
    prediction: Prediction
    result: TrialResult
    audit: bool


class Observer(Protocol):
    """What is told while a study runs."""

    def turned_away(self, number: int, count: int) -> None:
        """So many draws for a trial did not fit so far; told from another thread, too."""

    def waiting(self, number: int, reason: str) -> None:
        """A trial waits for memory; told again when the reason changes."""

    def launched(self, trial: Launched) -> None:
        """A trial's process is about to start."""

    def again(self, trial: Ended) -> None:
        """A trial ran out of memory under less than the budget, and gets the whole of it."""

    def ended(self, trial: Ended) -> None:
        """A trial has an outcome."""

    def note(self, message: str) -> None:
        """Something that a person should know."""


class Stopper:
    """Asked all the time; set by signals and `tuner stop`.

    Attributes:
        level: 0 go on, 1 finish what runs, 2 stop it.
        reason: Why.
        heeded: Whether a loop looks at it: before and after, a signal ends the command at once.
    """

    def __init__(self) -> None:
        self.level = 0
        self.reason = ""
        self.heeded = False

    def stop(self, level: int, reason: str) -> None:
        """Ask to stop; a higher level wins."""
        if level > self.level:
            self.level, self.reason = level, reason
