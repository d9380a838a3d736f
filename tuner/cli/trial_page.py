"""All that is known of one trial, in sections that fit 80 columns."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tuner.store.rows import DriverRecord, MetricRecord, StudyRecord, TrialRecord

_WIDTH = 80
_TITLE_WIDTH = 20
_Rows = Iterable[tuple[str, str | None]]


def print_trial(
    study: StudyRecord,
    trial: TrialRecord,
    metrics: Sequence[MetricRecord],
    driver: DriverRecord | None = None,
) -> None:
    """Print one trial for a person; what is not known is left out.

    Args:
        study: Its study.
        trial: The trial.
        metrics: Its metrics per epoch.
        driver: Who drove it last, or None where that is not known.
    """
    environment = {} if driver is None else driver.environment
    _section(f"trial {trial.number} of study '{study.name}'", _outcome(study, trial))
    _section("params", ((name, _short(value)) for name, value in trial.params.items()))
    _section("memory", _memory(study, trial))
    _section("predicted at the peak", _categories(trial))
    _section("failed request", _failed_request(trial))
    _section("earlier attempts", _attempts(trial))
    _section("metrics per epoch", _epochs(metrics))
    _section("run", _run(trial))
    _section("environment", _environment(study, trial, environment))
    _section("settings", _settings(environment.get("settings") or study.settings))
    traceback = (trial.failure or {}).get("traceback")
    if traceback:
        click.echo(f"\ntraceback\n{traceback.rstrip()}")


def _outcome(study: StudyRecord, trial: TrialRecord) -> _Rows:
    audit = " (an audit: predicted not to fit)" if trial.audit else ""
    yield "outcome", f"{trial.outcome}{audit}"
    yield "reason", trial.reason
    yield study.metric, None if trial.value is None else f"{trial.value:.6g}"
    for name, value in trial.metrics.items():
        if name != study.metric:
            yield name, f"{_short(value)} at the best epoch"
    yield "repeats", None if trial.repeats is None else f"the params of trial {trial.repeats}"
    for warning in trial.warnings:
        yield "warning", warning
    if trial.late_result is not None:
        late = trial.late_result.get("outcome", "one")
        yield "late result", f"{late}, which came after the trial had been given up"


def _memory(study: StudyRecord, trial: TrialRecord) -> _Rows:
    launched = trial.outcome != "pruned_memory"
    yield "budget", format_bytes(study.budget_bytes)
    if trial.reservation_bytes is not None:
        yield "reservation", format_bytes(trial.reservation_bytes)
    band = f"{format_bytes(trial.predicted_low_bytes)} to {format_bytes(trial.predicted_high_bytes)}"
    known = trial.predicted_bytes is not None
    yield "predicted", f"{format_bytes(trial.predicted_bytes)}  ({band})" if known else "unknown"
    required = None if trial.prediction is None else trial.prediction.required
    if required is not None:
        low, high = format_bytes(required.low), format_bytes(required.high)
        yield "required", f"{format_bytes(required.expected)}  ({low} to {high})"
    if trial.verdict is not None:
        chance = trial.fits_probability
        yield "verdict", trial.verdict + ("" if chance is None else f"  (fits with {chance:.1%})")
    if launched:
        source = f"  ({trial.peak_source})" if trial.peak_source else ""
        yield "measured peak", f"{format_bytes(trial.peak_bytes)}{source}"
    for phase, size_bytes in trial.phases.items():
        yield f"  in {phase}", format_bytes(size_bytes)
    measured = f"{format_bytes(trial.allocated_bytes)}, " if trial.allocated_bytes is not None else ""
    yield "allocated", f"{measured}{format_bytes(trial.predicted_allocated_bytes)} predicted"
    for title, known_bytes in (
        ("reserved", trial.reserved_bytes),
        ("baseline", trial.baseline_bytes),
        ("used before, by all", trial.used_before_bytes),
        ("peak use, by all", trial.device_wide_bytes),
        ("host peak", trial.host_peak_bytes),
    ):
        yield title, None if known_bytes is None else format_bytes(known_bytes)
    if trial.growth_bytes is not None:
        growth = f"{format_bytes(trial.growth_bytes)} per training step" if trial.growth_bytes else "none"
        yield "growth", growth
    points = (trial.timeline or {}).get("points")
    if points:
        yield "timeline", f"{len(points)} points in {format_seconds(points[-1][0])} (all with -f json)"


def _categories(trial: TrialRecord) -> _Rows:
    found = {} if trial.prediction is None else trial.prediction.categories
    for name, size_bytes in sorted(found.items(), key=lambda item: -item[1]):
        if size_bytes:
            yield name.replace("_", " "), format_bytes(size_bytes)


def _failed_request(trial: TrialRecord) -> _Rows:
    failure = trial.failure or {}
    for name in ("requested_bytes", "allocated_bytes", "reserved_bytes", "free_bytes"):
        if failure.get(name) is not None:
            yield name.removesuffix("_bytes"), format_bytes(failure[name])
    yield "phase", failure.get("phase")


def _attempts(trial: TrialRecord) -> _Rows:
    for number, attempt in enumerate(trial.attempts or [], start=1):
        cap = format_bytes(attempt.get("reservation_bytes"))
        reason = attempt.get("reason") or (attempt.get("failure") or {}).get("reason")
        yield str(number), f"{attempt.get('outcome')} under {cap}" + (f": {reason}" if reason else "")


def _epochs(metrics: Sequence[MetricRecord]) -> _Rows:
    by_epoch: dict[int, list[MetricRecord]] = {}
    for metric in metrics:
        by_epoch.setdefault(metric.epoch, []).append(metric)
    for epoch, found in by_epoch.items():
        values = ", ".join(f"{m.name} {'nan' if m.value is None else _short(m.value)}" for m in found)
        within = found[0].epoch_peak_bytes
        peak = f"peak so far {format_bytes(found[0].peak_bytes)}"
        peak = peak if within is None else f"its peak {format_bytes(within)}"
        yield f"epoch {epoch}", f"{values}; after {format_seconds(found[0].seconds)}, {peak}"


def _run(trial: TrialRecord) -> _Rows:
    yield "asked", _moment(trial.asked_at)
    yield "launched", _moment(trial.started_at)
    yield "ended", _moment(trial.ended_at)
    yield "waited", None if trial.waiting_seconds is None else format_seconds(trial.waiting_seconds)
    yield "took", None if trial.seconds is None else format_seconds(trial.seconds)
    predicting = trial.prediction_seconds
    yield "prediction took", None if predicting is None else format_seconds(predicting)
    yield "device", trial.device or trial.environment.get("device")
    yield "seed", None if trial.seed is None else str(trial.seed)
    yield "attempt", str(trial.attempt)
    if trial.run_folder is not None:
        yield "run folder", _near(trial.run_folder)
        yield "checkpoint", trial.checkpoint


def _environment(study: StudyRecord, trial: TrialRecord, driver: dict[str, Any]) -> _Rows:
    child = trial.environment
    packages = {"python": driver.get("python"), **(driver.get("packages") or {})}
    packages |= {name: child[name] for name in ("python", "tuner", "torch") if child.get(name)}
    yield "versions", ", ".join(f"{name} {text}" for name, text in packages.items() if text) or None
    yield "git commit", _commit(driver)
    yield "study file", None if driver.get("study_file") is None else _near(driver["study_file"])
    yield "  its digest", _digest(study.workload_digest, child.get("workload_digest"))
    yield "host", driver.get("host")
    yield "platform", child.get("platform") or driver.get("platform")
    yield "processor", driver.get("processor")
    yield "device name", child.get("device_name")
    yield "GPU driver", driver.get("gpu_driver")
    for gpu in driver.get("gpus") or []:
        yield f"cuda:{gpu['index']}", f"{gpu['name']}, {format_bytes(gpu['total_bytes'])}, {gpu['uuid']}"
    yield "threads", None if child.get("threads") is None else str(child["threads"])
    yield "command", shlex.join(driver["command"]) if driver.get("command") else None
    yield "started in", driver.get("cwd")
    yield from (driver.get("variables") or {}).items()


def _commit(driver: dict[str, Any]) -> str | None:
    if not driver:
        return None
    git = driver.get("git")
    if git is None:
        return "none: the study file is in no repository"
    state = {True: " dirty", False: "", None: " (whether it was dirty is not known)"}[git["dirty"]]
    return f"{git['commit'] or 'none yet'}{state}, of {git['root']}"


def _digest(at_creation: str, in_trial: str | None) -> str:
    if in_trial is None or in_trial == at_creation:
        return f"{at_creation[:12]}" + (", as at the study's creation" if in_trial else "")
    return f"{in_trial[:12]}: CHANGED, it was {at_creation[:12]} when the study was created"


def _settings(settings: dict[str, Any]) -> _Rows:
    for name, setting in settings.items():
        yield name.replace("_", " "), f"{_setting(name, setting['value'])}  ({setting['origin']})"


def _setting(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name in ("budget", "pool"):
        return format_bytes(value)
    return format_seconds(value) if name in ("timeout", "trial_timeout") else str(value)


def _section(title: str, rows: _Rows) -> None:
    """Print a section; one without a row is left out."""
    lines = [_line(name, text) for name, text in rows if text is not None]
    if lines:
        click.echo("\n".join(["", title, *lines]))


def _line(title: str, text: str) -> str:
    head = f"  {title:<{_TITLE_WIDTH}} "
    if len(title) > _TITLE_WIDTH:
        head = f"  {title[: _WIDTH - 3]}\n{' ' * (_TITLE_WIDTH + 3)}"
    room = _WIDTH - _TITLE_WIDTH - 3
    wrapped = textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    return head + f"\n{' ' * (_TITLE_WIDTH + 3)}".join(wrapped)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _near(path: str) -> str:
    """Return a path from the current folder where it lies below it."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"
