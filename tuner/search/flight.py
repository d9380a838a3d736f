"""A trial between its question and its answer.

::

    asked, predicted ─┬─► pruned
                      └─► waiting ─► running ─┬─► ended
                             ▲                │
                             └────────────────┘  out of memory under less than the budget, once
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tuner.execution.launcher import Running
from tuner.execution.run_folder import Request, RunFolder, trial_token
from tuner.processes import this_process
from tuner.records import Prediction, TrialResult
from tuner.scheduling.devices import Place
from tuner.search.events import Ended
from tuner.search.seeds import derived_seed
from tuner.search.session import Session
from tuner.steps import EVAL_STEPS, TRAIN_STEPS


@dataclass(eq=False)
class Flight:
    """One trial that this driver works on.

    Attributes:
        number: Optuna's number of the trial.
        trial_id: Its row.
        params: The configuration.
        audit: Whether it is launched although predicted not to fit.
        prediction: What was predicted.
        attempt: From 1; a second one has the whole budget.
        since: When it began to wait.
        reason: What it was last said to wait for.
        reservation_bytes: What it runs under.
        folder: Where it runs.
        running: Its process.
        started: When that was started.
    """

    number: int
    trial_id: int
    params: dict[str, Any]
    audit: bool
    prediction: Prediction
    attempt: int = 1
    since: float = field(default_factory=time.monotonic)
    reason: str = ""
    looked: float = 0.0
    reservation_bytes: int = 0
    folder: RunFolder | None = None
    running: Running | None = None
    pid_noted: bool = False
    started: float = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for memory."""
        return self.running is None

    def wants_bytes(self, budget_bytes: int, *, least_bytes: int = 0, allowance_bytes: int = 0) -> int:
        """Return the reservation: the upper end of the band, at most the budget.

        What could not be predicted, what was predicted not to fit, and a second attempt get the
        whole budget.

        Args:
            budget_bytes: The study's budget.
            least_bytes: What trials were seen to take for what is not predicted.
            allowance_bytes: What the cap counts beyond what is predicted.
        """
        device = self.prediction.device
        if device is None or self.audit or self.attempt > 1:
            return budget_bytes
        return min(budget_bytes, max(device.high, least_bytes) + allowance_bytes)

    def request(self, session: Session, place: Place, *, context_bytes: int | None) -> Request:
        """Return what its worker is told; see there for the context."""
        plan = session.plan
        return Request(
            workload=plan.loaded.reference,
            params=self.params,
            device=place.kind,
            reservation_bytes=self.reservation_bytes,
            context_bytes=context_bytes,
            seed=derived_seed(session.seed_base, self.number),
            threads=plan.threads,
            example_steps=(TRAIN_STEPS, EVAL_STEPS),
            visible_device=place.visible_device,
            attempt=self.attempt,
            token=trial_token(self.trial_id, session.driver_id, this_process()),
        )

    def as_attempt(self, result: TrialResult) -> dict[str, Any]:
        """Return what is kept of an attempt that is to be repeated."""
        return {
            "attempt": self.attempt,
            "reservation_bytes": self.reservation_bytes,
            "outcome": result.outcome,
            "seconds": result.seconds,
            "peaks": result.peaks.to_json(),
            "failure": None if result.failure is None else result.failure.to_json(),
            "run_folder": None if self.folder is None else str(self.folder.path),
        }

    def begin_again(self) -> None:
        """Wait for the whole budget."""
        self.attempt += 1
        self.running, self.pid_noted = None, False
        self.since, self.looked, self.reason = time.monotonic(), 0.0, ""

    def ended(self, result: TrialResult) -> Ended:
        """Return it as an observer sees it."""
        return Ended(self.number, self.params, self.prediction, result, self.audit)
