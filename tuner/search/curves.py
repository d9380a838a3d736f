"""The learning curves of a study, and the limits that they set to the trials that run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from tuner.execution.limits import Limits
from tuner.execution.run_folder import RunFolder
from tuner.records import Outcome, Prediction, TrialResult
from tuner.search.flight import Flight
from tuner.search.pruning import NO_PRUNER, Curve, best_so_far, limits_for
from tuner.search.session import Session
from tuner.store.rows import CurveRecord

LOOK_SECONDS = 10.0  # how often the trials of other drivers are looked for
_ENDED = frozenset({Outcome.COMPLETED, Outcome.PRUNED_METRIC})


class Curves:
    """Keeps the curves of trials that have ended, and writes limits for those that run.

    Those of earlier sessions and other drivers come from the database, this driver's own are added
    as they end. With one trial at a time and one driver, limits depend on nothing but the trials
    before it, so that a seeded study repeats.

    An audit has no limits: it is launched to see whether it fits, and a trial that was stopped early
    does not tell.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._pruner = session, session.plan.pruner
        self._by_memory = not session.study.single
        self._curves: dict[int, Curve] = {}
        self._written: dict[int, Limits] = {}  # of the trials that run, by id
        self._looked = 0.0
        self._is_stale = False  # whether a trial has ended since limits were written
        if self._is_active:
            self._look()

    @property
    def _is_active(self) -> bool:
        return self._pruner != NO_PRUNER

    def begin(self, flight: Flight, folder: RunFolder) -> None:
        """Write the limits of a trial that is about to start in a folder.

        Raises:
            OSError: The disk is full.
        """
        if self._is_active and not flight.audit:
            self._written[flight.trial_id] = self._limits(flight)
            folder.write_limits(self._written[flight.trial_id])

    def end(self, flight: Flight, result: TrialResult) -> None:
        """Add the curve of a trial that this driver has settled."""
        self._written.pop(flight.trial_id, None)
        if not self._is_active or result.outcome not in _ENDED:
            return
        metric = self._session.study.metric
        values = tuple(epoch.metrics[metric] for epoch in result.epochs if metric in epoch.metrics)
        record = CurveRecord(
            trial_id=flight.trial_id,
            outcome=result.outcome,
            predicted_bytes=_expected_bytes(flight.prediction),
            peak_bytes=result.peaks.device_bytes,
            values=values,
        )
        self._add(record)

    def renew(self, flights: Iterable[Flight]) -> None:
        """Write again the limits of running trials, where other trials have ended since.

        Trials of other drivers are looked for every `LOOK_SECONDS`.
        """
        if not self._written:
            return
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._look()
        if not self._is_stale:
            return
        self._is_stale = False
        for flight in flights:
            written = self._written.get(flight.trial_id)
            if written is None or flight.folder is None:
                continue
            limits = self._limits(flight)
            if limits != written:
                self._written[flight.trial_id] = limits
                with contextlib.suppress(OSError):  # the disk is full: the earlier limits must do
                    flight.folder.write_limits(limits)

    def _limits(self, flight: Flight) -> Limits:
        return limits_for(
            self._pruner,
            _expected_bytes(flight.prediction),
            list(self._curves.values()),
            maximize=self._session.study.maximize,
            by_memory=self._by_memory,
        )

    def _look(self) -> None:
        """Add the trials that the database knows and this driver does not."""
        study = self._session.study
        for record in self._session.reader.curves(study.id, study.metric, self._curves.keys()):
            self._add(record)
        self._looked = time.monotonic()

    def _add(self, record: CurveRecord) -> None:
        # Predicted where it is: for the trial that is compared, nothing else is known yet.
        needs_bytes = record.peak_bytes if record.predicted_bytes is None else record.predicted_bytes
        best = best_so_far(record.values, maximize=self._session.study.maximize)
        finished = record.outcome == Outcome.COMPLETED
        self._curves[record.trial_id] = Curve(needs_bytes, best, finished)
        self._is_stale = True


def _expected_bytes(prediction: Prediction | None) -> int | None:
    device = None if prediction is None else prediction.device
    return None if device is None else device.expected
