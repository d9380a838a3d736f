"""The loop of a study: suggest → predict → reserve → launch → measure → record → tell.

Several trials are on their way at once, as memory allows; one thread drives them, and each turn
of the loop takes each of them as far as it goes. What becomes of a trial is data. What ends a study
(too many failures, nothing that fits) does so after the trials that run; what nobody foresaw (a full
disk, a database that does not come back) kills them, and the next start runs them again.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future, ThreadPoolExecutor

from tuner.errors import Interrupted, LeaseLost, TunerError, WorkloadError
from tuner.execution.launcher import Launcher
from tuner.execution.run_folder import RunFolder, StopRequest, folder_name
from tuner.measure.meters import UNTOUCHED_BYTES
from tuner.records import Failure, Outcome, TrialResult, Verdict
from tuner.scheduling.devices import present_target
from tuner.scheduling.ledger import Admission, Ledger
from tuner.scheduling.packing import Wish
from tuner.search.asking import Asker, Cancelled, Proposal
from tuner.search.calibrations import Calibrations
from tuner.search.curves import Curves
from tuner.search.environment import given_context_bytes
from tuner.search.events import Goal, Launched, Observer, Stopper
from tuner.search.flight import Flight
from tuner.search.heart import Heart
from tuner.search.recover import recover, without_budget
from tuner.search.session import Session
from tuner.search.settling import settle
from tuner.search.tally import Tally
from tuner.search.told import pruned
from tuner.search.wake import Wake
from tuner.store.slots import Slot
from tuner.units import format_seconds

GRACE_SECONDS = 5.0  # between asking a trial to end and killing it
_LOOK_SECONDS = 0.5  # how often a waiting trial looks whether it may start
_REST_SECONDS = 0.25


class StudyLoop:
    """Drives one session to its goal."""

    def __init__(
        self,
        session: Session,
        launcher: Launcher,
        ledger: Ledger,
        *,
        observer: Observer,
        goal: Goal,
        stopper: Stopper,
    ) -> None:
        self._session, self._launcher, self._ledger = session, launcher, ledger
        self._observer, self._goal, self._stopper = observer, goal, stopper
        target = present_target(session.plan.place.target)
        self._calibrations = Calibrations(session, target)
        self._context_bytes = given_context_bytes(session.study, target)
        self._tally = Tally(session, goal, observer)
        self._asked: tuple[Slot, Future[Proposal]] | None = None
        self._curves = Curves(session)
        self._flights: list[Flight] = []
        self._started = time.monotonic()
        self._no_slot_until = 0.0
        self._error: TunerError | None = None
        self._audits: list[int] | None = None  # rejections to audit, once the search is over
        self._wake = Wake()

    def run(self) -> None:
        """Run trials until the goal is reached, then audit.

        Raises:
            NothingFeasible: No draw fits the budget.
            TooManyFailures: More launches failed than the goal tolerates.
            Interrupted: The user stopped the study.
            WorkloadError: The workload's `suggest` fails.
        """
        with (
            Heart(self._session) as self._heart,
            contextlib.closing(self._wake),
            ThreadPoolExecutor(1, thread_name_prefix="tracer") as tracer,
        ):
            self._asker = Asker(
                self._session,
                self._calibrations,
                tracer,
                when_found=self._wake.up,
                on_turned_away=self._observer.turned_away,
            )
            self._stopper.heeded = True
            try:
                while not self._is_over():
                    self._turn()
            finally:
                self._stopper.heeded = False
                self._abandon()
        if self._error is not None:
            raise self._error
        if self._stopper.level and self._tally.launched < self._goal.trials:
            raise Interrupted(
                f"{self._stopper.reason}; {self._tally.launched} of {self._goal.trials} trials are done",
                hint="the same command continues the study",
            )

    def _is_over(self) -> bool:
        """Whether nothing is on its way and nothing more will be."""
        if self._flights or self._asked is not None:
            return False
        if self._ends():
            return True
        if self._audits is not None:
            return not self._audits
        claims = self._session.slots.claims(self._session.study.id)
        self._tally.launched = max(self._tally.launched, claims.launched)  # of other drivers, too
        if self._tally.used_up or claims.launched >= self._goal.trials:
            self._audits = self._tally.audits()
            return not self._audits
        return False

    def _turn(self) -> None:
        """Take every trial as far as it goes now, and begin another one if there is room."""
        try:
            self._look_around()
            if self._asked is not None and self._ends():
                self._asker.cancel()
            moved = [self._advance(flight) for flight in list(self._flights)]
            self._curves.renew(self._flights)
            if self._asked is not None and self._asked[1].done():
                self._answered()
            elif self._may_ask():
                self._ask()
            elif not any(moved):
                self._rest()
        except LeaseLost as error:
            self._start_over(error)

    def _advance(self, flight: Flight) -> bool:
        """Take one trial as far as it goes; return whether it went anywhere."""
        if flight.running is None:
            return self._give_up(flight) if self._ends() else self._admit(flight)
        result = flight.running.poll()
        if result is not None:
            self._ended(flight, result)
            return True
        self._watch(flight)
        return False

    def _ask(self) -> None:
        """Begin a trial, if there is a slot for it."""
        if self._audits is None:
            slot = self._asker.claim(trials=self._goal.trials)
        else:
            slot = self._asker.claim_audit(self._audits.pop(0))
        if slot is None:
            self._no_slot_until = time.monotonic() + _LOOK_SECONDS
            return
        self._asked = slot, self._asker.propose(slot)

    def _answered(self) -> None:
        """Begin the trial that was asked for, with the configuration that was found."""
        assert self._asked is not None
        (slot, found), self._asked = self._asked, None
        try:
            proposal = found.result()
        except Cancelled:
            return
        except WorkloadError as error:
            self._error = error
            return
        if proposal.params is None or self._ends():
            self._asker.give_back(slot, proposal)
            if proposal.params is None and proposal.was_given:
                self._observer.note("a queued configuration had been tried before")
            elif proposal.params is None:
                self._error = self._error or self._tally.nothing_new()
            return
        flight = self._asker.begin(slot, proposal)
        self._flights.append(flight)
        self._session.writer.record_prediction(flight.trial_id, flight.prediction)
        if flight.prediction.verdict is Verdict.PRUNE and not flight.audit:
            self._settle(flight, pruned(flight.prediction, self._session.study.budget_bytes))
        self._error = self._error or self._tally.searched(nothing_fits=proposal.nothing_fits)

    def _admit(self, flight: Flight) -> bool:
        """Launch a waiting trial if there is room for it."""
        if time.monotonic() - flight.looked < _LOOK_SECONDS:
            return False
        flight.reservation_bytes = flight.wants_bytes(
            self._session.study.budget_bytes,
            least_bytes=self._tally.data_bytes,
            allowance_bytes=UNTOUCHED_BYTES if self._session.plan.place.kind == "cpu" else 0,
        )
        wish = Wish(flight.reservation_bytes, self._tally.host_bytes())
        admission = self._ledger.admit(flight.trial_id, self._session.driver_id, wish)
        if admission.granted:
            self._launch(flight, admission)
            return True
        flight.looked = time.monotonic()
        if admission.reason != flight.reason:
            flight.reason = admission.reason
            self._observer.waiting(flight.number, admission.reason)
        return False

    def _launch(self, flight: Flight, admission: Admission) -> None:
        session, place = self._session, admission.place
        folder = RunFolder.create(
            session.plan.runs_dir / folder_name(session.study.name) / f"{flight.number:05d}"
        )
        session.writer.record_launch(
            flight.trial_id,
            run_folder=str(folder.path),
            reservation_bytes=flight.reservation_bytes,
            device=place.key,
            attempt=flight.attempt,
            waiting_seconds=time.monotonic() - flight.since,
        )
        self._observer.launched(
            Launched(
                number=flight.number,
                params=flight.params,
                prediction=flight.prediction,
                reservation_bytes=flight.reservation_bytes,
                device=place.target,
                attempt=flight.attempt,
            )
        )
        self._curves.begin(flight, folder)
        flight.folder, flight.started = folder, time.monotonic()
        request = flight.request(session, place, context_bytes=self._context_bytes)
        flight.running = self._launcher.start(folder, request)
        if self._tally.launched + len(self._flights) < self._goal.trials:
            self._launcher.prepare()

    def _watch(self, flight: Flight) -> None:
        """Hold a running trial to its time, and stop it when told to."""
        running = flight.running
        assert running is not None
        if not flight.pid_noted and running.pid is not None:
            flight.pid_noted = True
            self._ledger.runs_as(flight.trial_id, running.pid)
        limit = self._goal.trial_timeout_seconds
        if self._stopper.level > 1:
            request = StopRequest(Outcome.INTERRUPTED, "interrupted by the user")
            running.stop(request, grace_seconds=GRACE_SECONDS)
        elif limit is not None and time.monotonic() - flight.started > limit:
            request = StopRequest(Outcome.TIMED_OUT, f"ran longer than {format_seconds(limit)}")
            running.stop(request, grace_seconds=GRACE_SECONDS)

    def _ended(self, flight: Flight, result: TrialResult) -> None:
        """Settle a trial whose process has ended, or give it the whole budget."""
        self._calibrations.learn(flight.prediction, result, flight.reservation_bytes)
        if not self._deserves_more(flight, result):
            self._settle(flight, result)
        elif self._ends():
            self._settle(flight, without_budget(result))
        else:
            self._session.writer.record_attempt(flight.trial_id, flight.as_attempt(result))
            self._observer.again(flight.ended(result))
            flight.begin_again()

    def _deserves_more(self, flight: Flight, result: TrialResult) -> bool:
        below = flight.reservation_bytes < self._session.study.budget_bytes
        return result.outcome is Outcome.OUT_OF_MEMORY and below and flight.attempt == 1

    def _settle(self, flight: Flight, result: TrialResult) -> None:
        """Keep what became of a trial, count it, and look for room for others."""
        in_time = settle(self._session, flight, result)
        self._flights.remove(flight)
        self._no_slot_until = 0.0
        for other in self._flights:
            other.looked = 0.0
        if not in_time:
            late = f"trial {flight.number} had been given up for lost; its result is kept beside it"
            self._observer.note(late)
            return
        self._curves.end(flight, result)
        self._error = self._error or self._tally.count(flight, result)
        self._observer.ended(flight.ended(result))

    def _give_up(self, flight: Flight) -> bool:
        """Settle a trial that will not be launched any more; its params come again on resume."""
        reason = self._stopper.reason or "the study ended before it could start"
        self._settle(flight, TrialResult(Outcome.INTERRUPTED, failure=Failure(reason)))
        return True

    def _ends(self) -> bool:
        """Whether no further trial may start."""
        if self._stopper.level or self._error is not None:
            return True
        limit = self._goal.timeout_seconds
        return limit is not None and time.monotonic() - self._started > limit

    def _may_ask(self) -> bool:
        places, jobs = len(self._session.plan.places), self._session.plan.jobs
        waiting = sum(flight.is_waiting for flight in self._flights)
        if self._asked is not None or waiting >= places or len(self._flights) >= jobs or self._ends():
            return False
        if self._audits is not None:
            return bool(self._audits)
        return not self._tally.used_up and time.monotonic() >= self._no_slot_until

    def _look_around(self) -> None:
        """See what other processes have said and done.

        Raises:
            LeaseLost: They have given this driver up.
        """
        if self._heart.lease_lost:
            raise LeaseLost("this driver was given up for lost by another one")
        if self._heart.stop_reason is not None:
            self._stopper.stop(1, self._heart.stop_reason)
        if self._heart.others_lost:
            self._heart.others_lost = False
            again = self._session.outages(lambda: recover(self._session))
            self._observer.note(f"another driver was lost; {again} of its trials will run again")

    def _start_over(self, error: LeaseLost) -> None:
        """Join again after this driver was given up: what it held is others' now."""
        self._observer.note(f"{error.message}; it goes on as a new one")
        for flight in list(self._flights):
            result = flight.running.poll() if flight.running is not None else None
            if result is not None:
                more = self._deserves_more(flight, result)
                self._settle(flight, without_budget(result) if more else result)
        self._abandon()
        self._flights.clear()
        self._audits = None  # to be counted anew
        given_up_id = self._session.driver_id
        self._session.join_again()
        self._heart.lease_lost = False
        # Whoever gave it up has settled what it held; or has died over that, and nobody would.
        self._session.drivers.give_up(given_up_id)
        self._session.outages(lambda: recover(self._session))

    def _abandon(self) -> None:
        """Kill what still runs, and end what is still traced."""
        request = StopRequest(Outcome.INTERRUPTED, "the study ended")
        for flight in self._flights:  # all at once: one that does not die keeps nobody waiting
            if flight.running is not None:
                flight.running.stop(request, grace_seconds=0)
                flight.running.poll()
        for flight in self._flights:
            if flight.running is not None:
                flight.running.kill()
        self._forget_asked()

    def _forget_asked(self) -> None:
        """End the search for a configuration; of what was found, no trial comes."""
        if self._asked is None:
            return
        self._asker.cancel()
        (slot, found), self._asked = self._asked, None
        with contextlib.suppress(Exception):  # it was settled where it was raised, or by the next start
            self._asker.give_back(slot, found.result())

    def _rest(self) -> None:
        """Wait until something happens, but not for long."""
        running = [flight.running for flight in self._flights if flight.running is not None]
        self._wake.wait([trial.fileno() for trial in running], _REST_SECONDS)
