"""Which devices a target names, and what of the host's memory can be had."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from tuner.errors import UsageError
from tuner.measure.nvml import Device, Devices
from tuner.scheduling import devices as module
from tuner.scheduling.devices import (
    Place,
    available_host_bytes,
    check_budget,
    choose_places,
    joint_target,
    present_target,
)
from tuner.units import GIB, MIB

if TYPE_CHECKING:
    from pathlib import Path

SMALL, LARGE = "NVIDIA GeForce RTX 3060", "NVIDIA A100-SXM4-40GB"


def gpu(index: int, free: int, name: str = LARGE) -> Device:
    return Device(index, f"GPU-{index}", name, 40 * GIB if name == LARGE else 12 * GIB, free * GIB, (8, 0))


FOUR = (gpu(0, 5), gpu(1, 30), gpu(2, 11, SMALL), gpu(3, 39))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A host with four GPUs of two models and a build of PyTorch for CUDA."""
    monkeypatch.setattr(module.nvml, "devices", lambda: Devices(FOUR, None, "570"))
    monkeypatch.setattr(module, "torch_has_cuda", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, "cuda:0,1,3"),
        ("cuda", "cuda:0,1,3"),  # all of the freest one's model
        (" CUDA ", "cuda:0,1,3"),
        ("cuda:2", "cuda:2"),
        ("cuda:1,0", "cuda:0,1"),
        ("cuda:3,3", "cuda:3"),
        ("cpu", "cpu"),
    ],
)
def test_a_target_names_devices_of_one_model(
    host: pytest.MonkeyPatch, target: str | None, expected: str
) -> None:
    places = choose_places(target)
    assert joint_target(places) == expected
    assert joint_target(choose_places(joint_target(places))) == expected  # a resumed study finds them again


def test_the_freest_device_comes_first_and_is_known_by_its_uuid(host: pytest.MonkeyPatch) -> None:
    assert choose_places("cuda") == tuple(
        Place(f"cuda:{index}", LARGE, f"GPU-{index}", 40 * GIB, free * GIB)
        for index, free in ((3, 39), (1, 30), (0, 5))
    )
    assert [place.key for place in choose_places("cuda:0,3")] == ["GPU-3", "GPU-0"]
    assert choose_places("cuda:0")[0].default_budget_bytes == int(5 * GIB * 0.95)
    (cpu,) = choose_places("cpu")
    assert (cpu.key, cpu.kind) == (f"cpu@{socket.gethostname()}", "cpu")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cuda:4", r"there is no cuda:4"),
        ("cuda:0,7", r"there is no cuda:7"),
        ("cuda:0,2", r"different models: NVIDIA A100-SXM4-40GB, NVIDIA GeForce RTX 3060"),
        ("cuda:", "names no GPUs"),
        ("cuda:a", "names no GPUs"),
        ("cuda:-1", "names no GPUs"),
        ("cuda:0,", "names no GPUs"),
        ("cuda:0;1", "names no GPUs"),
        ("a100-40gb", "a profile to predict for"),
        ("cuda0", "there is no target"),
        ("", "there is no target"),
    ],
)
def test_what_is_no_device_here_is_one_clear_line(
    host: pytest.MonkeyPatch, target: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        choose_places(target)
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_without_a_gpu_the_default_is_the_cpu_and_cuda_says_why_not(host: pytest.MonkeyPatch) -> None:
    host.setattr(module.nvml, "devices", lambda: Devices((), "the NVIDIA driver is not loaded"))
    assert joint_target(choose_places(None)) == "cpu"
    for target in ("cuda", "cuda:0"):
        with pytest.raises(UsageError, match="no GPU to run on: the NVIDIA driver is not loaded"):
            choose_places(target)


def test_a_build_of_pytorch_without_cuda_runs_on_the_cpu(host: pytest.MonkeyPatch) -> None:
    host.setattr(module, "torch_has_cuda", lambda: False)
    assert joint_target(choose_places(None)) == "cpu"
    with pytest.raises(UsageError, match="no CUDA"):
        choose_places("cuda:1")


def test_a_card_is_found_by_its_index_where_some_are_hidden(host: pytest.MonkeyPatch) -> None:
    host.setattr(module.nvml, "devices", lambda: Devices((gpu(0, 39), gpu(2, 11, SMALL)), None, "570"))
    assert present_target("cuda:2").gpu == SMALL
    assert present_target("cuda:0").gpu == LARGE
    assert present_target("cuda:1").gpu not in (SMALL, LARGE)
    with pytest.raises(UsageError, match=r"there is no cuda:1"):
        choose_places("cuda:1")


def test_a_budget_is_at_most_the_device() -> None:
    place = Place("cuda:0", SMALL, "GPU-0", 12 * GIB, 11 * GIB)
    check_budget(12 * GIB, place)
    with pytest.raises(
        UsageError, match=r"13\.00 GiB is more than NVIDIA GeForce RTX 3060 has \(12\.00 GiB\)"
    ):
        check_budget(13 * GIB, place)


def files(root: Path, **texts: str) -> None:
    for name, content in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def cgroup(root: Path, folder: str, limit: str, current: int, inactive: int) -> None:
    where = root / "sys/fs/cgroup" / folder
    where.mkdir(parents=True, exist_ok=True)
    (where / "memory.max").write_text(f"{limit}\n")
    (where / "memory.current").write_text(f"{current}\n")
    (where / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\nactive_file 5\n")


def test_host_memory_is_what_is_available_within_every_cgroups_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "host_memory_bytes", lambda: 16 * GIB)
    available = lambda: available_host_bytes(tmp_path)  # noqa: E731
    assert available() == 16 * GIB  # nothing to be read
    files(tmp_path, proc__meminfo="MemTotal: 99 kB\nMemAvailable:    8388608 kB\nBuffers: 1 kB\n")
    assert available() == 8 * GIB
    cgroup(tmp_path, "", "max", 9 * GIB, 0)
    assert available() == 8 * GIB
    cgroup(tmp_path, "", str(6 * GIB), 3 * GIB, GIB)  # a container: its caches can be had
    assert available() == 4 * GIB
    files(tmp_path, proc__self__cgroup="1:memory:/old\n0::/job/step\n")
    assert available() == 4 * GIB
    cgroup(tmp_path, "job", str(2 * GIB), GIB, 0)  # a batch system's, above this process's own
    cgroup(tmp_path, "job/step", "max", GIB, 0)
    assert available() == GIB
    cgroup(tmp_path, "job/step", str(512 * MIB), GIB, 0)  # lowered under what it holds
    assert available() == 0
