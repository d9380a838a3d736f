"""What a killed driver leaves behind is put in order, between any two steps of the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from tests.search.stand_ins import completed, run_loop, session_on
from tests.search.test_loop import optuna_trials
from tuner.execution.run_folder import RunFolder
from tuner.records import TrialResult
from tuner.search.events import Goal
from tuner.search.loop import StudyLoop
from tuner.search.optuna_study import OptunaStudy
from tuner.store.writer import Writer


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, and no handler of ours catches it."""


STEPS = [
    (StudyLoop, "_suggest"),
    (StudyLoop, "_add"),
    (StudyLoop, "_predict"),
    (Writer, "record_prediction"),
    (Writer, "record_launch"),
    (Writer, "record_result"),
    (OptunaStudy, "tell"),
    (StudyLoop, "_note"),
]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_at_any_step_nothing_is_lost_and_nothing_stays_running(
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type[Any],
    step: str,
    moment: str,
) -> None:
    launches: list[dict[str, Any]] = []

    def counted(params: dict[str, Any]) -> TrialResult:
        launches.append(params)
        return completed(params)

    original, calls = getattr(owner, step), [0]

    def kill_at_third(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3 and moment == "before":
            raise Killed
        value = original(self, *args, **kwargs)
        if calls[0] == 3:
            raise Killed
        return value

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, kill_at_third)
        with pytest.raises(Killed), session_on(sqlite_url, tmp_path, seed=2) as session:
            run_loop(session, Goal(trials=6), counted)
    with session_on(sqlite_url, tmp_path, seed=2) as session:
        run_loop(session, Goal(trials=6), counted)
        trials = session.reader.trials(session.study.id)
    told = optuna_trials(sqlite_url)
    finished = [trial for trial in trials if trial.outcome == "completed"]
    assert len(finished) == 6
    assert all(trial.outcome != "running" for trial in trials)
    assert all(trial.state not in (TrialState.RUNNING, TrialState.WAITING) for trial in told)
    # A trial whose result was recorded is not run again; at most the one in flight is.
    assert len(launches) - len(finished) <= 1
    for trial in finished:
        assert told[trial.number].state is TrialState.COMPLETE
        assert told[trial.number].params == trial.params


def test_a_report_that_was_written_is_recorded_not_repeated(sqlite_url: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "left")
    with session_on(sqlite_url, tmp_path) as session:
        trial = session.optuna.ask()
        params = session.plan.loaded.workload.suggest(trial)
        trial_id = session.writer.add_trial(
            session.study.id, trial.number, params, driver_id=session.driver_id
        )
        session.writer.record_launch(trial_id, run_folder=str(folder.path), reservation_bytes=1)
    folder.write_report(completed(params).to_json())
    with session_on(sqlite_url, tmp_path) as session:
        recovered = session.reader.trial(session.study.id, 0)
    assert (recovered.outcome, recovered.value) == ("completed", completed(params).value)


def test_interrupted_params_are_run_again_first(sqlite_url: str, tmp_path: Path) -> None:
    with session_on(sqlite_url, tmp_path) as session:
        trial = session.optuna.ask()
        params = session.plan.loaded.workload.suggest(trial)
        session.writer.add_trial(session.study.id, trial.number, params, driver_id=session.driver_id)
    with session_on(sqlite_url, tmp_path, allocated=lambda p: 1 << 20) as session:
        launcher, _ = run_loop(session, Goal(trials=2))
        trials = session.reader.trials(session.study.id)
    assert launcher.launched[0] == params
    assert [(t.outcome, t.repeats) for t in trials[:2]] == [("interrupted", None), ("completed", 0)]
