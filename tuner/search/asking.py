"""The first steps of a trial: a slot, a question to Optuna, params, a row, a trace that begins."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import optuna

from tuner.errors import WorkloadError
from tuner.memory.prediction import Estimate
from tuner.records import Outcome
from tuner.search.flight import Flight
from tuner.search.optuna_study import derived_seed
from tuner.search.session import Session
from tuner.stand_in import require_plain
from tuner.store.patience import why_transient
from tuner.store.slots import Slot


class Asker:
    """Begins trials.

    Args:
        session: The study.
        tracer: Where traces run.
        when_traced: Called from there at the end of each.
    """

    def __init__(self, session: Session, tracer: Executor, when_traced: Callable[[], None]) -> None:
        self._session, self._tracer, self._when_traced = session, tracer, when_traced

    def claim(self, *, trials: int) -> Slot | None:
        """Take the right to one of so many trials, or see that there is none for now."""
        session, token = self._session, str(uuid.uuid4())
        return session.slots.claim(session.study.id, session.driver_id, token=token, trials=trials)

    def claim_audit(self, number: int) -> Slot | None:
        """Take the right to audit a pruned trial, or see that another driver has."""
        session, token = self._session, str(uuid.uuid4())
        return session.slots.claim_audit(session.study.id, session.driver_id, token=token, number=number)

    def begin(self, slot: Slot) -> Flight:
        """Begin the trial of a slot, whose estimate is then being made; each line is one step.

        Raises:
            WorkloadError: The workload's `suggest` fails.
        """
        try:
            trial = self._ask(slot)
            params = self._suggest(trial)
            trial_id = self._add(trial, params, slot)
        except Exception as error:
            if why_transient(error) is None:  # else the database is away, and this driver ends
                self._session.slots.release(slot.id, self._session.driver_id)
            raise
        return Flight(trial.number, trial_id, params, slot.audit, self._trace(params))

    def _ask(self, slot: Slot) -> optuna.Trial:
        if slot.repeats is None:
            return self._session.optuna.ask()
        return self._session.optuna.ask_again(slot.repeats, audit=slot.audit)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        session = self._session
        try:
            params = session.outages(lambda: session.plan.loaded.workload.suggest(trial))
            require_plain(params)
            return params
        except Exception as error:
            if why_transient(error) is not None:
                raise
            session.optuna.tell(trial.number, Outcome.ERROR, value=None, memory_bytes=None, budget_bytes=1)
            raise WorkloadError(f"suggest() fails: {type(error).__name__}: {error}") from error

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

    def _trace(self, params: dict[str, Any]) -> Future[Estimate]:
        tracing = self._tracer.submit(self._session.predictor.estimate, params)
        tracing.add_done_callback(lambda _: self._when_traced())
        return tracing
