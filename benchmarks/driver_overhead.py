"""What the driver itself costs per trial, and whether its memory grows.

Trials end at once and predictions are functions, so that what is left is the loop, Optuna and the
database. One study of `--trials` trials per database; "at N" is the mean over the last tenth of the
first N trials. `trace` and `predict` are listed apart: they are not the driver's.

Run as: python benchmarks/driver_overhead.py [--trials 1000] [--jobs 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.postgresql import Server
from tests.search.stand_ins import FunctionLauncher, FunctionPredictor, FunctionTrial, Watcher, session_on
from tuner.execution.run_folder import Request, RunFolder
from tuner.processes import process_memory
from tuner.records import Outcome, Peaks, TrialResult
from tuner.scheduling.ledger import Ledger
from tuner.search.calibrations import Calibrations
from tuner.search.events import Ended, Goal, Stopper
from tuner.search.loop import StudyLoop
from tuner.search.optuna_study import OptunaStudy
from tuner.store.reservations import Reservations
from tuner.store.slots import Slots
from tuner.store.writer import Writer
from tuner.units import MIB
from tuner.workload import Maximize, Workload

TARGET_SECONDS = 0.1  # per trial at 1,000 trials
FLAT_BYTES = 16 * 1024  # per trial: Optuna keeps every trial of a study in memory
EVERY = 20  # trials between two looks at the memory
LEAST_TRIALS = 100  # in the second half, for its slope to say something
_CONTEXT = 400 * MIB


class Space(Workload):
    """Four params, as a small study has."""

    objective = Maximize("score")

    def suggest(self, trial: Any) -> dict[str, Any]:
        """Draw two numbers on a logarithmic scale, an integer and a choice."""
        return {
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-1, log=True),
            "width": trial.suggest_int("width", 8, 512, log=True),
            "layers": trial.suggest_int("layers", 1, 8),
            "optimizer": trial.suggest_categorical("optimizer", ["sgd", "adam", "adamw"]),
        }


def allocated(params: dict[str, Any]) -> int:
    """Return the bytes above the context: at most 512 MiB, so that all fit."""
    return int(params["width"] * params["layers"] * MIB / 8)


def trained(params: dict[str, Any]) -> TrialResult:
    """Return a result that lets small models lose a little."""
    size = allocated(params)
    score = (size / MIB) ** 0.5 - abs(params["learning_rate"] - 1e-3) * 100
    return TrialResult(
        Outcome.COMPLETED,
        value=score,
        metrics={"score": score},
        peaks=Peaks(_CONTEXT + size, "VmHWM", size),
        seconds=0.0,
    )


class _Trial(FunctionTrial):
    pid = 1 << 22  # no process: pids end below


class _Launcher(FunctionLauncher):
    def start(self, folder: RunFolder, request: Request) -> FunctionTrial:
        return _Trial(self._result(request.params))


class _Samples(Watcher):
    """Notes, at each end of a trial, the time and what each part has taken so far."""

    def __init__(self, parts: dict[str, float]) -> None:
        super().__init__()
        self._parts = parts
        self.moments = [(time.perf_counter(), time.process_time(), dict(parts))]
        self.resident_bytes: list[tuple[int, int]] = []

    def ended(self, trial: Ended) -> None:
        self.moments.append((time.perf_counter(), time.process_time(), dict(self._parts)))
        count = len(self.moments) - 1
        memory = process_memory() if count % EVERY == 0 else None
        if memory is not None:
            self.resident_bytes.append((count, memory.resident_bytes))


# The part that each call belongs to; a call within another one counts for the outer part alone.
PARTS: list[tuple[Any, str, str]] = [
    (Slots, "claim", "claim"),
    (OptunaStudy, "ask", "ask"),
    (OptunaStudy, "rehearse", "rehearse"),
    (Writer, "add_trial", "add"),
    (FunctionPredictor, "estimate", "trace"),
    (Calibrations, "predict", "predict"),
    (Writer, "record_prediction", "record"),
    (Reservations, "decide", "reserve"),
    (RunFolder, "create", "folder"),
    (Writer, "record_launch", "record"),
    (Reservations, "runs_as", "record"),
    (RunFolder, "write_result", "folder"),
    (Writer, "record_result", "record"),
    (OptunaStudy, "tell", "tell"),
]
APART = ("trace", "predict")


@contextmanager
def timed(parts: dict[str, float]) -> Iterator[None]:
    """Add up the seconds of every call to its part while the body runs."""
    with ExitStack() as undo:
        for owner, name, part in PARTS:
            found = vars(owner)[name]
            undo.callback(setattr, owner, name, found)
            if isinstance(found, classmethod):
                setattr(owner, name, classmethod(_timed(found.__func__, part, parts)))
            else:
                setattr(owner, name, _timed(found, part, parts))
        yield


def _timed(original: Callable[..., Any], part: str, parts: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            parts[part] += time.perf_counter() - start

    return run


def measure(url: str, folder: Path, *, trials: int, jobs: int) -> dict[str, Any]:
    """Run one study; return seconds per trial, whole and by part, and the driver's memory."""
    parts: dict[str, float] = defaultdict(float)
    samples = _Samples(parts)
    with (
        session_on(url, folder, allocated=allocated, workload=Space(), jobs=jobs) as session,
        timed(parts),
    ):
        ledger = Ledger(session.reservations, session.plan.places)
        samples.moments = [(time.perf_counter(), time.process_time(), dict(parts))]
        StudyLoop(
            session, _Launcher(trained), ledger, observer=samples, goal=Goal(trials), stopper=Stopper()
        ).run()
    counts = sorted({count for count in (10, 100, 1000) if count < trials} | {trials})
    return {
        "trials": trials,
        "jobs": jobs,
        "at": {str(count): _at(samples.moments, count) for count in counts},
        "resident": _slope(samples.resident_bytes),
    }


def _at(moments: list[tuple[float, float, dict[str, float]]], count: int) -> dict[str, Any]:
    """Return the mean seconds per trial over the last tenth of the first `count` trials."""
    over = max(count // 10, min(count, 5))
    first, last = moments[count - over], moments[count]
    parts = {name: (last[2][name] - first[2].get(name, 0.0)) / over for name in last[2]}
    apart = sum(parts.get(name, 0.0) for name in APART)
    whole = (last[0] - first[0]) / over
    return {
        "seconds": whole - apart,
        "cpu_seconds": (last[1] - first[1]) / over,
        # Traces and predictions are made within the rehearsal.
        "parts": {**parts, "other": whole - sum(parts.values()) + apart},
    }


def _slope(resident: list[tuple[int, int]]) -> dict[str, Any]:
    """Return how the driver's resident bytes go on over the second half of the study."""
    later = resident[len(resident) // 2 :]
    judged = len(later) * EVERY >= LEAST_TRIALS
    slope = statistics.linear_regression(*zip(*later, strict=True)).slope if judged else None
    return {"samples": resident, "slope_bytes_per_trial": slope}


def measure_both(*, trials: int, jobs: int) -> dict[str, Any]:
    """Run a study on SQLite and one on PostgreSQL; print and return what was measured."""
    found = {}
    with tempfile.TemporaryDirectory() as name, Server() as server:
        for kind in ("sqlite", "postgresql"):
            folder = Path(name) / kind
            folder.mkdir()
            url = f"sqlite:///{folder}/tuner.db" if kind == "sqlite" else server.url
            found[kind] = measure(url, folder, trials=trials, jobs=jobs)
            _print(kind, found[kind])
    return found


def main() -> None:
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = measure_both(trials=arguments.trials, jobs=arguments.jobs)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2))


def _print(kind: str, found: dict[str, Any]) -> None:
    names = [name for name in dict.fromkeys(part for _, _, part in PARTS) if name not in APART]
    names += ["other", *APART]
    print(f"\n{kind}: ms per trial" + "".join(f"{'at ' + count:>10}" for count in found["at"]))
    for label, value in (("driver", "seconds"), ("its CPU time", "cpu_seconds")):
        print(f"  {label:<{len(kind) + 12}}" + _row(at[value] for at in found["at"].values()))
    for name in names:
        label = f"({name})" if name in APART else f"  {name}"
        values = (at["parts"].get(name, 0.0) for at in found["at"].values())
        print(f"  {label:<{len(kind) + 12}}" + _row(values))
    last = list(found["at"].values())[-1]["seconds"]
    slope = found["resident"]["slope_bytes_per_trial"]
    print(f"  target {1000 * TARGET_SECONDS:.0f} ms: {'met' if last < TARGET_SECONDS else 'MISSED'}")
    if slope is not None:
        flat = "flat" if slope < FLAT_BYTES else "GROWS"
        print(f"  resident bytes: {slope / 1024:+.1f} KiB per trial over the second half ({flat})")


def _row(values: Iterator[float] | Any) -> str:
    return "".join(f"{1000 * value:>10.1f}" for value in values)


if __name__ == "__main__":
    main()
