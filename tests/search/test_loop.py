"""The loop: what is launched, what is pruned, what Optuna is told, and when it ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from tests.search.stand_ins import BUDGET, CONTEXT, Widths, completed, failing, fits, run_loop, session_on
from tuner.errors import Interrupted, NothingFeasible, TooManyFailures, WorkloadError
from tuner.records import Failure, Outcome, Peaks, TrialResult
from tuner.search.events import Goal, Stopper
from tuner.search.optuna_storage import optuna_storage
from tuner.store.engine import parse_url
from tuner.units import MIB


def optuna_trials(url: str) -> list[optuna.trial.FrozenTrial]:
    """Return the study's trials as plain Optuna sees them."""
    with optuna_storage(parse_url(url)) as storage:
        return optuna.load_study(study_name="widths", storage=storage).trials


def test_what_surely_does_not_fit_is_never_launched(storage: str, tmp_path: Path) -> None:
    with session_on(storage, tmp_path, seed=1) as session:
        launcher, watcher = run_loop(session, Goal(trials=15))
        counts = session.reader.outcomes(session.study.id)
        trials = session.reader.trials(session.study.id)
        rejected = session.rejections.all(session.study.id)
    assert len(launcher.launched) == 15
    assert max(params["width"] for params in launcher.launched) <= 17  # 1 GiB - context is 624 MiB
    assert counts == {"completed": 15}
    assert len(rejected) == sum(watcher.away.values()) > 0
    assert {one.reason.partition(" ")[0] for one in rejected} == {"predicted"}
    assert sum(trial.draws or 0 for trial in trials) == 15 + len(rejected)
    for trial in [*trials, *rejected]:
        assert trial.predicted_bytes == pytest.approx(CONTEXT + fits(trial.params), rel=0.03)


def test_optuna_is_told_as_the_table_says(storage: str, tmp_path: Path) -> None:
    """Baseline: what plain Optuna reads back from the same database."""
    with session_on(storage, tmp_path, seed=1) as session:
        run_loop(session, Goal(trials=12))
        ours = {trial.number: trial for trial in session.reader.trials(session.study.id)}
        front = {trial.number for trial in session.reader.front(session.study.id)}
    with optuna_storage(parse_url(storage)) as opened:
        best = optuna.load_study(study_name="widths", storage=opened).best_trials
    assert {trial.number for trial in best} == front
    for told in optuna_trials(storage):
        trial = ours[told.number]
        assert told.params == trial.params
        violation = told.constraints["memory"]
        if trial.outcome == "completed":
            assert told.state is TrialState.COMPLETE
            # A seeded study is told context + allocator's peak, which repeats to the byte.
            assert told.values == [trial.value, float(CONTEXT + fits(trial.params))]
            assert violation <= 0
        else:
            assert (told.state, trial.outcome) == (TrialState.PRUNED, "pruned_memory")
            assert violation > 0


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.OUT_OF_MEMORY, TrialState.PRUNED),
        (Outcome.PRUNED_METRIC, TrialState.PRUNED),
        (Outcome.TIMED_OUT, TrialState.FAIL),
        (Outcome.CRASHED, TrialState.FAIL),
        (Outcome.ERROR, TrialState.FAIL),
    ],
)
def test_launched_trials_without_a_value(
    sqlite_url: str, tmp_path: Path, outcome: Outcome, state: TrialState
) -> None:
    with session_on(sqlite_url, tmp_path) as session:
        run_loop(session, Goal(trials=2, max_failures=9), failing(outcome))
    told = [t for t in optuna_trials(sqlite_url) if t.state is state]
    assert len(told) >= 2
    if outcome is Outcome.OUT_OF_MEMORY:
        assert all(t.constraints["memory"] > 0 for t in told)
    if state is TrialState.FAIL:
        assert all(not t.constraints for t in told)


def test_the_failed_request_counts_into_the_constraint(sqlite_url: str, tmp_path: Path) -> None:
    def out_of_memory(params: dict[str, Any]) -> TrialResult:
        failure = Failure("out of memory", requested_bytes=BUDGET)
        return TrialResult(Outcome.OUT_OF_MEMORY, peaks=Peaks(BUDGET // 2), failure=failure)

    with session_on(sqlite_url, tmp_path, allocated=lambda params: MIB) as session:
        run_loop(session, Goal(trials=1), out_of_memory)
    assert optuna_trials(sqlite_url)[0].constraints["memory"] == pytest.approx(0.5)


def test_a_space_in_which_nothing_fits_ends_with_the_smallest_prediction(
    sqlite_url: str, tmp_path: Path
) -> None:
    with session_on(sqlite_url, tmp_path, allocated=lambda params: BUDGET + fits(params)) as session:
        with pytest.raises(NothingFeasible, match=r"smallest prediction is 1\.4") as caught:
            run_loop(session, Goal(trials=1))
        assert session.reader.outcomes(session.study.id) == {"pruned_memory": 1}
        assert session.rejections.count(session.study.id)[0] == 200
    assert "none of 200 configurations fits the budget of 1.00 GiB" in caught.value.message


def test_a_space_that_is_used_up_says_so_and_is_audited(sqlite_url: str, tmp_path: Path) -> None:
    """The first two draws fit, nothing afterwards."""
    draws = iter([MIB, MIB])
    with session_on(sqlite_url, tmp_path, allocated=lambda params: next(draws, 2 * BUDGET)) as session:
        launcher, watcher = run_loop(session, Goal(trials=9, audit_share=0.01))
    assert len(launcher.launched) == 2 + 6  # 1 % of the three times 200 that were turned away
    assert sum(trial.audit for trial in watcher.trials) == 6
    assert "the search ends with 2 of 9 trials" in watcher.notes[0]


def test_params_that_json_cannot_hold_stop_the_study_at_once(sqlite_url: str, tmp_path: Path) -> None:
    class Odd(Widths):
        def suggest(self, trial: Any) -> dict[str, Any]:
            return {"width": trial.suggest_int("width", 2, 20), "kind": object}

    with session_on(sqlite_url, tmp_path, workload=Odd()) as session:
        with pytest.raises(WorkloadError, match="not JSON serializable"):
            run_loop(session, Goal(trials=3))
        assert session.reader.trials(session.study.id) == []
    assert [trial.state for trial in optuna_trials(sqlite_url)] == [TrialState.FAIL]


def test_untraceable_code_is_tried_never_pruned(sqlite_url: str, tmp_path: Path) -> None:
    with session_on(sqlite_url, tmp_path, allocated=lambda params: None) as session:
        launcher, watcher = run_loop(session, Goal(trials=5))
    assert len(launcher.launched) == 5
    assert {trial.prediction.verdict for trial in watcher.trials} == {"try"}


def test_the_first_three_launches_failing_stops_the_study(sqlite_url: str, tmp_path: Path) -> None:
    with session_on(sqlite_url, tmp_path) as session:
        with pytest.raises(TooManyFailures, match="3 of 3 launched trials failed"):
            run_loop(session, Goal(trials=30), failing(Outcome.ERROR))


def test_max_failures_is_the_number_tolerated(sqlite_url: str, tmp_path: Path) -> None:
    with session_on(sqlite_url, tmp_path) as session:
        with pytest.raises(TooManyFailures, match="2 of 2"):
            run_loop(session, Goal(trials=30, max_failures=1), failing(Outcome.CRASHED))


def test_out_of_memory_is_data_and_no_failure(sqlite_url: str, tmp_path: Path) -> None:
    """Each gets the whole budget once, see test_parallel.py; what may need all of it had it at first."""
    with session_on(sqlite_url, tmp_path) as session:
        launcher, watcher = run_loop(session, Goal(trials=6), failing(Outcome.OUT_OF_MEMORY))
        assert session.reader.outcomes(session.study.id)["out_of_memory"] == 6
    assert len(launcher.launched) == 6 + len(watcher.repeated)
    assert len(watcher.repeated) >= 1


def test_calibration_learns_unless_the_study_is_seeded(sqlite_url: str, tmp_path: Path) -> None:
    """Every trial takes 60 MiB more than the prior says: the centre moves there, seeded it stays."""

    def heavier(params: dict[str, Any]) -> TrialResult:
        peaks = Peaks(CONTEXT + MIB + 72 * MIB, "VmHWM", MIB)
        return TrialResult(Outcome.COMPLETED, value=0.5, peaks=peaks)

    expected = {}
    for seed in (None, 3):
        with session_on(sqlite_url + str(seed), tmp_path, seed=seed, allocated=lambda p: MIB) as session:
            _, watcher = run_loop(session, Goal(trials=20), heavier)
        devices = [trial.prediction.device for trial in watcher.trials]
        expected[seed] = [device.expected for device in devices if device is not None]
    assert len(set(expected[3])) == 1
    assert expected[None][0] == expected[3][0]
    assert expected[None][-1] - expected[None][0] == pytest.approx(60 * MIB, rel=0.25)


def test_stopping_between_trials_is_an_interruption(sqlite_url: str, tmp_path: Path) -> None:
    stopper = Stopper()

    def stop_after(params: dict[str, Any]) -> TrialResult:
        stopper.stop(1, "interrupted")
        return completed(params)

    with session_on(sqlite_url, tmp_path) as session:
        with pytest.raises(Interrupted, match="1 of 9 trials are done"):
            run_loop(session, Goal(trials=9), stop_after, stopper)
        assert session.reader.outcomes(session.study.id).get("running", 0) == 0


def test_tuner_stop_reaches_the_loop(sqlite_url: str, tmp_path: Path) -> None:
    with session_on(sqlite_url, tmp_path) as session:
        session.drivers.request_stop(session.study.id, "asked to stop")
        with pytest.raises(Interrupted, match="asked to stop"):
            run_loop(session, Goal(trials=9))


def test_a_suggest_that_raises_stops_the_study_and_leaves_nothing_running(
    sqlite_url: str, tmp_path: Path
) -> None:
    class Broken(Widths):
        def suggest(self, trial: Any) -> dict[str, Any]:
            trial.suggest_int("width", 2, 20)
            raise RuntimeError("no such thing")

    with session_on(sqlite_url, tmp_path, workload=Broken()) as session:
        with pytest.raises(WorkloadError, match="no such thing"):
            run_loop(session, Goal(trials=3))
    assert [trial.state for trial in optuna_trials(sqlite_url)] == [TrialState.FAIL]


def test_infinite_values_are_kept_and_never_on_the_front(storage: str, tmp_path: Path) -> None:
    def infinite(params: dict[str, Any]) -> TrialResult:
        result = completed(params)
        value = math.inf if params["width"] % 2 else result.value
        return TrialResult(Outcome.COMPLETED, value=value, peaks=result.peaks)

    with session_on(storage, tmp_path, seed=5) as session:
        run_loop(session, Goal(trials=12), infinite)
        trials = session.reader.trials(session.study.id, ["completed"])
        front = session.reader.front(session.study.id)
    assert any(trial.value == math.inf for trial in trials)
    assert all(trial.value is not None and math.isfinite(trial.value) for trial in front)


def test_single_objective_tells_the_metric_alone(sqlite_url: str, tmp_path: Path) -> None:
    with session_on(sqlite_url, tmp_path, single=True) as session:
        run_loop(session, Goal(trials=4))
    complete = [t for t in optuna_trials(sqlite_url) if t.state is TrialState.COMPLETE]
    assert all(len(trial.values) == 1 and "memory" in trial.constraints for trial in complete)


def test_a_space_that_lost_a_parameter_ends_its_audit_and_holds_no_slot(
    sqlite_url: str, tmp_path: Path
) -> None:
    class Deeper(Widths):
        def suggest(self, trial: Any) -> dict[str, Any]:
            return {**super().suggest(trial), "depth": trial.suggest_int("depth", 1, 2)}

    with session_on(sqlite_url, tmp_path, seed=1) as session:
        run_loop(session, Goal(trials=10))
    with session_on(sqlite_url, tmp_path, seed=1, workload=Deeper()) as session:
        with pytest.raises(WorkloadError, match="depth"):
            run_loop(session, Goal(trials=10, audit_share=1.0))
        assert session.slots.asking(session.study.id) is False


def test_an_audit_launches_a_share_of_what_was_pruned_once(sqlite_url: str, tmp_path: Path) -> None:
    with session_on(sqlite_url, tmp_path, seed=1) as session:
        run_loop(session, Goal(trials=10))
        rejected = session.rejections.all(session.study.id)
        launcher, audits = run_loop(session, Goal(trials=10, audit_share=1.0))
        assert [trial.audit for trial in audits.trials] == [True] * len(rejected)
        again, _ = run_loop(session, Goal(trials=10, audit_share=1.0))
        audited = [t.rejection_id for t in session.reader.trials(session.study.id) if t.audit]
    assert launcher.launched == [one.params for one in rejected] != []
    assert audited == [one.id for one in rejected]
    assert again.launched == []
