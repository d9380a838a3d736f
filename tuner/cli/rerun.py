"""`tuner rerun`: train a trial's configuration again, and say whether it gives the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import reading, storage_option
from tuner.errors import Interrupted
from tuner.settings import resolve
from tuner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tuner.records import TrialResult
    from tuner.search.agreement import Comparison
    from tuner.search.conditions import Change
    from tuner.store.rows import StudyRecord, TrialRecord

_WIDTH = 80


@click.command("rerun", short_help="Train a trial again, and compare metric and peak.")
@click.argument("name")
@click.argument("number", type=int)
@storage_option
@click.option("--threads", metavar="N", help="Intra-op threads  [default: as many as it had]")
@click.option("--runs-dir", metavar="DIR", help="Where the run folder goes  [default: tuner-runs]")
@click.option("--force", is_flag=True, help="Run a trial that was pruned before its launch, too.")
@click.option(
    "-f", "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True,
    help="How to print.",
)  # fmt: skip
def command(name: str, number: int, storage: str | None, form: str, *, force: bool, **flags: Any) -> int:
    """Train the configuration of trial NUMBER of study NAME again, and compare metric and peak.

    It runs as it ran then: same study file, params, seed, threads and cap, in a fresh process.
    Nothing is recorded in the study. What is not as it was (code, versions, device) is said first.

    With a seed on a CPU, metric and allocator's peak must be equal, and the resident peak within
    2 % or 8 MiB. On a GPU, or without a seed, the metric may differ: by how much is said, and not
    judged; peaks must be within 2 %.

    Exit code 0: it agrees (or there is nothing to compare with). 1: it does not.
    """
    from tuner.cli.trial_rows import find_trial
    from tuner.execution.launcher import LocalLauncher
    from tuner.execution.run_folder import RunFolder, folder_name
    from tuner.search.agreement import compare
    from tuner.search.conditions import changes_since
    from tuner.search.rerun import check_rerun, place_of, rerun_request, run_again

    setting = resolve(flags, ["threads", "runs_dir"])
    threads = setting["threads"].value if setting["threads"].origin == "flag" else None
    with reading(storage) as reader:
        study = reader.study(name)
        trial = find_trial(reader, study, number)
        metrics = reader.metrics(trial.id)
        driver = None if trial.driver_id is None else reader.driver(trial.driver_id)
    file = check_rerun(study, trial, force=force)
    place = place_of(study, trial)
    request = rerun_request(study, trial, place, threads=threads)
    changes = changes_since(study, trial, driver, file=file, request=request, place=place)
    for change in changes:
        click.echo(f"warning: {change.text}", err=True)
    runs_dir = Path(setting["runs_dir"].value)
    folder = RunFolder.create(runs_dir / folder_name(study.name) / f"rerun-{number:05d}")
    try:
        with LocalLauncher(runs_dir, request.workload, place.kind) as launcher, _progress(study) as told:
            result = run_again(launcher, folder, request, told)
    except KeyboardInterrupt:
        raise Interrupted("interrupted: the trial's process is gone, nothing was recorded") from None
    comparison = compare(
        study, trial, metrics, result, repeatable=place.kind == "cpu" and request.seed is not None
    )
    if form == "json":
        _print_json(study, trial, comparison, changes, folder.path)
    else:
        _print(study, trial, comparison, result)
        click.echo(f"nothing of this is in the study; log and weights: {folder.path}", err=True)
    return 1 if comparison.agrees is False else 0


@contextmanager
def _progress(study: StudyRecord) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Give a function that shows events: a live line on a terminal, else a line per epoch."""

    def text(event: dict[str, Any]) -> str | None:
        if event["kind"] != "epoch":
            return None
        value = event["metrics"].get(study.metric)
        shown = "" if value is None else f": {study.metric} {value:.6g}"
        return f"epoch {event['epoch']}{shown} after {format_seconds(event['seconds'])}"

    if not sys.stderr.isatty():
        yield lambda event: click.echo(line, err=True) if (line := text(event)) else None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, highlight=False).status("training") as status:
        yield lambda event: status.update(Text(line)) if (line := text(event)) else None


def _print(study: StudyRecord, trial: TrialRecord, comparison: Comparison, result: TrialResult) -> None:
    then, now = comparison.then, comparison.now
    rows = [
        (study.metric, _number(then.value), _number(now.value), _apart(then.value, now.value)),
        ("device peak", *_sizes(then.device_bytes, now.device_bytes)),
        ("allocated peak", *_sizes(then.allocated_bytes, now.allocated_bytes)),
        ("outcome", then.outcome or trial.outcome, now.outcome or "", ""),
        ("took", format_seconds(trial.seconds), format_seconds(result.seconds), ""),
    ]
    click.echo(f"{'':<16} {'then':>18} {'now':>18} {'difference':>14}")
    for title, *cells in rows:
        click.echo(f"{title[:16]:<16} {cells[0]:>18} {cells[1]:>18} {cells[2]:>14}".rstrip())
    if result.failure is not None:
        _say(f"now: {result.failure.reason}")
    for note in comparison.notes:
        _say(f"note: {note}")
    verdict = {True: "agrees", False: "differs: ", None: "nothing to compare with"}[comparison.agrees]
    _say(verdict + "; ".join(comparison.differences))


def _say(text: str) -> None:
    click.echo(click.wrap_text(text, _WIDTH, "", "  "))


def _print_json(
    study: StudyRecord, trial: TrialRecord, comparison: Comparison, changes: list[Change], folder: Path
) -> None:
    from tuner.cli.output import jsonable

    fields = {
        "study": study.name,
        "number": trial.number,
        **comparison.to_json(),
        "changes": [change.to_json() for change in changes],
        "run_folder": str(folder),
    }
    click.echo(json.dumps(jsonable(fields), indent=2))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.8g}"


def _sizes(then: int | None, now: int | None) -> tuple[str, str, str]:
    return format_bytes(then), format_bytes(now), _apart(then, now)


def _apart(then: float | None, now: float | None) -> str:
    """Return the difference in per cent of what was."""
    if then is None or now is None:
        return "–"
    if then == now:
        return "equal"
    return f"{(now - then) / abs(then):+.3%}" if then else "–"
