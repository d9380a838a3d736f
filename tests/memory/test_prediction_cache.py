"""What is not traced twice: keys, the memory_free list and its check, and real predictors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DIGITS
from tuner.errors import WorkloadError
from tuner.memory.prediction import Estimate, estimate
from tuner.memory.prediction_cache import CHECK_EVERY, MOST_ENTRIES, Fingerprint, PredictionCache
from tuner.memory.predictor import Predictor
from tuner.memory.target_rules import rules_for
from tuner.memory.targets import resolve_target
from tuner.memory.trace import trace_workload
from tuner.stand_in import Range, check_memory_free, draw
from tuner.workload import Maximize, Workload, load_workload

SOURCE = """
from torch import nn
import torch
from tuner import Maximize, Workload
from {helper} import WIDTH

class Net(Workload):
    objective = Maximize("accuracy")
    memory_free = ("rate", "hidden")

    def suggest(self, trial):
        return {{
            "batch": trial.suggest_int("batch", 1, 64),
            "rate": trial.suggest_float("rate", 0.0, 1.0),
            "hidden": trial.suggest_int("hidden", 1, 4096),
        }}

    def setup(self, params, device):
        model = nn.Sequential(nn.Linear(WIDTH, params["hidden"]), nn.Linear(params["hidden"], 1))
        return {{"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=params["rate"])}}

    def example_batch(self, params, device):
        if params["batch"] == 13:
            import os
            os._exit(3)
        return torch.empty(params["batch"], WIDTH)

    def train_step(self, state, batch):
        state["optimizer"].zero_grad()
        state["model"](batch).sum().backward()
        state["optimizer"].step()
"""


def estimate_of(size: int, **fields: Any) -> Estimate:
    return Estimate(size, size, size, **fields)


@pytest.fixture
def warnings() -> list[str]:
    return []


@pytest.fixture
def cache(warnings: list[str]) -> PredictionCache:
    cache = PredictionCache("cpu", 2, warnings.append)
    cache.code_is("code", ("rate",))
    return cache


def test_params_that_differ_in_memory_free_ones_alone_share_an_entry(cache: PredictionCache) -> None:
    cache.keep({"width": 1, "rate": 0.1}, estimate_of(5))

    same, other = cache.find({"rate": 0.1, "width": 1}), cache.find({"width": 1, "rate": 0.2})

    assert same is not None
    assert other is not None
    assert (same.exact, same.estimate.notes) == (True, ())
    assert (other.exact, other.estimate.allocated_bytes) == (False, 5)
    assert "rate" in other.estimate.notes[0]
    assert cache.find({"width": 2, "rate": 0.1}) is None
    assert cache.find({"width": 1.0, "rate": 0.1}) is None  # a float may take another way than an int


def test_another_code_finds_nothing_and_an_unknown_one_neither(cache: PredictionCache) -> None:
    cache.keep({"width": 1}, estimate_of(5))
    for fingerprint in ("other", None):
        cache.code_is(fingerprint, ("rate",))
        assert cache.find({"width": 1}) is None
    cache.code_is("code", ("rate",))
    assert cache.find({"width": 1}) is not None


def test_every_twentieth_hit_is_to_be_traced_again(cache: PredictionCache) -> None:
    cache.keep({"width": 1, "rate": 0.1}, estimate_of(5))

    due = [hit.due for i in range(60) if (hit := cache.find({"width": 1, "rate": i})) is not None]

    assert [number for number, is_due in enumerate(due, start=1) if is_due] == [20, 40, 60]


def test_a_mismatch_switches_the_list_off_and_keeps_what_was_traced(
    cache: PredictionCache, warnings: list[str]
) -> None:
    cache.keep({"width": 1, "rate": 0.1}, estimate_of(5))
    cache.keep({"width": 2, "rate": 0.1}, estimate_of(7))
    hit = cache.find({"width": 1, "rate": 0.9})
    assert hit is not None

    checked = cache.check({"width": 1, "rate": 0.9}, hit, estimate_of(6))

    assert checked.allocated_bytes == 6
    assert warnings == [checked.notes[-1]]
    assert "memory_free is wrong: another value of rate takes 6 B instead of 5 B" in warnings[0]
    cache.code_is("code", ("rate",))  # the workload still says so with its next answer
    assert cache.find({"width": 2, "rate": 0.5}) is None
    known = {rate: cache.find({"width": 1, "rate": rate}) for rate in (0.1, 0.9)}
    assert {rate: hit and hit.estimate.allocated_bytes for rate, hit in known.items()} == {0.1: 5, 0.9: 6}
    assert all(hit and warnings[0] in hit.estimate.notes for hit in known.values())
    assert warnings[0] in cache.keep({"width": 3, "rate": 1}, estimate_of(1)).notes


def test_a_match_leaves_the_list_on(cache: PredictionCache, warnings: list[str]) -> None:
    cache.keep({"width": 1, "rate": 0.1}, estimate_of(5))
    hit = cache.find({"width": 1, "rate": 0.9})
    assert hit is not None

    cache.check({"width": 1, "rate": 0.9}, hit, replace(estimate_of(5), seconds=3.0))

    assert warnings == []
    assert cache.find({"width": 1, "rate": 0.5}) is not None


def test_a_configuration_that_takes_another_amount_itself_is_not_blamed_on_the_list(
    cache: PredictionCache, warnings: list[str]
) -> None:
    cache.keep({"width": 1}, estimate_of(5))
    hit = cache.find({"width": 1})
    assert hit is not None
    cache.check({"width": 1}, hit, estimate_of(6))
    assert "the same configuration traced again takes 6 B instead of 5 B" in warnings[0]


def imported(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def modules_restored() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("modules_restored")
def test_a_fingerprint_is_of_the_folders_loaded_modules_and_of_nothing_else(tmp_path: Path) -> None:
    for name in ("study", "beside", "unused", "deep/below", "site-packages/foreign"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("x = 1\n")

    def fingerprint(*loaded: str) -> str:
        study = imported(tmp_path / "study.py", "fp_study")
        for name in loaded:
            imported(tmp_path / f"{name}.py", f"fp_{name.replace('/', '_')}")
        return Fingerprint(study).hexdigest()

    alone = fingerprint()
    assert fingerprint("site-packages/foreign") == alone
    both = fingerprint("beside", "deep/below")
    assert both != alone
    (tmp_path / "unused.py").write_text("x = 2\n")
    assert fingerprint() == both
    for name in ("beside", "deep/below", "study"):
        (tmp_path / f"{name}.py").write_text("x = 2\n")
        changed = fingerprint()
        assert changed != both
        both = changed


@pytest.mark.usefixtures("modules_restored")
def test_a_module_that_is_loaded_later_counts_and_a_package_counts_as_a_whole(tmp_path: Path) -> None:
    package = tmp_path / "fp_package"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__", "models", "inner/__init__", "inner/study"):
        (package / f"{name}.py").write_text("x = 1\n")
    sys.path.insert(0, str(tmp_path))
    try:
        study = importlib.import_module("fp_package.inner.study")
        fingerprint = Fingerprint(study)
        before = fingerprint.hexdigest()
        importlib.import_module("fp_package.models")
    finally:
        sys.path.remove(str(tmp_path))
    assert fingerprint.hexdigest() != before
    assert fingerprint.hexdigest() == Fingerprint(study).hexdigest()


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "cached_helper.py").write_text("WIDTH = 8\n")
    path = tmp_path / "cached_study.py"
    path.write_text(SOURCE.format(helper="cached_helper"))
    return path


def params(batch: int = 4, rate: float = 0.1, hidden: int = 16) -> dict[str, Any]:
    return {"batch": batch, "rate": rate, "hidden": hidden}


def test_the_latest_used_are_kept() -> None:
    cache = PredictionCache("cpu", 1, lambda message: None)
    cache.code_is("code")
    traced = Estimate(1, 1, 1)
    cache.keep(params(batch=-1), traced)
    for batch in range(MOST_ENTRIES):
        cache.keep(params(batch=batch), traced)
        assert cache.find(params(batch=-1)) is not None, "it is used again and again"
    assert cache.find(params(batch=0)) is None
    assert cache.find(params(batch=1)) is not None
    assert len(cache._entries) == MOST_ENTRIES


def test_a_real_predictor_serves_hits_and_finds_a_wrong_list(study: Path, tmp_path: Path) -> None:
    """Hidden is named memory_free, and is not."""
    warnings: list[str] = []
    with Predictor(str(study), "cpu", log=tmp_path / "log.txt", threads=1) as predictor:
        predictor.on_warning = warnings.append
        traced = predictor.estimate(params()).allocated_bytes
        served = [predictor.estimate(params(rate=i / 100)) for i in range(CHECK_EVERY - 1)]
        assert {estimate.allocated_bytes for estimate in served} == {traced}
        checked = predictor.estimate(params(hidden=4096))  # the twentieth hit
        assert checked.allocated_bytes is not None
        assert traced is not None
        assert checked.allocated_bytes > 10 * traced
        assert "memory_free is wrong: another value of hidden, rate" in warnings[0]
        assert warnings[0] in checked.notes
        # And from now on nothing rests on the list.
        sizes = {predictor.estimate(params(hidden=hidden)).allocated_bytes for hidden in (16, 17, 18)}
        assert len(sizes) == 3
    assert len(warnings) == 1


def test_a_crash_costs_one_prediction_and_code_that_changed_since_is_traced_anew(
    study: Path, tmp_path: Path
) -> None:
    with Predictor(str(study), "cpu", log=tmp_path / "log.txt", threads=1) as predictor:
        first = predictor.estimate(params())
        crashed = predictor.estimate(params(batch=13))
        assert crashed.allocated_bytes is None
        assert "ended with code 3" in crashed.notes[0]
        again = predictor.estimate(params())
        assert again.allocated_bytes == first.allocated_bytes
        predictor.estimate(params(batch=13))
        (tmp_path / "cached_helper.py").write_text("WIDTH = 8192\n")
        wider = predictor.estimate(params())
    assert wider.allocated_bytes is not None
    assert first.allocated_bytes is not None
    assert wider.allocated_bytes > 100 * first.allocated_bytes


@pytest.mark.parametrize("file", [DIGITS, DIGITS.with_name("char_gpt.py")], ids=lambda file: file.stem)
def test_what_the_studies_name_as_memory_free_is(file: Path) -> None:
    """Against traces with both ends of each parameter named."""
    workload, target = load_workload(str(file)).workload, resolve_target("a100-40gb")
    drawn = draw(workload, {})
    for name in workload.memory_free:
        asked = drawn.space[name]
        assert isinstance(asked, Range)
        found = [
            estimate(trace_workload(workload, {**drawn.params, name: value}, rules_for(target)), target)
            for value in (asked.low, asked.high)
        ]
        assert found[0] == found[1]


class Space(Workload):
    objective = Maximize("accuracy")

    def suggest(self, trial: Any) -> dict[str, Any]:
        params = {"lr": trial.suggest_float("learning_rate", 0.1, 1.0)}
        if trial.suggest_categorical("kind", ["plain", "deep"]) == "deep":
            for layer in range(trial.suggest_int("layers", 1, 3)):
                params[f"dropout_{layer}"] = trial.suggest_float(f"dropout_{layer}", 0.0, 0.5)
        return params


@pytest.mark.parametrize("names", [(), ("lr",), frozenset({"lr"}), ("lr", "dropout_2")])
def test_names_of_params_are_accepted_on_every_branch(names: Any) -> None:
    check_memory_free(type("Named", (Space,), {"memory_free": names})())


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("learning_rate",), "Named.memory_free names 'learning_rate', which is not one of its params"),
        (("lr", "dropout_3"), "names 'dropout_3'"),
        ("lr", "must be a tuple of names, not 'lr'"),
        ((1,), "must be a tuple of names"),
    ],
)
def test_what_is_no_param_is_refused_with_the_params(names: Any, said: str) -> None:
    with pytest.raises(WorkloadError, match="memory_free") as caught:
        check_memory_free(type("Named", (Space,), {"memory_free": names})())

    assert said in caught.value.message
    if "which is not" in said:
        assert caught.value.hint == "its params: lr, dropout_0, dropout_1, dropout_2"
