"""Which single change makes a configuration fit, against all values of each parameter."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.test_capacity import prediction
from tuner.memory.parameter_values import grid
from tuner.memory.single_changes import SingleChanges, single_changes
from tuner.records import Prediction
from tuner.stand_in import draw
from tuner.workload import Maximize, Workload

FACTOR = {"adam": 4, "sgd": 2, "none": 1}


class Product(Workload):
    """Needs width · depth · batch · factor of the optimizer, whatever the rest."""

    objective = Maximize("accuracy")
    memory_free = ("rate",)

    def suggest(self, trial: Any) -> dict[str, Any]:
        return {
            "width": trial.suggest_int("width", 10, 200),
            "depth": trial.suggest_int("depth", 1, 6),
            "batch": trial.suggest_categorical("batch", [64, 8, 16, 32]),
            "optimizer": trial.suggest_categorical("optimizer", list(FACTOR)),
            "scale": trial.suggest_float("scale", 0.5, 4.0),
            "seed": trial.suggest_int("seed", 0, 1000),
            "rate": trial.suggest_float("rate", 1e-4, 1e-1, log=True),
        }


def size_of(params: dict[str, Any]) -> int:
    whole: int = params["width"] * params["depth"] * params["batch"] * FACTOR[params["optimizer"]]
    return round(whole * params["scale"])


def changes_for(params: dict[str, Any], budget: int) -> SingleChanges:
    def predict(params: dict[str, Any]) -> Prediction:
        return prediction(size_of(params), budget)

    return single_changes(Product(), draw(Product(), {}, params), predict)


PARAMS = st.fixed_dictionaries(
    {
        "width": st.integers(10, 200),
        "depth": st.integers(1, 6),
        "batch": st.sampled_from([8, 16, 32, 64]),
        "optimizer": st.sampled_from(list(FACTOR)),
    }
)


@settings(deadline=None)
@given(PARAMS, st.floats(0.001, 0.99))
def test_each_change_is_the_nearest_that_fits_of_all_values(params: dict[str, Any], share: float) -> None:
    drawn = draw(Product(), {}, params)
    budget = max(1, int(size_of(drawn.params) * share))

    found = changes_for(params, budget)

    changed = {change.param: change.after for change in found.changes}
    for name in ("width", "depth", "batch", "scale"):
        fitting = [v for v in grid(drawn.space[name]) if size_of({**drawn.params, name: v}) <= budget]
        assert changed.get(name) == max(fitting, default=None), name
    assert all(size_of({**drawn.params, c.param: c.after}) <= budget for c in found.changes)
    cheaper = [o for o in FACTOR if size_of({**drawn.params, "optimizer": o}) <= budget]
    assert changed.get("optimizer") in (cheaper or [None])
    assert found.no_effect == ("seed", "rate")
    shares = [change.share for change in found.changes if change.share is not None]
    assert shares == sorted(shares)


def test_what_is_not_enough_alone_shows_its_best() -> None:
    """10 · 2 · 8 · 4 · 4 = 2560; at best 1280, 640 and 320, and width and batch are at their least."""
    found = changes_for({"width": 10, "depth": 2, "batch": 8, "optimizer": "adam", "scale": 4.0}, 300)

    assert found.changes == ()
    best = {change.param: (change.after, change.prediction.allocated_bytes) for change in found.not_enough}
    assert best == {"depth": (1, 1280), "optimizer": ("none", 640), "scale": (0.5, 320)}


def test_a_value_outside_the_space_is_brought_back_into_it() -> None:
    found = changes_for({"width": 5000, "depth": 1, "batch": 8, "optimizer": "none", "scale": 1.0}, 1000)

    assert [(c.param, c.before, c.after, c.share) for c in found.changes] == [("width", 5000, 125, 0.975)]


def test_a_larger_value_that_needs_less_is_found_too() -> None:
    def predict(params: dict[str, Any]) -> Prediction:
        return prediction(10_000 // params["width"], 60)  # as of a stride, or of shards

    drawn = draw(Product(), {}, {"width": 100})
    found = single_changes(Product(), drawn, predict)

    assert [(c.param, c.after) for c in found.changes] == [("width", 164)]
