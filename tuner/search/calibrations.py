"""What the study's own trials have taught the predictions so far."""

from __future__ import annotations

from tuner.memory.calibration import Calibration, Measured
from tuner.memory.prediction import Estimate, predict
from tuner.memory.targets import Target
from tuner.records import Prediction, TrialResult
from tuner.search.learned import measured_from, measured_in
from tuner.search.session import Session
from tuner.search.warm_start import warm_study


class Calibrations:
    """One calibration per mix of operators, each updated by the trials of its mix.

    A study that was started warm has what the other one measured, on a device of the same model.
    A seeded study keeps the prior, so that it repeats.
    """

    def __init__(self, session: Session, target: Target) -> None:
        self._study, self._target = session.study, target
        self._seeded = session.study.seed is not None
        self._measured: list[Measured] = []
        if not self._seeded:
            for study in filter(None, (warm_study(session), session.study)):
                if study.device_name == session.study.device_name:
                    self._measured += measured_in(session.reader, study, target)
        self._by_mix: dict[str, Calibration] = {}

    def predict(self, estimate: Estimate) -> Prediction:
        """Return the prediction for what was traced, under the study's budget."""
        return predict(
            estimate,
            self._target,
            self._of(estimate.mix),
            context_bytes=self._study.context_bytes,
            budget_bytes=self._study.budget_bytes,
        )

    def learn(self, prediction: Prediction, result: TrialResult, cap_bytes: int | None) -> None:
        """Take in what a launched trial says.

        Args:
            prediction: What was predicted for it.
            result: What became of it.
            cap_bytes: What it was allowed to take.
        """
        if self._seeded:
            return
        measured = measured_from(
            prediction,
            result,
            context_bytes=self._study.context_bytes or self._target.context_bytes,
            cap_bytes=cap_bytes,
        )
        if measured is not None:
            self._measured.append(measured)
            self._by_mix.pop(measured.mix, None)

    def _of(self, mix: str) -> Calibration:
        if mix not in self._by_mix:
            self._by_mix[mix] = Calibration.of_mix(self._target.kind, mix).updated(
                self._measured, context_spread_bytes=self._target.context_spread_bytes
            )
        return self._by_mix[mix]
