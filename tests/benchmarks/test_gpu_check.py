"""The GPU check, run for real on the CPU, and its GPU path with stand-ins for what a GPU answers."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gpu_check as driver
from benchmarks import gpu_child, gpu_facts
from benchmarks.gpu_comparison import Comparison, smallest_cap
from benchmarks.gpu_configurations import CONFIGURATIONS
from benchmarks.gpu_report import default_path, summary_of
from benchmarks.memory_accuracy import real_peak, traced_peak
from tests.benchmarks.conftest import Check
from tests.conftest import ROOT
from tuner.measure.nvml import DEVICE_WIDE, Devices, Use
from tuner.memory.cpu_rules import OperatorProbe
from tuner.memory.cuda_rules import CudaDevice, cuda_rules
from tuner.memory.cuda_rules.attention import Attention, choose_backend
from tuner.memory.prediction import estimate
from tuner.memory.targets import resolve_target
from tuner.memory.trace import trace_build
from tuner.units import GIB, MIB

BLOCKED = ("optuna", "sqlalchemy", "alembic", "psycopg", "click", "rich", "filelock", "plotly", "streamlit",
           "numpy", "sklearn", "pandas")  # fmt: skip
BLOCKER = f"""
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {BLOCKED!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def test_a_bare_host_checks_itself(gpu_check: Check, tmp_path: Path) -> None:
    """Baseline: the profiler; 0.5 %, 3 % where oneDNN allocates. Of what is installed, the rest is absent.

    The cap within 10 %: it is one of the process's data, not of the allocator's blocks.
    """
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    names = ["adam", "resnet_channels_last", "transformer_cap"]
    done = gpu_check(
        "--device", "cpu", "--quick", "--only", ",".join(names), "--json", "out/check.json",
        PYTHONPATH=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "check.json").read_text())
    rows = {row["name"]: row for row in report["configurations"]}
    assert list(rows) == names
    assert rows["adam"]["predicted"]["allocated_bytes"] == pytest.approx(
        rows["adam"]["measured"]["allocated_bytes"], rel=0.005
    )
    assert abs(rows["resnet_channels_last"]["errors"]["allocated"]) < 0.03
    cap = rows["transformer_cap"]
    assert cap["measured"]["failed_bytes"] < cap["measured"]["required_bytes"]
    assert abs(cap["errors"]["required"]) < 0.1
    assert report["environment"]["torch"] == torch.__version__
    assert report["summary"]["allocated"]["count"] == 2
    assert report["summary"]["ran"] == 3


def test_what_is_taken_away_cannot_be_imported(tmp_path: Path) -> None:
    """So that the test above can fail."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    command = [sys.executable, "-P", "-c", "import optuna"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert "No module named 'optuna'" in done.stderr


def test_a_configuration_that_fails_is_reported_and_the_rest_goes_on(
    gpu_check: Check, tmp_path: Path
) -> None:
    """PyTorch refuses capturable optimizers on a CPU."""
    done = gpu_check("--device", "cpu", "--only", "adam_capturable,sgd", "--json", "check.json")
    assert done.returncode == 1
    failed, ran = json.loads((tmp_path / "check.json").read_text())["configurations"]
    assert failed["status"] == "failed"
    assert "capturable" in failed["reason"]
    assert ran["status"] == "ran"
    assert re.search(r"^adam_capturable +failed: prediction: .*capturable", done.stdout, re.MULTILINE)
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_a_child_that_hangs_is_killed(gpu_check: Check) -> None:
    """A tenth of a second is not enough to trace."""
    done = gpu_check("--device", "cpu", "--only", "lstm", "--timeout", "0.1s")
    assert done.returncode == 1
    assert "no answer within 0.1 s" in done.stdout


def test_the_list_names_every_configuration_and_fact(gpu_check: Check) -> None:
    done = gpu_check("--list")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == [*CONFIGURATIONS, *gpu_facts.FACTS]
    assert len(CONFIGURATIONS) >= 15
    assert max(map(len, done.stdout.splitlines())) <= 110


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "resnet,nothing"], "there is no configuration 'nothing'; known: resnet, "),
        (["--only", ","], "--only names nothing; known: "),
        (["--only", "sgd", "--timeout", "soon"], "'soon' is not a duration"),
        (["--device", "cpu", "--only", "context"], "context can be measured on a GPU only"),
        (["--device", "cuda"], "PyTorch finds no GPU here; "),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the last case needs a host without a GPU")
def test_bad_input_is_one_clear_line(gpu_check: Check, arguments: list[str], says: str) -> None:
    done = gpu_check(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert says in line


@pytest.mark.parametrize("name", ["resnet_channels_last", "index_put", "transformer_fp16", "clipping"])
def test_programs_are_traced_to_their_true_peak(name: str) -> None:
    """Baseline: the profiler over the same steps; 0.5 %."""
    build = CONFIGURATIONS[name].build
    assert traced_peak(build, OperatorProbe()) == pytest.approx(real_peak(build), rel=0.005)


@pytest.mark.parametrize("name", ["depthwise", "sdpa_math", "large_vocabulary", "sdpa_bf16", "gru"])
def test_programs_suit_a_card_of_8_gib(name: str) -> None:
    """Large enough to tell a rule from rounding, with room for the context: the extremes of each kind."""
    found = estimate(trace_build(CONFIGURATIONS[name].build, cuda_rules(CudaDevice())), resolve_target("t4"))
    assert found.reserved_bytes is not None
    assert 200 * MIB < found.reserved_bytes < 4 * GIB


def test_cudnn_attention_is_reached_where_math_is_switched_off() -> None:
    """`select_sdp_backend` in sdp_utils.cpp tries cuDNN after math on other cards than Hopper."""
    query = torch.zeros(2, 4, 128, 64, dtype=torch.bfloat16)
    call, ampere = Attention(query, query, query), CudaDevice((8, 6))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert choose_backend(call, ampere) == "cudnn"
        with pytest.raises(RuntimeError, match="No available kernel"):
            choose_backend(call, CudaDevice((7, 5)))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        assert choose_backend(call, ampere) == "math"


@pytest.mark.parametrize(
    ("true", "ran", "failed"), [(0.97, 0.98, 0.965), (1.03, 1.035, 1.02), (2, None, 1.3)]
)
def test_the_smallest_cap_is_closed_in_on(true: float, ran: float | None, failed: float) -> None:
    """Within 1 % when the prediction is within 3 %, in four tries."""
    predicted = 4 * GIB
    found = smallest_cap(lambda cap: cap >= true * predicted, predicted)
    assert len(found.tries) == 4
    assert found.failed_bytes is not None
    assert found.failed_bytes < true * predicted
    assert found.failed_bytes / predicted == pytest.approx(failed, abs=0.16 if ran is None else 0.01)
    if ran is None:
        assert found.ran_bytes is None
    else:
        assert found.ran_bytes is not None
        assert true <= found.ran_bytes / predicted <= true * 1.015


# The GPU path, with stand-ins


class _Answered:
    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def answer(self, timeout_seconds: float) -> dict[str, Any]:
        return self._answer


class GpuStandby:
    """Answers as children on a GPU would: 500 MiB of context; work under 900 MiB runs out of memory."""

    def ask(self, job: str, **details: Any) -> _Answered:
        answers = {
            "environment": {
                "device": "cuda", "torch": "2.14.1+cu130", "cudnn": 91500, "gpu": "NVIDIA T4 (stand-in)",
                "compute_capability": [7, 5], "capacity_bytes": 15 * GIB,
            },
            "fact": {"rows": [{"what": "fact", "measured": 500 * MIB, "assumed": 450 * MIB}] * 2},
            "predict": {
                "allocated_bytes": 880 * MIB, "reserved_bytes": 990 * MIB, "required_bytes": 900 * MIB,
            },
            "measure": {
                "allocated_bytes": 800 * MIB, "reserved_bytes": 1000 * MIB, "device_bytes": 1500 * MIB,
                "out_of_memory": (details.get("cap_bytes") or GIB) < 900 * MIB,
            },
        }  # fmt: skip
        if job == "measure" and details["name"] == "vgg":
            return _Answered({"failed": "AcceleratorError: CUDA error"})
        return _Answered(answers[job])

    def __enter__(self) -> GpuStandby:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stand-ins for a GPU's children and for NVML; the folder of measurements."""
    monkeypatch.setattr(driver, "Standby", lambda variables: GpuStandby())
    monkeypatch.setattr(driver.nvml, "devices", lambda: Devices((), "NVML is absent", driver="580.65"))
    monkeypatch.setattr(driver, "MEASUREMENTS", tmp_path)
    return tmp_path


def checked(only: str | None) -> int:
    arguments = argparse.Namespace(
        device=None, only=only, quick=False, json=None, snapshots=None, timeout=None, list=False
    )
    return driver._check(arguments, driver._named(only))


def test_a_full_check_on_a_gpu_is_kept_where_measurements_are(
    gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(None) == 1, "vgg failed"
    report = json.loads((gpu / "gpu_check-nvidia-t4-stand-in-2.14.1-cu130.json").read_text())
    rows = {row["name"]: row for row in report["configurations"]}
    assert rows["adam"]["predicted"]["device_bytes"] == 1490 * MIB, "context after a warm-up + reserved"
    assert rows["adam"]["errors"] == pytest.approx(
        {"allocated": 0.1, "reserved": -0.01, "device": -10 / 1500}
    )
    assert rows["sdpa_bf16"]["reason"] == "needs compute capability 8.0"
    assert rows["vgg"]["reason"] == "AcceleratorError: CUDA error"
    cap = rows["transformer_cap"]["measured"]
    assert cap["failed_bytes"] < 900 * MIB <= cap["required_bytes"] <= 910 * MIB
    assert set(report["facts"]) == set(gpu_facts.FACTS)
    shown = capsys.readouterr().out
    assert "device bytes cannot be measured: NVML is absent" in shown
    assert re.search(r"^fact +500.0 MiB  assumed 450.0 MiB \(-10.0%\)$", shown, re.MULTILINE)
    assert max(len(line) for line in shown.splitlines() if not line.startswith("written to")) <= 110


def test_a_part_of_the_check_does_not_replace_a_full_one(gpu: Path) -> None:
    assert checked("adam") == 0
    assert list(gpu.iterdir()) == []


@pytest.mark.parametrize(
    ("used", "device_bytes"),
    [
        (Use(180, "nvml, this process"), 190),
        (Use(230, DEVICE_WIDE), 140),  # others used 100 before
        (Use(None, "no driver"), None),
    ],
)
def test_device_bytes_are_the_context_and_the_peak_of_reserved(
    monkeypatch: pytest.MonkeyPatch, used: Use, device_bytes: int | None
) -> None:
    """Reserved peaks at 90 in a step and is 80 at the end, so that the context is 100 (or 50)."""
    allocated, reserved = iter([10, 50, 70, 60]), iter([20, 60, 90, 80])
    uses = iter([Use(100, DEVICE_WIDE), used])
    for name, answer in {
        "synchronize": lambda device: None,
        "reset_peak_memory_stats": lambda device: None,
        "max_memory_allocated": lambda device: next(allocated),
        "max_memory_reserved": lambda device: next(reserved),
        "memory_reserved": lambda device: 80,
        "memory_stats": lambda device: {"num_alloc_retries": 1},
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(gpu_child, "GPU", torch.device("cpu"))
    monkeypatch.setattr(gpu_facts.nvml, "process_use", lambda visible, pid: next(uses))
    found = gpu_child.measure({"name": "sgd", "device": "cuda"})
    assert found["device_bytes"] == device_bytes
    assert found["allocated_bytes"] == 70
    assert found["by_step_bytes"] == [10, 50, 70, 60]
    assert found["retries"] == 1


def _held_bytes(device: torch.device | None = None) -> int:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device without workspaces or reserves: what is allocated is what tensors hold."""
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, _held_bytes)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return torch.device("cpu")


def test_workspaces_are_what_stays_when_all_tensors_are_gone(cpu_as_gpu: torch.device) -> None:
    """A CPU has none; the figures assumed for an RTX 3090 are PyTorch's default, 8,519,680 B."""
    rows = gpu_facts.cublas_workspaces(cpu_as_gpu)
    assert [row["measured"] for row in rows] == [0] * 5
    assert [row["assumed"] for row in rows] == [8_519_680, 8_519_680, 0, 0, 8_519_680]


def test_the_reserve_is_what_stays_beside_outputs_and_states(
    cpu_as_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU keeps nothing that Python can see."""
    small = [(kind, 4, 8, 64, 2, 2) for kind in ("lstm", "gru", "rnn_tanh")]
    monkeypatch.setattr(gpu_facts, "_LAYOUTS", small)
    rows = [row for row in gpu_facts.recurrent_reserve(cpu_as_gpu) if not row["what"].endswith("backward")]
    assert {row["measured"] for row in rows} == {0}
    assert len(rows) == 2 * len(small)


@pytest.mark.parametrize("layout", gpu_facts._LAYOUTS[4:8], ids=str)
def test_the_assumed_reserve_is_what_the_rule_allocates(
    layout: tuple[str, int, int, int, int, int],
) -> None:
    """Baseline: the blocks of a trace with the rule."""
    kind, steps, batch, hidden, layers, directions = layout

    def build(device: torch.device) -> Any:
        layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind]
        cell = layer(hidden, hidden, layers, bidirectional=directions == 2).to(device)
        return lambda: cell(torch.randn(steps, batch, hidden, device=device))[0].sum().backward()

    blocks = {block.bytes for block in trace_build(build, cuda_rules(CudaDevice())).blocks}
    assert set(gpu_facts.assumed_of(layout)) <= blocks


def test_the_choice_of_attention_is_asked_of_pytorch(cpu_as_gpu: torch.device) -> None:
    rows = gpu_facts.attention_choice(cpu_as_gpu)
    assert {row["measured"] for row in rows} <= {"math", "flash"}, "a CPU has two"
    assert {row["assumed"] for row in rows} == {"flash", "efficient"}


def test_tracing_is_assumed_to_take_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = iter([Use(100, DEVICE_WIDE), Use(130, DEVICE_WIDE)])
    monkeypatch.setattr(gpu_facts.nvml, "process_use", lambda visible, pid: next(uses))
    (row,) = gpu_facts.tracing_context(torch.device("cpu"))
    assert (row["measured"], row["assumed"]) == (30, 0)


def test_the_summary_names_the_worst() -> None:
    rows = [
        {"name": name, "status": "ran", "errors": {"allocated": error}}
        for name, error in (("a", 0.01), ("b", -0.05), ("c", 0.02))
    ]
    found = summary_of([*rows, {"name": "d", "status": "failed"}])
    assert found["allocated"] == {"count": 3, "median": 0.02, "worst": -0.05, "worst_configuration": "b"}
    assert (found["ran"], found["failed"]) == (3, 1)


def test_measurements_that_are_kept_are_named_after_gpu_and_version() -> None:
    """And are full ones, without a failure to run."""
    folder = ROOT / "docs" / "measurements"
    made_up = default_path(folder, {"gpu": "NVIDIA A100-SXM4-40GB", "torch": "2.11.0+cu130"})
    assert made_up == folder / "gpu_check-nvidia-a100-sxm4-40gb-2.11.0-cu130.json"
    for path in folder.glob("gpu_check-*.json"):
        report = json.loads(path.read_text())
        assert path == default_path(folder, report["environment"])
        assert {row["name"] for row in report["configurations"]} >= {"resnet", "adam"}


def test_a_hang_under_a_cap_ends_the_search() -> None:
    class Hanging(GpuStandby):
        asked = 0

        def ask(self, job: str, **details: Any) -> _Answered:
            if job == "measure":
                self.asked += 1
                return _Answered({"failed": "no answer within 90 s"})
            return super().ask(job, **details)

    standby, environment = Hanging(), {"device": "cuda", "compute_capability": [9, 0], "capacity_bytes": GIB}
    found = Comparison(standby, environment, 90, snapshots=None).configuration("vgg_cap", asked_for=False)  # type: ignore[arg-type]
    assert found["reason"] == "under a cap: no answer within 90 s"
    assert standby.asked == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpu_is_checked(gpu_check: Check, tmp_path: Path) -> None:
    """Without convolutions: allocated within 5 %, device bytes within 5 % where NVML tells them."""
    done = gpu_check("--only", "cublas_workspaces,adam,transformer_fp32", "--json", "check.json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "check.json").read_text())
    assert set(report["facts"]) == {"context", "cublas_workspaces"}
    for row in report["configurations"]:
        assert all(abs(error) < 0.05 for error in row["errors"].values()), row
