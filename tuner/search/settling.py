"""The last steps of a trial: its result is kept in its folder, in our tables, and with Optuna."""

from __future__ import annotations

import contextlib

from tuner.records import Prediction, TrialResult
from tuner.search.flight import Flight
from tuner.search.session import Session
from tuner.search.told import told_bytes


def settle(session: Session, flight: Flight, result: TrialResult) -> bool:
    """Keep what became of a trial.

    Returns:
        False where it had been given up for lost: what counts is what was recorded then, and its
        Optuna trial is told of by whoever did that.
    """
    if flight.folder is not None:
        with contextlib.suppress(OSError):  # the disk is full: the worker's report must do
            flight.folder.write_result(result)
    in_time = session.writer.record_result(flight.trial_id, result)
    if in_time:
        _tell(session, flight.number, result, flight.prediction)
    return in_time


def _tell(session: Session, number: int, result: TrialResult, prediction: Prediction | None) -> None:
    study = session.study
    device = None if prediction is None else prediction.device
    session.optuna.tell(
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
