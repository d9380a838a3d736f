"""What this driver has seen end: counts, limits, and what they say about going on."""

from __future__ import annotations

import math

from tuner.errors import NothingFeasible, TooManyFailures, TunerError
from tuner.records import Outcome, TrialResult
from tuner.scheduling.ledger import HOST_BYTES_PER_TRIAL
from tuner.search.events import Goal, Observer
from tuner.search.flight import Flight
from tuner.search.optuna_study import derived_seed
from tuner.search.session import Session
from tuner.search.told import counts_as_launch, is_failure
from tuner.units import format_bytes

MOST_PRUNES_IN_A_ROW = 200
_FIRST_FAILURES = 3  # the first launches all failing stops a study at once
_FAILED_SHARE = 0.2
_HOST_MARGIN = 1.1  # over the largest process seen so far


class Tally:
    """Counts the outcomes of a study.

    Attributes:
        launched: Launched trials that are settled, audits left out, as far as this driver knows.
        used_up: Whether so many draws in a row did not fit that the search ends.
        data_bytes: The largest peak of a trial while it opened its data, which no trace sees.
    """

    def __init__(self, session: Session, goal: Goal, observer: Observer) -> None:
        self._session, self._goal, self._observer = session, goal, observer
        trials = session.reader.trials(session.study.id)
        self.launched = sum(counts_as_launch(trial.outcome, audit=trial.audit) for trial in trials)
        self.used_up = False
        self._prunes_in_a_row = 0
        self.data_bytes = max((trial.phases.get("data", 0) for trial in trials), default=0)
        self._host_peak_bytes = max((trial.host_peak_bytes or 0 for trial in trials), default=0)

    def count(self, flight: Flight, result: TrialResult) -> TunerError | None:
        """Count a trial that is settled; return what ends the study now, if anything does."""
        outcome = result.outcome
        self._host_peak_bytes = max(self._host_peak_bytes, result.host_peak_bytes or 0)
        self.data_bytes = max(self.data_bytes, result.peaks.phases.get("data", 0))
        if counts_as_launch(outcome, audit=flight.audit):
            self.launched += 1
        if flight.audit:
            return None
        if outcome is Outcome.PRUNED_MEMORY:
            self._prunes_in_a_row += 1
        elif outcome.final:
            self._prunes_in_a_row = 0
        if self._prunes_in_a_row >= MOST_PRUNES_IN_A_ROW:
            self.used_up = True
            return self._nothing_more_fits()
        return self._too_many_failures() if outcome.failed else None

    def host_bytes(self) -> int:
        """Return the host memory to set aside for a trial; 0 where the device is the host."""
        if self._session.plan.place.kind == "cpu":
            return 0
        seen_bytes = int(self._host_peak_bytes * _HOST_MARGIN)
        return seen_bytes or HOST_BYTES_PER_TRIAL

    def audits(self) -> list[int]:
        """Return the numbers of the pruned trials to launch all the same.

        Always the same choice for the same study, so that a resumed audit goes on with it, and
        drivers that look at different moments choose nearly the same.
        """
        trials = self._session.reader.trials(self._session.study.id)
        audited = {trial.repeats for trial in trials if trial.audit and trial.outcome != Outcome.INTERRUPTED}
        pruned = [trial.number for trial in trials if trial.outcome == Outcome.PRUNED_MEMORY]
        wanted = math.ceil(self._goal.audit_share * len(pruned))
        chosen = sorted(pruned, key=lambda number: derived_seed(self._session.study.id, number))[:wanted]
        return [number for number in sorted(chosen) if number not in audited]

    def _nothing_more_fits(self) -> TunerError | None:
        trials = self._session.reader.trials(self._session.study.id)
        prunes = self._prunes_in_a_row
        if any(trial.outcome == Outcome.COMPLETED for trial in trials):
            self._observer.note(
                f"{prunes} configurations in a row do not fit the budget: the search ends with "
                f"{self.launched} of {self._goal.trials} trials"
            )
            return None
        smallest = min((t.predicted_bytes for t in trials if t.predicted_bytes is not None), default=None)
        return NothingFeasible(
            f"none of {prunes} configurations in a row fits the budget of "
            f"{format_bytes(self._session.study.budget_bytes)}; "
            f"the smallest prediction is {format_bytes(smallest)}",
            hint="raise --budget, or let suggest() offer smaller configurations",
        )

    def _too_many_failures(self) -> TunerError | None:
        study_id = self._session.study.id  # of all drivers together
        counts = self._session.reader.outcomes(study_id, audits=False)
        failures = sum(count for outcome, count in counts.items() if is_failure(outcome))
        self.launched = max(self.launched, self._session.slots.claims(study_id).launched)
        if self._goal.max_failures is not None:
            too_many = failures > self._goal.max_failures
        else:
            all_failed = failures == self.launched and failures >= _FIRST_FAILURES
            too_many = all_failed or failures > max(_FIRST_FAILURES, _FAILED_SHARE * self._goal.trials)
        if not too_many:
            return None
        kinds = ", ".join(f"{n} {o}" for o, n in sorted(counts.items()) if is_failure(o))
        return TooManyFailures(
            f"{failures} of {self.launched} launched trials failed ({kinds})",
            hint=f"see why: tuner trials {self._session.study.name}; tolerate more: --max-failures",
        )
