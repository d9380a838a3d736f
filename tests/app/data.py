"""Studies that fill a database for the app, and where each of their trials belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.processes import this_process
from tuner.records import Band, EpochMetrics, Failure, Outcome, Peaks, Prediction, TrialResult, Verdict
from tuner.store import migrations, schema
from tuner.store.drivers import Drivers
from tuner.store.engine import Engine, open_engine, parse_url
from tuner.store.reader import Reader
from tuner.store.rows import NewStudy
from tuner.store.writer import Writer

MIB = 1 << 20
BUDGET_MIB = 1024
HOSTILE = "<img src=x onerror=alert(1)>"
BATCH_SIZES: tuple[Any, ...] = (64, "auto", None, [256, 128])  # None: the param is missing

WITHIN = range(20)
INFINITE = 20
OVER = range(21, 25)
PRUNED = range(25, 32)
OUT_OF_MEMORY = range(32, 36)
ERRORS = range(36, 39)
RUNNING = 39
TRIALS = 40
# By construction: more memory is a better value, except for every third trial, which is worst.
FRONT = [number for number in WITHIN if number % 3 != 2]
COMPLETED = len(WITHIN) + 1 + len(OVER)


def peak_mib(number: int) -> int:
    """The peak that a trial was measured at, in MiB."""
    if number in OVER or number in OUT_OF_MEMORY:
        return BUDGET_MIB + 10 * number
    return 100 + 40 * number if number in WITHIN else 300


def predicted_mib(number: int) -> int:
    """The peak that was predicted for a trial, in MiB; never the measured one."""
    return 2000 + 100 * number if number in PRUNED else peak_mib(number) + 7


def value(number: int) -> float:
    """The value of a completed trial."""
    if number == INFINITE:
        return float("inf")
    return 0.4 if number % 3 == 2 else 0.5 + number / 64


def params(number: int) -> dict[str, Any]:
    """The configuration of a trial; `batch_size` is of several types, or missing."""
    batch_size = BATCH_SIZES[number % len(BATCH_SIZES)]
    chosen = {"optimizer": "adam" if number % 2 else "sgd", "lr": 0.001 * (number + 1), HOSTILE: HOSTILE}
    return chosen if batch_size is None else {**chosen, "batch_size": batch_size}


def new_study(name: str, **changes: Any) -> NewStudy:
    """A study as `tuner run` would create it."""
    values: dict[str, Any] = {
        "name": name,
        "workload": "studies/digits_cnn.py:DigitsCnn",
        "workload_reference": "/somewhere/studies/digits_cnn.py:DigitsCnn",
        "workload_digest": "0" * 64,
        "target": "cpu",
        "device_name": "a processor",
        "budget_bytes": BUDGET_MIB * MIB,
        "metric": "accuracy",
        "direction": "maximize",
        "single": False,
        "seed": 1,
        "context_bytes": None,
        "settings": {},
        "tuner_version": "0.1.0",
    }
    return NewStudy(**{**values, **changes})


def fill(url: str, name: str = "digits", numbers: Any = range(TRIALS), **changes: Any) -> None:
    """Add a study with the trials of these numbers to a database, which is made if it is not there."""
    engine = open_engine(parse_url(url))
    try:
        migrations.upgrade(engine)
        study_id = Writer(engine).create_study(new_study(name, **changes))
        _add(engine, url, study_id, numbers)
    finally:
        engine.dispose()


def grow(url: str, name: str, numbers: Any) -> None:
    """Add trials to a study that is there."""
    engine = open_engine(parse_url(url))
    try:
        _add(engine, url, Reader(engine).study(name).id, numbers)
    finally:
        engine.dispose()


def remove(url: str, name: str) -> None:
    """Delete a study."""
    engine = open_engine(parse_url(url))
    try:
        with engine.begin() as connection:
            connection.execute(schema.study.delete().where(schema.study.c.name == name))
    finally:
        engine.dispose()


def _add(engine: Engine, url: str, study_id: int, numbers: Any) -> None:
    writer = Writer(engine)
    driver_id = Drivers(engine).join(study_id, this_process())
    for number in numbers:
        trial_id = writer.add_trial(study_id, number, params(number), driver_id=driver_id)
        writer.record_prediction(trial_id, prediction(number))
        if number not in PRUNED:
            folder = Path(parse_url(url).database or "").parent / "runs" / str(number)
            writer.record_launch(
                trial_id,
                run_folder=str(folder),
                reservation_bytes=predicted_mib(number) * MIB,
                device="cpu@here",
                waiting_seconds=1.0,
            )
        if number != RUNNING:
            writer.record_result(trial_id, result(number))


def prediction(number: int) -> Prediction:
    """What was predicted for a trial."""
    expected = predicted_mib(number) * MIB
    band = Band(expected - MIB, expected, expected + MIB)
    return Prediction(
        allocated_bytes=expected // 2,
        reserved_bytes=None,
        device=band,
        required=band,
        fits_probability=0.5,
        verdict=Verdict.PRUNE if number in PRUNED else Verdict.LAUNCH,
        categories={"parameters": expected // 2, "activations": expected // 2, "buffers": 0},
        assumptions=("the optimizer is as it says",),
    )


def result(number: int) -> TrialResult:
    """What became of a trial."""
    if number in PRUNED:
        failure = Failure(f"{HOSTILE}: trial {number} would not fit")
        return TrialResult(Outcome.PRUNED_MEMORY, failure=failure)
    peaks = Peaks(device_bytes=peak_mib(number) * MIB, source="VmHWM", phases={"train": 90 * MIB})
    if number in OUT_OF_MEMORY:
        failure = Failure("refused an allocation", phase="train", requested_bytes=64 * MIB)
        return TrialResult(Outcome.OUT_OF_MEMORY, peaks=peaks, failure=failure, seconds=2.0)
    if number in ERRORS:
        failure = Failure("ValueError: no such layer", traceback="Trace of the workload: ValueError")
        return TrialResult(Outcome.ERROR, peaks=peaks, failure=failure, seconds=1.0)
    epochs = tuple(EpochMetrics(epoch, {"accuracy": value(number)}, float(epoch)) for epoch in (1, 2))
    return TrialResult(
        Outcome.COMPLETED,
        value=value(number),
        metrics={"accuracy": value(number)},
        epochs=epochs,
        peaks=peaks,
        seconds=12.5,
        environment={"torch": "2.9"},
        warnings=("the loader was slow",) if number == 0 else (),
    )
