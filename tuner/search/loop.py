"""The loop of a study: suggest → predict → reserve → launch → measure → record → tell.

Several trials are on their way at once, as memory allows; one thread drives them, and each turn
of the loop takes each of them as far as it goes. What becomes of a trial is data; exceptions that
leave this module stop the study, after the trials that run have ended.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import optuna

from tuner.errors import Interrupted, LeaseLost, TunerError, WorkloadError
from tuner.execution.launcher import Launcher
from tuner.execution.run_folder import RunFolder, StopRequest, folder_name
from tuner.measure.meters import UNTOUCHED_BYTES
from tuner.records import Failure, Outcome, Prediction, TrialResult, Verdict
from tuner.scheduling.devices import present_target
from tuner.scheduling.ledger import Admission, Ledger
from tuner.scheduling.packing import Wish
from tuner.search.calibrations import Calibrations
from tuner.search.events import Goal, Launched, Observer, Stopper
from tuner.search.flight import Flight
from tuner.search.heart import Heart
from tuner.search.optuna_study import AUDIT, derived_seed
from tuner.search.recover import recover, without_budget
from tuner.search.session import Session
from tuner.search.tally import Tally
from tuner.search.told import pruned, told_bytes
from tuner.stand_in import require_plain
from tuner.store.patience import why_transient
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
        self._calibrations = Calibrations(session, present_target(session.plan.place.target))
        self._tally = Tally(session, goal, observer)
        self._flights: list[Flight] = []
        self._started = time.monotonic()
        self._no_slot_until = 0.0
        self._error: TunerError | None = None
        self._audits: list[int] | None = None  # numbers to audit, once the search is over
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
            ThreadPoolExecutor(1, thread_name_prefix="tracer") as self._tracer,
            contextlib.closing(self._wake),
        ):
            try:
                while not self._is_over():
                    self._turn()
            finally:
                self._abandon()
        if self._error is not None:
            raise self._error

    def _is_over(self) -> bool:
        """Whether nothing is on its way and nothing more will be."""
        if self._flights:
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
            moved = [self._advance(flight) for flight in list(self._flights)]
            if self._may_ask():
                self._ask()
            elif not any(moved):
                self._rest()
        except LeaseLost as error:
            self._start_over(error)

    def _advance(self, flight: Flight) -> bool:
        """Take one trial as far as it goes; return whether it went anywhere."""
        if flight.prediction is None:
            if not flight.tracing.done():
                return self._ends() and self._give_up(flight)
            return self._predicted(flight)
        if flight.running is None:
            return self._give_up(flight) if self._ends() else self._admit(flight)
        result = flight.running.poll()
        if result is not None:
            self._ended(flight, result)
            return True
        self._watch(flight)
        return False

    def _ask(self) -> None:
        """Begin a trial; each line is one step."""
        slot = self._claim()
        if slot is None:
            return
        trial_id = None
        try:
            trial = self._ask_in(slot)
            params = self._suggest(trial)
            if params is None:
                return
            trial_id = self._add(trial, params, slot)
        finally:
            if trial_id is None:
                self._session.slots.release(slot.id, self._session.driver_id)
        tracing = self._trace(params)
        audit = bool(trial.user_attrs.get(AUDIT, False))
        self._flights.append(Flight(trial.number, trial_id, params, audit, tracing))

    def _claim(self) -> Slot | None:
        """Take the right to one trial, or see that there is none for now."""
        session, token = self._session, str(uuid.uuid4())
        if self._audits is None:
            slot = session.slots.claim(
                session.study.id, session.driver_id, token=token, trials=self._goal.trials
            )
        else:
            slot = session.slots.claim_audit(
                session.study.id, session.driver_id, token=token, number=self._audits.pop(0)
            )
        if slot is None:
            self._no_slot_until = time.monotonic() + _LOOK_SECONDS
        return slot

    def _ask_in(self, slot: Slot) -> optuna.Trial:
        if slot.repeats is None:
            return self._session.optuna.ask()
        return self._session.optuna.ask_again(slot.repeats, audit=slot.audit)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Any] | None:
        try:
            params = self._session.outages(lambda: self._session.plan.loaded.workload.suggest(trial))
            require_plain(params)
            return params
        except Exception as error:
            if why_transient(error) is not None:
                raise
            self._tell(trial.number, TrialResult(Outcome.ERROR), None)
            self._error = WorkloadError(f"suggest() fails: {type(error).__name__}: {error}")
            self._error.__cause__ = error
            return None

    def _add(self, trial: optuna.Trial, params: dict[str, Any], slot: Slot) -> int:
        return self._session.writer.add_trial(
            self._session.study.id,
            trial.number,
            params,
            driver_id=self._session.driver_id,
            slot_id=slot.id,
            seed=derived_seed(self._session.seed_base, trial.number),
            audit=slot.audit,
            repeats=slot.repeats,
        )

    def _trace(self, params: dict[str, Any]) -> Future[Any]:
        tracing = self._tracer.submit(self._session.predictor.estimate, params)
        tracing.add_done_callback(lambda _: self._wake.up())
        return tracing

    def _predicted(self, flight: Flight) -> bool:
        prediction = self._calibrations.predict(flight.tracing.result())
        self._session.writer.record_prediction(flight.trial_id, prediction)
        flight.prediction, flight.since = prediction, time.monotonic()
        if prediction.verdict is Verdict.PRUNE and not flight.audit:
            self._settle(flight, pruned(prediction, self._session.study.budget_bytes))
        return True

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
        assert flight.prediction is not None
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
        flight.folder, flight.started = folder, time.monotonic()
        flight.running = self._launcher.start(folder, flight.request(session, place))
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
        assert flight.prediction is not None
        self._calibrations.learn(flight.prediction, result, flight.reservation_bytes)
        below = flight.reservation_bytes < self._session.study.budget_bytes
        if result.outcome is not Outcome.OUT_OF_MEMORY or not below:
            self._settle(flight, result)
            return
        if self._ends():
            self._settle(flight, without_budget(result))
            return
        self._session.writer.record_attempt(flight.trial_id, flight.as_attempt(result))
        self._observer.again(flight.ended(result))
        flight.begin_again()

    def _settle(self, flight: Flight, result: TrialResult) -> None:
        """Keep what became of a trial: in its folder, in our tables, with Optuna."""
        if flight.folder is not None:
            with contextlib.suppress(OSError):  # the disk is full: the worker's report must do
                flight.folder.write_result(result)
        in_time = self._session.writer.record_result(flight.trial_id, result)
        self._tell(flight.number, result, flight.prediction)
        self._flights.remove(flight)
        self._no_slot_until = 0.0
        for other in self._flights:
            other.looked = 0.0  # there may be room now
        if not in_time:
            self._observer.note(
                f"trial {flight.number} had been given up for lost; its result is kept beside it"
            )
            return
        self._error = self._error or self._tally.count(flight, result)
        if flight.prediction is not None:
            self._observer.ended(flight.ended(result))

    def _tell(self, number: int, result: TrialResult, prediction: Prediction | None) -> None:
        study = self._session.study
        device = None if prediction is None else prediction.device
        self._session.optuna.tell(
            number,
            result.outcome,
            value=result.value,
            memory_bytes=told_bytes(
                result.outcome,
                peaks=result.peaks,
                failure=result.failure,
                predicted_bytes=None if device is None else device.expected,
                context_bytes=study.context_bytes,
                repeatable=study.seed is not None,
            ),
            budget_bytes=study.budget_bytes,
        )

    def _give_up(self, flight: Flight) -> bool:
        """Settle a trial that will not be launched any more; its params come again on resume."""
        if flight.prediction is None:
            self._session.predictor.cancel()
        reason = self._stopper.reason or "the study ended before it could start"
        self._settle(flight, TrialResult(Outcome.INTERRUPTED, failure=Failure(reason)))
        return True

    def _ends(self) -> bool:
        """Whether no further trial may start."""
        if self._stopper.level and self._error is None:
            self._error = Interrupted(
                f"{self._stopper.reason}; {self._tally.launched} of {self._goal.trials} trials are done",
                hint="the same command continues the study",
            )
        if self._error is not None:
            return True
        limit = self._goal.timeout_seconds
        return limit is not None and time.monotonic() - self._started > limit

    def _may_ask(self) -> bool:
        places, jobs = len(self._session.plan.places), self._session.plan.jobs
        waiting = sum(flight.is_waiting for flight in self._flights)
        tracing = any(flight.prediction is None for flight in self._flights)
        if tracing or waiting >= places or len(self._flights) >= jobs or self._ends():
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
                self._settle(flight, result)
        self._abandon()
        self._flights.clear()
        self._session.join_again()
        self._heart.lease_lost = False

    def _abandon(self) -> None:
        """Kill what still runs, and end what is still traced."""
        for flight in self._flights:
            if flight.running is not None:
                flight.running.kill()
            elif flight.prediction is None:
                self._session.predictor.cancel()

    def _rest(self) -> None:
        """Wait until something happens, but not for long."""
        running = [flight.running for flight in self._flights if flight.running is not None]
        self._wake.wait([trial.fileno() for trial in running], _REST_SECONDS)


class Wake:
    """Waits for any of some descriptors, or for a call from another thread."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def up(self) -> None:
        """End the wait that is going on, or the next one."""
        with contextlib.suppress(OSError):
            os.write(self._write, b".")

    def wait(self, descriptors: list[int], seconds: float) -> None:
        """Wait until a descriptor can be read, `up` is called, or the time is over."""
        with selectors.DefaultSelector() as selector:
            for descriptor in {self._read, *(fd for fd in descriptors if fd >= 0)}:
                selector.register(descriptor, selectors.EVENT_READ)
            selector.select(seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._read)
        os.close(self._write)
