"""Samplers by name: what is refused, and why."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tuner.errors import UsageError
from tuner.search.sampling.samplers import KINDS, build, check_sampler, options_of, typed


@pytest.mark.parametrize(
    ("name", "options", "single", "message"),
    [
        ("tpee", {}, False, "there is no sampler 'tpee'"),
        ("cmaes", {}, False, "knows one objective only"),
        ("memory-aware", {}, True, "trades memory against the metric"),
        ("tpe", {"n_candidates": 3}, False, "has no option 'n_candidates'"),
        ("tpe", {"seed": 3}, False, "has no option 'seed'"),
        ("nsga2", {"population_size": 0}, False, "refuses its options"),
    ],
)
def test_what_cannot_be_used_is_one_sentence_that_names_what_can(
    name: str, options: dict[str, Any], single: bool, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_sampler(name, options, single=single)
    assert message in caught.value.message
    if "no sampler" in message:
        assert all(known in (caught.value.hint or "") for known in KINDS)
    if "no option" in message:
        assert "n_ei_candidates" in (caught.value.hint or "")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package 'cmaes'") as caught:
        check_sampler("cmaes", {}, single=True)
    assert caught.value.hint == "pip install cmaes"


@pytest.mark.parametrize("name", [name for name in KINDS if name != "cmaes"])
def test_each_is_made_with_its_options(name: str) -> None:
    sampler = build(name, {}, seed=1, random_trials=7, parallel=True)
    assert isinstance(sampler, KINDS[name].sampler)  # type: ignore[arg-type]
    assert "seed" not in options_of(name)


def test_a_sampler_is_checked_without_a_word_of_optunas() -> None:
    """In a process of its own, where nothing else has been imported that keeps warnings back."""
    code = "from tuner.search.sampling.samplers import check_sampler; check_sampler('tpe', {}, single=False)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_options_are_typed_as_json_where_they_can_be() -> None:
    assert typed({"a": "48", "b": "true", "c": "sobol", "d": "null"}) == {
        "a": 48, "b": True, "c": "sobol", "d": None,
    }  # fmt: skip
