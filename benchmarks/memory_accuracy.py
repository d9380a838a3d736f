"""How close traces come to real runs on the CPU's own allocator, and how long they take.

Baseline: `torch.profiler`'s memory events over three real steps (every allocation of the CPU
allocator). With `--reference FOLDER`, GPU figures measured by others instead, beside the published
predictions of other estimators for the same rows.

Run as: python benchmarks/memory_accuracy.py [--reference FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.zoo import ZOO, Build
from tuner.memory.cpu_rules import OperatorProbe, cpu_rules
from tuner.memory.prediction import estimate
from tuner.memory.targets import resolve_target
from tuner.memory.trace import trace_build
from tuner.profiling import profiled_peak

STEPS = 3


def real_peak(build: Build) -> int:
    """Return the allocator's true peak over building and three steps, in bytes."""
    torch.manual_seed(0)
    with profiled_peak() as peak:
        step = build(torch.device("cpu"))
        for _ in range(STEPS):
            step()
    return peak.bytes


def traced_peak(build: Build, probe: OperatorProbe) -> int:
    """Return the predicted peak of the same, in bytes."""
    found = estimate(trace_build(build, cpu_rules(probe), STEPS), resolve_target("cpu"))
    assert found.allocated_bytes is not None
    return found.allocated_bytes


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write every row there")
    parser.add_argument("--reference", type=Path, metavar="FOLDER", help="score the figures below it")
    parser.add_argument("--mlp-rows", type=int, default=100, help="rows of mlp_a100.csv to take")
    arguments = parser.parse_args()
    if arguments.reference is not None:
        from benchmarks.reference.report import report

        _write(arguments.json, report(arguments.reference, mlp_rows=arguments.mlp_rows))
        return
    _write(arguments.json, {"rows": _zoo()})


def _write(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"torch": torch.__version__, **found}, indent=2))


def _zoo() -> list[dict[str, Any]]:
    probe = OperatorProbe()
    rows: list[dict[str, Any]] = []
    print(f"{'model':<26}{'real MiB':>10}{'traced MiB':>12}{'error %':>9}{'first s':>9}{'again s':>9}")
    for name, build in ZOO.items():
        row: dict[str, Any] = {"model": name, "real_bytes": real_peak(build)}
        for key in ("first_seconds", "again_seconds"):
            start = time.perf_counter()
            row["traced_bytes"] = traced_peak(build, probe)
            row[key] = time.perf_counter() - start
        row["error"] = row["traced_bytes"] / row["real_bytes"] - 1
        rows.append(row)
        print(
            f"{name:<26}{row['real_bytes'] / 2**20:>10.2f}{row['traced_bytes'] / 2**20:>12.2f}"
            f"{row['error']:>9.3%}{row['first_seconds']:>9.2f}{row['again_seconds']:>9.2f}"
        )
    errors = [abs(row["error"]) for row in rows]
    seconds = statistics.median(row["again_seconds"] for row in rows)
    print(f"median |error| {statistics.median(errors):.3%}, worst {max(errors):.3%}, {seconds:.2f} s a trace")
    return rows


if __name__ == "__main__":
    main()
