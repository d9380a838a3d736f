"""What user code does around a step: state of the process, values, tensors from elsewhere.

Baseline: PyTorch's profiler over the same steps on real tensors, within 0.1 % unless said.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.zoo import Build, Step
from tests.memory.test_trace import peak_of_trace
from tuner.errors import Untraceable
from tuner.memory.cpu_rules import cpu_rules
from tuner.memory.cuda_rules import CudaDevice, cuda_rules
from tuner.memory.peak import predict_peak
from tuner.memory.trace import trace_build
from tuner.profiling import profiled_peak
from tuner.records import CATEGORIES
from tuner.steps import batches_in

CPU, CUDA = cpu_rules(), cuda_rules(CudaDevice(cublas_workspace_bytes=0))


def real_peak(build: Build, steps: int) -> int:
    with profiled_peak() as peak:
        step = build(torch.device("cpu"))
        for _ in range(steps):
            step()
    return peak.bytes


def _every_fourth(device: torch.device) -> Step:
    model, calls = nn.Linear(512, 512), [0]
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.randn(64, 512)).pow(2).mean().backward()
        calls[0] += 1
        if calls[0] % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def _guarded(device: torch.device) -> Step:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        loss = model(torch.randn(64, 512)).pow(2).mean()
        if torch.isnan(loss) or torch.isinf(loss).any() or not torch.isfinite(loss):
            return
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()

    return step


def _skipping_large_losses(device: torch.device) -> Step:
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        loss = model(torch.randn(64, 512)).pow(2).mean()
        if loss > 1e6:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _converted_after_the_optimizer(device: torch.device) -> Step:
    model = nn.Linear(512, 512)
    optimizer = torch.optim.Adam(model.parameters())
    model.double()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(64, 512, dtype=torch.double)).pow(2).mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("build", "steps"),
    [(_every_fourth, 8), (_guarded, 3), (_skipping_large_losses, 3), (_converted_after_the_optimizer, 3)],
)
def test_a_step_is_followed_to_its_update(build: Build, steps: int) -> None:
    assert peak_of_trace(trace_build(build, CPU)) == pytest.approx(real_peak(build, steps), rel=0.001)


def test_an_unknown_branch_is_said_and_traced_both_ways() -> None:
    (note,) = trace_build(_skipping_large_losses, CPU).notes
    assert "a branch depends on the value of a tensor (test_whole_process.py:" in note


def test_an_optimizer_that_goes_on_by_values_cannot_be_traced() -> None:
    def build(device: torch.device) -> Step:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.LBFGS(model.parameters())

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)  # type: ignore[arg-type]

    with pytest.raises(Untraceable, match="LBFGS goes on by the values"):
        trace_build(build, CPU)


def test_an_optimizer_that_never_steps_is_not_trusted() -> None:
    def build(device: torch.device) -> Step:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters())
        return lambda: (optimizer, model(torch.randn(4, 8)).sum().backward())  # type: ignore[func-returns-value]

    with pytest.raises(Untraceable, match="no optimizer stepped within"):
        trace_build(build, CPU)


@functools.cache
def _table(size: int) -> torch.Tensor:
    return torch.zeros(size, size)


def test_what_a_module_caches_is_counted_in_every_trace() -> None:
    """4 MiB, made in the first trace and found in the second (counted there twice at most)."""

    def build(device: torch.device) -> Step:
        model = nn.Linear(8, 8)
        return lambda: (model(torch.randn(4, 8)).sum() + _table(1024)[0, 0] * _table(1024).sum()).backward()

    first, second = (peak_of_trace(trace_build(build, CPU)) for _ in range(2))
    assert 4 * 2**20 < first <= second < 2.1 * first


def test_a_model_made_outside_is_refused_and_left_alone() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(Untraceable, match="made outside setup"):
        trace_build(lambda device: lambda: model(torch.randn(2, 8)).sum().backward(), CPU)
    assert model.weight.grad is None


def test_host_copies_take_nothing_on_the_gpu() -> None:
    """Outputs of 1 MiB kept on the host against the same step without; back on the GPU they count."""

    def build_with(keep: bool, back: bool = False) -> Any:
        def build(device: torch.device) -> Step:
            model, kept = nn.Linear(256, 256).to(device), []

            def step() -> None:
                output = model(torch.randn(1024, 256, device=device))
                if keep:
                    kept.append(output.detach().cpu())
                    joined = torch.cat(kept)
                    if back:
                        joined.to(device).sum()
                output.pow(2).mean().backward()
                torch.cuda.synchronize()

            return step

        return build

    plain, kept, back = (
        peak_of_trace(trace_build(build_with(*how), CUDA, 6), "cuda")
        for how in ((False,), (True,), (True, True))
    )
    assert kept == plain
    assert back > plain + 2**20


def test_the_process_is_as_it_was() -> None:
    def build(device: torch.device) -> Step:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("cuda")
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cudnn.benchmark = True
        torch.use_deterministic_algorithms(True)
        model = nn.Linear(8, 8)
        return lambda: model(torch.randn(2, 8)).sum().backward()

    with torch.no_grad():
        trace_build(build, CUDA)
        assert not torch.is_grad_enabled()
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_device().type == "cpu"
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()


def test_other_threads_train_meanwhile() -> None:
    wrong: list[str] = []
    done = threading.Event()

    def train() -> None:
        while not done.is_set():
            layer = nn.Linear(64, 64)
            nn.init.constant_(layer.weight, 0.0)
            nn.init.normal_(layer.weight)
            if not layer.weight.abs().sum() > 0:
                wrong.append("an initialiser did nothing")
            if layer.double().weight.dtype is not torch.float64:
                wrong.append("a conversion did nothing")

    def trace() -> None:
        for _ in range(3):
            trace_build(_guarded, CUDA)

    training = threading.Thread(target=train)
    tracing = [threading.Thread(target=trace) for _ in range(2)]
    for thread in (training, *tracing):
        thread.start()
    for thread in tracing:
        thread.join()
    done.set()
    training.join()
    assert not wrong


def test_a_batch_as_the_default_collation_makes_it_is_one_batch() -> None:
    """`[images, labels]` against several batches in a list."""
    images, labels = torch.empty(4, 3, 8, 8), torch.empty(4, dtype=torch.long)
    assert len(batches_in([images, labels])) == 1
    assert len(batches_in((images, labels))) == 1
    assert len(batches_in([(images, labels), (images[:2], labels[:2])])) == 2
    assert len(batches_in([images, images[:2]])) == 2


@pytest.mark.parametrize("target", ["cpu", "rtx-3090"])
def test_categories_are_those_that_are_documented(target: str) -> None:
    """Adam's step counters, which lie on the host beside a GPU, make no category of their own."""
    assert set(predict_peak(_guarded, target).categories) == set(CATEGORIES)
