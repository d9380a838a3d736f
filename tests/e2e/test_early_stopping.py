"""Early stopping through the command line: real children, what the rows say, what is printed and left."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import ROOT, Tuner
from tests.e2e.test_study import query

CURVES = ROOT / "tests" / "workloads" / "curves.py"
ROWS = (
    "SELECT t.number, t.outcome, t.reason, t.peak_bytes, t.value, count(m.epoch) FROM tuner_trials t "
    "LEFT JOIN tuner_metric m ON m.trial_id = t.trial_id GROUP BY t.number ORDER BY t.number"
)
FLAGS = ("--seed", "1", "--threads", "1", "--pruner", "median", "--pruner-option", "startup_trials=2")


def test_poor_trials_end_at_their_first_epoch_and_again_so(tuner: Tuner, tmp_path: Path) -> None:
    """Two good trials, then poor ones of the same size; in one go, and resumed."""
    found = []
    for name, goals in (("whole", ["4"]), ("pieces", ["3", "4"])):
        for goal in goals:
            done = tuner("run", CURVES, "--study-name", name, "--trials", goal, *FLAGS)
            assert done.returncode == 0, done.stderr
        rows = query(tmp_path, ROWS.replace(" GROUP", f" WHERE t.study = '{name}' GROUP"))
        found.append([(*row[:3], row[4], row[5]) for row in rows])
        assert [row[1] for row in rows] == ["completed"] * 2 + ["pruned_metric"] * 2
        assert all(row[3] > 0 for row in rows)  # each keeps its peak
        assert [row[5] for row in rows] == [4, 4, 1, 1]
        assert "below the median" in rows[2][2]
        assert "of 2 trials that need no more memory" in rows[2][2]
        assert "pruned_metric" in done.stderr
        assert rows[3][2] in done.stderr  # the line of a stopped trial says why
    assert found[0] == found[1]
    front = json.loads(tuner("pareto", "whole", "-f", "json").stdout)
    assert {trial["number"] for trial in front} <= {0, 1}
    kept = {path.parent.name for path in tmp_path.glob("tuner-runs/whole/*/best.pt")}
    assert kept == {f"{trial['number']:05d}" for trial in front}
    stored = json.loads(query(tmp_path, "SELECT settings FROM tuner_study WHERE name = 'whole'")[0][0])
    assert stored["pruner"] == {"value": "median", "origin": "flag"}
    assert stored["pruner_option"] == {"value": {"startup_trials": "2"}, "origin": "flag"}


def test_a_pruner_that_is_none_is_refused_before_anything_is_written(tuner: Tuner, tmp_path: Path) -> None:
    for flags, words in (
        (["--pruner", "best"], "known: none, median, percentile, asha"),
        (["--pruner", "asha", "--pruner-option", "eta=3"], "reduction_factor=5"),
        (["--pruner", "asha", "--pruner-option", "reduction_factor"], "name=value"),
        (["--pruner-option", "percentile=3"], "choose one with --pruner"),
    ):
        done = tuner("run", CURVES, *flags)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "tuner.db").exists()
