"""Limits in a run folder: a real child heeds them at its epoch, and keeps what it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.execution.launching import finish, request_for
from tuner.execution.launcher import LocalLauncher
from tuner.execution.limits import Limit, Limits
from tuner.execution.run_folder import RunFolder
from tuner.records import Outcome, TrialResult

CURVES = str(ROOT / "tests" / "workloads" / "curves.py")


def run(folder: Path, limits: dict[int, float], **params: Any) -> TrialResult:
    """Run a trial of skill 0.8 (0.4, 0.6, 0.7, 0.75) below limits."""
    run_folder = RunFolder.create(folder / "trial")
    told = {epoch: Limit(value, f"the median {value} of 3 trials") for epoch, value in limits.items()}
    run_folder.write_limits(Limits(maximize=True, by_epoch=told))
    with LocalLauncher(folder, CURVES) as launcher:
        return finish(launcher.start(run_folder, request_for(CURVES, {"width": 1, "skill": 0.8, **params})))


def test_a_child_ends_at_the_epoch_that_decides_and_keeps_its_peak(tmp_path: Path) -> None:
    result = run(tmp_path, {1: 0.4, 2: 0.61, 3: 0.9})
    assert result.outcome is Outcome.PRUNED_METRIC
    assert result.failure is not None
    assert result.failure.reason == "epoch 2: 0.6, below the median 0.61 of 3 trials"
    assert [epoch.epoch for epoch in result.epochs] == [1, 2]
    assert result.value == pytest.approx(0.6)
    peak_bytes, baseline_bytes = result.peaks.device_bytes, result.peaks.baseline_bytes
    assert peak_bytes is not None
    assert baseline_bytes is not None
    assert peak_bytes > baseline_bytes
    assert result.checkpoint == "best.pt"


def test_a_trial_that_is_done_is_not_stopped_any_more(tmp_path: Path) -> None:
    result = run(tmp_path, {1: 0.4, 4: 0.9})
    assert result.outcome is Outcome.COMPLETED
    assert len(result.epochs) == 4


def test_neither_is_one_whose_patience_is_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its epochs are all as good as the first: the second is its last."""
    monkeypatch.setenv("CURVES_PATIENCE", "1")
    result = run(tmp_path, {2: 0.9})
    assert result.outcome is Outcome.COMPLETED
    assert len(result.epochs) == 2


def test_a_trial_without_a_number_is_below_any_limit(tmp_path: Path) -> None:
    result = run(tmp_path, {2: -9.0}, silent=3)
    assert result.outcome is Outcome.PRUNED_METRIC
    assert result.failure is not None
    assert result.failure.reason == "epoch 2: no number yet, below the median -9.0 of 3 trials"
    assert result.value is None


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 1}', '{"version": 2, "maximize": true, "by_epoch": {}}', "[]"]
)
def test_limits_that_cannot_be_read_stop_nothing(tmp_path: Path, text: str) -> None:
    folder = RunFolder.create(tmp_path / "trial")
    assert folder.read_limits() is None
    (folder.path / "limits.json").write_text(text)
    assert folder.read_limits() is None


def test_the_latest_limits_count(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "trial")
    for value in (0.1, float("inf")):
        folder.write_limits(Limits(maximize=False, by_epoch={7: Limit(value, "so")}))
        assert folder.read_limits() == Limits(maximize=False, by_epoch={7: Limit(value, "so")})
