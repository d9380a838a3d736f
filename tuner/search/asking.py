"""The first steps of a trial: a slot, a question to Optuna, a configuration that may fit, a row.

::

    claim ─► ask ─► rehearse (suggest, predict, again …) ─► suggest ─► add
             └──────────── in a thread of its own ────────────────┘

The thread is one for all: Optuna's samplers read a study's trials through a cache per thread, which
`ask` empties, and predictions come from one process.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import optuna

from tuner.errors import WorkloadError
from tuner.records import Prediction, Verdict
from tuner.search.calibrations import Calibrations
from tuner.search.flight import Flight
from tuner.search.optuna_study import AUDIT, REPEATS
from tuner.search.plain_choices import PlainChoices
from tuner.search.sampling.finding import Rehearsal
from tuner.search.sampling.history import Forecast
from tuner.search.sampling.rehearsal import rehearse, restored
from tuner.search.seeds import derived_seed
from tuner.search.session import Session
from tuner.search.told import why_pruned
from tuner.stand_in import require_plain
from tuner.store.patience import why_transient
from tuner.store.rows import NewRejection
from tuner.store.slots import Slot


@dataclass(frozen=True)
class Proposal:
    """A trial that Optuna knows, and its configuration.

    Attributes:
        number: Optuna's number of it.
        params: The configuration; None when everything that was drawn had been tried before.
        prediction: What is predicted for it.
        rehearsal: How it was found; None for params that are run again.
    """

    number: int
    params: dict[str, Any] | None
    prediction: Prediction | None
    rehearsal: Rehearsal | None

    @property
    def nothing_fits(self) -> bool:
        """Whether nothing that was drawn fits: the smallest of it was taken."""
        forecast = None if self.rehearsal is None else self.rehearsal.forecast
        return forecast is not None and not forecast.fits and not self.was_given

    @property
    def was_given(self) -> bool:
        """Whether its params, or some of them, were queued."""
        return self.rehearsal is not None and self.rehearsal.given


class Cancelled(Exception):
    """The search ended while a configuration was looked for."""


class Asker:
    """Begins trials, one at a time.

    Args:
        session: The study.
        calibrations: Turn estimates into predictions.
        thread: Where configurations are looked for.
        when_found: Called from there at the end of each.
        on_turned_away: Called from there with a trial's number, and how many draws did not fit so far.
    """

    def __init__(
        self,
        session: Session,
        calibrations: Calibrations,
        thread: Executor,
        *,
        when_found: Callable[[], None],
        on_turned_away: Callable[[int, int], None],
    ) -> None:
        self._session, self._calibrations = session, calibrations
        self._thread, self._when_found, self._on_turned_away = thread, when_found, on_turned_away
        self._cancelled = False

    def claim(self, *, trials: int) -> Slot | None:
        """Take the right to one of so many trials, or see that there is none for now."""
        session, token = self._session, str(uuid.uuid4())
        return session.slots.claim(session.study.id, session.driver_id, token=token, trials=trials)

    def claim_audit(self, rejection_id: int) -> Slot | None:
        """Take the right to audit a rejection, or see that another driver has."""
        session, token = self._session, str(uuid.uuid4())
        return session.slots.claim_audit(
            session.study.id, session.driver_id, token=token, rejection_id=rejection_id
        )

    def propose(self, slot: Slot) -> Future[Proposal]:
        """Ask Optuna, and look for a configuration.

        The future raises WorkloadError when the workload's `suggest` fails, and Cancelled.
        """
        self._cancelled = False
        found = self._thread.submit(self._propose, slot)
        found.add_done_callback(lambda _: self._when_found())
        return found

    def cancel(self) -> None:
        """End the search for a configuration soon."""
        self._cancelled = True
        self._session.predictor.cancel()

    def begin(self, slot: Slot, proposal: Proposal) -> Flight:
        """Add a trial's row, and what was turned away before it."""
        session, rehearsal = self._session, proposal.rehearsal
        assert proposal.params is not None
        assert proposal.prediction is not None
        trial_id = session.writer.add_trial(
            session.study.id,
            proposal.number,
            proposal.params,
            driver_id=session.driver_id,
            slot_id=slot.id,
            seed=derived_seed(session.seed_base, proposal.number),
            repeats=slot.repeats,
            rejection_id=slot.rejection_id,
            draws=None if rehearsal is None else rehearsal.draws,
            rehearsal_seconds=None if rehearsal is None else rehearsal.seconds,
            rejections=() if rehearsal is None else _stored(rehearsal),
        )
        return Flight(proposal.number, trial_id, proposal.params, slot.audit, proposal.prediction)

    def give_back(self, slot: Slot, proposal: Proposal) -> None:
        """Let a slot go of which no trial came; Optuna's counts as failed."""
        self._session.optuna.put_back(proposal.number, again=proposal.params is not None)
        self._session.slots.release(slot.id, self._session.driver_id)

    def _propose(self, slot: Slot) -> Proposal:
        trial: optuna.Trial | None = None
        try:
            trial = self._ask(slot)
            if slot.repeats is None and slot.rejection_id is None:
                return self._rehearsed(trial)
            params = self._suggest(trial)
            return Proposal(trial.number, params, self._predict(params), None)
        except Exception as error:
            if why_transient(error) is None:  # else the database is away, and this driver ends
                if trial is not None:
                    self._session.optuna.put_back(trial.number, again=isinstance(error, Cancelled))
                self._session.slots.release(slot.id, self._session.driver_id)
            raise

    def _ask(self, slot: Slot) -> optuna.Trial:
        optuna_study = self._session.optuna
        if slot.repeats is not None:
            return optuna_study.ask_again(slot.repeats)
        if slot.rejection_id is None:
            return optuna_study.ask()
        rejection = self._session.rejections.one(slot.rejection_id)
        answers = rejection.answers or rejection.params
        draw = rehearse(
            self._plain, lambda name, asked: restored(asked, answers[name]), number=rejection.number
        )
        return optuna_study.ask_for(
            draw.answers, draw.distributions, {AUDIT: rejection.id, REPEATS: rejection.number}
        )

    def _rehearsed(self, trial: optuna.Trial) -> Proposal:
        predictions: dict[str, Prediction] = {}

        def forecast(params: Any) -> Forecast:
            prediction = predictions[repr(params)] = self._predict(params)
            return self._forecast(prediction)

        rehearsal = self._session.optuna.rehearse(
            trial,
            self._plain,
            forecast,
            on_turned_away=lambda count: self._on_turned_away(trial.number, count),
        )
        if rehearsal.draw is None:
            return Proposal(trial.number, None, None, rehearsal)
        params = self._suggest(trial)
        known = predictions.get(repr(params))  # another, should suggest() be moody
        return Proposal(trial.number, params, known or self._predict(params), rehearsal)

    def _suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return self._session.outages(lambda: self._plain(trial))

    def _plain(self, trial: Any) -> dict[str, Any]:
        """Return what the workload suggests; it must travel as JSON.

        Raises:
            WorkloadError: It does not, or `suggest` fails.
        """
        try:
            params: dict[str, Any] = self._session.plan.loaded.workload.suggest(PlainChoices(trial))  # type: ignore[arg-type]
            require_plain(params)
            return params
        except Exception as error:
            if why_transient(error) is not None:
                raise
            raise WorkloadError(f"suggest() fails: {type(error).__name__}: {error}") from error

    def _predict(self, params: dict[str, Any]) -> Prediction:
        if self._cancelled:
            raise Cancelled
        estimate = self._session.predictor.estimate(params)
        if self._cancelled:  # the trace was ended
            raise Cancelled
        return self._calibrations.predict(estimate)

    def _forecast(self, prediction: Prediction) -> Forecast:
        device, fits = prediction.device, prediction.verdict is not Verdict.PRUNE
        return Forecast(
            memory_bytes=None if device is None else device.expected,
            fits=fits,
            fits_probability=prediction.fits_probability,
            reason="" if fits else why_pruned(prediction, self._session.study.budget_bytes),
        )


def _stored(rehearsal: Rehearsal) -> list[NewRejection]:
    return [
        NewRejection(
            params=one.draw.params,
            answers=None if one.draw.params == one.draw.answers else one.draw.answers,
            predicted_bytes=one.forecast.memory_bytes,
            reason=one.forecast.reason,
        )
        for one in rehearsal.rejections
    ]
