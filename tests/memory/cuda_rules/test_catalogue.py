"""Every rule that the code applies is in the catalogue, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tuner.memory.cuda_rules import CATALOGUE, Rule
from tuner.memory.rules import COMPILED

SOURCES = sorted((ROOT / "tuner" / "memory" / "cuda_rules").glob("*.py"))
# Done by the recorder, by the trace and by the band: no call site names them.
ELSEWHERE = {"gradient accumulation in place", "step counters on the host", "cuDNN convolution workspaces"}


def _names_in(source: Path) -> set[str]:
    """Return rule names in a module: `NAME = "…"`, and `rule="…"` of a call."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "rule":
            assert isinstance(node.value, ast.Constant)
            found.add(node.value.value)
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == [
            "NAME"
        ]:
            assert isinstance(node.value, ast.Constant)
            found.add(node.value.value)
    return found


def test_the_catalogue_names_every_rule_once() -> None:
    applied = set().union(*map(_names_in, SOURCES)) | {COMPILED}
    names = [rule.name for rule in CATALOGUE]
    assert len(applied) >= 12
    assert sorted(names) == sorted(applied | ELSEWHERE)


@pytest.mark.parametrize("rule", CATALOGUE, ids=lambda rule: rule.name)
def test_a_rule_says_its_effect_source_and_limits_in_whole_sentences(rule: Rule) -> None:
    assert all(text == text.strip() and "|" not in text and "\n" not in text for text in rule)
    assert rule.effect.endswith(".")
    assert rule.limits.endswith(".")
    assert any(word in rule.source for word in (".cpp", ".cu", ".h", ".py", ".csv", "torch/optim"))
