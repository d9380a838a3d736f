"""What is free on a device: others' memory seen anew each time, told apart from our trials'."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import QueuePool

from tests.store.conftest import Store
from tuner.measure.nvml import DeviceMemory
from tuner.processes import process_memory
from tuner.records import Outcome, TrialResult
from tuner.scheduling import ledger as module
from tuner.scheduling.devices import Place
from tuner.scheduling.ledger import Admission, Ledger
from tuner.scheduling.packing import Wish
from tuner.store.engine import parse_url
from tuner.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOTAL = 100 * GIB
GPU = Place("cuda:0", "a GPU", "GPU-1", TOTAL, TOTAL)
CPU = Place("cpu", "a CPU", None, 64 * GIB, 64 * GIB)


@dataclass
class Gpu:
    """What the fake NVML tells: bytes by process, and whether it tells them apart."""

    by_pid: dict[int, int] = field(default_factory=dict)
    per_process: bool = True
    broken: bool = False

    def memory_of(self, uuid: str) -> DeviceMemory:
        assert uuid == "GPU-1"
        if self.broken:
            return DeviceMemory(problem="the NVIDIA driver is not loaded")
        used = sum(self.by_pid.values())
        return DeviceMemory(TOTAL, used, dict(self.by_pid) if self.per_process else None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()
    monkeypatch.setattr(module.nvml, "memory_of", fake.memory_of)
    monkeypatch.setattr(module, "available_host_bytes", lambda: 1000 * GIB)
    return fake


@pytest.fixture
def store(sqlite_url: str) -> Iterator[Store]:
    opened = Store(parse_url(sqlite_url))
    yield opened
    opened.engine.dispose()


class Trials:
    """Trials of one driver: each asks, may run as a process, and ends."""

    def __init__(self, store: Store, *places: Place, pool: int | None = None, name: str = "plain") -> None:
        self._store, self._study_id = store, store.study(name)
        self.ledger = Ledger(store.reservations, places, pool_bytes=pool)
        self._ids: dict[int, int] = {}

    def ask(self, number: int, device: int, host: int = 0) -> Admission:
        self._ids[number] = self._store.trial(self._study_id, number)
        driver_id = self._store.driver(self._study_id)
        return self.ledger.admit(self._ids[number], driver_id, Wish(device, host))

    def runs_as(self, number: int, pid: int) -> None:
        self.ledger.runs_as(self._ids[number], pid)

    def ends(self, number: int) -> None:
        self._store.writer.record_result(self._ids[number], TrialResult(Outcome.COMPLETED))


@pytest.mark.parametrize("per_process", [True, False])
def test_our_own_trials_are_not_counted_twice(store: Store, gpu: Gpu, per_process: bool) -> None:
    gpu.per_process = per_process
    trials = Trials(store, GPU)
    assert trials.ask(0, 40 * GIB).granted
    trials.runs_as(0, 11)
    gpu.by_pid[11] = 39 * GIB
    assert trials.ask(1, 55 * GIB).granted  # 95 of 95: the headroom is 5 %
    refused = trials.ask(2, GIB)
    assert (refused.granted, refused.place) == (False, GPU)
    assert refused.reason == "1.00 GiB on cuda:0: 2 trials there hold 95.00 GiB of 95.00 GiB"


@pytest.mark.parametrize("per_process", [True, False])
def test_what_others_take_between_two_launches_is_seen(store: Store, gpu: Gpu, per_process: bool) -> None:
    gpu.per_process = per_process
    trials = Trials(store, GPU)
    assert trials.ask(0, 40 * GIB).granted
    trials.runs_as(0, 11)
    gpu.by_pid |= {11: 40 * GIB, 99: 30 * GIB}
    refused = trials.ask(1, 40 * GIB)  # (100 - 30) × 0.95 - 40 = 26.5
    assert not refused.granted
    assert refused.reason.endswith(
        "1 trial there holds 40.00 GiB of 66.50 GiB; other processes use 30.00 GiB"
    )
    del gpu.by_pid[99]
    assert trials.ask(1, 40 * GIB).granted


@pytest.mark.parametrize("per_process", [True, False])
def test_what_a_dead_trial_left_behind_is_not_charged_to_the_next(
    store: Store, gpu: Gpu, per_process: bool
) -> None:
    """Case D17: its loader workers survive, and the device is still full."""
    gpu.per_process = per_process
    trials = Trials(store, GPU)
    assert trials.ask(0, 60 * GIB).granted
    trials.runs_as(0, 11)
    gpu.by_pid = {12: 50 * GIB}  # 11 is dead, its worker 12 is not
    trials.ends(0)
    refused = trials.ask(1, 60 * GIB)
    assert refused.reason == "60.00 GiB on cuda:0, 50.00 GiB are free; other processes use 50.00 GiB"
    assert trials.ask(2, 20 * GIB).granted is False  # its turn comes after
    gpu.by_pid = {}
    assert trials.ask(1, 60 * GIB).granted


def test_a_process_that_is_not_noted_yet_is_taken_for_ours(store: Store, gpu: Gpu) -> None:
    trials = Trials(store, GPU)
    assert trials.ask(0, 40 * GIB).granted
    gpu.by_pid = {11: 35 * GIB}  # it has started, and nobody said as what
    assert trials.ask(1, 55 * GIB).granted


def test_where_nvml_tells_no_processes_others_hold_what_they_held_before_ours_ran(
    store: Store, gpu: Gpu
) -> None:
    gpu.per_process = False
    trials = Trials(store, GPU)
    gpu.by_pid = {99: 50 * GIB}
    assert trials.ask(0, 40 * GIB).granted
    gpu.by_pid[11] = 5 * GIB  # it has just begun: 55 in use less its 40 would leave others 15
    assert "other processes use 50.00 GiB" in trials.ask(1, 20 * GIB).reason


def test_what_others_no_longer_use_is_not_held_against_them(store: Store, gpu: Gpu) -> None:
    """In a container others are never told apart while a trial of ours runs."""
    gpu.per_process = False
    trials = Trials(store, GPU)
    gpu.by_pid = {99: 70 * GIB}
    assert trials.ask(0, 20 * GIB).granted
    gpu.by_pid = {11: 6 * GIB}
    assert trials.ask(1, 60 * GIB).granted  # (100 - 6) × 0.95 - 20 = 69.3
    gpu.by_pid = {11: 20 * GIB, 12: 50 * GIB}  # what is ours by now: 6 is all that others may have
    assert "other processes use 6.00 GiB" in trials.ask(2, 40 * GIB).reason


@pytest.mark.parametrize("place", [GPU, CPU])
def test_memory_is_read_while_nobody_waits_for_the_reservations(
    store: Store, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    busy: list[int] = []
    pool = store.engine.pool
    assert isinstance(pool, QueuePool)

    def noted(read: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (busy.append(pool.checkedout()), read(*args))[1]

    monkeypatch.setattr(module.nvml, "memory_of", noted(gpu.memory_of))
    for name in ("available_host_bytes", "process_memory"):
        monkeypatch.setattr(module, name, noted(getattr(module, name)))
    trials = Trials(store, place)
    assert trials.ask(0, GIB, GIB).granted
    trials.runs_as(0, os.getpid())
    assert trials.ask(1, GIB, GIB).granted
    assert len(busy) >= 3
    assert not any(busy)


def test_a_pool_counts_the_trials_of_its_own_study(store: Store, gpu: Gpu) -> None:
    small, large = Trials(store, GPU, pool=10 * GIB), Trials(store, GPU, name="large")
    assert large.ask(0, 12 * GIB).granted
    assert small.ask(0, 6 * GIB).granted
    refused = small.ask(1, 6 * GIB)
    assert refused.reason == "6.00 GiB on cuda:0: 1 trial there holds 6.00 GiB of 10.00 GiB"
    assert large.ask(1, 12 * GIB).granted
    small.ends(0)
    assert small.ask(1, 6 * GIB).granted


def test_a_broken_nvml_forgets_nothing(store: Store, gpu: Gpu) -> None:
    trials = Trials(store, GPU)
    gpu.by_pid = {99: 50 * GIB}
    assert trials.ask(0, 20 * GIB).granted
    gpu.broken = True
    assert "other processes use 50.00 GiB" in trials.ask(1, 40 * GIB).reason
    assert trials.ask(0, 20 * GIB).granted


def test_host_memory_limits_children_on_a_gpu(
    store: Store, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_host_bytes", lambda: 10 * GIB)
    trials = Trials(store, GPU)
    assert trials.ask(0, GIB, host=6 * GIB).granted
    refused = trials.ask(1, GIB, host=6 * GIB)
    assert refused.reason == "6.00 GiB on the host's memory: 1 trial there holds 6.00 GiB of 9.50 GiB"
    assert not trials.ask(2, GIB, host=3 * GIB).granted  # behind the one before it
    trials.ends(1)
    assert trials.ask(2, GIB, host=3 * GIB).granted


def test_a_trial_on_the_cpu_and_one_on_a_gpu_do_not_both_get_the_hosts_memory(
    store: Store, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 GiB: one trial on the CPU may take 8 of them, whatever it holds by now."""
    monkeypatch.setattr(module, "available_host_bytes", lambda: 12 * GIB)
    on_cpu, on_gpu = Trials(store, CPU), Trials(store, GPU)
    assert on_gpu.ask(0, GIB, host=GIB).granted
    assert on_cpu.ask(1, 8 * GIB).granted
    assert not on_gpu.ask(2, GIB, host=3 * GIB).granted  # (12 - 8) × 0.95 - 1 = 2.8
    on_gpu.ends(2)
    assert on_gpu.ask(3, GIB, host=2 * GIB).granted
    assert not on_cpu.ask(4, GIB).granted  # (12 - 3) × 0.95 - 8 = 0.55
    on_cpu.ends(4)
    assert on_cpu.ask(5, 512 * MIB).granted


def test_a_pool_on_the_cpu_holds_two_of_40_percent_or_one_of_70(store: Store) -> None:
    trials = Trials(store, CPU, pool=1000 * MIB)
    assert [trials.ask(number, 400 * MIB).granted for number in range(2)] == [True, True]
    refused = trials.ask(2, 700 * MIB)
    assert refused.reason == "700.0 MiB on cpu: 2 trials there hold 800.0 MiB of 1000.0 MiB"
    trials.ends(0)
    assert not trials.ask(2, 700 * MIB).granted
    assert not trials.ask(3, 100 * MIB).granted  # not past the large one
    trials.ends(1)
    assert trials.ask(2, 700 * MIB).granted


def test_resident_bytes_of_our_trials_are_no_use_by_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process stands for a trial's: what it holds is added back, to within 5 MiB."""
    monkeypatch.setattr(module, "available_host_bytes", lambda: GIB)
    trials = Trials(store, CPU)
    assert trials.ask(0, GIB // 2).granted
    memory = process_memory(os.getpid())
    assert memory is not None
    left = int((GIB + memory.resident_bytes) * 0.95) - GIB // 2
    assert not trials.ask(1, left - 5 * MIB).granted
    trials.runs_as(0, os.getpid())
    assert not trials.ask(1, left + 5 * MIB).granted
    assert trials.ask(1, left - 5 * MIB).granted


def test_on_a_cpu_a_single_trial_is_always_let_in(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_host_bytes", lambda: MIB)
    trials = Trials(store, CPU)
    assert trials.ask(0, GIB).granted
    assert not trials.ask(1, MIB).granted
    (held,) = [row for row in store.reservations.all() if row.granted]
    assert (held.device, held.host) == (f"cpu@{socket.gethostname()}", socket.gethostname())
