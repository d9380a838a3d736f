"""The kept curves give the kept table, and the page shows that table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.early_stopping import RECORDED, all_rows, as_markdown, known_curves, replay
from tests.conftest import ROOT
from tuner.search.pruning import NoPruner, PercentilePruner


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return all_rows(known_curves(None, None))


def test_the_kept_curves_give_the_kept_table(rows: list[dict[str, Any]]) -> None:
    """To nine digits: moocore's sums may differ from machine to machine."""
    kept = json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]
    for row, was in zip(rows, kept, strict=True):
        for name, value in row.items():
            expected = was[name] if isinstance(value, str) else pytest.approx(was[name], rel=1e-9)
            assert value == expected, (row["workload"], row["pruner"], name)


def test_the_page_shows_that_table(rows: list[dict[str, Any]]) -> None:
    assert as_markdown(rows) in (ROOT / "docs" / "early-stopping.md").read_text(encoding="utf-8")


def test_nothing_is_lost_where_nothing_is_stopped() -> None:
    for trials in known_curves(None, None).values():
        untouched = replay(trials, NoPruner(), 2)
        assert (untouched.epochs, untouched.front, untouched.stopped) == (1, 1, 0)
        strictest = replay(trials, PercentilePruner(0, startup_trials=0), 2)
        assert strictest.epochs < 1
        assert 0 < strictest.front <= 1
