"""`tuner doctor`: each thing that is wrong has its own line, and the exit code says whether it matters."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from tests.conftest import TINY, Tuner, rtx_3060
from tuner.cli import checks
from tuner.cli.checks import Status
from tuner.measure import nvml
from tuner.measure.contexts import ContextStore, MeasuredContext, MeasurementError
from tuner.units import GIB, MIB

DEVICE = nvml.Device(0, "GPU-1", "NVIDIA GeForce RTX 3060", 12 * GIB, 11 * GIB, (8, 6))
MEASURED = MeasuredContext(300 * MIB, 12_622_168_064, "nvml, this process + torch.cuda reserved")
no_cuda = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch has CUDA")
no_card = pytest.mark.skipif(checks.gpus_on_the_bus() > 0, reason="there is a GPU here")


class FakeProbe:
    """Answers what it is told to, and counts how often it was asked."""

    def __init__(self, answer: MeasuredContext | MeasurementError) -> None:
        self.answer, self.asked = answer, 0

    def measure(self, device: nvml.Device) -> MeasuredContext:
        self.asked += 1
        if isinstance(self.answer, MeasurementError):
            raise self.answer
        return self.answer


@pytest.fixture
def without_library(tmp_path: Path) -> dict[str, str]:
    """A host without NVML, wherever the test runs: the file found first is no library."""
    folder = tmp_path / "no-nvml"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_bytes(b"")
    return {"LD_LIBRARY_PATH": str(folder), "TUNER_STATE_DIR": str(tmp_path / "state")}


def report(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.stderr == ""
    parsed = json.loads(done.stdout)
    assert parsed["ok"] == (done.returncode == 0)
    return {check["name"]: check for check in parsed["checks"]}


@no_card
def test_a_cpu_host_is_well(tuner: Tuner, without_library: dict[str, str], tmp_path: Path) -> None:
    done = tuner("doctor", COLUMNS="80", **without_library)

    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert f"PyTorch {torch.__version__} on Python" in " ".join(done.stdout.split())
    assert "no NVIDIA driver is installed" in " ".join(done.stdout.split())
    assert "no failures" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"no-nvml"}  # nothing is made


@no_card
def test_json_and_csv_hold_the_same_checks(tuner: Tuner, without_library: dict[str, str]) -> None:
    checked = report(tuner("doctor", "-f", "json", **without_library))

    assert list(checked) == ["torch", "nvidia-ml-py", "driver", "host memory", "disk", "database"]
    assert checked["torch"]["facts"]["torch"] == torch.__version__
    assert checked["host memory"]["facts"]["total_bytes"] > checked["host memory"]["facts"]["available_bytes"]
    stat = os.statvfs("/tmp")
    assert checked["disk"]["facts"]["free_bytes"] == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.05)
    rows = list(csv.DictReader(io.StringIO(tuner("doctor", "-f", "csv", **without_library).stdout)))
    assert [row["name"] for row in rows] == list(checked)


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "of different versions", "reboot"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission", "MIG"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "fallen off the bus", "reboot"),
    ],
)
def test_a_driver_that_cannot_be_used_is_a_failure(
    code: int, said: str, hint: str, nvml_library: str, tuner: Tuner, tmp_path: Path
) -> None:
    """Case D41: predictions still work, the doctor's exit code says that the GPU does not."""
    environment = {**rtx_3060(nvml_library), "NVML_STAND_IN_INIT": str(code)}

    done = tuner("doctor", "-f", "json", TUNER_STATE_DIR=str(tmp_path / "state"), **environment)

    driver = report(done)["driver"]
    assert (done.returncode, driver["status"]) == (1, "failure")
    assert said in driver["message"]
    assert hint in driver["hint"]
    assert tuner("predict", TINY, **environment).returncode == 0


@no_card
def test_a_library_without_driver_and_card_is_a_cpu_host(nvml_library: str, tuner: Tuner) -> None:
    """As in a container image that was built for GPUs."""
    environment = {**rtx_3060(nvml_library), "NVML_STAND_IN_INIT": str(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)}

    done = tuner("doctor", "-f", "json", **environment)

    assert done.returncode == 0
    assert "the NVIDIA driver is not loaded" in report(done)["driver"]["message"]


@no_cuda
def test_a_gpu_that_this_pytorch_cannot_use_is_a_failure(
    nvml_library: str, tuner: Tuner, tmp_path: Path
) -> None:
    environment = {**rtx_3060(nvml_library), "NVML_STAND_IN_PROCESSES": f"7:{600 * MIB} 8:?"}

    done = tuner("doctor", "-f", "json", TUNER_STATE_DIR=str(tmp_path / "state"), **environment)

    checked = report(done)
    assert done.returncode == 1
    assert checked["driver"]["message"] == "NVIDIA driver 570.195.03"
    assert checked["torch"]["status"] == "failure"
    assert "pytorch.org" in checked["torch"]["hint"]
    gpu = checked["cuda:0"]
    assert gpu["message"] == (
        "NVIDIA GeForce RTX 3060: 1.00 GiB of 12.00 GiB used, 2 other processes with 600.0 MiB"
    )
    assert gpu["facts"]["profile"] == "rtx-3060"
    assert "cuda:0 context" not in checked  # nothing to measure with
    assert not (tmp_path / "state").exists()


@no_cuda
def test_the_slice_of_a_gpu_is_shown_and_not_the_gpu(nvml_library: str, tuner: Tuner) -> None:
    """Case D39: the GPU itself may not be asked."""
    environment = {
        **rtx_3060(nvml_library),
        "NVML_STAND_IN_MEMORY": str(pynvml.NVML_ERROR_NO_PERMISSION),
        "NVML_STAND_IN_SLICES": f"MIG-1:{4864 * MIB}:{4 * MIB}",
        "CUDA_VISIBLE_DEVICES": "MIG-1",
    }
    gpu = report(tuner("doctor", "-f", "json", **environment))["cuda:0"]["facts"]
    assert (gpu["uuid"], gpu["total_bytes"], gpu["used_bytes"]) == ("MIG-1", 4864 * MIB, 4 * MIB)


@pytest.mark.parametrize(("visible", "code", "status"), [("", 0, "ok"), ("-1", 0, "ok"), ("7", 1, "failure")])
def test_a_hidden_gpu_is_well_and_one_that_is_not_there_is_not(
    visible: str, code: int, status: str, nvml_library: str, tuner: Tuner
) -> None:
    done = tuner("doctor", "-f", "json", CUDA_VISIBLE_DEVICES=visible, **rtx_3060(nvml_library))

    driver = report(done)["driver"]
    assert (done.returncode, driver["status"]) == (code, status)
    assert "CUDA_VISIBLE_DEVICES" in driver["message"]


def test_a_card_without_a_driver_is_a_failure(tmp_path: Path) -> None:
    for slot, vendor, kind in (
        ("0", "0x10de", "0x030000"),
        ("1", "0x10de", "0x040300"),
        ("2", "0x8086", "0x030000"),
    ):
        (tmp_path / slot).mkdir()
        (tmp_path / slot / "vendor").write_text(f"{vendor}\n")
        (tmp_path / slot / "class").write_text(f"{kind}\n")
    (tmp_path / "3").mkdir()
    on_the_bus = checks.gpus_on_the_bus(tmp_path)  # a card, its sound device, another maker's, and nothing

    assert on_the_bus == 1
    assert checks.gpus_on_the_bus(tmp_path / "nowhere") == 0
    devices = nvml.Devices((), "no NVIDIA driver is installed", error="LibraryNotFound")
    check = checks.check_driver(devices, on_the_bus)
    assert check.status is Status.FAILURE
    assert check.message == "1 NVIDIA GPU(s) on the bus, but no NVIDIA driver is installed"
    assert checks.check_driver(devices, 0).status is Status.OK


def test_the_context_is_measured_once_and_again_when_asked(tmp_path: Path) -> None:
    probe, store = FakeProbe(MEASURED), ContextStore(tmp_path)

    def check(*, remeasure: bool = False, driver: str = "570.1") -> checks.Check:
        return checks.check_context(DEVICE, driver, probe, store, remeasure=remeasure)

    first, second = check(), check()
    assert (first.message, second.message) == ("300.0 MiB, measured now", "300.0 MiB, measured before")
    assert probe.asked == 1
    assert second.facts == {**first.facts, "context_bytes": 300 * MIB, "total_bytes": 12_622_168_064}
    probe.answer = MeasuredContext(400 * MIB, 12_622_168_064, "nvml, this process")
    assert check(remeasure=True).message == "400.0 MiB, measured now"
    assert check().message == "400.0 MiB, measured before"
    assert check(driver="575.1").message == "400.0 MiB, measured now"  # a driver's update
    assert probe.asked == 3


def test_a_context_that_cannot_be_measured_is_a_failure_with_the_reason(tmp_path: Path) -> None:
    probe = FakeProbe(MeasurementError("no kernel image is available for execution on the device"))

    check = checks.check_context(DEVICE, "570.1", probe, ContextStore(tmp_path), remeasure=False)

    assert check.status is Status.FAILURE
    assert "no kernel image" in check.message
    assert not list(tmp_path.iterdir())


def test_a_context_that_cannot_be_kept_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    store = ContextStore(tmp_path / "file" / "state")
    check = checks.check_context(DEVICE, "570.1", FakeProbe(MEASURED), store, remeasure=False)

    assert check.status is Status.WARNING
    assert "TUNER_STATE_DIR" in (check.hint or "")


def test_processes_of_which_nvml_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "device_processes", lambda uuid: (nvml.GpuProcess(7, None),))
    assert checks.check_gpu(DEVICE).message.endswith("used, 1 other process, their memory is not reported")


@pytest.mark.parametrize(
    ("installed", "status", "hint"),
    [
        ({"nvidia-ml-py": "13.580"}, Status.OK, None),
        ({"nvidia-ml-py": "13.580", "pynvml": "11.5.3"}, Status.WARNING, "pip uninstall -y pynvml"),
        ({"pynvml": "11.5.3"}, Status.WARNING, "pip uninstall -y pynvml"),
        ({}, Status.WARNING, "pip install nvidia-ml-py"),
    ],
)
def test_the_deprecated_distribution_is_named(
    installed: dict[str, str], status: Status, hint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D41."""

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(checks, "version", version)
    check = checks.check_pynvml()
    assert check.status is status
    assert (check.hint or "").startswith(hint or "")
    assert (check.hint is None) == (hint is None)


def test_a_pytorch_that_cannot_be_imported_is_a_failure(
    tuner: Tuner, without_library: dict[str, str], tmp_path: Path
) -> None:
    """The first line of a broken installation is what users report."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libcudnn.so.9: cannot open')")
    path = f"{tmp_path / 'broken'}:{os.environ.get('PYTHONPATH', '')}"

    done = tuner("doctor", "-f", "json", PYTHONPATH=path, **without_library)

    check = report(done)["torch"]
    assert (done.returncode, check["status"]) == (1, "failure")
    assert "libcudnn.so.9: cannot open" in check["message"]


@no_card
def test_a_database_is_checked_but_does_not_decide(
    tuner: Tuner, without_library: dict[str, str], tmp_path: Path
) -> None:
    def check(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = tuner("doctor", "-f", "json", *arguments, **without_library)
        return done.returncode, report(done)["database"]

    code, absent = check()
    assert (code, absent["status"]) == (0, "ok")
    assert "not there yet" in absent["message"]
    (tmp_path / "empty.db").write_bytes(b"")
    code, empty = check("--storage", "sqlite:///empty.db")
    assert (code, empty["status"], empty["hint"]) == (0, "warning", "tuner db upgrade")
    assert tuner("db", "upgrade", "--storage", "sqlite:///empty.db").returncode == 0
    assert check("--storage", "sqlite:///empty.db")[1]["status"] == "ok"
    code, away = check("--storage", "postgresql://u:s3cr3t@127.0.0.1:1/db")
    assert (code, away["status"]) == (0, "warning")
    assert "s3cr3t" not in json.dumps(away)


def test_little_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=1, used=1, free=MIB)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: full)
    check = checks.check_disk(tmp_path / "not" / "there")
    assert (check.status, check.facts["free_bytes"]) == (Status.WARNING, MIB)
    assert "tuner clean" in (check.hint or "")
