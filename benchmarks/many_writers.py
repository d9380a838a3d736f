"""Many processes write one study at once, while a reader looks at it every second, as the app does.

Each process opens the database, brings it to this version's schema, joins the study on our side and
on Optuna's, and asks, records and tells its trials. Nothing is trained: what is measured is the
database. At the end every trial must be there once, on both sides.

Run as: python benchmarks/many_writers.py [--processes 32] [--trials 20] [--storage URL] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import SchemaError
from tuner.processes import this_process
from tuner.records import EpochMetrics, Outcome, Peaks, TrialResult
from tuner.search.optuna_storage import optuna_storage
from tuner.search.optuna_study import OptunaStudy
from tuner.search.sampling.history import Forecast
from tuner.store import migrations
from tuner.store.drivers import Drivers
from tuner.store.engine import URL, open_engine, parse_url, store_errors
from tuner.store.locks import exclusive
from tuner.store.opening import reading
from tuner.store.patience import patient
from tuner.store.rows import NewStudy
from tuner.store.writer import Writer

if TYPE_CHECKING:
    from multiprocessing.queues import Queue
    from multiprocessing.synchronize import Barrier

NAME = "crowd"
BUDGET_BYTES = 1 << 30
PATIENCE_SECONDS = 120.0
PRELOADED = [
    "benchmarks.many_writers",
    "alembic.command",
    "optuna.samplers",
    "optuna.storages._rdb.models",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
]


def write(storage: str, trials: int, barrier: Barrier, answers: Queue[dict[str, Any]]) -> None:
    """Be one of the processes: open, write `trials` trials, and say how it went."""
    url = parse_url(storage)
    told: list[str] = []
    slowest = 0.0
    barrier.wait()
    start = time.monotonic()
    with store_errors(url):
        engine = open_engine(url)
        patience = functools.partial(
            patient, on_wait=told.append, should_give_up=lambda: False, seconds=PATIENCE_SECONDS
        )
        migrations.upgrade(engine)
        with exclusive(engine, "optuna"):
            optuna = OptunaStudy(
                url,
                NAME,
                maximize=True,
                single=False,
                seed=None,
                budget_bytes=4096,
                parallel=True,
                patience=patience,
            )
        writer, drivers = Writer(engine, patience), Drivers(engine, patience)
        study_id = writer.create_study(new_study())
        driver_id = drivers.join(study_id, this_process())
        opened = time.monotonic() - start
        for index in range(trials):
            before = time.monotonic()
            trial = optuna.ask()
            optuna.rehearse(trial, _suggest, lambda width: Forecast(width, fits=True))
            width = patience(functools.partial(_suggest, trial))
            trial_id = writer.add_trial(study_id, trial.number, {"width": width}, driver_id=driver_id)
            writer.record_result(trial_id, result(index, width))
            optuna.tell(
                trial.number,
                Outcome.COMPLETED,
                value=float(width),
                memory_bytes=width,
                budget_bytes=BUDGET_BYTES,
            )
            slowest = max(slowest, time.monotonic() - before)
        drivers.leave(driver_id, "finished")
        optuna.close()
        engine.dispose()
    answers.put({"opened_seconds": opened, "slowest_seconds": slowest, "told": told})


def _suggest(trial: Any) -> int:
    return int(trial.suggest_int("width", 1, 4096))


def new_study() -> NewStudy:
    """Return the study that all processes create."""
    return NewStudy(
        NAME, "crowd.py:Crowd", "crowd.py:Crowd", "0" * 64, "cpu", None, BUDGET_BYTES, "accuracy",
        "maximize", single=False, seed=None, context_bytes=None, settings={}, tuner_version="0",
    )  # fmt: skip


def result(index: int, width: int) -> TrialResult:
    """Return what a trial is said to have given."""
    epochs = tuple(EpochMetrics(epoch, {"accuracy": float(width)}, epoch * 0.1) for epoch in (1, 2, 3))
    return TrialResult(Outcome.COMPLETED, float(width), {}, epochs, Peaks(width), seconds=float(index))


def read(url: URL, done: threading.Event, seen: dict[str, Any]) -> None:
    """Look at the study every second, as the app does, until it is done."""
    while True:
        last = done.is_set()
        start = time.monotonic()
        try:
            with reading(url) as reader:
                for study in reader.studies():
                    seen["trials"] = len(reader.trials(study.id))
                    reader.front(study.id)
            seen["readings"] += 1
            seen["slowest_seconds"] = max(seen["slowest_seconds"], time.monotonic() - start)
        except SchemaError:
            seen["too_early"] += 1  # nobody has created it yet
        except Exception as error:
            seen["errors"].append(f"{type(error).__name__}: {error}")
        if last:
            return
        done.wait(1)


def count(url: URL) -> dict[str, int]:
    """Return how many trials there are on either side, and how many are not as they should be."""
    with optuna_storage(url) as storage:
        theirs = storage.get_all_trials(storage.get_study_id_from_name(NAME), deepcopy=False)
    with reading(url) as reader:
        study = reader.study(NAME)
        ours = reader.trials(study.id)
        metrics = sum(len(reader.metrics(trial.id)) for trial in ours)
    finished = {trial.number: trial.params for trial in theirs if trial.state.is_finished()}
    return {
        "finished": sum(trial.outcome == "completed" for trial in ours),
        "running": sum(trial.is_running for trial in ours),
        "metrics": metrics,
        "told": len(finished),
        "untold": len(theirs) - len(finished),
        "different": sum(finished.get(trial.number) != trial.params for trial in ours),
    }


def measure(storage: str, processes: int, trials: int) -> dict[str, Any]:
    """Start the processes, wait for them, and return what became of their trials."""
    context = multiprocessing.get_context("forkserver")  # imports once; each process is of its own
    context.set_forkserver_preload(PRELOADED)
    barrier, answers = context.Barrier(processes + 1), context.Queue()
    crowd = [
        context.Process(target=write, args=(storage, trials, barrier, answers)) for _ in range(processes)
    ]
    for process in crowd:
        process.start()
    barrier.wait()
    start = time.monotonic()
    done = threading.Event()
    seen: dict[str, Any] = {"readings": 0, "too_early": 0, "slowest_seconds": 0.0, "errors": []}
    reader = threading.Thread(target=read, args=(parse_url(storage), done, seen))
    reader.start()
    for process in crowd:
        process.join()
    seconds = time.monotonic() - start
    done.set()
    reader.join()
    failed = [process.exitcode for process in crowd if process.exitcode]
    said = [answers.get() for _ in range(processes - len(failed))]
    return {
        "database": parse_url(storage).get_backend_name(),
        "processes": processes,
        "trials_each": trials,
        "cores": os.cpu_count(),
        "failed_processes": len(failed),
        **count(parse_url(storage)),
        "seconds": round(seconds, 2),
        "milliseconds_per_trial": round(seconds * 1000 / max(1, processes * trials), 1),
        "slowest_opening_seconds": round(max((one["opened_seconds"] for one in said), default=0.0), 2),
        "slowest_trial_seconds": round(max((one["slowest_seconds"] for one in said), default=0.0), 2),
        "told_to_the_user": sorted({line for one in said for line in one["told"]}),
        "reader": {**seen, "slowest_seconds": round(seen["slowest_seconds"], 2)},
    }


def main() -> None:
    """Print what became of the trials, and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--storage", help="default: a new SQLite file in a temporary folder")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        storage = arguments.storage or f"sqlite:///{folder}/crowd.db"
        found = measure(storage, arguments.processes, arguments.trials)
    for name, value in found.items():
        print(f"{name:<26}{value}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    whole = arguments.processes * arguments.trials
    complete = found["finished"] == found["told"] == whole and not found["different"]
    sys.exit(0 if complete and not found["failed_processes"] and not found["reader"]["errors"] else 1)


if __name__ == "__main__":
    main()
