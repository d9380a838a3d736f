"""`tuner targets`, and predictions for a GPU that NVML (a stand-in) shows on this machine."""

from __future__ import annotations

import csv
import io
import json
from importlib.metadata import version
from socket import gethostname
from typing import TYPE_CHECKING

import pytest

from tests.conftest import TINY, Tuner, rtx_3060
from tuner.measure.contexts import ContextKey, ContextStore, MeasuredContext
from tuner.memory.targets import profile_names, resolve_target
from tuner.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

UUID = "GPU-5741d1c0-0000-0000-0000-000000000001"
NOWHERE = {"LD_LIBRARY_PATH": "/nonexistent"}


def test_the_table_lists_every_gpu_within_80_columns(tuner: Tuner) -> None:
    done = tuner("targets", COLUMNS="80")

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    listed = [line.split()[0] for line in lines[2:]]
    assert [name for name in listed if not name.startswith(("cuda:", "*"))] == profile_names()
    (l40s,) = (line for line in lines if line.startswith("l40s "))
    assert l40s.split() == ["l40s", "L40S", "44.42", "GiB", "8.9", "not", "measured"]
    assert "1445 ± 60 MiB" in done.stdout


def test_json_and_csv_hold_all_that_is_known(tuner: Tuner) -> None:
    rows = {row["target"]: row for row in json.loads(tuner("targets", "-f", "json").stdout)}

    target = resolve_target("h100")
    row = rows["h100-80gb"]
    assert row["capacity_bytes"] == target.capacity_bytes
    assert (row["compute_capability"], row["cublas_workspace_bytes"]) == ("9.0", 32 * MIB)
    assert (row["context_bytes"], row["context_range_bytes"]) == (None, [256 * MIB, 636 * MIB])
    assert "vllm" in row["capacity_source"]
    assert rows["a100-40gb"]["context_bytes"] == 1445 * MIB
    in_csv = list(csv.DictReader(io.StringIO(tuner("targets", "-f", "csv").stdout)))
    assert [r["target"] for r in in_csv] == list(rows)
    assert in_csv[0].keys() == row.keys()


def test_sources_are_shown_when_asked_for(tuner: Tuner) -> None:
    done = tuner("targets", "--sources", COLUMNS="80")

    assert max(map(len, done.stdout.splitlines())) <= 80
    text = " ".join(done.stdout.split())
    for name in profile_names():
        target = resolve_target(name)
        assert target.capacity_source in text
        assert target.context_source.removeprefix("not measured; ") in text


def test_a_gpu_of_this_machine_comes_first_and_is_marked(nvml_library: str, tuner: Tuner) -> None:
    done = tuner("targets", COLUMNS="80", **rtx_3060(nvml_library))

    lines = done.stdout.splitlines()
    assert lines[2].startswith("cuda:0 * ")
    assert [line.split()[0] for line in lines if " * " in line] == ["cuda:0", "rtx-3060"]
    assert lines[-1] == "* on this machine"
    rows = json.loads(tuner("targets", "-f", "json", **rtx_3060(nvml_library)).stdout)
    assert rows[0]["target"] == "cuda:0"
    assert rows[0]["capacity_bytes"] == 12_622_168_064  # PyTorch's, not nvidia-smi's 12,288 MiB


def predicted(tuner: Tuner, target: str, **environment: str) -> dict[str, dict[str, int]]:
    done = tuner("predict", TINY, "--target", target, "-f", "json", **environment)
    assert done.returncode == 0, done.stderr
    prediction: dict[str, dict[str, int]] = json.loads(done.stdout)
    return prediction


def test_a_prediction_for_cuda_uses_the_card_that_is_there(
    nvml_library: str, tuner: Tuner, tmp_path: Path
) -> None:
    """Without it: the generic profile. An unknown Hopper card: its workspaces all the same."""
    state = {"TUNER_STATE_DIR": str(tmp_path / "state")}
    hopper = {**rtx_3060(nvml_library), **state, "NVML_STAND_IN_CAPABILITY": "90"}
    hopper["NVML_STAND_IN_NAME"] = "NVIDIA GH200 480GB"

    known = predicted(tuner, "cuda:0", **rtx_3060(nvml_library), **state)
    unknown = predicted(tuner, "cuda:0", **hopper)
    named = predicted(tuner, "3060", **state)

    assert known["target"] == "cuda:0"
    assert known["device_bytes"] == named["device_bytes"]
    grown = unknown["allocated_bytes"] - known["allocated_bytes"]  # type: ignore[operator]
    assert grown == 2 * (32 * MIB - 8_519_680)


@pytest.mark.parametrize("present", [True, False])
def test_the_context_measured_on_this_host_is_used(
    present: bool, nvml_library: str, tuner: Tuner, tmp_path: Path
) -> None:
    state = {"TUNER_STATE_DIR": str(tmp_path / "state")}
    # The stand-in's driver; another, and the figure does not hold.
    driver = "570.195.03" if present else "535.1"
    key = ContextKey(gethostname(), UUID, driver, version("torch"))
    ContextStore(tmp_path / "state").put(
        key, MeasuredContext(321 * MIB, 12_622_168_064, "nvml, this process + torch.cuda reserved")
    )

    prediction = predicted(tuner, "cuda", **rtx_3060(nvml_library), **state)

    assert (prediction["categories"]["context"] == 321 * MIB) == present
    said = " ".join(prediction["assumptions"])
    assert ("measured on this host" in said) == present
    assert ("not measured" in said) != present
