"""`tuner largest`: its answers against `tuner predict`, its refusals, and its end by Ctrl-C."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_bad_input import check_refusal
from tests.conftest import DIGITS, ROOT, TINY, Tuner, clean_environment
from tuner.memory.calibration import Calibration
from tuner.memory.prediction import predict
from tuner.memory.predictor import Predictor
from tuner.memory.targets import resolve_target

EMBEDDING = ROOT / "tests" / "workloads" / "embedding.py"
CUDA = ("--target", "a100-40gb")  # its context is no measurement, so that answers repeat


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    fields: dict[str, Any] = json.loads(done.stdout)
    return fields


def test_the_answer_surely_fits_and_the_next_value_does_not(tuner: Tuner, tmp_path: Path) -> None:
    """Baseline: predictions of the values themselves, of all up to 40 above the answer."""
    arguments = ("--param", "width", "--set", "batch_size=64", *CUDA, "--budget", "1700MiB")
    arguments += ("--max", "20000", "-f", "json")
    found = result(tuner("largest", TINY, *arguments))
    target = resolve_target("a100-40gb")

    with Predictor(str(TINY), target.name, log=tmp_path / "log.txt", threads=1) as predictor:

        def verdict(width: int) -> str | None:
            estimate = predictor.estimate({"width": width, "batch_size": 64, "mode": "fine"})
            prior = Calibration.prior(target.kind)
            return predict(
                estimate, target, prior, context_bytes=None, budget_bytes=found["budget_bytes"]
            ).verdict

        assert found["budget_bytes"] == 1700 << 20
        assert verdict(found["largest"]) == "launch"
        assert not [width for width in range(1, 41) if verdict(found["largest"] + width) == "launch"]
        assert verdict(found["largest_to_try"]) == "try"
        assert verdict(found["largest_to_try"] + 1) == "prune"
    assert found["values"] == 19_993
    assert found["left_bytes"] == found["budget_bytes"] - found["required_bytes"]["expected"] > 0
    predicted = [probe["value"] for probe in found["predicted"]]
    assert predicted == sorted(predicted)
    assert {8, 20_000, found["largest"]} <= set(predicted)


def test_a_batch_beyond_the_training_set_is_said_and_cut(tuner: Tuner) -> None:
    """The digits have 1,437 training images (studies/digits_cnn.py)."""
    arguments = ("--param", "batch_size", "--max", "100000", "--set", "width=16", *CUDA, "--budget", "30GiB")
    found = result(tuner("largest", DIGITS, *arguments, "-f", "json"))

    assert (found["largest"], found["largest_to_try"], found["samples"]) == (1437, 1437, 1437)
    assert found["params"]["batch_size"] == 1437
    assert found["notes"] == ["the training set has 1,437 samples; a larger batch changes nothing"]


def test_a_width_beyond_the_training_set_is_not_cut(tuner: Tuner) -> None:
    """The tiny workload has 128 samples, and a width has nothing to do with them."""
    found = result(tuner("largest", TINY, "--param", "width", *CUDA, "-f", "json"))

    assert (found["largest"], found["samples"], found["notes"]) == (4096, None, [])


def test_over_another_parameter_it_is_a_table(tuner: Tuner) -> None:
    arguments = ("largest", EMBEDDING, "--param", "rows", "--over", "width", *CUDA, "--budget", "16GiB")
    done = tuner(*arguments, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    shown = [
        line.split() for line in done.stdout.splitlines() if line.split()[:1] and line.split()[0].isdigit()
    ]

    rows = list(csv.DictReader(io.StringIO(tuner(*arguments, "-f", "csv").stdout)))

    assert [row["width"] for row in rows] == ["64", "128", "256", "512"]
    assert [line[:2] for line in shown] == [[row["width"], row["largest"]] for row in rows]
    assert [row["largest"] for row in rows[:3]] == ["2000000"] * 3  # the end of the space
    tables = [int(row["width"]) * int(row["largest"]) * 4 for row in rows[3:]]  # bytes
    # Weight, gradient, two moments and a temporary of Adam's: 5 tables, in at most 16 GiB.
    assert all(0.75 * (16 << 30) < 5 * table < 16 << 30 for table in tables)
    for row in rows:
        assert int(row["left_bytes"]) == (16 << 30) - int(row["required_bytes"])


def test_the_values_of_text_can_be_gone_over(tuner: Tuner) -> None:
    arguments = ("--param", "rows", "--over", "optimizer", "--set", "width=512", *CUDA, "--budget", "16GiB")
    rows = result(tuner("largest", EMBEDDING, *arguments, "-f", "json"))["rows"]

    assert [row["optimizer"] for row in rows] == ["adam", "sgd"]
    assert rows[0]["largest"] < rows[1]["largest"] == 2_000_000  # SGD has no moments


def test_where_nothing_fits_the_smallest_prediction_and_the_budget_are_named(tuner: Tuner) -> None:
    done = tuner("largest", TINY, "--param", "width", *CUDA, "--budget", "100MiB")

    check_refusal(done, code=3, said="no width fits the budget of 100.0 MiB; the smallest prediction is 1.4")
    assert "width=8 batch_size=16" in done.stderr


def test_what_cannot_be_traced_at_all_is_said(tuner: Tuner) -> None:
    done = tuner("largest", TINY, "--param", "batch_size", *CUDA, TINY_MODES="raises")

    check_refusal(done, code=1, said="no batch_size can be predicted: cannot be traced: ")


REFUSED: dict[str, tuple[list[str], str]] = {
    "no parameter": ([], "Missing option '--param'"),
    "unknown": (["--param", "nope"], "Tiny has no parameter 'nope'"),
    "unknown over": (["--param", "width", "--over", "nope"], "Tiny has no parameter 'nope'"),
    "text": (["--param", "mode"], "the choices of mode have no order: fine"),
    "set as well": (["--param", "width", "--set", "width=8"], "--set width=8: width is what varies here"),
    "over as well": (
        ["--param", "width", "--over", "width"],
        "--over width is the parameter that is looked for",
    ),
    "no number": (["--param", "width", "--max", "many"], "'many' is not a valid integer"),
    "below the space": (["--param", "width", "--max", "7"], "width is at least 8, so it cannot end at 7"),
    "no size": (["--param", "width", "--budget", "6XB"], "'6XB' is not a size"),
    "no target": (["--param", "width", "--target", "nope"], "there is no target 'nope'"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_bad_input_is_refused_in_one_line(case: str, tuner: Tuner) -> None:
    arguments, said = REFUSED[case]

    check_refusal(tuner("largest", TINY, *arguments), code=2, said=said)


def test_without_a_budget_one_is_asked_for(tuner: Tuner) -> None:
    done = tuner("largest", EMBEDDING, "--param", "rows", "--target", "cpu")

    check_refusal(done, code=2, said="there is no budget to fit into")


def test_a_wrong_memory_free_is_refused_before_anything_is_traced(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.workloads.tiny import Tiny\n"
        'class Mine(Tiny):\n    memory_free = ("rate",)\n'
    )
    for command in (("largest", "--param", "width"), ("predict",), ("run",)):
        done = tuner(command[0], "study.py", *command[1:])
        check_refusal(done, code=2, said="Mine.memory_free names 'rate', which is not one of its params")
        assert "hint: its params: width, batch_size, mode" in done.stderr


def test_ctrl_c_ends_it_with_130(tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(
        f"import pathlib, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.workloads.tiny import Tiny\n"
        "class Mine(Tiny):\n"
        "    def setup(self, params, device):\n"
        '        pathlib.Path("tracing").touch()\n'
        "        return super().setup(params, device)\n"
    )
    # As from a terminal, also where the tests run in the background, with SIGINT ignored.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from tuner.cli.main import main; main()"
    driver = subprocess.Popen(
        [sys.executable, "-P", "-c", code, "largest", "study.py", "--param", "width", *CUDA],
        cwd=tmp_path,
        env=clean_environment(TINY_MODES="slow", TINY_SLEEP="60"),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "tracing").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    driver.send_signal(signal.SIGINT)
    _, said = driver.communicate(timeout=30)
    assert driver.returncode == 130, said
    assert said.strip() == "error: aborted"


def test_a_parameter_that_wrongly_counts_as_memory_free_is_traced_all_the_same(
    tuner: Tuner, tmp_path: Path
) -> None:
    """Against the same workload without the list."""
    answers = []
    for listed in ("()", '("width",)'):
        (tmp_path / "study.py").write_text(
            f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from tests.workloads.tiny import Tiny\n"
            f"class Mine(Tiny):\n    memory_free = {listed}\n"
        )
        done = tuner("largest", "study.py", "--param", "width", *CUDA, "-f", "json")
        answers.append(json.loads(done.stdout)["largest"])
    assert answers[0] == answers[1]
