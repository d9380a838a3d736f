"""What a person or a script sees while a study runs.

A live bar on a terminal, a plain line per trial elsewhere (both on standard error), a JSON line per
event with `--json` (on standard output).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tuner.cli.output import jsonable, short_params
from tuner.cli.trial_rows import emit_front
from tuner.records import Outcome
from tuner.search.events import Ended, Goal, Launched, Observer
from tuner.search.session import Session
from tuner.units import format_bytes, format_seconds

_WAITING_EVERY_SECONDS = 30.0


@contextmanager
def make_observer(session: Session, goal: Goal, *, as_json: bool, recovered: int) -> Iterator[Observer]:
    """Return the observer that suits the output."""
    tally = _Tally(session, goal)
    if as_json:
        _event("study", **_study_fields(session), recovered=recovered)
        yield _JsonLines()
        return
    click.echo(_headline(session), err=True)
    if tally.launched or recovered:
        again = f", {recovered} interrupted to run again" if recovered else ""
        click.echo(f"resumed: {tally.launched} of {goal.trials} trials are done{again}", err=True)
    if sys.stderr.isatty():
        with _bar(tally) as bar:
            yield bar
    else:
        yield _PlainLines(tally)


def print_end(session: Session, *, as_json: bool) -> None:
    """Print the front, and how to see more."""
    counts = session.reader.outcomes(session.study.id)
    front = session.reader.front(session.study.id)
    audits = _audits(session)
    if as_json:
        _event("end", outcomes=counts, front=[t.number for t in front], audits=audits)
        return
    emit_front(session.study, front, "table")
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items(), key=lambda c: -c[1]))
    click.echo(f"trials: {told or 'none'}", err=True)
    if audits["launched"]:
        click.echo(
            f"audit: {audits['launched']} pruned configurations were launched all the same, "
            f"{audits['wrongly_pruned']} of them fitted the budget",
            err=True,
        )
    click.echo("open the app with: tuner app", err=True)


class _Tally:
    """Counts what has happened, earlier sessions included."""

    def __init__(self, session: Session, goal: Goal) -> None:
        self.goal = goal
        self.metric = session.study.metric
        self._maximize = session.study.maximize
        self._budget_bytes = session.study.budget_bytes
        self._started = time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.best: float | None = None
        self.launched = 0
        for trial in session.reader.trials(session.study.id):
            if not trial.is_running:
                self._count(trial.outcome, trial.value, trial.peak_bytes, audit=trial.audit)
        self._launched_before = self.launched

    def add(self, trial: Ended) -> None:
        """Count a trial that has ended."""
        result = trial.result
        self._count(result.outcome, result.value, result.peaks.device_bytes, audit=trial.audit)

    def seconds_left(self) -> float | None:
        """Return a guess from the pace of this session."""
        done = self.launched - self._launched_before
        if done == 0:
            return None
        return (time.monotonic() - self._started) / done * max(0, self.goal.trials - self.launched)

    def summary(self) -> str:
        """Return counts by outcome and the best value."""
        counts = " ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        best = "" if self.best is None else f" · best {self.metric} {self.best:.4g}"
        return f"{counts}{best}"

    def _count(self, outcome: str, value: float | None, peak_bytes: int | None, *, audit: bool) -> None:
        self.outcomes[str(outcome)] += 1
        known = Outcome(outcome)
        if known.launched and known.final and not audit:
            self.launched += 1
        if known is Outcome.COMPLETED and value is not None and (peak_bytes or 0) <= self._budget_bytes:
            better = self.best is None or (value > self.best if self._maximize else value < self.best)
            self.best = value if better else self.best


class _PlainLines:
    """One line per trial."""

    def __init__(self, tally: _Tally) -> None:
        self._tally = tally
        self._waiting_told = -math.inf

    def waiting(self, number: int, reason: str) -> None:
        """Print what a trial waits for, now and then: in a full pool every trial waits a little."""
        if time.monotonic() - self._waiting_told > _WAITING_EVERY_SECONDS:
            self._waiting_told = time.monotonic()
            click.echo(f"trial {number} waits for {reason}", err=True)

    def launched(self, trial: Launched) -> None:
        """Say nothing: the line comes when the trial has ended."""

    def again(self, trial: Ended) -> None:
        """Print that the trial gets the whole budget."""
        click.echo(f"{describe(trial)} · again with the whole budget", err=True)

    def ended(self, trial: Ended) -> None:
        """Print the trial."""
        self._tally.add(trial)
        left = format_seconds(self._tally.seconds_left())
        click.echo(
            f"[{self._tally.launched}/{self._tally.goal.trials}] {describe(trial)} · {left} left", err=True
        )

    def note(self, message: str) -> None:
        """Print it."""
        click.echo(message, err=True)


class _Bar:
    """A live bar with counts, best value and time left; trials scroll above it."""

    def __init__(self, tally: _Tally, progress: Any, task: Any) -> None:
        self._tally, self._progress, self._task = tally, progress, task
        self._running: dict[int, Launched] = {}
        self._waiting: dict[int, str] = {}

    def waiting(self, number: int, reason: str) -> None:
        """Show what a trial waits for."""
        self._waiting[number] = reason
        self._show_running()

    def launched(self, trial: Launched) -> None:
        """Show which trials run."""
        self._waiting.pop(trial.number, None)
        self._running[trial.number] = trial
        self._show_running()

    def again(self, trial: Ended) -> None:
        """Print above the bar that the trial gets the whole budget."""
        self._running.pop(trial.number, None)
        self._print(f"{describe(trial)} · again with the whole budget", "yellow")

    def ended(self, trial: Ended) -> None:
        """Print the trial above the bar, and move it."""
        self._running.pop(trial.number, None)
        self._waiting.pop(trial.number, None)
        self._tally.add(trial)
        self._print(describe(trial), _STYLES.get(trial.result.outcome, ""))
        self._progress.update(
            self._task,
            completed=min(self._tally.launched, self._tally.goal.trials),
            summary=self._tally.summary(),
            left=format_seconds(self._tally.seconds_left()),
        )
        self._show_running()

    def _print(self, line: str, style: str) -> None:
        from rich.text import Text

        self._progress.console.print(Text(line, style=style))

    def _show_running(self) -> None:
        """Show which trials run under how much, by device, and what the next one waits for."""
        lines = []
        for device in sorted({trial.device for trial in self._running.values()}):
            there = [trial for trial in self._running.values() if trial.device == device]
            numbers = ", ".join(str(trial.number) for trial in there)
            held = format_bytes(sum(trial.reservation_bytes for trial in there))
            lines.append(f"{device}: trial{'s' if len(there) > 1 else ''} {numbers} under {held}")
        lines += [f"trial {number} waits for {reason}" for number, reason in self._waiting.items()]
        self._progress.update(self._task, running="\n".join(lines))

    def note(self, message: str) -> None:
        """Print it above the bar."""
        self._progress.console.print(message)


_STYLES = {Outcome.COMPLETED: "green", Outcome.PRUNED_MEMORY: "dim", Outcome.OUT_OF_MEMORY: "yellow"}


@contextmanager
def _bar(tally: _Tally) -> Iterator[Observer]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True, highlight=False)
    progress = Progress(
        TextColumn("trials"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]} left"),
        console=console,
        auto_refresh=False,
    )
    task = progress.add_task(
        "trials",
        total=tally.goal.trials,
        completed=tally.launched,
        summary=tally.summary(),
        left="–",
        running="",
    )

    def render() -> Group:
        fields = progress.tasks[0].fields
        return Group(progress, f"{fields['summary']}", f"{fields['running']}")

    with Live(get_renderable=render, console=console, refresh_per_second=4, transient=True):
        yield _Bar(tally, progress, task)


class _JsonLines:
    """One JSON object per event."""

    def waiting(self, number: int, reason: str) -> None:
        """Print what a trial waits for."""
        _event("waiting", number=number, reason=reason)

    def launched(self, trial: Launched) -> None:
        """Print the launch with its prediction."""
        _event(
            "launched",
            number=trial.number,
            params=trial.params,
            prediction=trial.prediction.to_json(),
            reservation_bytes=trial.reservation_bytes,
            device=trial.device,
            attempt=trial.attempt,
        )

    def again(self, trial: Ended) -> None:
        """Print that the trial gets the whole budget."""
        self._print("again", trial)

    def ended(self, trial: Ended) -> None:
        """Print the trial's result."""
        self._print("ended", trial)

    def _print(self, kind: str, trial: Ended) -> None:
        fields = trial.result.to_json()
        device = trial.prediction.device
        _event(
            kind,
            number=trial.number,
            params=trial.params,
            audit=trial.audit,
            verdict=trial.prediction.verdict,
            predicted_bytes=None if device is None else device.expected,
            **{key: fields[key] for key in ("outcome", "value", "metrics", "peaks", "failure", "seconds")},
        )

    def note(self, message: str) -> None:
        """Print it as an event."""
        _event("note", message=message)


def describe(trial: Ended) -> str:
    """Return a trial on one line."""
    result, prediction = trial.result, trial.prediction
    expected = None if prediction.device is None else prediction.device.expected
    parts = [f"trial {trial.number} {'audit: ' if trial.audit else ''}{result.outcome}"]
    if result.value is not None and result.outcome is Outcome.COMPLETED:
        parts.append(f"{result.value:.4g}")
    measured = format_bytes(result.peaks.device_bytes) if result.peaks.device_bytes else ""
    if expected is None:
        parts.append(f"{measured}, not predicted" if measured else "not predicted")
    else:
        parts.append(f"{measured}{' of ' if measured else ''}{format_bytes(expected)} predicted")
    if result.outcome not in (Outcome.COMPLETED, Outcome.PRUNED_MEMORY) and result.failure is not None:
        parts.append(result.failure.reason)
    parts.extend(f"warning: {warning}" for warning in result.warnings[:1])
    parts.append(short_params(trial.params))
    return " · ".join(parts)


def _headline(session: Session) -> str:
    study = session.study
    return (
        f"study '{study.name}' on {study.device_name} ({study.target}), "
        f"budget {format_bytes(study.budget_bytes)}"
    )


def _study_fields(session: Session) -> dict[str, Any]:
    study = session.study
    names = ("name", "workload", "target", "device_name", "budget_bytes", "metric", "direction", "seed")
    return {name: getattr(study, name) for name in names}


def _audits(session: Session) -> dict[str, int]:
    trials = [trial for trial in session.reader.trials(session.study.id) if trial.audit]
    launched = [trial for trial in trials if trial.outcome in (Outcome.COMPLETED, Outcome.OUT_OF_MEMORY)]
    wrong = [
        trial
        for trial in launched
        if trial.outcome == Outcome.COMPLETED and (trial.peak_bytes or 0) <= session.study.budget_bytes
    ]
    return {"launched": len(launched), "wrongly_pruned": len(wrong)}


def _event(kind: str, **fields: Any) -> None:
    click.echo(json.dumps({"event": kind, **jsonable(fields)}))
    sys.stdout.flush()
