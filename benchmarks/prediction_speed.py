"""How long predictions take: a transformer of 124 M parameters, three training and two evaluation steps.

The first prediction of a process imports and warms up; the next ones trace; the same structure again
(another learning rate, named as `memory_free`) comes from the cache. Beside them, what a trial's end costs:
an update of the calibration from 2,000 trials; and with --reference, a replay of three real traces of a GPU.

Run as: python benchmarks/prediction_speed.py [--target rtx-3090] [--reference FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tuner.memory.calibration import Calibration, Measured
from tuner.memory.predictor import Predictor
from tuner.memory.replay import replay
from tuner.memory.snapshot_files import read_snapshot
from tuner.units import GIB, MIB

WORKLOAD = Path(__file__).with_name("gpt_100m.py")
TRACES, REPEATS = 5, 15
LARGE_TRACES = ("lm3b-ctx128-step", "medium-ctx128-step", "medium-ctx256-step")


def seconds_of(step: Callable[[], object]) -> list[float]:
    """Return how long each of five calls took."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return found


def updates() -> list[float]:
    """Time an update of the calibration from 2,000 trials."""
    sizes = np.random.default_rng(0).integers(100 * MIB, 20 * GIB, 2000).tolist()
    trials = [Measured(500 * MIB, size, 500 * MIB + size) for size in sizes]
    prior = Calibration.prior("cuda")
    return seconds_of(lambda: prior.updated(trials))


def replays(folder: Path) -> tuple[int, list[float]]:
    """Return the events of three large traces and the times of their replay."""
    histories = [read_snapshot(folder / "allocator" / f"{name}.json.gz")[0] for name in LARGE_TRACES]
    events = sum(len(history.events) for history in histories)
    return events, seconds_of(lambda: [replay(history) for history in histories])


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="rtx-3090")
    parser.add_argument("--reference", type=Path, help="folder with measured traces")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Predictor(str(WORKLOAD), arguments.target, log=Path(folder) / "log", threads=2) as predictor,
    ):

        def seconds(batch_size: int, learning_rate: float) -> float:
            start = time.perf_counter()
            found = predictor.estimate({"batch_size": batch_size, "learning_rate": learning_rate})
            assert found.allocated_bytes is not None, found.notes
            return time.perf_counter() - start

        first = seconds(8, 1e-3)
        traced = [seconds(9 + i, 1e-3) for i in range(TRACES)]
        repeated = [seconds(8, 1e-4 * (i + 1)) for i in range(REPEATS)]
    rows = {
        "first, with start of the child": [first],
        "next, another batch size": traced,
        "same structure again": repeated,
        "calibration, 2,000 trials": updates(),
    }
    if arguments.reference is not None:
        events, seconds_each = replays(arguments.reference)
        rows[f"replay of {events:,} events"] = seconds_each
    print(f"{'prediction':<34}{'count':>6}{'median s':>10}{'worst s':>10}")
    for name, values in rows.items():
        print(f"{name:<34}{len(values):>6}{statistics.median(values):>10.4f}{max(values):>10.4f}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "seconds": rows}, indent=2))


if __name__ == "__main__":
    main()
