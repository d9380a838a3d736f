"""What a killed driver leaves behind is put in order; tests/e2e/test_kill_matrix.py kills at every step."""

from __future__ import annotations

from pathlib import Path

from tests.search.stand_ins import completed, run_loop, session_on
from tuner.execution.run_folder import Request, RunFolder
from tuner.search.events import Goal


def test_a_report_that_was_written_is_recorded_not_repeated(sqlite_url: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "left")
    with session_on(sqlite_url, tmp_path) as session:
        trial = session.optuna.ask()
        params = session.plan.loaded.workload.suggest(trial)
        trial_id = session.writer.add_trial(
            session.study.id, trial.number, params, driver_id=session.driver_id, seed=11
        )
        folder.write_request(Request("widths.py:Widths", params, "cpu", 1, None, 11, 1, (3, 2)))
        session.writer.record_launch(trial_id, run_folder=str(folder.path), reservation_bytes=1)
    folder.write_report(completed(params).to_json())
    with session_on(sqlite_url, tmp_path) as session:
        recovered = session.reader.trial(session.study.id, 0)
    assert (recovered.outcome, recovered.value) == ("completed", completed(params).value)


def test_a_report_in_a_folder_of_the_same_name_on_another_host_is_not_taken(
    sqlite_url: str, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "left")
    with session_on(sqlite_url, tmp_path) as session:
        trial_id = session.writer.add_trial(
            session.study.id, 0, {"width": 4}, driver_id=session.driver_id, seed=11
        )
        session.writer.record_launch(trial_id, run_folder=str(folder.path), reservation_bytes=1)
    folder.write_request(Request("widths.py:Widths", {"width": 9}, "cpu", 1, None, 12, 1, (3, 2)))
    folder.write_report(completed({"width": 9}).to_json())
    with session_on(sqlite_url, tmp_path) as session:
        assert session.reader.trial(session.study.id, 0).outcome == "interrupted"


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
