"""NVML on hosts where it cannot be used, and processes it cannot see (cases D40, D41)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pynvml
import pytest

from tuner.measure import nvml
from tuner.measure.nvml import Devices, Use

if TYPE_CHECKING:
    from collections.abc import Callable

CODES = sorted(pynvml.NVMLError._valClassMapping)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without libnvidia-ml, wherever the test runs: pynvml raises its own error."""

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)


def raising(code: int) -> Callable[..., None]:
    def raise_it(*arguments: object) -> None:
        raise pynvml.NVMLError(code)

    return raise_it


def is_one_sentence(text: str | None) -> bool:
    return text is not None and bool(text.strip()) and "\n" not in text and len(text) < 120


@pytest.mark.usefixtures("no_driver")
def test_a_host_without_a_driver_has_no_gpu_and_says_why() -> None:
    assert nvml.devices() == Devices((), "no NVIDIA driver is installed (libnvidia-ml is missing)", None)


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("visible", ["0", "GPU-c0ffee", "0,1", "", "MIG-c0ffee", "-1"])
def test_without_a_driver_the_use_of_a_process_is_unknown_with_the_reason(visible: str) -> None:
    use = nvml.process_use(visible, os.getpid())

    assert use == Use(None, "no NVIDIA driver is installed (libnvidia-ml is missing)")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "reboot, or reload the driver"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "fallen off the bus"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "no permission"),
    ],
)
def test_a_known_problem_says_what_it_is_and_what_helps(
    code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raising(code))

    found = nvml.devices()

    assert found.found == ()
    assert found.problem is not None
    assert said in found.problem
    assert nvml.process_use("0", 1).source == found.problem


@pytest.mark.parametrize("code", CODES)
def test_every_error_of_nvml_is_one_sentence(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raising(code))

    assert nvml.devices().found == ()
    assert is_one_sentence(nvml.devices().problem)
    assert nvml.process_use("0", 1).bytes is None
    assert is_one_sentence(nvml.process_use("0", 1).source)


@pytest.mark.usefixtures("no_driver")
def test_a_driver_that_goes_away_after_the_start_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start works; everything after it, the shutdown included, is pynvml's own "uninitialised"."""
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)

    assert nvml.devices().found == ()
    assert is_one_sentence(nvml.devices().problem)
    assert nvml.process_use("0", 1).bytes is None
