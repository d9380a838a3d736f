"""Early stopping against training everything: the front that is found, and the epochs that it takes.

Records real learning curves once: a study of 30 trials per workload through `tuner run`, with more
epochs than usual (longer_studies.py), nothing stopped. Then replays the product's own rules on them:
the trials in an order drawn by a seed, one at a time, each stopped where its limits say so. No
learning rate follows a schedule, so that the first epochs of a recorded trial are the whole of a
shorter one: each workload is replayed at several lengths.

What a replay does not see: a sampler that learns from stopped trials, and so draws others.

Counted are epochs, and the hypervolume of the front of finished trials (objective against measured
peak; the reference point is the worst objective and the largest peak of all that finish) as a share of
the hypervolume that the same trials give when none is stopped; moocore computes it.

Run as: python benchmarks/early_stopping.py [--record FOLDER | --studies FOLDER] [--json FILE]
By default the curves in docs/measurements/early_stopping.json are replayed again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moocore

from tuner.search.pruner_options import make_pruner
from tuner.search.pruning import Curve, Pruner, best_so_far, limits_for
from tuner.store.engine import parse_url
from tuner.store.opening import reading

STUDIES = Path(__file__).with_name("longer_studies.py")
RECORDED = Path(__file__).parents[1] / "docs" / "measurements" / "early_stopping.json"
WORKLOADS = {"digits_cnn": ("LongerDigitsCNN", (3, 6, 9)), "char_gpt": ("LongerCharGPT", (2, 3, 4))}
TRIALS = 30
SEEDS = range(10)
EPOCHS_TARGET, FRONT_TARGET = 0.6, 0.99
# The last stops whatever any finished trial beats, to show what there is to save.
PRUNERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("none", {}),
    ("median", {}),
    ("percentile", {}),
    ("asha", {}),
    ("percentile", {"percentile": "0", "startup_trials": "0"}),
)


@dataclass(frozen=True)
class Recorded:
    """One configuration, trained to its end.

    Attributes:
        needs_bytes: Device bytes as predicted before the launch, the median of the band.
        peak_bytes: Device bytes as measured at the end.
        losses: The objective at the end of each epoch, with a sign that makes less better.
    """

    needs_bytes: int
    peak_bytes: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Replayed:
    """One study, replayed: the share of epochs, of hypervolume, and of trials that were stopped."""

    epochs: float
    front: float
    stopped: float


def record(folder: Path, workload: str) -> None:
    """Train a study to its end in a folder, or go on with the one that is there.

    Raises:
        CalledProcessError: The command fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-P", "-m", "tuner", "run", f"{STUDIES}:{WORKLOADS[workload][0]}"]
    command += ["--jobs", "1", "--threads", "1", "--seed", "1", "--trials", str(TRIALS)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TUNER_")}
    subprocess.run([*command, "--keep-checkpoints", "none"], cwd=folder, env=kept, check=True)


def read(folder: Path) -> list[Recorded]:
    """Return the completed trials of the one study in a folder's database."""
    with reading(parse_url(f"sqlite:///{folder}/tuner.db")) as reader:
        study = reader.studies()[0]
        curves = reader.curves(study.id, study.metric)
    sign = -1.0 if study.maximize else 1.0
    return [
        Recorded(curve.predicted_bytes, curve.peak_bytes, tuple(sign * value for value in curve.values))
        for curve in curves
        if curve.outcome == "completed" and curve.predicted_bytes and curve.peak_bytes
    ]


def replay(trials: Sequence[Recorded], pruner: Pruner, epochs: int) -> Replayed:
    """Train trials of so many epochs one after another, in this order, and stop what the rule stops."""
    ended: list[Curve] = []
    finished: list[Recorded] = []
    used = 0
    for trial in trials:
        best = best_so_far(trial.losses[:epochs], maximize=False)
        limits = limits_for(pruner, trial.needs_bytes, ended, maximize=False, by_memory=True)
        came_to = next((e for e in range(1, epochs) if limits.reason_to_stop(e, best[e - 1])), epochs)
        used += came_to
        ended.append(Curve(trial.needs_bytes, best[:came_to], came_to == epochs))
        if came_to == epochs:
            finished.append(trial)
    return Replayed(
        used / (epochs * len(trials)),
        hypervolume(finished, trials, epochs) / hypervolume(trials, trials, epochs),
        1 - len(finished) / len(trials),
    )


def hypervolume(found: Sequence[Recorded], among: Sequence[Recorded], epochs: int) -> float:
    """Return the hypervolume of some trials, with objective and memory scaled to what all of them span."""
    points = {trial: (min(trial.losses[:epochs]), float(trial.peak_bytes)) for trial in among}
    lows, highs = ([pick(axis) for axis in zip(*points.values(), strict=True)] for pick in (min, max))
    scaled = [
        [(value - low) / (high - low) for value, low, high in zip(points[trial], lows, highs, strict=True)]
        for trial in found
    ]
    return float(moocore.hypervolume(scaled, ref=[1.0, 1.0]))


def compare(trials: Sequence[Recorded], name: str, options: dict[str, str], epochs: int) -> dict[str, Any]:
    """Return the medians over the orders of arrival."""
    pruner = make_pruner(name, options)
    orders = [random.Random(seed).sample(list(trials), len(trials)) for seed in SEEDS]
    runs = [replay(order, pruner, epochs) for order in orders]
    shares = {key: [asdict(run)[key] for run in runs] for key in ("epochs", "front", "stopped")}
    return {
        "pruner": " ".join([name, *(f"{key}={value}" for key, value in options.items())]),
        "epochs": epochs,
        **{f"{key}_share": statistics.median(values) for key, values in shares.items()},
        "front_share_least": min(shares["front"]),
        "front_shares": shares["front"],
        "epochs_shares": shares["epochs"],
    }


def all_rows(curves: dict[str, list[Recorded]]) -> list[dict[str, Any]]:
    """Return what each rule comes to on each workload at each length."""
    return [
        {"workload": workload, "configurations": len(trials), **compare(trials, name, options, epochs)}
        for workload, trials in curves.items()
        for epochs in WORKLOADS[workload][1]
        for name, options in PRUNERS
    ]


def known_curves(record_in: Path | None, studies_in: Path | None) -> dict[str, list[Recorded]]:
    """Return the curves of each workload: trained now, read from folders, or as they were kept."""
    folder = record_in or studies_in
    if folder is None:
        kept = json.loads(RECORDED.read_text(encoding="utf-8"))["curves"]
        return {
            name: [Recorded(**{**trial, "losses": tuple(trial["losses"])}) for trial in trials]
            for name, trials in kept.items()
        }
    if record_in is not None:
        for name in WORKLOADS:
            record(record_in / name, name)
    return {name: read(folder / name) for name in WORKLOADS}


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of docs/early-stopping.md; what meets both targets is bold."""
    lines = ["| study | epochs | `--pruner` | of all epochs | of the front | least | stopped |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in rows:
        if row["pruner"] != "none":
            front = f"{row['front_share']:.2%}"
            shown = f"**{front}**" if meets_targets(row) else front
            cells = [
                row["workload"],
                str(row["epochs"]),
                f"`{row['pruner']}`",
                f"{row['epochs_share']:.1%}",
                shown,
            ]
            cells += [f"{row['front_share_least']:.1%}", f"{row['stopped_share']:.0%}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def meets_targets(row: dict[str, Any]) -> bool:
    """Whether the medians of a row are what early stopping is to come to."""
    return bool(row["epochs_share"] <= EPOCHS_TARGET and row["front_share"] >= FRONT_TARGET)


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line per workload, length and rule."""
    print(
        f"{'workload':<11} {'epochs':>6} {'pruner':<24} {'of epochs':>9} {'of front':>9} {'least':>6} stopped"
    )
    for row in rows:
        print(
            f"{row['workload']:<11} {row['epochs']:>6} {row['pruner']:<24} {row['epochs_share']:>9.1%} "
            f"{row['front_share']:>9.2%} {row['front_share_least']:>6.1%} {row['stopped_share']:>7.0%}"
            f"{' *' if meets_targets(row) else ''}"
        )
    print(f"* at most {EPOCHS_TARGET:.0%} of the epochs and at least {FRONT_TARGET:.0%} of the hypervolume")


def main() -> None:
    """Record where asked to, replay, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, help="train studies in this folder, or go on with them")
    parser.add_argument("--studies", type=Path, help="read the studies that were trained in this folder")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of docs/early-stopping.md, too"
    )
    parser.add_argument("--json", type=Path, help="where the result and the curves are written")
    arguments = parser.parse_args()
    curves = known_curves(arguments.record, arguments.studies)
    rows = all_rows(curves)
    print_table(rows)
    if arguments.markdown:
        print(as_markdown(rows))
    if arguments.json is not None:
        kept = {name: [asdict(trial) for trial in trials] for name, trials in curves.items()}
        arguments.json.write_text(json.dumps({"rows": rows, "curves": kept}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
