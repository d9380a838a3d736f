"""The loop of a study: suggest → predict → launch → measure → record → tell.

One trial at a time. What becomes of a trial is data; exceptions that leave this module stop the
study.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Any, Protocol

import optuna

from tuner.errors import Interrupted, NothingFeasible, TooManyFailures, WorkloadError
from tuner.execution.launcher import Launcher
from tuner.execution.run_folder import Request, RunFolder, folder_name
from tuner.memory.calibration import Calibration
from tuner.memory.prediction import predict
from tuner.records import Failure, Outcome, Peaks, Prediction, TrialResult, Verdict
from tuner.scheduling.devices import present_target
from tuner.search.learned import measured_from, measured_in
from tuner.search.optuna_study import AUDIT, REPEATS, derived_seed
from tuner.search.session import Session
from tuner.stand_in import require_plain
from tuner.steps import EVAL_STEPS, TRAIN_STEPS
from tuner.store.rows import TrialRecord
from tuner.units import format_bytes

MOST_PRUNES_IN_A_ROW = 200
_FIRST_FAILURES = 3  # the first launches all failing stops a study at once
_FAILED_SHARE = 0.2
_BEAT_SECONDS = 5.0


@dataclass(frozen=True)
class Goal:
    """When a study is done.

    Attributes:
        trials: Launched trials in the study, earlier sessions included, audits not.
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
class Ended:
    """A trial that has ended, for an observer."""

    number: int
    params: dict[str, Any]
    prediction: Prediction
    result: TrialResult
    audit: bool


class Observer(Protocol):
    """What is told while a study runs."""

    def launched(self, number: int, params: dict[str, Any], prediction: Prediction) -> None:
        """A trial's process is about to start."""

    def ended(self, trial: Ended) -> None:
        """A trial has an outcome."""

    def note(self, message: str) -> None:
        """Something that a person should know."""


class Stopper:
    """Asked between trials and while one runs; set by signals, `tuner stop` and the time-out.

    Attributes:
        level: 0 go on, 1 finish the running trial, 2 stop it.
        reason: Why.
    """

    def __init__(self) -> None:
        self.level = 0
        self.reason = ""

    def stop(self, level: int, reason: str) -> None:
        """Ask to stop; a higher level wins."""
        if level > self.level:
            self.level, self.reason = level, reason


class StudyLoop:
    """Drives one session to its goal."""

    def __init__(
        self, session: Session, launcher: Launcher, observer: Observer, goal: Goal, stopper: Stopper
    ) -> None:
        self._session, self._launcher, self._observer = session, launcher, observer
        self._goal, self._stopper = goal, stopper
        self._target = present_target(session.plan.place.target)
        self._started = time.monotonic()
        self._last_beat = 0.0
        self._counts = session.reader.outcomes(session.study.id)
        trials = session.reader.trials(session.study.id)
        self._launched = sum(1 for trial in trials if _counts_as_launch(trial))
        # A seeded study keeps the prior, so that it repeats.
        self._measured = [] if session.study.seed is not None else measured_in(session, self._target)
        self._calibrations: dict[str, Calibration] = {}

    def run(self) -> None:
        """Run trials until the goal is reached, then audit.

        Raises:
            NothingFeasible: No draw fits the budget.
            TooManyFailures: More launches failed than the goal tolerates.
            Interrupted: The user stopped the study.
        """
        prunes_in_a_row = 0
        while self._launched < self._goal.trials:
            if self._should_end():
                return
            ended = self._one_trial()
            prunes_in_a_row = prunes_in_a_row + 1 if ended.result.outcome is Outcome.PRUNED_MEMORY else 0
            if prunes_in_a_row >= MOST_PRUNES_IN_A_ROW:
                self._nothing_more_fits(prunes_in_a_row)
                break
            self._check_failures()
        self._audit()

    def _one_trial(self) -> Ended:
        """Take one trial from its question to its answer; each line is one step."""
        trial = self._session.optuna.ask()
        params = self._suggest(trial)
        trial_id = self._add(trial, params)
        prediction = self._predict(trial_id, params)
        if prediction.verdict is Verdict.PRUNE and not trial.user_attrs.get(AUDIT, False):
            result = _pruned(prediction, self._session.study.budget_bytes)
        else:
            result = self._launch(trial, trial_id, params, prediction)
        self._session.writer.record_result(trial_id, result)
        self._tell(trial.number, result, prediction)
        return self._note(trial, params, prediction, result)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        try:
            params = self._session.plan.loaded.workload.suggest(trial)
            require_plain(params)
            return params
        except Exception as error:
            self._session.optuna.tell(
                trial.number, Outcome.ERROR, value=None, memory_bytes=None, budget_bytes=1
            )
            raise WorkloadError(f"suggest() fails: {type(error).__name__}: {error}") from error

    def _add(self, trial: optuna.Trial, params: dict[str, Any]) -> int:
        return self._session.writer.add_trial(
            self._session.study.id,
            trial.number,
            params,
            owner=self._session.owner,
            seed=derived_seed(self._session.seed_base, trial.number),
            audit=trial.user_attrs.get(AUDIT, False),
            repeats=trial.user_attrs.get(REPEATS),
        )

    def _predict(self, trial_id: int, params: dict[str, Any]) -> Prediction:
        found = self._session.predictor.estimate(params)
        prediction = predict(
            found,
            self._target,
            self._calibration(found.mix),
            context_bytes=self._session.study.context_bytes,
            budget_bytes=self._session.study.budget_bytes,
        )
        self._session.writer.record_prediction(trial_id, prediction)
        return prediction

    def _launch(
        self, trial: optuna.Trial, trial_id: int, params: dict[str, Any], prediction: Prediction
    ) -> TrialResult:
        session = self._session
        folder = RunFolder.create(
            session.plan.runs_dir / folder_name(session.study.name) / f"{trial.number:05d}"
        )
        request = Request(
            workload=session.plan.loaded.reference,
            params=params,
            device=session.plan.place.kind,
            reservation_bytes=session.study.budget_bytes,
            context_bytes=session.study.context_bytes if session.study.seed is not None else None,
            seed=derived_seed(session.seed_base, trial.number),
            threads=session.plan.threads,
            example_steps=(TRAIN_STEPS, EVAL_STEPS),
        )
        session.writer.record_launch(
            trial_id, run_folder=str(folder.path), reservation_bytes=request.reservation_bytes
        )
        self._observer.launched(trial.number, params, prediction)
        return self._launcher.run(
            folder,
            request,
            timeout_seconds=self._goal.trial_timeout_seconds,
            should_stop=self._should_stop_trial,
            more_to_come=self._launched + 1 < self._goal.trials,
        )

    def _tell(self, number: int, result: TrialResult, prediction: Prediction) -> None:
        study = self._session.study
        expected = None if prediction.device is None else prediction.device.expected
        self._session.optuna.tell(
            number,
            result.outcome,
            value=result.value,
            memory_bytes=told_bytes(
                result.outcome,
                peaks=result.peaks,
                failure=result.failure,
                predicted_bytes=expected,
                context_bytes=study.context_bytes,
                repeatable=study.seed is not None,
            ),
            budget_bytes=study.budget_bytes,
        )

    def _note(
        self, trial: optuna.Trial, params: dict[str, Any], prediction: Prediction, result: TrialResult
    ) -> Ended:
        ended = Ended(trial.number, params, prediction, result, trial.user_attrs.get(AUDIT, False))
        self._counts[result.outcome] = self._counts.get(result.outcome, 0) + 1
        if result.outcome.launched and result.outcome.final and not ended.audit:
            self._launched += 1
        self._learn(prediction, result)
        self._observer.ended(ended)
        return ended

    def _learn(self, prediction: Prediction, result: TrialResult) -> None:
        """Calibrate on a launched trial; a seeded study keeps the calibration of its start."""
        if self._session.study.seed is not None:
            return
        study = self._session.study
        measured = measured_from(
            prediction,
            result,
            context_bytes=study.context_bytes or self._target.context_bytes,
            cap_bytes=study.budget_bytes,
        )
        if measured is not None:
            self._measured.append(measured)
            self._calibrations.pop(measured.mix, None)

    def _calibration(self, mix: str) -> Calibration:
        """Return what the trials of a mix of operators have taught so far."""
        if mix not in self._calibrations:
            self._calibrations[mix] = Calibration.of_mix(self._target.kind, mix).updated(
                self._measured, context_spread_bytes=self._target.context_spread_bytes
            )
        return self._calibrations[mix]

    def _audit(self) -> None:
        """Launch a share of the pruned configurations: the only honest figure for wrong prunes."""
        trials = self._session.reader.trials(self._session.study.id)
        audited = {trial.repeats for trial in trials if trial.audit and trial.outcome != Outcome.INTERRUPTED}
        pruned = [trial for trial in trials if trial.outcome == Outcome.PRUNED_MEMORY]
        wanted = math.ceil(self._goal.audit_share * len(pruned))
        # Always the same choice for the same study, so that a resumed audit goes on with it.
        chosen = random.Random(self._session.study.id).sample(pruned, wanted)  # noqa: S311
        for trial in sorted(chosen, key=lambda trial: trial.number):
            if trial.number not in audited:
                if self._should_end():
                    return
                self._session.optuna.enqueue_again(trial.number, audit=True)
                self._one_trial()

    def _nothing_more_fits(self, prunes: int) -> None:
        trials = self._session.reader.trials(self._session.study.id)
        if any(trial.outcome == Outcome.COMPLETED for trial in trials):
            self._observer.note(
                f"{prunes} configurations in a row do not fit the budget: the search ends with "
                f"{self._launched} of {self._goal.trials} trials"
            )
            return
        smallest = min((t.predicted_bytes for t in trials if t.predicted_bytes is not None), default=None)
        raise NothingFeasible(
            f"none of {prunes} configurations in a row fits the budget of "
            f"{format_bytes(self._session.study.budget_bytes)}; "
            f"the smallest prediction is {format_bytes(smallest)}",
            hint="raise --budget, or let suggest() offer smaller configurations",
        )

    def _check_failures(self) -> None:
        failures = sum(count for outcome, count in self._counts.items() if _is_failure(outcome))
        if self._goal.max_failures is not None:
            too_many = failures > self._goal.max_failures
        else:
            all_failed = failures == self._launched and failures >= _FIRST_FAILURES
            too_many = all_failed or failures > max(_FIRST_FAILURES, _FAILED_SHARE * self._goal.trials)
        if too_many:
            kinds = ", ".join(f"{n} {o}" for o, n in sorted(self._counts.items()) if _is_failure(o))
            raise TooManyFailures(
                f"{failures} of {self._launched} launched trials failed ({kinds})",
                hint=f"see why: tuner trials {self._session.study.name}; tolerate more: --max-failures",
            )

    def _should_end(self) -> bool:
        """Whether no further trial may start.

        Raises:
            Interrupted: The user stopped the study.
        """
        self._beat()
        if self._stopper.level:
            raise Interrupted(
                f"{self._stopper.reason}; {self._launched} of {self._goal.trials} trials are done",
                hint="the same command continues the study",
            )
        limit = self._goal.timeout_seconds
        return limit is not None and time.monotonic() - self._started > limit

    def _should_stop_trial(self) -> bool:
        self._beat()
        return self._stopper.level > 1

    def _beat(self) -> None:
        if time.monotonic() - self._last_beat > _BEAT_SECONDS:
            self._last_beat = time.monotonic()
            reason = self._session.writer.beat(self._session.study.id, self._session.owner)
            if reason is not None:
                self._stopper.stop(1, reason)


def told_bytes(
    outcome: Outcome,
    *,
    peaks: Peaks,
    failure: Failure | None,
    predicted_bytes: int | None,
    context_bytes: int | None,
    repeatable: bool,
) -> int | None:
    """Return the device bytes that Optuna is told for a trial, or None.

    Args:
        outcome: What became of the trial.
        peaks: What was measured.
        failure: The failed request of an out-of-memory trial.
        predicted_bytes: What was predicted.
        context_bytes: The study's context.
        repeatable: True for a seeded study: on a CPU the resident peak differs by a few pages from
            run to run, context + allocator's peak does not.
    """
    if outcome is Outcome.PRUNED_MEMORY:
        return predicted_bytes
    if outcome is Outcome.OUT_OF_MEMORY:
        if repeatable and predicted_bytes is not None:
            return predicted_bytes
        requested_bytes = failure.requested_bytes if failure is not None else None
        return (peaks.device_bytes or 0) + (requested_bytes or 0)
    if repeatable and peaks.allocated_bytes is not None and context_bytes is not None:
        return context_bytes + (peaks.reserved_bytes or peaks.allocated_bytes)
    return peaks.device_bytes


def _pruned(prediction: Prediction, budget_bytes: int) -> TrialResult:
    required = prediction.required
    reason = (
        f"predicted to need {format_bytes(None if required is None else required.expected)}, "
        f"the budget is {format_bytes(budget_bytes)}"
    )
    return TrialResult(Outcome.PRUNED_MEMORY, failure=Failure(reason))


def _counts_as_launch(trial: TrialRecord) -> bool:
    if trial.is_running or trial.audit:
        return False
    outcome = Outcome(trial.outcome)
    return outcome.launched and outcome.final


def _is_failure(outcome: str) -> bool:
    return outcome != "running" and Outcome(outcome).failed
