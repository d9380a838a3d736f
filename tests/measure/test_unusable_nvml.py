"""Case D41: NVML that is there and cannot be used harms nobody who needs no GPU."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pynvml
import pytest

from tests.app import data
from tests.conftest import ROOT, TINY, Tuner, clean_environment, rtx_3060

BROKEN = {
    "driver not loaded": (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver is not loaded"),
    "mismatch": (
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        "the NVIDIA driver and its library are of different versions: reboot, or reload the driver",
    ),
}


@pytest.fixture(params=[*BROKEN, "reloaded", "no library"])
def broken(
    request: pytest.FixtureRequest, nvml_library: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, str], str]:
    """The environment of a host with a broken NVML, and what is said about it."""
    host = rtx_3060(nvml_library)
    if request.param == "no library":  # the file found first is none
        folder = tmp_path_factory.mktemp("no-nvml")
        (folder / "libnvidia-ml.so.1").write_bytes(b"")
        return {
            **host,
            "LD_LIBRARY_PATH": str(folder),
        }, "no NVIDIA driver is installed (libnvidia-ml is missing)"
    if request.param == "reloaded":
        after = f"2 {pynvml.NVML_ERROR_UNINITIALIZED}"
        return {**host, "NVML_STAND_IN_AFTER": after}, "the NVIDIA driver went away while it was asked"
    code, said = BROKEN[request.param]
    return {**host, "NVML_STAND_IN_INIT": str(code)}, said


def test_prediction_works_and_a_gpu_run_is_refused_with_the_reason(
    broken: tuple[dict[str, str], str], tuner: Tuner
) -> None:
    environment, said = broken
    predicted = tuner("predict", TINY, "--target", "cuda", **environment)
    run = tuner("run", TINY, "--target", "cuda:0", "--trials", "1", **environment)

    assert (predicted.returncode, predicted.stderr) == (0, "")
    assert run.returncode == 2
    (line, hint) = run.stderr.strip().splitlines()
    assert said in line
    assert "--target cpu" in hint
    assert run.stdout == ""


def test_a_cpu_study_runs_on_a_host_with_a_broken_driver(nvml_library: str, tuner: Tuner) -> None:
    environment = {**rtx_3060(nvml_library), "NVML_STAND_IN_INIT": "18"}

    done = tuner("run", TINY, "--target", "cpu", "--trials", "1", **environment)

    assert done.returncode == 0, done.stderr


def test_the_app_needs_no_nvml(sqlite_url: str) -> None:
    """A page is drawn in an interpreter in which `import pynvml` fails, and with it all of NVML."""
    data.fill(sqlite_url, numbers=range(3))
    code = (
        "import sys; sys.modules['pynvml'] = None\n"
        "from streamlit.testing.v1 import AppTest\n"
        f"app = AppTest.from_file({str(ROOT / 'app' / 'main.py')!r}, default_timeout=60).run()\n"
        "assert not app.exception, app.exception[0].value\n"
        "assert app.title[0].value\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(TUNER_STORAGE=sqlite_url),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_importing_pytorch_and_everything_of_ours_warns_of_nothing() -> None:
    """PyTorch warns (FutureWarning) where the deprecated distribution pynvml is installed."""
    code = "import torch, torch.cuda, pynvml, tuner.measure.nvml, tuner.execution.worker, tuner.search.loop"
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", code],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_declared_dependency_is_the_maintained_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    assert [name for name in declared if "nvml" in name or "nvidia" in name] == ["nvidia-ml-py>=12"]
