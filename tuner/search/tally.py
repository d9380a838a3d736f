"""What this driver has seen end: counts, limits, and what they say about going on."""

from __future__ import annotations

import json
import math

from tuner.errors import NothingFeasible, TooManyFailures, TunerError
from tuner.records import Outcome, TrialResult, Verdict
from tuner.scheduling.ledger import HOST_BYTES_PER_TRIAL
from tuner.search.events import Goal, Observer
from tuner.search.flight import Flight
from tuner.search.seeds import derived_seed
from tuner.search.session import Session
from tuner.search.told import counts_as_launch, is_failure
from tuner.units import format_bytes

_SEARCHES_IN_VAIN = 3  # in a row: after so many no more are made
_FIRST_FAILURES = 3  # the first launches all failing stops a study at once
_FAILED_SHARE = 0.2
_HOST_MARGIN = 1.1  # over the largest process seen so far


class Tally:
    """Counts the outcomes of a study.

    Attributes:
        launched: Launched trials that are settled, audits left out, as far as this driver knows.
        used_up: Whether nothing more is expected of the space, so that the search ends.
        data_bytes: The largest peak of a trial while it opened its data, which no trace sees.
    """

    def __init__(self, session: Session, goal: Goal, observer: Observer) -> None:
        self._session, self._goal, self._observer = session, goal, observer
        trials = session.reader.trials(session.study.id)
        self.launched = sum(counts_as_launch(trial.outcome, audit=trial.audit) for trial in trials)
        self.used_up = False
        self._in_vain = 0
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
        return self._too_many_failures() if outcome.failed else None

    def searched(self, *, nothing_fits: bool) -> TunerError | None:
        """Count a search for a configuration; return what ends the study now, if anything does."""
        self._in_vain = self._in_vain + 1 if nothing_fits else 0
        if not nothing_fits:
            return None
        if not self._has_launched():
            return self._nothing_feasible()
        if self._in_vain >= _SEARCHES_IN_VAIN:
            self._end("what else was drawn does not fit the budget")
        return None

    def nothing_new(self) -> TunerError | None:
        """Note that all that was drawn had been tried before; return the error that this is, if it is one."""
        if not self._has_launched():
            return self._nothing_feasible()
        trials = self._session.reader.trials(self._session.study.id)
        distinct = len({json.dumps(trial.params, sort_keys=True) for trial in trials})
        self._end(f"all {distinct} configurations that were drawn have been tried")
        return None

    def _end(self, why: str) -> None:
        self.used_up = True
        self._observer.note(f"{why}: the search ends with {self.launched} of {self._goal.trials} trials")

    def host_bytes(self) -> int:
        """Return the host memory to set aside for a trial; 0 where the device is the host.

        What was seen is a trial's largest single process, its loader workers come on top: it may
        raise the figure, never lower it.
        """
        if self._session.plan.place.kind == "cpu":
            return 0
        return max(HOST_BYTES_PER_TRIAL, int(self._host_peak_bytes * _HOST_MARGIN))

    def audits(self) -> list[int]:
        """Return the ids of the rejections to launch all the same.

        Always the same choice for the same study, so that a resumed audit goes on with it, and
        drivers that look at different moments choose nearly the same.
        """
        if not self._goal.audit_share:
            return []
        study_id = self._session.study.id
        trials = self._session.reader.trials(study_id)
        audited = {trial.rejection_id for trial in trials if trial.outcome != Outcome.INTERRUPTED}
        rejected = [(one.number, one.place, one.id) for one in self._session.rejections.all(study_id)]
        wanted = math.ceil(self._goal.audit_share * len(rejected))
        chosen = sorted(rejected, key=lambda one: derived_seed(study_id, f"{one[0]}/{one[1]}"))[:wanted]
        return [rejection_id for *_, rejection_id in sorted(chosen) if rejection_id not in audited]

    def _has_launched(self) -> bool:
        """Whether anything that was drawn so far was thought to fit."""
        trials = self._session.reader.trials(self._session.study.id)
        return any(trial.verdict in (Verdict.LAUNCH, Verdict.TRY) for trial in trials)

    def _nothing_feasible(self) -> TunerError:
        count, smallest_bytes = self._session.rejections.count(self._session.study.id)
        budget_bytes = self._session.study.budget_bytes
        return NothingFeasible(
            f"none of {count} configurations fits the budget of {format_bytes(budget_bytes)}; "
            f"the smallest prediction is {format_bytes(smallest_bytes)}",
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
