"""What a person or a script sees while a study runs.

A live bar on a terminal, a plain line per trial elsewhere (both on standard error), a JSON line per
event with `--json` (on standard output).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import click

from tuner.cli.output import jsonable
from tuner.cli.progress_bar import progress_bar
from tuner.cli.score import Score, describe, turned_away_so_far
from tuner.cli.trial_rows import emit_front
from tuner.cli.waits import Waits
from tuner.records import Outcome
from tuner.search.events import Ended, Goal, Launched, Observer
from tuner.search.session import Session
from tuner.units import format_bytes, format_seconds

_SIZE = re.compile(r"[\d.,]+ (B|[KMGT]iB)\b")


@contextmanager
def make_observer(session: Session, goal: Goal, *, as_json: bool, recovered: int) -> Iterator[Observer]:
    """Return the observer that suits the output."""
    score = Score(session, goal)
    if as_json:
        _event("study", **_study_fields(session), recovered=recovered)
        with closing(_JsonLines()) as lines:
            yield lines
        return
    click.echo(_headline(session), err=True)
    if score.launched or recovered:
        again = f", {recovered} interrupted to run again" if recovered else ""
        click.echo(f"resumed: {score.launched} of {goal.trials} trials are done{again}", err=True)
    if sys.stderr.isatty():
        with progress_bar(score) as bar:
            yield bar
    else:
        with closing(_PlainLines(score)) as lines:
            yield lines


def print_end(session: Session, *, as_json: bool) -> None:
    """Print the front, and how to see more."""
    counts = session.reader.outcomes(session.study.id)
    front = session.reader.front(session.study.id)
    audits = _audits(session)
    if as_json:
        numbers = [trial.number for trial in front]
        _event("end", outcomes=counts, front=numbers, audits=audits, searches=_searched(session))
        return
    emit_front(session.study, front, "table")
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items(), key=lambda c: -c[1]))
    click.echo(f"trials: {told or 'none'}", err=True)
    searched = _searched(session)
    if searched["turned_away"]:
        click.echo(
            f"turned away: {searched['turned_away']} configurations predicted not to fit; "
            f"a search took {format_seconds(searched['mean_seconds'])} on average",
            err=True,
        )
    if audits["launched"]:
        click.echo(
            f"audit: {audits['launched']} pruned configurations were launched all the same, "
            f"{audits['wrongly_pruned']} of them fitted the budget",
            err=True,
        )
    click.echo("open the app with: tuner app", err=True)


class _PlainLines:
    """One line per trial."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._waits = Waits(lambda number, words: click.echo(f"trial {number} {words}", err=True))

    def close(self) -> None:
        """Print nothing any more."""
        self._waits.close()

    def turned_away(self, number: int, count: int) -> None:
        """Print, now and then, that the search for a trial's configuration goes on."""
        self._waits.waits(number, turned_away_so_far(count))

    def waiting(self, number: int, reason: str) -> None:
        """Print what a trial waits for, now and then: in a full pool every trial waits a little."""
        self._waits.waits(number, f"waits for {reason}")

    def launched(self, trial: Launched) -> None:
        """Say nothing: the line comes when the trial has ended."""
        self._waits.ends(trial.number)

    def again(self, trial: Ended) -> None:
        """Print that the trial gets the whole budget."""
        click.echo(f"{describe(trial)} · again with the whole budget", err=True)

    def ended(self, trial: Ended) -> None:
        """Print the trial."""
        self._waits.ends(trial.number)
        self._score.add(trial)
        left = format_seconds(self._score.seconds_left())
        click.echo(
            f"[{self._score.launched}/{self._score.goal.trials}] {describe(trial)} · {left} left", err=True
        )

    def note(self, message: str) -> None:
        """Print it."""
        click.echo(message, err=True)


class _JsonLines:
    """One JSON object per event."""

    def __init__(self) -> None:
        self._waits = Waits(lambda number, reason: _event("waiting", number=number, reason=reason))
        self._searches = Waits(lambda number, count: _event("turned_away", number=number, count=int(count)))
        self._kinds: dict[int, str] = {}

    def close(self) -> None:
        """Print nothing any more."""
        self._waits.close()
        self._searches.close()

    def turned_away(self, number: int, count: int) -> None:
        """Print, now and then, how many draws did not fit so far."""
        self._searches.waits(number, str(count))

    def waiting(self, number: int, reason: str) -> None:
        """Print what a trial waits for: at once where more than sizes changed, else now and then."""
        kind = _SIZE.sub("", reason)
        known, self._kinds[number] = self._kinds.get(number), kind
        self._waits.waits(number, reason, at_once=kind != known)

    def launched(self, trial: Launched) -> None:
        """Print the launch with its prediction."""
        self._no_longer_waits(trial.number)
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
        self._no_longer_waits(trial.number)
        self._print("ended", trial)

    def _no_longer_waits(self, number: int) -> None:
        self._waits.ends(number)
        self._searches.ends(number)
        self._kinds.pop(number, None)

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


def _searched(session: Session) -> dict[str, Any]:
    """Return how many draws were turned away, and what a search for a configuration took."""
    count, _ = session.rejections.count(session.study.id)
    seconds = [
        trial.rehearsal_seconds
        for trial in session.reader.trials(session.study.id)
        if trial.rehearsal_seconds is not None
    ]
    return {"turned_away": count, "mean_seconds": sum(seconds) / len(seconds) if seconds else None}


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
