"""What a killed driver leaves behind is put in order; tests/e2e/test_kill_matrix.py kills at every step."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.search.stand_ins import completed, run_loop, session_on
from tuner.execution.run_folder import Request, RunFolder, trial_token
from tuner.processes import this_process
from tuner.search.events import Goal


def request_of(params: dict[str, Any], token: str) -> Request:
    return Request("widths.py:Widths", params, "cpu", 1, None, 11, 1, (3, 2), token=token)


def test_a_report_that_was_written_is_recorded_not_repeated(sqlite_url: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "left")
    with session_on(sqlite_url, tmp_path) as session:
        trial = session.optuna.ask()
        params = session.plan.loaded.workload.suggest(trial)
        trial_id = session.writer.add_trial(
            session.study.id, trial.number, params, driver_id=session.driver_id, seed=11
        )
        token = trial_token(trial_id, session.driver_id, this_process())
        folder.write_request(request_of(params, token))
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
        elsewhere = dataclasses.replace(this_process(), host="another-host")
        # Another database's trial there: same ids, same params, same seed.
        folder.write_request(request_of({"width": 4}, trial_token(trial_id, session.driver_id, elsewhere)))
    folder.write_report(completed({"width": 4}).to_json())
    with session_on(sqlite_url, tmp_path) as session:
        assert session.reader.trial(session.study.id, 0).outcome == "interrupted"


@pytest.mark.parametrize("place", ["truncated", "below a file"])
def test_a_run_folder_that_cannot_be_read_costs_one_trial_only(
    place: str, sqlite_url: str, tmp_path: Path
) -> None:
    folder = RunFolder.create(tmp_path / "runs" / "left")
    with session_on(sqlite_url, tmp_path) as session:
        trial_id = session.writer.add_trial(session.study.id, 0, {"width": 4}, driver_id=session.driver_id)
        folder.write_request(
            request_of({"width": 4}, trial_token(trial_id, session.driver_id, this_process()))
        )
        session.writer.record_launch(trial_id, run_folder=str(folder.path), reservation_bytes=1)
    (folder.path / "report.json").write_text('{"version": 1, "outcome": "comp')
    if place == "below a file":
        shutil.rmtree(folder.path)
        folder.path.parent.rmdir()
        folder.path.parent.write_text("a file where the run folders were")
    with session_on(sqlite_url, tmp_path) as session:
        trial = session.reader.trial(session.study.id, 0)
    assert trial.outcome == "interrupted"
    assert "its run folder cannot be read: " in (trial.reason or "")


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
