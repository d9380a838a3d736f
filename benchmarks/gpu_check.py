"""How close predictions come on the GPU that is here: allocated, reserved and device bytes.

Each configuration is predicted without the GPU and run on it, in child processes of their own: this
process never touches CUDA. Needs PyTorch and nvidia-ml-py alone; takes under five minutes. Without
a GPU the same programs run at a few MiB on the CPU, against the peak that PyTorch's profiler sees.

Run as: python benchmarks/gpu_check.py [--quick] [--only NAME,…] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

if str(ROOT := Path(__file__).resolve().parents[1]) not in sys.path:
    sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from benchmarks.gpu_comparison import Comparison
from benchmarks.gpu_configurations import CONFIGURATIONS
from benchmarks.gpu_facts import FACTS
from benchmarks.gpu_report import (
    FAILED,
    default_path,
    fact_lines,
    header,
    line_of,
    save,
    summary_lines,
    summary_of,
)
from benchmarks.gpu_standby import Standby
from tuner.errors import TunerError, UsageError
from tuner.measure import nvml
from tuner.units import format_bytes, parse_seconds

Row = dict[str, Any]
MEASUREMENTS = ROOT / "docs" / "measurements"
_TIMEOUT_SECONDS = {"cuda": 90.0, "cpu": 300.0}


class Selection(NamedTuple):
    """What is to be checked."""

    configurations: list[str]
    facts: list[str]


def main() -> int:
    """Check what the arguments name; return the exit code: 0 when all of it ran."""
    arguments = _arguments()
    try:
        if arguments.list:
            _print_list()
            return 0
        named = _named(arguments.only)
        return _check(arguments, named)
    except TunerError as error:
        hint = f"; {error.hint}" if error.hint else ""
        print(f"gpu_check: {error.message}{hint}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("gpu_check: interrupted; the JSON file holds what had finished", file=sys.stderr)
        return 130


def _arguments() -> argparse.Namespace:
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="gpu_check", description=lines[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--only", metavar="NAME,…", help="configurations and facts, as --list names them")
    parser.add_argument("--quick", action="store_true", help="about 15 configurations")
    parser.add_argument("--list", action="store_true", help="show the names and end")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="default: docs/measurements/gpu_check-<gpu>-<torch version>.json where all is checked on a GPU",
    )
    parser.add_argument(
        "--snapshots", type=Path, metavar="FOLDER", help="keep PyTorch's memory snapshots (GPU)"
    )
    parser.add_argument("--timeout", metavar="TIME", help="for one child; default 90s on a GPU, 5m on a CPU")
    return parser.parse_args()


def _print_list() -> None:
    for name, configuration in CONFIGURATIONS.items():
        marks = ("quick" if configuration.quick else "", "GPU alone" if configuration.cuda_only else "")
        print(f"{name:<24}{configuration.about}{''.join(f' [{mark}]' for mark in marks if mark)}")
    for name, fact in FACTS.items():
        about = (fact.__doc__ or "").splitlines()[0]
        print(f"{name:<24}{about.rstrip('.')} [GPU fact]")


def _named(only: str | None) -> list[str] | None:
    """Return the names that were asked for.

    Raises:
        UsageError: There is no such configuration or fact.
    """
    if only is None:
        return None
    names = list(dict.fromkeys(name.strip() for name in only.split(",") if name.strip()))
    known = [*CONFIGURATIONS, *FACTS]
    for name in names:
        if name not in known:
            raise UsageError(f"there is no configuration '{name}'", hint=f"known: {', '.join(known)}")
    if not names:
        raise UsageError("--only names nothing", hint=f"known: {', '.join(known)}")
    return names


def _selection(named: list[str] | None, device: str, *, quick: bool) -> Selection:
    """Return what is checked on a device.

    Raises:
        UsageError: A fact was asked for that only a GPU can show.
    """
    if named is None:
        facts = list(FACTS) if device == "cuda" else []
        return Selection([n for n, c in CONFIGURATIONS.items() if c.quick or not quick], facts)
    facts = [name for name in named if name in FACTS]
    if facts and device == "cpu":
        raise UsageError(f"{facts[0]} can be measured on a GPU only")
    if device == "cuda" and "context" not in facts:
        facts.insert(0, "context")  # device bytes are predicted with it
    return Selection([name for name in named if name in CONFIGURATIONS], facts)


def _check(arguments: argparse.Namespace, named: list[str] | None) -> int:
    timeout_seconds = None if arguments.timeout is None else parse_seconds(arguments.timeout)
    driver, variables = _nvml()
    if arguments.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    start = time.perf_counter()
    with Standby(variables) as standby:
        environment = standby.ask("environment", device=arguments.device).answer(_TIMEOUT_SECONDS["cpu"])
        if "failed" in environment:
            raise UsageError(f"PyTorch cannot be used: {environment['failed']}")
        if arguments.device == "cuda" and environment["device"] != "cuda":
            raise UsageError("PyTorch finds no GPU here", hint=driver.problem or "is it a CUDA build?")
        environment |= {"driver": driver.driver, "nvml": driver.problem or "works"}
        device = environment["device"]
        checked = Comparison(
            standby, environment, timeout_seconds or _TIMEOUT_SECONDS[device], snapshots=arguments.snapshots
        )
        selection = _selection(named, device, quick=arguments.quick)
        path = arguments.json
        if path is None and device == "cuda" and named is None and not arguments.quick:
            path = default_path(MEASUREMENTS, environment)
        return _run(checked, selection, path, asked_for=named is not None, start=start)


def _nvml() -> tuple[nvml.Devices, dict[str, str]]:
    """Return what NVML says, and variables that make CUDA and NVML speak of the same GPU."""
    # On a CPU: waiting children do not fight for cores, and freed tensors return to the system.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", "MALLOC_MMAP_THRESHOLD_": "65536"}
    variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    try:
        found = nvml.devices()
    except ImportError:
        return nvml.Devices((), "nvidia-ml-py is not installed"), variables
    if found.found and "CUDA_VISIBLE_DEVICES" not in os.environ:
        variables["CUDA_VISIBLE_DEVICES"] = found.found[0].uuid
    return found, variables


def _run(check: Comparison, selection: Selection, path: Path | None, *, asked_for: bool, start: float) -> int:
    report: Row = {
        "version": 1,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": 0.0,
        "environment": check.environment,
        "facts": {},
        "configurations": [],
        "summary": {},
    }

    def keep() -> None:
        report["seconds"] = round(time.perf_counter() - start, 1)
        report["summary"] = summary_of(report["configurations"])
        if path is not None:
            save(path, report)

    _print_environment(check.environment)
    for name in selection.facts:
        report["facts"][name] = check.fact(name)
        print(*fact_lines(name, report["facts"][name]), sep="\n", flush=True)
        keep()
    if selection.configurations:
        print(header(), flush=True)
    for name in selection.configurations:
        row = check.configuration(name, asked_for=asked_for)
        report["configurations"].append(row)
        print(line_of(row), flush=True)
        keep()
    print(*summary_lines(report["summary"]), f"{report['seconds']:.0f} s", sep="\n")
    print(f"written to {path}" if path is not None else "not kept: --json FILE does")
    failed_facts = any("failed" in answer for answer in report["facts"].values())
    return 1 if report["summary"][FAILED] or failed_facts else 0


def _print_environment(environment: Row) -> None:
    if environment["device"] == "cpu":
        print(f"CPU, torch {environment['torch']}: allocated bytes against PyTorch's profiler")
        return
    capability = ".".join(map(str, environment["compute_capability"]))
    capacity = format_bytes(environment["capacity_bytes"])
    print(f"{environment['gpu']}, compute capability {capability}, {capacity}", end="; ")
    print(*(f"{key} {environment[key] or 'unknown'}" for key in ("torch", "cudnn", "driver")), sep=", ")
    if environment["nvml"] != "works":
        print(f"device bytes cannot be measured: {environment['nvml']}")


if __name__ == "__main__":
    sys.exit(main())
