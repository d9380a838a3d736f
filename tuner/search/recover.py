"""What an earlier driver left behind, put in order before the next trial.

A driver may die between any two steps of the loop. On the next start, every trial that was its:

* has a report in its run folder: the result is recorded and told;
* has none: it is `interrupted`, told as FAIL, and its params are queued again;
* is settled in our tables but running for Optuna: it is told again;
* is known to Optuna only: it was never launched; told as FAIL.
"""

from __future__ import annotations

from pathlib import Path

from tuner.execution.run_folder import RunFolder
from tuner.records import Failure, Outcome, Peaks, TrialResult
from tuner.search.loop import told_bytes
from tuner.search.session import Session
from tuner.store.rows import TrialRecord


def recover(session: Session) -> int:
    """Settle every trial that no driver works on; return how many were interrupted."""
    trials = session.reader.trials(session.study.id)
    for trial in trials:
        if trial.is_running:
            session.writer.record_result(trial.id, _left_result(trial))
    by_number = {trial.number: trial for trial in session.reader.trials(session.study.id)}
    for number in session.optuna.running():
        _tell_again(session, number, by_number.get(number))
    return _queue_interrupted(session, list(by_number.values()))


def _left_result(trial: TrialRecord) -> TrialResult:
    report = None if trial.run_folder is None else RunFolder(Path(trial.run_folder)).read_report()
    if report is not None:
        return TrialResult.from_json(report)
    return TrialResult(Outcome.INTERRUPTED, failure=Failure("its driver ended before it did"))


def _tell_again(session: Session, number: int, trial: TrialRecord | None) -> None:
    study = session.study
    if trial is None:
        outcome, value, memory_bytes = Outcome.INTERRUPTED, None, None
    else:
        outcome, value = Outcome(trial.outcome), trial.value
        memory_bytes = told_bytes(
            outcome,
            peaks=Peaks(trial.peak_bytes, None, trial.allocated_bytes, trial.reserved_bytes),
            failure=None if trial.failure is None else Failure(**trial.failure),
            predicted_bytes=trial.predicted_bytes,
            context_bytes=study.context_bytes,
            repeatable=study.seed is not None,
        )
    session.optuna.tell(
        number, outcome, value=value, memory_bytes=memory_bytes, budget_bytes=study.budget_bytes
    )


def _queue_interrupted(session: Session, trials: list[TrialRecord]) -> int:
    """Queue the params of each interrupted trial that was not run again; audits choose anew."""
    repeated = {trial.repeats for trial in trials}
    waiting = [
        trial.number
        for trial in trials
        if trial.outcome == Outcome.INTERRUPTED and not trial.audit and trial.number not in repeated
    ]
    for number in waiting:
        session.optuna.enqueue_again(number)
    return len(waiting)
