"""`memory_accuracy.py --reference FOLDER`: every file of public figures, scored and printed."""

from __future__ import annotations

import csv
import importlib.util
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reference import attention, mlp, modules, nvml, steps
from benchmarks.reference.scores import Scored, Summary, others, percentile
from tuner.memory.calibration import Calibration
from tuner.memory.replay import replay
from tuner.memory.snapshot_files import read_snapshot

MIB = 2**20
HEADER = (
    f"{'rows':<34}{'count':>6}{'median':>9}{'90th':>9}{'worst':>9}{'band':>7}{'width':>7}{'oom':>7}{'s':>7}"
)


def report(folder: Path, *, mlp_rows: int) -> dict[str, Any]:
    """Score every file below `folder`; print as it goes; return what the JSON holds."""
    found: dict[str, Any] = {}
    print(HEADER)
    for name, rows in (
        ("allocator: reserved peak", _allocator(folder)),
        ("modules.csv", _modules(folder)),
        ("modules.csv, leftovers", _modules_with_leftovers(folder)),
        ("attention.csv", _attention(folder)),
        ("steps.csv, allocated", _steps(folder, "allocated")),
        ("steps.csv, reserved", _steps(folder, "reserved")),
        ("mlp_a100.csv", mlp.scored(folder, mlp_rows)),
    ):
        found[name] = _shown(name, list(rows))
    if importlib.util.find_spec("torchvision") and importlib.util.find_spec("transformers"):
        found |= _nvml(folder)
    else:
        print("nvml_rows.csv needs torchvision and transformers: make bench-accuracy")
    return found


def _shown(name: str, rows: Sequence[Scored]) -> dict[str, Any]:
    summary = Summary.of(name, rows)
    coverage = "" if summary.coverage is None else f"{summary.coverage:.0%}"
    width = "" if summary.band_width is None else f"{summary.band_width:.1%}"
    died = summary.out_of_memory_hit + summary.out_of_memory_missed
    memory = f"{summary.out_of_memory_hit}/{died}" if died else ""
    print(
        f"{name:<34}{summary.rows:>6}{summary.median:>9.3%}{summary.percentile_90:>9.3%}{summary.worst:>9.3%}"
        f"{coverage:>7}{width:>7}{memory:>7}{summary.seconds:>7.2f}",
        flush=True,
    )
    if summary.false_alarms:
        print(f"  {summary.false_alarms} rows that ran have P(fits) below 0.5")
    return {"summary": summary.to_json(), "rows": [row.to_json() for row in rows]}


def _allocator(folder: Path) -> Iterator[Scored]:
    for row in csv.DictReader((folder / "allocator" / "manifest.csv").read_text().splitlines()):
        start = time.perf_counter()
        (history,) = read_snapshot(folder / "allocator" / f"{row['name']}.json.gz")
        peak_bytes = replay(history).allocator.peak_reserved_bytes
        real_mib = row["peak_reserved_mib"] or row["final_reserved_mib"]
        yield Scored(row["name"], "", float(real_mib) * MIB, peak_bytes, seconds=time.perf_counter() - start)


def _modules(folder: Path) -> Iterator[Scored]:
    for row in modules.rows(folder):
        if row.kernel not in modules.WITH_LEFTOVERS:
            yield _module(row, 0.0)


def _modules_with_leftovers(folder: Path) -> Iterator[Scored]:
    """Score rows that hold a constant of other work, less the median constant of their group."""
    groups: dict[tuple[str, str], list[tuple[modules.Row, int]]] = {}
    for row in modules.rows(folder):
        if row.kernel in modules.WITH_LEFTOVERS:
            groups.setdefault(row.group, []).append((row, modules.predicted_bytes(row)))
    for members in groups.values():
        constant = statistics.median(row.measured_bytes - predicted for row, predicted in members)
        for row, _ in members:
            yield _module(row, constant)


def _module(row: modules.Row, constant: float) -> Scored:
    start = time.perf_counter()
    predicted = modules.predicted_bytes(row) + constant
    seconds = time.perf_counter() - start
    return Scored(f"{row.kernel} {row.x}", row.kernel, row.measured_bytes, predicted, seconds=seconds)


def _attention(folder: Path) -> Iterator[Scored]:
    for row in attention.rows(folder):
        start = time.perf_counter()
        predicted = attention.predicted_bytes(row)
        yield Scored(
            f"{row.length} x {row.width}{' compiled' if row.compiled else ''}",
            "",
            row.measured_bytes,
            predicted,
            seconds=time.perf_counter() - start,
        )


def _steps(folder: Path, quantity: str) -> Iterator[Scored]:
    for row in steps.rows(folder):
        start = time.perf_counter()
        allocated, reserved = steps.predicted_bytes(row)
        real, predicted = (
            (row.allocated_bytes, allocated) if quantity == "allocated" else (row.reserved_bytes, reserved)
        )
        yield Scored(row.name, "", real, predicted, seconds=time.perf_counter() - start)


def _nvml(folder: Path) -> dict[str, Any]:
    traced = [(row, *_traced(row)) for row in nvml.rows(folder)]
    found: dict[str, Any] = {}
    for title, convolutional in (("language models", False), ("convolutions", True)):
        chosen = [one for one in traced if one[0].is_convolutional == convolutional]
        prior = [nvml.score(row, e, Calibration.of_mix("cuda", e[0].mix), s) for row, e, s in chosen]
        name = f"nvml_rows.csv, {title}"
        found[name] = _shown(name, prior)
        found[name] |= {"families": _families(prior), "others": _others(prior), "capped": _capped(prior)}
        held_out = f"  fit on other families: {title}"
        found[held_out.strip()] = _shown(held_out[:33], list(_fit_on_other_families(chosen)))
    return found


def _traced(row: nvml.Row) -> tuple[list[nvml.Estimate], float]:
    start = time.perf_counter()
    return nvml.estimates(row), time.perf_counter() - start


def _fit_on_other_families(chosen: Sequence[Any]) -> Iterator[Scored]:
    """Calibrate on the rows of the same card and other families that ran, judge on this family."""
    for row, found, seconds in chosen:
        lessons = [
            nvml.measured(other, estimates)
            for other, estimates, _ in chosen
            if other.model != row.model and other.gpu == row.gpu and not other.out_of_memory
        ]
        yield nvml.score(row, found, Calibration.of_mix("cuda", found[0].mix).updated(lessons), seconds)


def _families(rows: Sequence[Scored]) -> dict[str, Any]:
    found = {}
    for family in sorted({row.family for row in rows}):
        members = [row for row in rows if row.family == family and not row.out_of_memory]
        errors = [row.error for row in members]
        found[family] = {"rows": len(errors), "median_error": statistics.median(errors)}
        print(
            f"  {family:<32}{len(errors):>6}{statistics.median(map(abs, errors)):>9.2%}"
            f"  {min(errors):+.1%} to {max(errors):+.1%}"
        )
    return found


def _others(rows: Sequence[Scored]) -> dict[str, Any]:
    found = {}
    for name, errors in others(rows).items():
        found[name] = {
            "rows": len(errors),
            "median": statistics.median(errors),
            "percentile_90": percentile(errors, 0.9),
        }
        print(
            f"  {name:<32}{len(errors):>6}{statistics.median(errors):>9.2%}{percentile(errors, 0.9):>9.2%}"
            f"{max(errors):>9.2%}"
        )
    return found


def _capped(rows: Sequence[Scored]) -> dict[str, float]:
    """Print how the requirement compares with the same work under a cap."""
    errors = [
        row.extra["required_bytes"] / row.extra["capped_bytes"] - 1
        for row in rows
        if row.extra is not None and row.extra["capped_bytes"] and not row.out_of_memory
    ]
    print(
        f"  {'required, against capped runs':<32}{len(errors):>6}{statistics.median(map(abs, errors)):>9.2%}"
        f"{percentile(map(abs, errors), 0.9):>9.2%}  median {statistics.median(errors):+.1%}"
    )
    return {"rows": len(errors), "median_error": statistics.median(errors)}
