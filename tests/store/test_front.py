"""The view tuner_pareto against a brute force over all pairs, and against Optuna's own front."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import optuna
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import insert

from tuner.store import schema

if TYPE_CHECKING:
    from tests.store.conftest import Store

BUDGET = 100
DIRECTIONS = ["maximize", "minimize"]
LARGEST = sys.float_info.max


@dataclasses.dataclass(frozen=True)
class Point:
    """A trial as far as the front sees it."""

    value: float | None
    peak_bytes: int | None
    outcome: str | None = "completed"


# Few different values, so that ties of either kind, and of both, are common.
POINTS = st.builds(
    Point,
    st.sampled_from([0.0, 5e-324, 0.5, 0.5000000000000001, 1.0, -1.0, 1e308, LARGEST, -LARGEST])
    | st.sampled_from([math.inf, -math.inf, math.nan, None]),
    st.sampled_from([0, 1, 2, 50, 99, BUDGET, BUDGET, BUDGET + 1, 2**62, None]),
    st.sampled_from(["completed"] * 8 + ["error", "out_of_memory", None]),
)
fresh_name = map(str, itertools.count())


def fill(store: Store, points: list[Point], direction: str) -> int:
    """Add a study with a trial for each point, numbered in order, and inserted in another."""
    study_id = store.study(f"front {next(fresh_name)}", direction=direction, budget_bytes=BUDGET)
    fixed = {"study_id": study_id, "audit": False, "params": {}, "asked_at": datetime.now(UTC)}
    rows: list[dict[str, Any]] = [
        {**fixed, "number": n, **dataclasses.asdict(p)} for n, p in enumerate(points)
    ]
    random.Random(0).shuffle(rows)
    if rows:
        with store.engine.begin() as connection:
            connection.execute(insert(schema.trial), rows)
    return study_id


def brute_force(points: list[Point], direction: str, budget_bytes: int = BUDGET) -> list[int]:
    """Return the numbers on the front by its definition: no other point is as good and better once."""
    sign = 1 if direction == "maximize" else -1
    costs = {
        number: (point.peak_bytes, -sign * point.value)
        for number, point in enumerate(points)
        if point.outcome == "completed" and point.value is not None and math.isfinite(point.value)
        if point.peak_bytes is not None and point.peak_bytes <= budget_bytes
    }
    front = [
        number
        for number, (peak, loss) in costs.items()
        if not any(p <= peak and v <= loss and (p, v) != (peak, loss) for p, v in costs.values())
    ]
    return sorted(front, key=lambda number: (costs[number][0], number))


def front_of(store: Store, study_id: int, budget_bytes: int | None = None) -> list[int]:
    return [trial.number for trial in store.reader.front(study_id, budget_bytes)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    points=st.lists(POINTS, max_size=14),
    direction=st.sampled_from(DIRECTIONS),
    budget_bytes=st.sampled_from([0, 1, 49, 50, 99, BUDGET - 1, BUDGET]),
)
def test_the_front_is_the_brute_forces_in_a_stable_order_whatever_other_studies_hold(
    store: Store, points: list[Point], direction: str, budget_bytes: int
) -> None:
    study_id = fill(store, points, direction)
    assert front_of(store, study_id) == brute_force(points, direction)
    assert front_of(store, study_id, budget_bytes) == brute_force(points, direction, budget_bytes)
    assert front_of(store, study_id, 10 * BUDGET) == brute_force(points, direction)  # the study's own holds


def test_the_front_is_optunas_on_the_points_that_are_feasible(store: Store) -> None:
    generator = random.Random(7)
    points = [Point(round(generator.gauss(), 1), generator.randint(1, 130)) for _ in range(150)]
    distribution = optuna.distributions.IntDistribution(0, len(points))
    for direction in DIRECTIONS:
        study = optuna.create_study(directions=[direction, "minimize"])
        for number, point in enumerate(points):
            assert point.peak_bytes is not None
            if point.peak_bytes <= BUDGET:
                trial = optuna.trial.create_trial(
                    params={"number": number},
                    distributions={"number": distribution},
                    values=[point.value, float(point.peak_bytes)],
                )
                study.add_trial(trial)
        theirs = sorted(trial.params["number"] for trial in study.best_trials)
        assert 3 <= len(theirs) < len(points)
        assert sorted(front_of(store, fill(store, points, direction))) == theirs


def test_exact_ties_are_all_kept_by_number_and_ties_of_one_kind_are_not(store: Store) -> None:
    pairs = [(0.5, 9), (0.5, 9), (0.5, 10), (0.4, 9), (0.6, 20), (0.5, 9), (0.6, 20)]
    points = [Point(*pair) for pair in pairs]
    assert front_of(store, fill(store, points, "maximize")) == [0, 1, 5, 4, 6]
    assert front_of(store, fill(store, points, "minimize")) == [3]


def test_a_value_that_is_not_finite_neither_is_on_the_front_nor_hides_others(store: Store) -> None:
    for value, direction in itertools.product([math.inf, -math.inf, math.nan, None], DIRECTIONS):
        points = [Point(value, 1), Point(LARGEST, 5), Point(-LARGEST, 5), Point(value, 5)]
        expected = 1 if direction == "maximize" else 2
        assert front_of(store, fill(store, points, direction)) == [expected], (value, direction)


def test_a_trial_over_the_budget_is_left_out_and_one_at_it_is_not(store: Store) -> None:
    points = [Point(0.9, BUDGET + 1), Point(0.8, BUDGET), Point(0.1, BUDGET // 2), Point(0.95, None)]
    assert front_of(store, fill(store, points, "maximize")) == [2, 1]
    assert store.sql("SELECT number FROM tuner_pareto ORDER BY peak_bytes") == [(2,), (1,)]
