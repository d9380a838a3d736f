"""How `gpu_check.py` shows and keeps what it found: the table, the summary, the JSON file."""

from __future__ import annotations

import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

from tuner.units import MIB, format_bytes

Row = dict[str, Any]
FIGURES = ("allocated", "reserved", "device")
RAN, FAILED, SKIPPED = "ran", "failed", "skipped"
_NAME, _WIDTH = 24, 110


def errors_of(predicted: Row, measured: Row) -> dict[str, float]:
    """Return predicted / measured - 1 of each figure that both have."""
    keys = [f"{figure}_bytes" for figure in (*FIGURES, "required")]
    known = [key for key in keys if predicted.get(key) is not None and measured.get(key)]
    return {key.removesuffix("_bytes"): predicted[key] / measured[key] - 1 for key in known}


def summary_of(rows: list[Row]) -> Row:
    """Return, for each figure, how many errors there are, their median and the worst, and counts."""
    found: Row = {status: sum(row["status"] == status for row in rows) for status in (RAN, FAILED, SKIPPED)}
    for figure in (*FIGURES, "required"):
        errors = {row["name"]: row["errors"][figure] for row in rows if figure in row.get("errors", {})}
        if errors:
            worst = max(errors, key=lambda name: abs(errors[name]))
            found[figure] = {
                "count": len(errors),
                "median": statistics.median(map(abs, errors.values())),
                "worst": errors[worst],
                "worst_configuration": worst,
            }
    return found


def header() -> str:
    """Return the table's two header lines."""
    groups = "".join(f"{figure + ' MiB':>18}{'':>8}" for figure in FIGURES)
    columns = f"{'measured':>9}{'predicted':>10}{'error':>7}" * len(FIGURES)
    return f"{'':<{_NAME}}{groups}\n{'configuration':<{_NAME}}{columns}{'s':>5}"


def line_of(row: Row) -> str:
    """Return a configuration as a line of the table."""
    name = f"{row['name']:<{_NAME}}"
    if row["status"] != RAN:
        return shorten(f"{name}{row['status']}: {row['reason']}", _WIDTH)
    predicted, measured, errors = row["predicted"], row["measured"], row["errors"]
    if "required_bytes" in measured:
        return f"{name}{_cap_line(row)}"
    cells = ""
    for figure in FIGURES:
        key = f"{figure}_bytes"
        error = f"{errors[figure]:+.1%}" if figure in errors else "–"
        cells += f"{_mib(measured.get(key)):>9}{_mib(predicted.get(key)):>10}{error:>7}"
    return f"{name}{cells}{row['seconds']:>5.1f}"


def _cap_line(row: Row) -> str:
    measured = row["measured"]
    failed = measured["failed_bytes"]
    least = "never failed" if failed is None else f"failed at {_mib(failed)}"
    ran = measured["required_bytes"]
    most = "never ran" if ran is None else f"ran at {_mib(ran)}"
    error = f" ({row['errors']['required']:+.1%}{' at least' if ran is None else ''})"
    predicted = _mib(row["predicted"]["required_bytes"])
    return f"MiB required: {predicted} predicted; {most}{error}, {least}; {len(measured['tries'])} tries"


def shorten(text: str, width: int) -> str:
    """Return a line that fits; the JSON file has all of it."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _mib(size_bytes: int | None) -> str:
    return "–" if size_bytes is None else f"{size_bytes / MIB:,.1f}"


def fact_lines(name: str, answer: Row) -> list[str]:
    """Return a fact as lines: what, measured, assumed."""
    if "failed" in answer:
        return [f"{name}: failed: {answer['failed']}"]
    lines = []
    for row in answer["rows"]:
        measured, assumed = row["measured"], row["assumed"]
        text = f"{row['what']:<70}{_value(measured):>12}"
        if assumed is not None:
            text += f"  assumed {_value(assumed)}"
            if measured and assumed and isinstance(measured, int):
                text += f" ({assumed / measured - 1:+.1%})"
            elif measured != assumed:
                text += " (differs)"
        lines.append(text)
    return lines


def _value(value: int | str | None) -> str:
    return value if isinstance(value, str) else format_bytes(value)


def summary_lines(summary: Row) -> list[str]:
    """Return the summary for people."""
    lines = [f"{summary[RAN]} ran, {summary[FAILED]} failed, {summary[SKIPPED]} skipped"]
    for figure in (*FIGURES, "required"):
        if figure in summary:
            found = summary[figure]
            lines.append(
                f"{figure:<10}median |error| {found['median']:.2%}, worst {found['worst']:+.2%}"
                f" ({found['worst_configuration']}), of {found['count']}"
            )
    return lines


def default_path(folder: Path, environment: Row) -> Path:
    """Return where a full measurement is kept: named after the GPU and the version of PyTorch."""
    gpu, version = (
        re.sub(r"[^a-z0-9.]+", "-", environment[key].lower()).strip("-") for key in ("gpu", "torch")
    )
    return folder / f"gpu_check-{gpu}-{version}.json"


def save(path: Path, report: Row) -> None:
    """Write the report as JSON, aside and renamed: an interrupted check keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
