"""What a driver that died left behind, put in order by the next one, or by one beside it.

A driver may die between any two steps of the loop. Every trial that was its:

* has a result or a report in its run folder: that is recorded and told;
* has none, or ran out of memory under less than the budget: it is `interrupted`, told as FAIL, and
  its params are run again by whoever claims the next slot;
* is settled in our tables but running for Optuna: it is told again;
* is known to Optuna only: it was never launched; told as FAIL.

One process at a time does this for a study, under a lock.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from tuner.execution.run_folder import RunFolder, trial_token
from tuner.processes import kill_orphans, process_memory
from tuner.records import Failure, Outcome, Peaks, TrialResult
from tuner.search.session import Session
from tuner.search.told import told_bytes
from tuner.store.locks import exclusive
from tuner.store.rows import TrialRecord

_DYING_SECONDS = 5.0  # a supervisor needs less than one to kill what its driver left


def recover(session: Session, *, own: bool = False) -> int:
    """Settle every trial that no living driver works on; return how many were interrupted.

    Args:
        session: The study.
        own: Whether this driver's own trials are among them: its loop has ended.
    """
    kill_orphans()  # of drivers that were killed together with their supervisors
    with exclusive(session.engine, f"study-{session.study.id}"):
        lost = [driver.id for driver in session.drivers.lost(session.study.id)]
        for driver_id in lost:  # one that was only silent can add nothing any more
            session.drivers.give_up(driver_id)
        interrupted = 0
        for trial in _left_trials(session, own=own):
            result = _left_result(session, trial)
            if session.writer.record_result(trial.id, result):
                interrupted += result.outcome is Outcome.INTERRUPTED
        _tell_what_was_not(session)
        for driver_id in lost:
            session.drivers.leave(driver_id, "lost")
        return interrupted


def _left_trials(session: Session, *, own: bool) -> list[TrialRecord]:
    """Return the running trials of drivers that do not live.

    Drivers join and leave meanwhile: a trial counts that was running before the living ones were
    read, and still is afterwards.
    """
    study_id = session.study.id
    before = {trial.id for trial in session.reader.trials(study_id, ["running"])}
    living = {driver.id for driver in session.reader.living_drivers(study_id)}
    if own:
        living.discard(session.driver_id)
    running = session.reader.trials(study_id, ["running"])
    return [trial for trial in running if trial.id in before and trial.driver_id not in living]


def _left_result(session: Session, trial: TrialRecord) -> TrialResult:
    pid = session.reservations.pid_of(trial.id)
    if pid is not None:
        _wait_for_end(pid)  # it may be writing its report
    reason, result = "its driver ended before it did", None
    if trial.run_folder is not None:
        try:
            result = _result_in(session, RunFolder(Path(trial.run_folder)), trial)
        except FileNotFoundError:
            pass  # it never began, or ran on another host
        except (OSError, ValueError) as error:
            reason += f", and its run folder cannot be read: {error}"
    if result is None:
        return TrialResult(Outcome.INTERRUPTED, failure=Failure(reason))
    below = (trial.reservation_bytes or 0) < session.study.budget_bytes
    if result.outcome is Outcome.OUT_OF_MEMORY and below:
        return without_budget(result)
    return result


def _result_in(session: Session, folder: RunFolder, trial: TrialRecord) -> TrialResult | None:
    """Return the result in a run folder, if it is this trial's: the path may be another host's.

    Raises:
        OSError: There is no such folder, or it cannot be read.
        ValueError: What it holds is damaged.
    """
    request = folder.read_request()
    driver = None if trial.driver_id is None else session.reader.driver(trial.driver_id)
    if driver is None:  # of a version that kept neither drivers nor tokens
        own = request.token is None and request.seed == trial.seed
    else:
        own = request.token == trial_token(trial.id, driver.id, driver.owner)
    return folder.read_result() if own else None


def without_budget(result: TrialResult) -> TrialResult:
    """Return what is kept of a trial that was to have the whole budget, and could not any more."""
    reason = "out of memory under less than the budget, and ended before it could have the whole"
    return dataclasses.replace(result, outcome=Outcome.INTERRUPTED, failure=Failure(reason))


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + _DYING_SECONDS
    while process_memory(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.05)


def _tell_what_was_not(session: Session) -> None:
    """Tell Optuna of every trial that it takes for running and nobody works on."""
    running = session.optuna.running()
    if not running:
        return
    asking = session.slots.asking(session.study.id)
    trials = {trial.number: trial for trial in session.reader.trials(session.study.id)}
    for number in running:
        trial = trials.get(number)
        if trial is None and asking:
            continue  # another driver has asked for it, and is about to add it
        if trial is None or not trial.is_running:
            _tell_again(session, number, trial)


def _tell_again(session: Session, number: int, trial: TrialRecord | None) -> None:
    study = session.study
    if trial is None:
        session.optuna.put_back(number, again=True)
        return
    memory_bytes = told_bytes(
        Outcome(trial.outcome),
        peaks=Peaks(trial.peak_bytes, None, trial.allocated_bytes, trial.reserved_bytes),
        failure=None if trial.failure is None else Failure(**trial.failure),
        predicted_bytes=trial.predicted_bytes,
        context_bytes=study.context_bytes,
        repeatable=study.seed is not None,
    )
    session.optuna.tell(
        number,
        Outcome(trial.outcome),
        value=trial.value,
        memory_bytes=memory_bytes,
        budget_bytes=study.budget_bytes,
    )
