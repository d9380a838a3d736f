"""What a launched trial says to the calibration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.search.stand_ins import BUDGET, CONTEXT, completed, fits, run_loop, session_on
from tuner.memory.calibration import CONVOLUTIONS, Calibration, Says
from tuner.memory.prediction import Estimate, predict
from tuner.memory.targets import resolve_target
from tuner.records import Failure, Outcome, Peaks, Prediction, TrialResult
from tuner.search.learned import measured_from, measured_in
from tuner.search.loop import Goal
from tuner.units import GIB, MIB


def predicted(reserved: int, required: int, **more: Any) -> Prediction:
    found = Estimate(reserved, reserved, required, mix=CONVOLUTIONS, **more)
    return predict(
        found,
        resolve_target("rtx-3090"),
        Calibration.prior("cuda", convolutions=True),
        context_bytes=CONTEXT,
        budget_bytes=BUDGET,
    )


def says(prediction: Prediction, result: TrialResult, cap: int = 8 * GIB) -> tuple[Says, int, int] | None:
    measured = measured_from(prediction, result, context_bytes=CONTEXT, cap_bytes=cap)
    return None if measured is None else (measured.says, measured.allocator_bytes, measured.device_bytes)


def test_a_trial_far_below_its_cap_says_its_device_bytes() -> None:
    result = TrialResult(Outcome.COMPLETED, peaks=Peaks(5 * GIB))
    assert says(predicted(4 * GIB, 3 * GIB), result) == (Says.DEVICE, 4 * GIB, 5 * GIB)


def test_a_trial_near_its_cap_says_only_what_was_enough() -> None:
    result = TrialResult(Outcome.COMPLETED, peaks=Peaks(7 * GIB))
    assert says(predicted(8 * GIB, 6 * GIB), result) == (Says.REQUIRED_AT_MOST, 6 * GIB, 7 * GIB)


def test_a_trial_that_ran_out_needs_more_than_it_held_and_asked_for() -> None:
    failure = Failure("out of memory", requested_bytes=GIB, allocated_bytes=7 * GIB)
    result = TrialResult(Outcome.OUT_OF_MEMORY, peaks=Peaks(8 * GIB), failure=failure)
    expected = (Says.REQUIRED_MORE, 6 * GIB, CONTEXT + 8 * GIB)
    assert says(predicted(8 * GIB, 6 * GIB), result) == expected


@pytest.mark.parametrize(
    ("peak", "requested", "bound"),
    [(3 * GIB, GIB // 2, GIB * 7 // 2), (3 * GIB, 2 * GIB, 4 * GIB), (3 * GIB, None, 3 * GIB)],
)
def test_without_the_allocators_figure_the_bound_is_below_the_cap(
    peak: int, requested: int | None, bound: int
) -> None:
    failure = Failure("out of memory", requested_bytes=requested)
    result = TrialResult(Outcome.OUT_OF_MEMORY, peaks=Peaks(peak), failure=failure)
    found = says(predicted(4 * GIB, 4 * GIB), result, cap=4 * GIB)
    assert found == (Says.REQUIRED_MORE, 4 * GIB, bound)


@pytest.mark.parametrize(
    ("growth", "result"),
    [
        (1, TrialResult(Outcome.COMPLETED, peaks=Peaks(GIB))),
        (0, TrialResult(Outcome.COMPLETED, peaks=Peaks(GIB), warnings=("a larger batch",))),
        (0, TrialResult(Outcome.COMPLETED)),
        (0, TrialResult(Outcome.PRUNED_METRIC, peaks=Peaks(GIB))),
        (0, TrialResult(Outcome.CRASHED, peaks=Peaks(GIB))),
    ],
)
def test_what_cannot_be_compared_says_nothing(growth: int, result: TrialResult) -> None:
    assert says(predicted(GIB, GIB, growth_bytes=growth), result) is None


def test_what_cannot_be_traced_says_nothing() -> None:
    result = TrialResult(Outcome.COMPLETED, peaks=Peaks(GIB))
    assert says(Prediction(None, None, None, None, None, None), result) is None


def test_a_resumed_study_learns_what_the_running_one_had(sqlite_url: str, tmp_path: Path) -> None:
    """Every third width runs out of memory. Baseline: what was seen while the study ran."""

    def some_run_out(params: dict[str, Any]) -> TrialResult:
        if params["width"] % 3:
            return completed(params)
        failure = Failure("out of memory", requested_bytes=64 * MIB)
        peaks = Peaks(CONTEXT + fits(params), "VmHWM")
        return TrialResult(Outcome.OUT_OF_MEMORY, peaks=peaks, failure=failure)

    with session_on(sqlite_url, tmp_path) as session:
        _, watcher = run_loop(session, Goal(trials=12), some_run_out)
        found = measured_in(session.reader, session.study, resolve_target("cpu"))
    seen = [
        measured_from(trial.prediction, trial.result, context_bytes=CONTEXT, cap_bytes=BUDGET)
        for trial in watcher.trials
    ]
    assert {trial.says for trial in found} == {Says.DEVICE, Says.REQUIRED_MORE}
    assert found == [trial for trial in seen if trial is not None]


def test_running_out_of_memory_makes_the_next_prediction_more_careful(
    sqlite_url: str, tmp_path: Path
) -> None:
    def out_of_memory(params: dict[str, Any]) -> TrialResult:
        return TrialResult(Outcome.OUT_OF_MEMORY, failure=Failure("out of memory: a library gave up"))

    with session_on(sqlite_url, tmp_path, allocated=lambda params: 580 * MIB) as session:
        _, watcher = run_loop(session, Goal(trials=6), out_of_memory)
    chances = [trial.prediction.fits_probability or 0.0 for trial in watcher.trials]
    assert chances[0] > 0.9
    assert chances[:6] == sorted(chances[:6], reverse=True)
    assert chances[5] < 0.5
