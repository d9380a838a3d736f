"""A study of any size, made up, as the app would read it from a real one: for benchmarks/app_scale.py.

Memory grows with width, depth and batch size; accuracy with width and depth, less with a poor learning
rate. A tenth runs out of memory or is pruned; one in a hundred fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy import Connection, insert

from tuner.processes import this_process
from tuner.records import CATEGORIES, Band, Prediction, Verdict
from tuner.store import migrations, schema
from tuner.store.drivers import Drivers
from tuner.store.engine import open_engine, parse_url
from tuner.store.rows import NewStudy
from tuner.store.writer import Writer
from tuner.units import GIB, MIB

BUDGET_BYTES = 4 * GIB
_CONTEXT_BYTES = 450 * MIB
_AT_ONCE = 2_000
_EPOCHS = 3
_START = datetime(2026, 1, 5, 8, tzinfo=UTC)


def fill(url: str, name: str, trials: int, seed: int = 0) -> None:
    """Add a study with so many trials, half as many rejections, and metrics, to a database."""
    engine = open_engine(parse_url(url))
    try:
        migrations.upgrade(engine)
        study_id = Writer(engine).create_study(_study(name))
        driver_id = Drivers(engine).join(study_id, this_process())
        rng = np.random.default_rng(seed)
        for start in range(0, trials, _AT_ONCE):
            numbers = range(start, min(trials, start + _AT_ONCE))
            with engine.begin() as connection:
                rows = [_trial(rng, number, study_id, driver_id) for number in numbers]
                connection.execute(insert(schema.trial), rows)
                _add_metrics(connection, study_id, rows)
                turned_away = [_rejection(rng, number, study_id) for number in numbers if number % 2]
                if turned_away:
                    connection.execute(insert(schema.rejection), turned_away)
    finally:
        engine.dispose()


def _study(name: str) -> NewStudy:
    return NewStudy(
        name=name,
        workload="studies/made_up.py:MadeUp",
        workload_reference="studies/made_up.py:MadeUp",
        workload_digest="0" * 64,
        target="cuda:0",
        device_name="NVIDIA RTX 3090",
        budget_bytes=BUDGET_BYTES,
        metric="accuracy",
        direction="maximize",
        single=False,
        seed=0,
        context_bytes=_CONTEXT_BYTES,
        settings={"budget": {"value": BUDGET_BYTES, "origin": "flag"}},
        tuner_version="0.1.0",
    )


def _params(rng: np.random.Generator) -> dict[str, Any]:
    params = {
        "width": int(2 ** rng.uniform(5, 11)),
        "depth": int(rng.integers(1, 25)),
        "batch_size": int(2 ** rng.integers(3, 10)),
        "learning_rate": float(10 ** rng.uniform(-5, -1)),
        "optimizer": str(rng.choice(["adam", "sgd", "lion"])),
    }
    if params["optimizer"] == "sgd":
        params["momentum"] = float(rng.uniform(0, 0.99))
    return params


def _needed_bytes(params: dict[str, Any]) -> int:
    weights = 12 * params["width"] ** 2 * params["depth"] * (3 if params["optimizer"] == "sgd" else 4)
    return int(_CONTEXT_BYTES + weights + 220 * params["width"] * params["depth"] * params["batch_size"])


def _trial(rng: np.random.Generator, number: int, study_id: int, driver_id: int) -> dict[str, Any]:
    params = _params(rng)
    needed = _needed_bytes(params)
    predicted = int(needed * rng.normal(1, 0.015))
    band = Band(int(predicted * 0.97), predicted, int(predicted * 1.03))
    chance = rng.uniform()
    outcome = "completed" if chance < 0.9 else "pruned_metric" if chance < 0.98 else "error"
    if needed > BUDGET_BYTES:
        outcome = "pruned_memory" if chance < 0.9 else "out_of_memory"
    launched = outcome != "pruned_memory"
    poor = abs(np.log10(params["learning_rate"]) + 3)
    accuracy = 0.5 + 0.09 * np.log2(params["width"]) / 2.2 + 0.004 * params["depth"] - 0.06 * poor
    value = float(min(0.999, accuracy + rng.normal(0, 0.01))) if outcome == "completed" else None
    asked = _START + timedelta(seconds=20 * number)
    started = asked + timedelta(seconds=float(rng.exponential(4)))
    seconds = float(30 + needed / GIB * 6)
    peak = min(needed, BUDGET_BYTES) if launched else None
    mix = "convolutions" if number % 3 == 0 else "plain"
    prediction = Prediction(
        allocated_bytes=predicted - _CONTEXT_BYTES,
        reserved_bytes=predicted - _CONTEXT_BYTES,
        device=band,
        required=band,
        fits_probability=float(needed <= BUDGET_BYTES),
        verdict=Verdict.LAUNCH if needed <= BUDGET_BYTES else Verdict.PRUNE,
        categories={name: predicted // len(CATEGORIES) for name in CATEGORIES},
        assumptions=("made up",),
        mix=mix,
    )
    return {
        "study_id": study_id,
        "driver_id": driver_id,
        "number": number,
        "audit": False,
        "params": params,
        "verdict": prediction.verdict,
        "fits_probability": prediction.fits_probability,
        "predicted_bytes": predicted,
        "predicted_low_bytes": band.low,
        "predicted_high_bytes": band.high,
        "predicted_allocated_bytes": prediction.allocated_bytes,
        "mix": mix,
        "prediction": prediction.to_json(),
        "prediction_seconds": 1.2,
        "device": f"GPU-{number % 2}",
        "reservation_bytes": min(band.high, BUDGET_BYTES) if launched else None,
        "waiting_seconds": (started - asked).total_seconds() if launched else None,
        "outcome": outcome,
        "value": value,
        "peak_bytes": peak,
        "peak_source": "nvml" if launched else None,
        "allocated_bytes": None if peak is None else peak - _CONTEXT_BYTES,
        "reserved_bytes": None if peak is None else peak - _CONTEXT_BYTES,
        "baseline_bytes": _CONTEXT_BYTES if launched else None,
        "phases": {"setup": peak // 3, "train": peak, "eval": peak // 2} if peak is not None else {},
        "metrics": {} if value is None else {"accuracy": value},
        "reason": None if outcome == "completed" else f"{outcome.replace('_', ' ')}, made up",
        "asked_at": asked,
        "started_at": started if launched else None,
        "ended_at": started + timedelta(seconds=seconds) if launched else asked,
        "seconds": seconds if launched else None,
        "environment": {"torch": "2.13.0"},
        "warnings": [],
    }


def _add_metrics(connection: Connection, study_id: int, rows: list[dict[str, Any]]) -> None:
    found = schema.trial.c
    numbers = {row["number"]: row for row in rows if row["value"] is not None}
    ids = connection.execute(
        schema.trial.select()
        .with_only_columns(found.id, found.number)
        .where(found.study_id == study_id, found.number.between(rows[0]["number"], rows[-1]["number"]))
    )
    metrics = [
        row for trial_id, number in ids if number in numbers for row in _curve(trial_id, numbers[number])
    ]
    if metrics:
        connection.execute(insert(schema.metric), metrics)


def _curve(trial_id: int, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for epoch in range(1, _EPOCHS + 1):
        yield {
            "trial_id": trial_id,
            "epoch": epoch,
            "name": "accuracy",
            "value": row["value"] * (0.7 + 0.1 * epoch),
            "seconds": row["seconds"] * epoch / _EPOCHS,
            "peak_bytes": row["peak_bytes"],
        }


def _rejection(rng: np.random.Generator, number: int, study_id: int) -> dict[str, Any]:
    params = _params(rng) | {"width": 2048, "depth": 24, "batch_size": 512}
    return {
        "study_id": study_id,
        "number": number,
        "place": 0,
        "params": params,
        "predicted_bytes": _needed_bytes(params),
        "reason": "predicted not to fit",
    }
