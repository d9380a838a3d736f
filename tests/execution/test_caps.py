"""A trial's cap holds, and it is nobody else's: real children on a CPU target, calls in order on CUDA."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import DIGITS, ROOT, TINY
from tests.execution.launching import finish, request_for, run_one
from tuner.execution.launcher import LocalLauncher, LocalTrial
from tuner.execution.run_folder import RunFolder
from tuner.execution.worker import _Trial
from tuner.measure import nvml
from tuner.measure.cuda_meter import CudaMeter
from tuner.measure.meters import UNTOUCHED_BYTES, CpuMeter
from tuner.processes import process_memory
from tuner.records import Outcome
from tuner.units import GIB, MIB

TINY_WORKLOAD = f"{TINY}:Tiny"
ENDINGS = f"{ROOT / 'tests' / 'workloads' / 'endings.py'}:Endings"
# What a step is the first to touch of the libraries' code is resident, and never limited.
TOLERANCE_BYTES = 6 * MIB


class Resident(threading.Thread):
    """Samples a trial's resident bytes every 2 ms."""

    def __init__(self, trial: LocalTrial) -> None:
        super().__init__(daemon=True)
        self._trial, self.peak_bytes, self.samples, self.ended = trial, 0, 0, False
        self.start()

    def run(self) -> None:
        while not self.ended:
            if self._trial.pid is not None and (memory := process_memory(self._trial.pid)):
                self.peak_bytes = max(self.peak_bytes, memory.resident_bytes)
                self.samples += 1
            time.sleep(0.002)


def tiny(width: int, **changes: Any) -> Any:
    return request_for(TINY_WORKLOAD, {"width": width, "batch_size": 16, "mode": "fine"}, **changes)


def test_an_under_predicted_trial_ends_alone(tmp_path: Path) -> None:
    """8192² floats with gradients and moments are 1 GiB, set aside are 600 MiB.

    The neighbour's metrics are those of the same trial alone, to the last bit.
    """
    alone = run_one(tmp_path, "alone", tiny(256))
    with LocalLauncher(tmp_path, TINY_WORKLOAD) as launcher, LocalLauncher(tmp_path, TINY_WORKLOAD) as other:
        greedy = launcher.start(
            RunFolder.create(tmp_path / "greedy"), tiny(8192, reservation_bytes=600 * MIB)
        )
        neighbour = other.start(RunFolder.create(tmp_path / "neighbour"), tiny(256))
        resident = Resident(greedy)
        ended, result = finish(greedy), finish(neighbour)
        resident.ended = True

    assert ended.outcome is Outcome.OUT_OF_MEMORY
    assert ended.failure is not None
    assert ended.failure.requested_bytes == 8192**2 * 4
    assert resident.samples > 50
    assert 500 * MIB < resident.peak_bytes < 600 * MIB + TOLERANCE_BYTES
    assert (ended.peaks.device_bytes or 0) < 600 * MIB + TOLERANCE_BYTES  # the kernel's own peak
    assert result.outcome is alone.outcome is Outcome.COMPLETED
    assert result.metrics == alone.metrics
    assert [epoch.metrics for epoch in result.epochs] == [epoch.metrics for epoch in alone.epochs]


def test_a_reservation_of_the_resident_peak_and_the_allowance_is_enough(tmp_path: Path) -> None:
    """The limit counts pages, touched or not; the study's data segment grows by 9 MiB more than it.

    2 MiB are added for what two runs of the same trial differ by.
    """
    digits = f"{DIGITS}:DigitsCNN"
    params = {"width": 32, "depth": 2, "batch_size": 512, "optimizer": "adam", "learning_rate": 0.01}
    request = request_for(digits, params)
    free = run_one(tmp_path, "free", request)
    peak_bytes = free.peaks.device_bytes
    assert peak_bytes is not None

    enough_bytes = peak_bytes + UNTOUCHED_BYTES + 2 * MIB
    capped = run_one(tmp_path, "capped", dataclasses.replace(request, reservation_bytes=enough_bytes))

    assert capped.outcome is free.outcome is Outcome.COMPLETED, capped.failure
    assert capped.metrics == free.metrics


def test_loader_workers_inherit_the_cap(tmp_path: Path) -> None:
    """Each takes 600 MiB: more than what 700 MiB leave after the context, nothing without a cap."""
    request = request_for(ENDINGS, {"ending": "a loader worker takes 600 MiB"})

    free = run_one(tmp_path, "free", dataclasses.replace(request, reservation_bytes=None))
    capped = run_one(tmp_path, "capped", dataclasses.replace(request, reservation_bytes=700 * MIB))

    assert free.outcome is Outcome.COMPLETED
    assert capped.outcome is Outcome.OUT_OF_MEMORY
    assert capped.failure is not None
    assert capped.failure.requested_bytes == 600 * MIB
    assert capped.failure.phase == "loader worker"


def test_on_a_gpu_the_context_is_subtracted_from_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 GiB set aside on a card of 16, 500 MiB are the context: the allocator gets the rest."""
    fractions: list[tuple[float, torch.device]] = []
    answers: dict[str, Any] = {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_reserved": 20 * MIB,
        "get_device_properties": SimpleNamespace(total_memory=16 * GIB),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *call: fractions.append(call))
    monkeypatch.setattr(nvml, "process_use", lambda *_: nvml.Use(520 * MIB, "nvml, this process"))
    device = torch.device("cuda:0")

    meter = CudaMeter(device, nvml.Before(0, shared=False))
    meter.cap(8 * GIB)
    meter.cap(8 * GIB, 300 * MIB)  # a study's frozen context
    meter.cap(400 * MIB)  # less than the context: nothing is left
    meter.lift_cap()

    shares = [(8 * GIB - 500 * MIB) / (16 * GIB), (8 * GIB - 300 * MIB) / (16 * GIB), 0.0, 1.0]
    assert fractions == [(share, device) for share in shares]


class Recorder(CpuMeter):
    """A meter that notes the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def cap(self, reservation_bytes: int, taken_bytes: int | None = None) -> None:
        self.calls.append(f"cap {reservation_bytes}")

    def lift_cap(self) -> None:
        self.calls.append("lift")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.calls.append(name)
        with super().phase(name):
            yield


def test_the_cap_is_set_before_the_workload_may_allocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a GPU: nothing of the workload runs before the first cap."""
    meter = Recorder()
    loaded = SimpleNamespace(
        workload=SimpleNamespace(
            open_loaders=lambda params: meter.calls.append("loaders run"),
            setup=lambda params, device: meter.calls.append("setup runs"),
            own_fit=lambda run: (_ for _ in ()).throw(ValueError("the end")),
        )
    )
    monkeypatch.setattr("tuner.execution.worker._environment", lambda request, loaded: {})
    request = request_for("-", {}, device="cuda", reservation_bytes=5)

    trial = _Trial(request, RunFolder(tmp_path), torch.device("cuda:0"), meter, loaded)  # type: ignore[arg-type]
    assert trial.run().outcome is Outcome.ERROR

    assert meter.calls == ["cap 5", "data", "loaders run", "cap 5", "setup", "setup runs", "lift"]
