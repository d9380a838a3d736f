"""The live bar of a study on a terminal: counts, best value, time left, who runs and who waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tuner.cli.score import Score, describe, turned_away_so_far
from tuner.records import Outcome
from tuner.search.events import Ended, Launched, Observer
from tuner.units import format_bytes, format_seconds


class Bar:
    """A live bar with counts, best value and time left; trials scroll above it."""

    def __init__(self, score: Score, progress: Any, task: Any) -> None:
        self._score, self._progress, self._task = score, progress, task
        self._running: dict[int, Launched] = {}
        self._waiting: dict[int, str] = {}

    def turned_away(self, number: int, count: int) -> None:
        """Show how many draws did not fit so far."""
        self._waiting[number] = turned_away_so_far(count)
        self._show_running()

    def waiting(self, number: int, reason: str) -> None:
        """Show what a trial waits for."""
        self._waiting[number] = f"waits for {reason}"
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
        self._score.add(trial)
        self._print(describe(trial), _STYLES.get(trial.result.outcome, ""))
        self._progress.update(
            self._task,
            completed=min(self._score.launched, self._score.goal.trials),
            summary=self._score.summary(),
            left=format_seconds(self._score.seconds_left()),
        )
        self._show_running()

    def _print(self, line: str, style: str) -> None:
        from rich.text import Text  # a plain string would be read as markup

        self._progress.console.print(Text(line, style=style))

    def _show_running(self) -> None:
        """Show which trials run under how much, by device, and what the next one waits for."""
        lines = []
        for device in sorted({trial.device for trial in self._running.values()}):
            there = [trial for trial in self._running.values() if trial.device == device]
            numbers = ", ".join(str(trial.number) for trial in there)
            held = format_bytes(sum(trial.reservation_bytes for trial in there))
            lines.append(f"{device}: trial{'s' if len(there) > 1 else ''} {numbers} under {held}")
        lines += [f"trial {number} {words}" for number, words in self._waiting.items()]
        self._progress.update(self._task, running="\n".join(lines))

    def note(self, message: str) -> None:
        """Print it above the bar."""
        self._print(message, "")


_STYLES = {Outcome.COMPLETED: "green", Outcome.PRUNED_MEMORY: "dim", Outcome.OUT_OF_MEMORY: "yellow"}


@contextmanager
def progress_bar(score: Score) -> Iterator[Observer]:
    """Show the bar while the body runs."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.text import Text

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
        total=score.goal.trials,
        completed=score.launched,
        summary=score.summary(),
        left="–",
        running="",
    )

    def render() -> Group:
        fields = progress.tasks[0].fields
        return Group(progress, Text(fields["summary"]), Text(fields["running"]))

    with Live(get_renderable=render, console=console, refresh_per_second=4, transient=True):
        yield Bar(score, progress, task)
