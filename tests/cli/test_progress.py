"""What a person or a script sees while trials wait; text that looks like markup is printed as it is."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tuner.cli import waits
from tuner.cli.progress import _JsonLines, _PlainLines
from tuner.cli.progress_bar import progress_bar
from tuner.cli.score import Score
from tuner.search.events import Launched

SCORE = cast(
    "Score", SimpleNamespace(goal=SimpleNamespace(trials=3), launched=1, summary=lambda: "best a[/b] 0.5")
)


def launch(number: int) -> Launched:
    return Launched(number, {}, cast("Any", SimpleNamespace(to_json=dict)), 1, "cpu", 1)


def reason(gib: float, device: str = "cuda:0") -> str:
    return f"3.10 GiB on {device}: 2 trials there hold {gib:.2f} GiB of 11.40 GiB"


def test_notes_reasons_and_metrics_may_look_like_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "120")
    with progress_bar(SCORE) as bar:
        bar.note("python [red]x.py (x [/y])")
        bar.waiting(2, "its turn on [/cuda]")
    seen = capsys.readouterr().err
    for text in ("python [red]x.py (x [/y])", "trial 2 waits for its turn on [/cuda]", "best a[/b] 0.5"):
        assert text in seen


def test_a_wait_that_came_too_early_is_told_later_unless_it_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "EVERY_SECONDS", 1.0)
    lines = _PlainLines(SCORE)
    for number in (1, 2, 3):
        lines.waiting(number, reason(number))
    lines.waiting(3, reason(9.8))
    lines.launched(launch(2))
    assert capsys.readouterr().err.splitlines() == [f"trial 1 waits for {reason(1)}"]
    time.sleep(1.5)
    assert capsys.readouterr().err.splitlines() == [f"trial 3 waits for {reason(9.8)}"]
    lines.waiting(4, reason(4))
    lines.waiting(5, reason(5))
    lines.close()
    time.sleep(1.5)
    assert len(capsys.readouterr().err.splitlines()) <= 1  # nothing after the end


def test_json_tells_another_device_at_once_and_other_sizes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waits, "EVERY_SECONDS", 1.0)
    lines = _JsonLines()
    for step in range(20):
        lines.waiting(1, reason(step / 10))
    lines.waiting(2, reason(5))
    lines.waiting(1, reason(3, "cuda:1"))
    lines.waiting(1, reason(4, "cuda:1"))
    lines.waiting(1, reason(5, "cuda:1"))

    def told() -> list[tuple[int, str]]:
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [(event["number"], event["reason"]) for event in events if event["event"] == "waiting"]

    assert told() == [(1, reason(0)), (2, reason(5)), (1, reason(3, "cuda:1"))]
    time.sleep(1.5)
    assert told() == [(1, reason(5, "cuda:1"))]
    lines.waiting(1, reason(6, "cuda:1"))
    lines.launched(launch(1))
    lines.waiting(1, reason(7, "cuda:1"))  # its second attempt
    assert told()[-1] == (1, reason(7, "cuda:1"))
    lines.close()
