"""`tuner show`: everything about one trial."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from tuner.cli.options import format_option, reading, storage_option
from tuner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord


@click.command("show", short_help="Show everything about one trial.")
@click.argument("name")
@click.argument("number", type=int)
@storage_option
@format_option
def command(name: str, number: int, storage: str | None, form: str) -> None:
    """Show trial NUMBER of study NAME: params, prediction, measured peaks, metrics, failure."""
    from tuner.cli.output import emit_one

    with reading(storage) as reader:
        study = reader.study(name)
        trial = reader.trial(study.id, number)
        metrics = reader.metrics(trial.id)
    if form == "table":
        print_trial(study, trial, metrics)
        return
    fields = dataclasses.asdict(trial)
    fields["prediction"] = None if trial.prediction is None else trial.prediction.to_json()
    fields["epochs"] = [dataclasses.asdict(metric) for metric in metrics]
    emit_one(fields, form)


def print_trial(study: StudyRecord, trial: TrialRecord, metrics: Sequence[MetricRecord]) -> None:
    """Print one trial for a person."""
    _section(f"trial {trial.number} of study '{study.name}'")
    _line("outcome", trial.outcome + (" (an audit: predicted not to fit)" if trial.audit else ""))
    if trial.reason is not None:
        _line("reason", trial.reason)
    if trial.value is not None:
        _line(study.metric, f"{trial.value:.6g}")
    for name, value in trial.params.items():
        _line(f"  {name}", f"{value:.6g}" if isinstance(value, float) else str(value))
    _memory(study, trial)
    if metrics:
        _section("metrics per epoch")
        for metric in metrics:
            value = "nan" if metric.value is None else f"{metric.value:.6g}"
            _line(f"{metric.epoch:>3} {metric.name}", f"{value}   after {format_seconds(metric.seconds)}")
    _section("run")
    _line("asked", _moment(trial.asked_at))
    _line("took", format_seconds(trial.seconds))
    _line("seed", str(trial.seed))
    for name, value in trial.environment.items():
        if name not in ("seed", "pid") and value is not None:
            _line(name, str(value))
    if trial.run_folder is not None:
        _line("run folder", trial.run_folder)
    for warning in trial.warnings:
        _line("warning", warning)
    if trial.failure is not None and trial.failure.get("traceback"):
        _section("traceback")
        click.echo(trial.failure["traceback"].rstrip())


def _memory(study: StudyRecord, trial: TrialRecord) -> None:
    _section("memory")
    _line("budget", format_bytes(study.budget_bytes))
    band = f"{format_bytes(trial.predicted_low_bytes)} to {format_bytes(trial.predicted_high_bytes)}"
    _line("predicted", f"{format_bytes(trial.predicted_bytes)}  ({band})")
    if trial.fits_probability is not None:
        _line("verdict", f"{trial.verdict} (fits with {trial.fits_probability:.1%})")
    if trial.outcome != "pruned_memory":
        source = f"  ({trial.peak_source})" if trial.peak_source else ""
        _line("measured", f"{format_bytes(trial.peak_bytes)}{source}")
    allocated = (
        f"{format_bytes(trial.allocated_bytes)}, predicted {format_bytes(trial.predicted_allocated_bytes)}"
    )
    _line("allocated", allocated)
    _line("baseline", format_bytes(trial.baseline_bytes))
    for phase, size_bytes in trial.phases.items():
        _line(f"  in {phase}", format_bytes(size_bytes))
    if trial.prediction is not None:
        for name, size_bytes in sorted(trial.prediction.categories.items(), key=lambda item: -item[1]):
            _line(f"  {name.replace('_', ' ')}", f"{format_bytes(size_bytes)} predicted at the peak")
    failure = trial.failure or {}
    for name in ("requested_bytes", "allocated_bytes", "reserved_bytes", "free_bytes"):
        if failure.get(name) is not None:
            _line(f"failed: {name.removesuffix('_bytes')}", format_bytes(failure[name]))


def _section(title: str) -> None:
    click.echo(f"\n{title}")


def _line(title: str, text: str) -> None:
    click.echo(f"  {title:<22} {text}")


def _moment(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
