"""Early stopping in the loop: who is stopped, what is kept of it, and whose curves count."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from sqlalchemy import event

from tests.search.stand_ins import CONTEXT, Watcher, Widths, fits, flying, run_loop, session_on, wait_until
from tests.search.test_loop import optuna_trials
from tuner.execution.run_folder import Request, RunFolder, StopRequest
from tuner.records import EpochMetrics, Failure, Outcome, Peaks, TrialResult
from tuner.scheduling.ledger import Ledger
from tuner.search import curves, loop
from tuner.search.events import Goal, Stopper
from tuner.search.loop import StudyLoop
from tuner.search.optuna_study import REPEATS
from tuner.search.pruning import AshaPruner, MedianPruner, Pruner
from tuner.search.session import Session
from tuner.store.rows import TrialRecord
from tuner.units import MIB

EPOCHS = 4
Learn = Callable[[dict[str, Any]], list[float]]


class Listed(Widths):
    """Trial n gets the n-th width and skill, a repeat those of its trial; the last ones for ever."""

    def __init__(self, *trials: tuple[int, float]) -> None:
        self._trials = trials

    def suggest(self, trial: Any) -> dict[str, Any]:
        number = trial.user_attrs.get(REPEATS, trial.number)
        width, skill = self._trials[min(number, len(self._trials) - 1)]
        return {
            "width": trial.suggest_int("width", width, width),
            "skill": trial.suggest_float("skill", skill, skill),
            "rate": trial.suggest_float("rate", 0, 1),  # no two trials are the same
        }


def learns(params: dict[str, Any]) -> list[float]:
    """Return a curve that comes closer to the trial's skill with each epoch."""
    return [params["skill"] * (1 - 0.5**epoch) for epoch in range(1, EPOCHS + 1)]


class LearningTrial:
    """Trains epoch by epoch, as far as it is let, and heeds its limits as the worker does."""

    pid = None

    def __init__(self, folder: RunFolder, params: dict[str, Any], learn: Learn, let: int) -> None:
        self.params, self._folder, self._values = params, folder, learn(params)
        self.let, self._epochs = let, 0
        self._descriptor = os.eventfd(0)

    def fileno(self) -> int:
        return self._descriptor

    def poll(self) -> TrialResult | None:
        while self._epochs < min(self.let, EPOCHS):
            self._epochs += 1
            limits = self._folder.read_limits()
            best = max(self._values[: self._epochs])
            reason = limits.reason_to_stop(self._epochs, best) if limits and self._epochs < EPOCHS else None
            if reason is not None:
                return self._result(Outcome.PRUNED_METRIC, reason)
        return self._result(Outcome.COMPLETED) if self._epochs == EPOCHS else None

    def _result(self, outcome: Outcome, reason: str = "") -> TrialResult:
        values = self._values[: self._epochs]
        size_bytes = fits(self.params)
        return TrialResult(
            outcome,
            value=max(values),
            epochs=tuple(EpochMetrics(n, {"score": value}, float(n)) for n, value in enumerate(values, 1)),
            peaks=Peaks(CONTEXT + size_bytes, "VmHWM", size_bytes),
            failure=Failure(reason) if reason else None,
        )

    def stop(self, request: StopRequest, *, grace_seconds: float) -> None:
        self.let, self._epochs = EPOCHS, EPOCHS

    def kill(self) -> None:
        pass


class LearningLauncher:
    """Starts trials that may train for `let` epochs at first."""

    def __init__(self, learn: Learn = learns, let: int = EPOCHS) -> None:
        self._learn, self._let = learn, let
        self.trials: list[LearningTrial] = []

    def prepare(self) -> None:
        pass

    def start(self, folder: RunFolder, request: Request) -> LearningTrial:
        folder.write_request(request)
        self.trials.append(LearningTrial(folder, request.params, self._learn, self._let))
        return self.trials[-1]


def drive(session: Session, trials: int) -> Watcher:
    watcher = Watcher()
    ledger = Ledger(session.reservations, session.plan.places, pool_bytes=None)
    StudyLoop(
        session, LearningLauncher(), ledger, observer=watcher, goal=Goal(trials=trials), stopper=Stopper()
    ).run()
    return watcher


def outcomes(session: Session) -> list[str]:
    return [trial.outcome for trial in session.reader.trials(session.study.id)]


MEDIAN = MedianPruner(startup_trials=3)


def test_a_poor_trial_is_stopped_and_keeps_peak_value_and_epochs(storage: str, tmp_path: Path) -> None:
    workload = Listed((5, 0.6), (5, 0.7), (5, 0.8), (6, 0.3))
    with session_on(storage, tmp_path, workload=workload, pruner=MEDIAN) as session:
        watcher = drive(session, 4)
        stopped = session.reader.trials(session.study.id)[3]
        metrics = session.reader.metrics(stopped.id)
        front = session.reader.front(session.study.id)
        assert session.slots.claims(session.study.id).launched == 4  # it counts as a launch
    assert outcomes_of(watcher) == ["completed"] * 3 + ["pruned_metric"]
    assert stopped.reason == "epoch 1: 0.15, below the median 0.35 of 3 trials that need no more memory"
    assert stopped.peak_bytes == CONTEXT + fits({"width": 6})
    assert stopped.value == 0.15
    assert [metric.epoch for metric in metrics] == [1]
    assert [trial.number for trial in front] == [2]
    told = optuna_trials(storage)[3]
    assert told.state is TrialState.PRUNED
    assert told.constraints["memory"] <= 0


def outcomes_of(watcher: Watcher) -> list[str]:
    return [str(trial.result.outcome) for trial in watcher.trials]


@pytest.mark.parametrize("pruner", [MEDIAN, AshaPruner()], ids=lambda pruner: pruner.name)
def test_small_models_survive_with_two_objectives_and_not_with_one(
    sqlite_url: str, tmp_path: Path, pruner: Pruner
) -> None:
    """Each smaller model is worse: a front of four, of which one objective keeps the large one alone."""
    workload = Listed((14, 0.9), (14, 0.9), (14, 0.9), (10, 0.7), (6, 0.5), (3, 0.2), (14, 0.6))
    found = {}
    for single in (False, True):
        folder = tmp_path / str(single)
        with session_on(
            f"{sqlite_url}{single}", folder, workload=workload, pruner=pruner, single=single, seed=1
        ) as session:
            drive(session, 7)
            found[single] = outcomes(session)
    poor = "pruned_metric"
    assert found[False] == ["completed"] * 6 + [poor]  # the last is worse than others of its size
    assert found[True] == ["completed"] * 3 + [poor] * 4


def test_earlier_sessions_count(storage: str, tmp_path: Path) -> None:
    """Three trials, then a new driver: its first poor trial is stopped."""
    workload = Listed((5, 0.6), (5, 0.7), (5, 0.8), (6, 0.3))
    with session_on(storage, tmp_path, workload=workload, pruner=MEDIAN) as session:
        drive(session, 3)
    with session_on(storage, tmp_path, workload=workload, pruner=MEDIAN) as session:
        drive(session, 4)
        assert outcomes(session) == ["completed"] * 3 + ["pruned_metric"]


def test_a_study_that_is_interrupted_stops_the_same_trials(sqlite_url: str, tmp_path: Path) -> None:
    """Seeded, one trial at a time: in one go, and with a new driver for each trial."""
    found = []
    for name, sessions in (("whole", [12]), ("pieces", list(range(1, 13)))):
        for trials in sessions:
            with session_on(
                sqlite_url + name, tmp_path / name, workload=Curious(), pruner=AshaPruner(), seed=3
            ) as session:
                drive(session, trials)
                kept = [
                    (t.params, t.outcome, t.value, t.reason) for t in session.reader.trials(session.study.id)
                ]
        found.append(kept)
    assert found[0] == found[1]
    assert {"completed", "pruned_metric"} <= {outcome for _, outcome, _, _ in found[0]}


class Curious(Widths):
    """Widths and skills as the sampler draws them."""

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {"width": trial.suggest_int("width", 2, 20), "skill": trial.suggest_float("skill", 0, 1)}


def test_a_trial_that_runs_learns_of_those_that_end_meanwhile(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at once, launched when nothing was known; three finish, the poor one ends at its next epoch."""
    monkeypatch.setattr(loop, "_REST_SECONDS", 0.02)
    workload = Listed((5, 0.8), (5, 0.8), (5, 0.8), (6, 0.1))
    launcher = LearningLauncher(let=1)
    with session_on(
        sqlite_url, tmp_path, workload=workload, pruner=MEDIAN, jobs=4, pool_bytes=None
    ) as session:
        with flying(session, Goal(trials=4), launcher) as (run, watcher):
            wait_until(lambda: len(launcher.trials) == 4)
            good = [trial for trial in launcher.trials if trial.params["skill"] > 0.5]
            poor = next(trial for trial in launcher.trials if trial.params["skill"] < 0.5)
            time.sleep(0.1)
            assert watcher.trials == []
            for trial in good:
                trial.let = EPOCHS
            wait_until(lambda: len(watcher.trials) == 3)
            poor.let = 2
            run.result(20)
    result = watcher.trials[-1].result
    assert (result.outcome, len(result.epochs)) == (Outcome.PRUNED_METRIC, 2)


def test_trials_of_other_drivers_count(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One driver's trial runs while another finishes three."""
    monkeypatch.setattr(curves, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(loop, "_REST_SECONDS", 0.02)
    workload = Listed((6, 0.1), (5, 0.8))
    launcher = LearningLauncher(let=1)
    with session_on(sqlite_url, tmp_path, workload=workload, pruner=MEDIAN) as session:
        with flying(session, Goal(trials=4), launcher) as (run, watcher):
            wait_until(lambda: launcher.trials)
            with session_on(sqlite_url, tmp_path, workload=workload, pruner=MEDIAN) as other:
                with flying(other, Goal(trials=4), LearningLauncher()) as (_, others):
                    wait_until(lambda: len(others.trials) == 3)
            time.sleep(0.5)
            launcher.trials[0].let = 2
            wait_until(lambda: watcher.trials)
            run.result(20)
    assert watcher.trials[0].result.outcome is Outcome.PRUNED_METRIC


def test_a_study_with_stopped_trials_goes_on_to_be_sampled(sqlite_url: str, tmp_path: Path) -> None:
    """Case D24: pruned trials without values, two objectives, and a sampler past its random phase.

    What is stopped has a constraint, what is not launched its prediction, and the front holds
    complete trials alone.
    """
    workload = Curious()
    with session_on(sqlite_url, tmp_path, workload=workload, pruner=AshaPruner(2), seed=4) as session:
        drive(session, 40)
        trials = {trial.number: trial for trial in session.reader.trials(session.study.id)}
        front = session.reader.front(session.study.id)
        turned_away, _ = session.rejections.count(session.study.id)
    told = {trial.number: trial for trial in optuna_trials(sqlite_url)}
    counts = {outcome: [n for n, t in trials.items() if t.outcome == outcome] for outcome in KINDS}
    assert len(counts["completed"]) > 10  # of which the sampler learns
    assert len(counts["pruned_metric"]) > 5
    assert turned_away > 0
    for number in counts["pruned_metric"] + counts["pruned_memory"]:
        assert told[number].state is TrialState.PRUNED
        over = told[number].constraints["memory"] > 0
        assert over is (trials[number].outcome == "pruned_memory")
        assert trials[number].predicted_bytes
    completed = [trials[number] for number in counts["completed"]]
    assert [trial.number for trial in front] == _front(completed)


KINDS = ("completed", "pruned_metric", "pruned_memory")


def _front(trials: list[TrialRecord]) -> list[int]:
    """Return the numbers of the trials that no other is as good as in both and better in one."""

    def beaten(trial: TrialRecord) -> bool:
        value, peak = trial.value or 0.0, trial.peak_bytes or 0
        return any(
            (t.value or 0.0) >= value
            and (t.peak_bytes or 0) <= peak
            and (t.value, t.peak_bytes) != (value, peak)
            for t in trials
        )

    kept = [trial for trial in trials if not beaten(trial)]
    return [trial.number for trial in sorted(kept, key=lambda t: (t.peak_bytes or 0, t.number))]


def test_an_audit_is_never_stopped(sqlite_url: str, tmp_path: Path) -> None:
    """It is launched to see whether it fits."""
    workload = Listed((5, 0.8), (5, 0.8), (5, 0.8), (20, 0.1), (5, 0.8))
    with session_on(sqlite_url, tmp_path, workload=workload, pruner=MEDIAN) as session:
        ledger = Ledger(session.reservations, session.plan.places, pool_bytes=None)
        goal = Goal(trials=4, audit_share=0.005)
        StudyLoop(session, LearningLauncher(), ledger, observer=Watcher(), goal=goal, stopper=Stopper()).run()
        audit = [trial for trial in session.reader.trials(session.study.id) if trial.audit]
    assert [(trial.params["skill"], trial.outcome) for trial in audit] == [(0.1, "completed")]


def test_without_a_pruner_curves_are_not_even_read(sqlite_url: str, tmp_path: Path) -> None:
    statements: list[str] = []
    with session_on(sqlite_url, tmp_path) as session:
        event.listen(session.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        launcher, _ = run_loop(session, Goal(trials=3))
        folder = RunFolder(Path(session.reader.trials(session.study.id)[0].run_folder or ""))
    assert not [text for text in statements if "SELECT" in text and "tuner_metric" in text]
    assert folder.read_limits() is None
    assert launcher.launched


def test_the_database_gives_the_curves_that_are_not_known(storage: str, tmp_path: Path) -> None:
    workload = Listed((5, 0.8), (5, 0.8), (5, 0.8), (6, 0.1))
    with session_on(storage, tmp_path, workload=workload, pruner=MEDIAN) as session:
        drive(session, 4)
        found = session.reader.curves(session.study.id, "score")
        assert [len(curve.values) for curve in found] == [EPOCHS] * 3 + [1]
        assert [curve.outcome for curve in found] == ["completed"] * 3 + ["pruned_metric"]
        assert found[0].values == tuple(learns({"skill": 0.8}))
        assert (found[0].peak_bytes or 0) == CONTEXT + 5 * 36 * MIB
        known = [curve.trial_id for curve in found[:3]]
        assert session.reader.curves(session.study.id, "score", known) == found[3:]
        assert session.reader.curves(session.study.id, "another") == []
