"""`tuner predict --explain`: what to change, and what does not matter."""

from __future__ import annotations

import json
from typing import Any

from tests.conftest import ROOT, Tuner

EMBEDDING = ROOT / "tests" / "workloads" / "embedding.py"
# Case D08: a table of 2,000,000 · 512 floats is 3,906.25 MiB; weight, gradient and two moments take
# four times that, and Adam one more for a temporary.
TABLE_BYTES = 2_000_000 * 512 * 4
TOO_LARGE = ("predict", EMBEDDING, "--set", "rows=2000000", "--set", "width=512", "--set", "batch_size=32")
TARGET = ("--target", "a100-40gb", "--budget", "16GiB")


def explained(tuner: Tuner, *arguments: str) -> dict[str, Any]:
    done = tuner(*TOO_LARGE, *arguments, "--explain", "-f", "json")
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def test_the_embeddings_rows_and_width_caused_the_rejection_not_the_batch(tuner: Tuner) -> None:
    found = explained(tuner, *TARGET)

    assert found["verdict"] == "prune"
    assert 4 * TABLE_BYTES <= found["allocated_bytes"] <= 5.05 * TABLE_BYTES
    changes = {change["param"]: change for change in found["single_changes"]}
    assert next(iter(changes)) in ("rows", "width")
    assert {"rows", "width"} <= set(changes)
    assert changes["width"]["after"] == 256
    assert not {"batch_size", "learning_rate"} & set(changes)
    outcast = {change["param"] for change in found["not_enough"]} | set(found["no_effect"])
    assert {"batch_size", "learning_rate"} <= outcast
    for change in found["single_changes"]:
        assert change["verdict"] == "launch"
        assert change["required_bytes"]["expected"] < 16 << 30


def test_a_change_that_is_shown_fits_when_it_is_made(tuner: Tuner) -> None:
    rows = {change["param"]: change for change in explained(tuner, *TARGET)["single_changes"]}["rows"]

    def verdict(count: int) -> str:
        done = tuner(*TOO_LARGE, "--set", f"rows={count}", *TARGET, "-f", "json")
        verdict: str = json.loads(done.stdout)["verdict"]
        return verdict

    assert (verdict(rows["after"]), rows["before"]) == ("launch", 2_000_000)
    assert verdict(rows["after"] + 100_000) != "launch"  # the next value of the space


def test_a_table_of_text_says_the_same_within_80_columns(tuner: Tuner) -> None:
    done = tuner(*TOO_LARGE, *TARGET, "--explain", COLUMNS="80")

    part = done.stdout.partition("what to change: any one of these surely fits the budget\n")[2]
    assert "rows" in part.split("\n\n")[0]
    assert "512 → 256" in part.split("\n\n")[0]
    assert "learning_rate" in part.partition("no effect on memory: ")[2]
    assert max(map(len, part.splitlines())) <= 80


def test_what_surely_fits_or_has_no_budget_needs_no_change(tuner: Tuner) -> None:
    small = explained(tuner, "--set", "rows=100000", *TARGET)
    assert (small["verdict"], small["single_changes"]) == ("launch", None)
    free = explained(tuner, "--target", "cpu")
    assert (free["verdict"], free["single_changes"]) == (None, None)


def test_without_explain_nothing_more_is_predicted(tuner: Tuner) -> None:
    done = tuner(*TOO_LARGE, *TARGET, "-f", "json")
    assert "single_changes" not in json.loads(done.stdout)
