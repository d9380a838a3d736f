"""The memory of a device and of each process: the real pynvml on the stand-in (cases D39, D40)."""

from __future__ import annotations

import os
import subprocess
import sys

import pynvml
import pytest

from tests.conftest import clean_environment, rtx_3060
from tests.measure.conftest import Driver
from tuner.measure import nvml
from tuner.measure.nvml import Before, DeviceMemory, Use
from tuner.units import GIB, MIB

UUID = "GPU-5741d1c0-0000-0000-0000-000000000001"
SLICE = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
OURS = os.getpid()
A100 = (40960 * MIB, 1012 * MIB)
NO_SUCH = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
NO_LIST = " ".join(f"nvmlDeviceGetComputeRunningProcesses_v{version}={NO_SUCH}" for version in (3, 2))


@pytest.mark.parametrize(
    ("answers", "by_pid", "problem"),
    [
        ({"PROCESSES": f"{OURS}:{600 * MIB} 8:{400 * MIB}"}, {OURS: 600 * MIB, 8: 400 * MIB}, None),
        ({"PROCESSES": f"{OURS}:{MIB}", "GRAPHICS": f"{OURS}:{MIB} 9:7"}, {OURS: MIB, 9: 7}, None),
        ({"PROCESSES": f"{OURS}:? 8:{400 * MIB}"}, None, "NVML does not say what each process uses"),
        ({}, None, "NVML lists no process, yet 1012.0 MiB are in use"),
        ({"RESERVED": 1000 * MIB}, {}, None),  # an idle card: what is used is the driver's reserve
        ({"ERRORS": f"nvmlDeviceGetMemoryInfo_v2={NO_SUCH}", "USED": 3 * MIB}, {}, None),
        (
            {"ERRORS": NO_LIST},
            None,
            "this driver does not list the processes of a GPU",
        ),
        ({"ERRORS": NO_LIST.split()[0], "PROCESSES": f"{OURS}:{MIB}"}, {OURS: MIB}, None),
    ],
    ids=["each", "drawing", "not available", "empty but in use", "idle", "old driver", "no list", "old list"],
)
def test_bytes_by_process_are_given_only_where_all_are_known(
    answers: dict[str, object], by_pid: dict[int, int] | None, problem: str | None, driver: Driver
) -> None:
    driver(**answers)

    total_bytes, used_bytes = A100
    expected = DeviceMemory(total_bytes, int(str(answers.get("USED", used_bytes))), by_pid, problem)
    assert nvml.memory_of(UUID) == expected


def test_numbers_of_another_pid_namespace_are_not_taken_for_ours(nvml_library: str) -> None:
    """Real PID namespaces: inside, this process is number 1, and 4000000 does not run."""
    code = "import os; from tuner.measure import nvml; m = nvml.memory_of({!r}); "
    code += "print(os.getpid(), m.by_pid, m.problem)"

    def inside(processes: str) -> str:
        done = subprocess.run(
            ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code.format(UUID)],
            env=clean_environment(**rtx_3060(nvml_library), NVML_STAND_IN_PROCESSES=processes),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0 and "unshare" in done.stderr:
            pytest.skip("no new PID namespace may be made here")
        return done.stdout.strip()

    assert inside(f"1:{MIB}") == f"1 {{1: {MIB}}} None"  # newer drivers: the caller's own numbers
    foreign = "1 None NVML counts processes outside this container"
    assert inside(f"4000000:{MIB}") == foreign
    assert inside(f"1:{MIB} 4000000:{MIB}") == foreign  # 1 is the same number by chance


@pytest.mark.parametrize(
    "code",
    [
        code
        for code in sorted(pynvml.NVMLError._valClassMapping)
        if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    ],
)
@pytest.mark.parametrize("call", range(1, 9))
def test_an_error_in_the_middle_of_a_sequence_is_one_sentence(code: int, call: int, driver: Driver) -> None:
    """As when the driver is reloaded ("uninitialized"): every call from the n-th on fails."""
    driver(AFTER=f"{call} {code}", PROCESSES=f"{OURS}:{MIB}")

    memory, devices = nvml.memory_of(UUID), nvml.devices()
    use, before = nvml.process_use("0", OURS), nvml.before_use("0", OURS)

    for problem in (memory.problem, devices.problem, use.source, nvml.device_use("0").source):
        assert problem is None or (problem.strip() and "\n" not in problem and len(problem) < 140)
    assert (memory.used_bytes is None) == (memory.total_bytes is None)
    assert bool(devices.found) != bool(devices.problem)
    assert (before.used_bytes is not None) or before.shared
    assert nvml.device_processes(UUID) in ((), (nvml.GpuProcess(OURS, MIB),))


def test_a_driver_that_is_reloaded_says_so(driver: Driver) -> None:
    driver(AFTER=f"2 {pynvml.NVML_ERROR_UNINITIALIZED}")
    assert nvml.devices().error == "Uninitialized"
    assert "went away while it was asked" in (nvml.memory_of(UUID).problem or "")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"PROCESSES": f"{OURS}:{600 * MIB} 8:{412 * MIB}"}, Use(600 * MIB, "nvml, this process")),
        ({"PROCESSES": f"{OURS}:?"}, Use(1012 * MIB, "nvml, device-wide")),  # WSL
        ({}, Use(1012 * MIB, "nvml, device-wide")),  # a container sees no process
        ({"PROCESSES": f"4711:{600 * MIB}"}, Use(1012 * MIB, "nvml, device-wide")),  # a host's number
        ({"ERRORS": NO_LIST}, Use(1012 * MIB, "nvml, device-wide")),
        (
            {"ERRORS": f"nvmlDeviceGetComputeRunningProcesses_v3={pynvml.NVML_ERROR_NOT_SUPPORTED}"},
            Use(1012 * MIB, "nvml, device-wide"),
        ),
    ],
    ids=["ours", "not available", "no process", "another namespace", "no function", "not supported"],
)
def test_the_use_of_a_process_or_what_can_be_known_instead(
    answers: dict[str, object], expected: Use, driver: Driver
) -> None:
    driver(**answers)

    assert nvml.process_use(UUID, OURS) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"USED": 3 * MIB}, Before(3 * MIB, shared=False, listed=False)),
        ({"USED": 500 * MIB, "RESERVED": 497 * MIB}, Before(500 * MIB, shared=False, listed=False)),
        ({}, Before(1012 * MIB, shared=True, listed=False)),  # of processes that are not shown
        ({"PROCESSES": "8:?"}, Before(1012 * MIB, shared=True, listed=False)),
        ({"PROCESSES": f"{OURS}:{600 * MIB}"}, Before(1012 * MIB, shared=True, listed=True)),
        ({"INIT": pynvml.NVML_ERROR_DRIVER_NOT_LOADED}, Before(None, shared=True, listed=False)),
    ],
    ids=["idle", "the driver's reserve", "not shown", "others", "our number before our time", "no driver"],
)
def test_what_was_there_before_a_process_touched_the_device(
    answers: dict[str, object], expected: Before, driver: Driver
) -> None:
    driver(**answers)

    assert nvml.before_use("0", OURS) == expected


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [1, 2, 3]), ("2,0", [3, 1]), (f"{UUID[:-1]}2", [2]), ("1,9,0", [2]), ("0,0", [])],
)
def test_devices_are_those_that_cuda_shows_in_its_order(
    visible: str | None, indices: list[int], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(COUNT=3)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    found = nvml.devices()

    assert [device.uuid for device in found.found] == [f"{UUID[:-1]}{index}" for index in indices]
    assert [device.index for device in found.found] == list(range(len(indices)))
    assert (found.problem is None) == bool(indices)


@pytest.mark.parametrize(
    ("visible", "error", "said"),
    [
        ("", "Hidden", "hides every GPU"),
        ("-1", "Hidden", "hides every GPU"),
        ("7", "NoneVisible", "names no GPU"),
    ],
)
def test_a_hidden_gpu_is_said_to_be_hidden(
    visible: str, error: str, said: str, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    found = nvml.devices()

    assert (found.found, found.error) == ((), error)
    assert said in (found.problem or "")


@pytest.mark.parametrize("visible", [SLICE, SLICE[:9], "0", None])
def test_the_budget_of_a_slice_is_the_slices(
    visible: str | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case D39: the GPU of 40 GiB may not be asked; its slice has 4,864 MiB, of which 4 are used."""
    driver(MEMORY=pynvml.NVML_ERROR_NO_PERMISSION, SLICES=f"{SLICE}:{4864 * MIB}:{4 * MIB}")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    (device,) = nvml.devices().found

    assert (device.uuid, device.total_bytes, device.free_bytes) == (SLICE, 4864 * MIB, 4860 * MIB)
    assert device.name == "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
    assert device.compute_capability == (8, 0)  # its GPU's: a slice has none of its own
    assert nvml.memory_of(SLICE) == DeviceMemory(4864 * MIB, 4 * MIB, {}, None)
    assert nvml.memory_of(UUID) == DeviceMemory(None, None, None, "no permission to ask the NVIDIA driver")


def test_a_slice_that_may_not_be_read_gives_no_figure(driver: Driver) -> None:
    refused = pynvml.NVML_ERROR_NO_PERMISSION
    driver(MEMORY=refused, SLICE_MEMORY=refused, SLICES=f"{SLICE}:{4864 * MIB}:0")

    found = nvml.devices()

    assert (found.found, found.error) == ((), "NoPermission")
    assert found.problem == f"the MIG slice {SLICE} cannot be read: no permission to ask the NVIDIA driver"


def test_a_gpu_that_may_not_be_used_is_passed_over(driver: Driver) -> None:
    """As CUDA does: the next one is cuda:0. In MIG mode without a slice there is nothing to use either."""
    driver(COUNT=2, SLICES=" ")
    (device,) = nvml.devices().found
    assert (device.index, device.uuid) == (0, f"{UUID[:-1]}2")


def test_an_unknown_uuid_is_a_problem_not_an_error(driver: Driver) -> None:
    assert nvml.memory_of("GPU-other") == DeviceMemory(problem="the NVIDIA driver knows no such device")


def test_an_idle_card_of_12_gib_is_described(nvml_library: str) -> None:
    """The whole way, in a process of its own: the library is found as the driver's would be."""
    code = f"from tuner.measure import nvml; m = nvml.memory_of({UUID!r}); print(m.total_bytes, m.used_bytes)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(**rtx_3060(nvml_library)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(12 * GIB), str(GIB)]
