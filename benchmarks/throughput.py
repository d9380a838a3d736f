"""Trials per minute, packed against one at a time; what the driver costs per trial; its memory.

Packing: the same study through `tuner run`, first one trial at a time, then as many as a pool holds.
One workload waits (a slow loader), with a pool for exactly four trials; one computes, two trials on
two cores, against the better of one at a time with one thread and with two. Meanwhile the resident
bytes of all trials are sampled from /proc. Driver: see driver_overhead.py.

Run as: python benchmarks/throughput.py [--only packing|driver] [--trials 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import driver_overhead
from benchmarks.sampling import resident_bytes, rows_of
from tuner.units import MIB

WAITING = Path(__file__).with_name("waiting.py")
COMPUTING = Path(__file__).with_name("computing.py")
WAITING_TARGET, COMPUTING_TARGET = 3.0, 1.5
_SAMPLE_SECONDS = 0.1


def run_study(workload: Path, trials: int, *flags: str) -> dict[str, Any]:
    """Run one study in an empty folder; return its pace and the most that its trials held together.

    The pace is that from the first launch to the last end: how long the command takes to start is
    the same for every way of running it.

    Raises:
        SystemExit: The command fails.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TUNER_")}
        driver = subprocess.Popen(
            [sys.executable, "-P", "-m", "tuner", "run", str(workload), "--trials", str(trials), *flags],
            cwd=folder,
            env=kept,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        samples = []
        while driver.poll() is None:
            samples.append(resident_bytes(folder))
            time.sleep(_SAMPLE_SECONDS)
        assert driver.stderr is not None
        with driver.stderr:
            said = driver.stderr.read()
        rows = [] if driver.returncode else rows_of(folder, _TRIALS)
    if len(rows) < trials:
        raise SystemExit(f"{workload.name} {' '.join(flags)} failed:\n{said}")
    started = [datetime.fromisoformat(row[0]) for row in rows]
    ended = [datetime.fromisoformat(row[1]) for row in rows]
    return {
        "flags": list(flags),
        "trials": trials,
        "per_minute": 60 * trials / (max(ended) - min(started)).total_seconds(),
        "mean_seconds": sum(row[3] for row in rows) / trials,
        "most_at_once": max(map(len, samples)),
        "most_bytes": max(map(sum, samples)),
        "reservation_bytes": max(row[2] for row in rows),
    }


_TRIALS = (
    "SELECT started_at, ended_at, reservation_bytes, seconds FROM tuner_trial WHERE outcome = 'completed'"
)


def waiting(trials: int) -> dict[str, Any]:
    """Compare one at a time with four at a time on the workload that waits."""
    alone = run_study(WAITING, trials, "--jobs", "1", "--threads", "1")
    pool_bytes = int(4.5 * alone["reservation_bytes"])  # for four, and not for five
    flags = ["--jobs", "8", "--threads", "1", "--pool", str(pool_bytes)]
    packed = run_study(WAITING, trials, *flags, "--budget", "1GiB")
    return _compared([alone], packed, target=WAITING_TARGET, pool_bytes=pool_bytes)


def computing(trials: int) -> dict[str, Any]:
    """Compare one at a time with two at a time, a core each, on the workload that computes."""
    alone = [run_study(COMPUTING, trials, "--jobs", "1", "--threads", threads) for threads in ("1", "2")]
    pool_bytes = int(2.5 * alone[0]["reservation_bytes"])
    pool_bytes = max(pool_bytes, 1 << 30)  # the budget, which the pool must hold
    packed = run_study(COMPUTING, trials, "--jobs", "2", "--threads", "1", "--pool", str(pool_bytes))
    return _compared(alone, packed, target=COMPUTING_TARGET, pool_bytes=pool_bytes)


def _compared(
    alone: list[dict[str, Any]], packed: dict[str, Any], *, target: float, pool_bytes: int
) -> dict[str, Any]:
    ratio = packed["per_minute"] / max(run["per_minute"] for run in alone)
    within = packed["most_bytes"] <= pool_bytes
    return {
        "one_at_a_time": alone,
        "packed": packed,
        "pool_bytes": pool_bytes,
        "ratio": ratio,
        "target": target,
        "met": ratio >= target and within,
        "within_pool": within,
    }


def main() -> None:
    """Print the tables and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["packing", "driver"])
    parser.add_argument("--waiting-trials", type=int, default=16)
    parser.add_argument("--computing-trials", type=int, default=8)
    parser.add_argument("--trials", type=int, default=1000, help="of the study that the driver is timed on")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    if arguments.only != "driver":
        found["waiting"] = waiting(arguments.waiting_trials)
        _print("waits, a pool for four", found["waiting"])
        found["computing"] = computing(arguments.computing_trials)
        _print("computes, two on two cores", found["computing"])
    if arguments.only != "packing":
        found["driver"] = driver_overhead.measure_both(trials=arguments.trials, jobs=1)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


def _print(title: str, found: dict[str, Any]) -> None:
    print(f"\n{title:<34}{'per minute':>11}{'s a trial':>11}{'at once':>9}{'most MiB':>10}")
    for run in [*found["one_at_a_time"], found["packed"]]:
        name = " ".join(run["flags"][:4])
        row = f"{run['per_minute']:>11.2f}{run['mean_seconds']:>11.1f}{run['most_at_once']:>9}"
        print(f"  {name:<32}{row}{run['most_bytes'] / MIB:>10.0f}")
    word = "met" if found["met"] else "MISSED"
    pool = f"{'within' if found['within_pool'] else 'ABOVE'} the pool of {found['pool_bytes'] / MIB:.0f} MiB"
    print(f"  {found['ratio']:.2f} × (target {found['target']} ×: {word}), {pool}")


if __name__ == "__main__":
    main()
