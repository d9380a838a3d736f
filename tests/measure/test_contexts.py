"""Measuring a context: the child's arithmetic, its failures, and the file that keeps the figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tuner.measure import context_child, contexts, meters, nvml
from tuner.measure.contexts import (
    ChildProbe,
    ContextKey,
    ContextStore,
    MeasuredContext,
    MeasurementError,
    state_folder,
)
from tuner.units import GIB, MIB

DEVICE = nvml.Device(0, "GPU-1", "NVIDIA GeForce RTX 3060", 12 * GIB, 11 * GIB, (8, 6))
KEY = ContextKey("host", "GPU-1", "570.195.03", "2.13.0+cu130")
MEASURED = MeasuredContext(300 * MIB, 12_622_168_064, "nvml, this process + torch.cuda reserved")


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_child_sees_one_gpu_and_its_answer_comes_back() -> None:
    code = (
        "import json, os, sys; answer = dict(context_bytes=len(os.environ['CUDA_VISIBLE_DEVICES']), "
        "total_bytes=2, source='x'); os.write(int(sys.argv[1]), json.dumps(answer).encode())"
    )
    assert ChildProbe(child(code)).measure(DEVICE) == MeasuredContext(len("GPU-1"), 2, "x")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('The NVIDIA driver is too old')", "driver is too old"),
        ("import os; os._exit(3)", "ended with code 3"),
        ("import os; os.kill(os.getpid(), 11)", "ended with code -11"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
    ids=["error", "exit", "crash", "hang"],
)
def test_a_child_that_fails_says_why(code: str, reason: str) -> None:
    with pytest.raises(MeasurementError, match=reason):
        ChildProbe(child(code), timeout_seconds=1 if "sleep" in code else 60).measure(DEVICE)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch has CUDA")
def test_the_real_child_says_what_pytorch_says_without_cuda() -> None:
    with pytest.raises(MeasurementError, match="not compiled with CUDA"):
        ChildProbe().measure(DEVICE)


@pytest.mark.parametrize(
    ("use", "others_mib", "expected_mib"),
    [
        (nvml.Use(600 * MIB, "nvml, this process"), 1000, 580),
        (nvml.Use(1600 * MIB, nvml.DEVICE_WIDE), 1000, 580),  # a container: what the device grew by
    ],
)
def test_the_context_is_what_nvml_shows_less_what_is_reserved(
    use: nvml.Use, others_mib: int, expected_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MiB are reserved after the warm-up; `torch.cuda` answers as on such a GPU."""
    answers = {
        "synchronize": None,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "memory_reserved": 20 * MIB,
        "memory_stats_as_nested_dict": {},
        "get_device_properties": SimpleNamespace(total_memory=12_622_168_064),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, answer=answer: answer)
    monkeypatch.setattr("tuner.warmup.warm_up", lambda device: None)
    monkeypatch.setattr(meters, "used_before", lambda device: nvml.Before(others_mib * MIB))
    monkeypatch.setattr(nvml, "process_use", lambda visible, pid: use)

    measured = MeasuredContext(**context_child.measure())

    assert (measured.context_bytes, measured.total_bytes) == (expected_mib * MIB, 12_622_168_064)
    assert measured.spread_bytes == (64 if use.source == nvml.DEVICE_WIDE else 16) * MIB


def test_what_was_measured_is_kept_for_its_host_device_driver_and_pytorch(tmp_path: Path) -> None:
    ContextStore(tmp_path / "state").put(KEY, MEASURED)

    store = ContextStore(tmp_path / "state")
    assert store.get(KEY) == MEASURED
    for other in ({"host": "x"}, {"uuid": "GPU-2"}, {"driver": "575.1"}, {"torch": "2.14.0"}):
        assert store.get(ContextKey(**{**vars(KEY), **other})) is None
    assert [path.name for path in store.path.parent.iterdir()] == ["contexts.json"]  # nothing aside


def test_a_new_driver_replaces_the_old_figure_and_other_devices_stay(tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    newer = ContextKey("host", "GPU-1", "575.1", "2.13.0+cu130")
    other = ContextKey("host", "GPU-2", "570.195.03", "2.13.0+cu130")
    for key in (KEY, other, newer):
        store.put(key, MEASURED)

    assert (store.get(KEY), store.get(newer), store.get(other)) == (None, MEASURED, MEASURED)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({"version": 99, "contexts": []}),
        json.dumps({"version": 1, "contexts": [{"key": vars(KEY), "context": {"bytes": 1}}, 3, {"key": 1}]}),
        json.dumps({"version": 1}),
    ],
)
def test_a_file_that_cannot_be_understood_counts_as_empty(text: str, tmp_path: Path) -> None:
    store = ContextStore(tmp_path)
    store.path.write_text(text)

    assert store.get(KEY) is None
    store.put(KEY, MEASURED)
    assert store.get(KEY) == MEASURED


def test_the_state_folder_follows_the_xdg_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("TUNER_STATE_DIR", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert state_folder() == Path("/home/ada/.local/state/vram-tuner")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert state_folder() == Path("/home/ada/.local/state/vram-tuner")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_folder() == Path("/state/vram-tuner")
    monkeypatch.setenv("TUNER_STATE_DIR", "/own")
    assert state_folder() == Path("/own")


def test_a_context_holds_for_this_build_of_pytorch() -> None:
    assert contexts.context_key(DEVICE, "570.195.03").torch == torch.__version__
