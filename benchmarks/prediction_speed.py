"""How long predictions take: a transformer of 124 M parameters, three training and two evaluation steps.

The first prediction of a process imports and warms up; the next ones trace; the same structure again
(another learning rate, named as `memory_free`) comes from the cache.

Run as: python benchmarks/prediction_speed.py [--target rtx-3090] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tuner.memory.predictor import Predictor

WORKLOAD = Path(__file__).with_name("gpt_100m.py")
TRACES, REPEATS = 5, 15


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="rtx-3090")
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
    }
    print(f"{'prediction':<34}{'count':>6}{'median s':>10}{'worst s':>10}")
    for name, values in rows.items():
        print(f"{name:<34}{len(values):>6}{statistics.median(values):>10.4f}{max(values):>10.4f}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "seconds": rows}, indent=2))


if __name__ == "__main__":
    main()
