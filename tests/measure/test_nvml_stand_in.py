"""The whole way to NVML: nvidia-ml-py loads a compiled stand-in, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from tests.conftest import clean_environment, rtx_3060
from tuner.measure import nvml
from tuner.units import GIB, MIB

UUID = "GPU-5741d1c0-0000-0000-0000-000000000001"


def asked(expression: str, environment: dict[str, str]) -> str:
    """Return the representation of an expression over our module, where the stand-in is NVML."""
    code = f"from tuner.measure import nvml; print(repr({expression}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_gpu_is_described(nvml_library: str) -> None:
    expected = nvml.Devices(
        (nvml.Device(0, UUID, "NVIDIA GeForce RTX 3060", 12 * GIB, 11 * GIB, (8, 6)),), None, "570.195.03"
    )
    assert asked("nvml.devices()", rtx_3060(nvml_library)) == repr(expected)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "of different versions: reboot, or reload the driver"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission to ask the NVIDIA driver"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "a GPU has fallen off the bus: reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, "NVML cannot be used"),
    ],
)
def test_a_problem_at_the_start_is_one_sentence_of_its_own(code: int, said: str, nvml_library: str) -> None:
    environment = {**rtx_3060(nvml_library), "NVML_STAND_IN_INIT": str(code)}
    assert said in asked("nvml.devices().problem", environment)


def test_a_file_that_is_no_library_counts_as_no_driver(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    said = asked("nvml.devices()", {"LD_LIBRARY_PATH": str(tmp_path)})
    assert "no NVIDIA driver is installed" in said
    assert "LibraryNotFound" in said


def test_a_driver_without_a_gpu_says_so(nvml_library: str) -> None:
    assert "shows no GPU" in asked("nvml.devices().problem", {"LD_LIBRARY_PATH": nvml_library})


def test_a_device_that_may_not_be_asked_is_said(nvml_library: str) -> None:
    """Case D39: a MIG parent whose memory a container may not read."""
    environment = {**rtx_3060(nvml_library), "NVML_STAND_IN_MEMORY": str(pynvml.NVML_ERROR_NO_PERMISSION)}
    assert "no permission" in asked("nvml.devices().problem", environment)


def test_processes_are_listed_with_what_is_known_of_each(nvml_library: str) -> None:
    environment = {**rtx_3060(nvml_library), "NVML_STAND_IN_PROCESSES": f"7:{600 * MIB} 8:?"}
    expected = (nvml.GpuProcess(7, 600 * MIB), nvml.GpuProcess(8, None))
    assert asked(f"nvml.device_processes({UUID!r})", environment) == repr(expected)
    assert asked(f"nvml.process_use({UUID!r}, 7)", environment) == repr(
        nvml.Use(600 * MIB, "nvml, this process")
    )
    assert asked(f"nvml.process_use({UUID!r}, 8)", environment) == repr(nvml.Use(GIB, nvml.DEVICE_WIDE))
    assert asked("nvml.device_processes('GPU-other')", environment) == "()"
