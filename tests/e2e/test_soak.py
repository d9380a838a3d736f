"""The soak of `make soak` with 20 trials: two drivers, real children, and everything is killed once."""

from __future__ import annotations

from benchmarks.soak import soak

BLOWS = ["trial", "restart immediate", "driver", "supervisor"]


def test_twenty_trials_under_fire_are_all_accounted_for() -> None:
    found = soak(trials=20, seed=1, database="postgresql", first=BLOWS)
    assert {name: problems for name, problems in found["wrong"].items() if problems} == {}
    assert found["blows"].keys() >= set(BLOWS[:2]), "the study ended before it was struck"
    struck = found["blows"].get("driver", 0)
    assert found["drivers_started"] - found["starts_refused"] == 2 + struck
    assert sum(found["outcomes"].get(outcome, 0) for outcome in ("completed", "killed")) == 20
