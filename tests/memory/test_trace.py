"""Traces against the CPU allocator's true peak, which PyTorch's profiler reports."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.memory_accuracy import real_peak, traced_peak
from benchmarks.zoo import ZOO, Step
from tests.conftest import DIGITS, ROOT
from tuner.errors import Untraceable
from tuner.measure.profile import allocated_peak
from tuner.memory.cpu_rules import OperatorProbe, cpu_rules
from tuner.memory.cuda_rules import CudaDevice, cuda_rules
from tuner.memory.prediction import estimate
from tuner.memory.targets import resolve_target
from tuner.memory.trace import Trace, trace_build, trace_workload
from tuner.stand_in import configuration
from tuner.workload import Workload, load_workload

CPU, CUDA = cpu_rules(), cuda_rules(CudaDevice())

# Where oneDNN allocates inside an operator, the probe stands for it; elsewhere the trace is exact.
ONEDNN = {
    "cnn",
    "cnn_batchnorm",
    "residual",
    "depthwise",
    "upsampling",
    "conv1d",
    "lstm",
    "lstm_bidirectional",
}


@pytest.fixture(scope="module")
def probe() -> OperatorProbe:
    return OperatorProbe()


def peak_of_trace(trace: Trace, target: str = "cpu") -> int:
    peak = estimate(trace, resolve_target(target)).allocated_bytes
    assert peak is not None
    return peak


@pytest.mark.parametrize("name", list(ZOO))
def test_zoo_is_traced_to_its_true_peak(name: str, probe: OperatorProbe) -> None:
    """Baseline: the profiler over the same three steps; tolerance 0.5 %, 3 % where oneDNN hides memory."""
    tolerance = 0.03 if name in ONEDNN else 0.005
    assert traced_peak(ZOO[name], probe) == pytest.approx(real_peak(ZOO[name]), rel=tolerance)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("digits_cnn.py", {"width": "48", "depth": "2", "batch_size": "64"}),
        ("digits_cnn.py", {"width": "32", "depth": "3", "batch_size": "512", "optimizer": "sgd"}),
        ("char_gpt.py", {"width": "64", "layers": "2", "batch_size": "16", "dropout": "0.1"}),
        ("char_gpt.py", {"width": "96", "heads": "4", "context": "128", "batch_size": "32"}),
    ],
)
def test_studies_are_traced_to_their_true_peak(
    file: str, settings: dict[str, str], probe: OperatorProbe
) -> None:
    """Baseline: the profiler over real batches; tolerance 0.5 % (3 % with convolutions)."""
    workload = load_workload(str(ROOT / "studies" / file)).workload
    params = configuration(workload, settings)
    loaders = workload.open_loaders(params)
    real = allocated_peak(
        workload,
        params,
        torch.device("cpu"),
        train_batches=loaders.train,
        eval_batches=loaders.eval,
        train_steps=3,
        eval_steps=2,
    )
    traced = peak_of_trace(trace_workload(workload, params, cpu_rules(probe)))
    assert traced == pytest.approx(real, rel=0.03 if file == DIGITS.name else 0.005)


def test_a_shared_wide_tensor_is_not_counted_twice(probe: OperatorProbe) -> None:
    """The naive trace has four wide tensors, a real run three: 2,048 × 2,048 floats are 16 MiB."""
    wide = 2048 * 2048 * 4
    traced, real = traced_peak(ZOO["two_heads"], probe), real_peak(ZOO["two_heads"])
    assert abs(traced - real) < wide // 100


def test_categories_add_up_and_are_right() -> None:
    """Baseline: arithmetic; 1,000 × 1,000 floats of weight, gradient and two moments each."""

    def build(device: torch.device) -> Step:
        model = nn.Linear(1000, 1000, bias=False)
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(4, 1000)).sum().backward()
            optimizer.step()

        return step

    found = estimate(trace_build(build, CPU), resolve_target("cpu"))
    weight = 4_000_000
    assert found.categories["parameters"] == weight
    assert found.categories["gradients"] == weight
    # Adam's step counter is a tensor of its own
    assert found.categories["optimizer_state"] == pytest.approx(2 * weight, abs=64)
    assert sum(found.categories.values()) == found.allocated_bytes
    assert found.peak_at is not None
    assert found.peak_at.phase == "optimizer"


def test_the_second_step_can_need_more_than_the_first() -> None:
    """Momentum appears at the first update: one step's trace misses a weight-sized buffer."""

    def build(device: torch.device) -> Step:
        model = nn.Linear(1000, 1000, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(400, 1000)).square().sum().backward()
            optimizer.step()

        return step

    one = peak_of_trace(trace_build(build, CPU, 1))
    three = peak_of_trace(trace_build(build, CPU, 3))
    assert three - one >= 3_000_000


def test_kept_outputs_are_multiplied_by_the_number_of_evaluation_steps() -> None:
    """Case D14 in small: logits of 256 × 1,000 floats kept per evaluation batch, 50 batches."""

    class Keeps(Workload):
        def setup(self, params: Any, device: Any) -> dict[str, Any]:
            model = nn.Linear(10, 1000)
            return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "kept": []}

        def example_batch(self, params: Any, device: Any) -> torch.Tensor:
            return torch.empty(256, 10)

        def train_step(self, state: Any, batch: torch.Tensor) -> None:
            state["model"](batch).sum().backward()
            state["optimizer"].step()

        def eval_step(self, state: Any, batch: torch.Tensor) -> None:
            state["kept"].append(state["model"](batch))

        def eval_steps(self, params: Any) -> int:
            return 50

    found = estimate(trace_workload(Keeps(), {}, CPU), resolve_target("cpu"))
    assert found.allocated_bytes == pytest.approx(50 * 256 * 1000 * 4, rel=0.02)


def test_memory_left_behind_by_each_step_is_reported() -> None:
    """Case D18: the loss itself is added up, so that every step's graph stays reachable."""

    def build(device: torch.device) -> Step:
        model, total = nn.Linear(100, 100), [torch.zeros(())]

        def step() -> None:
            total[0] = total[0] + model(torch.randn(64, 100)).square().sum()

        return step

    trace = trace_build(build, CPU)
    assert trace.growth_bytes >= 64 * 100 * 4
    assert trace_build(ZOO["mlp"], CPU).growth_bytes == 0


def _masked(device: torch.device) -> Step:
    return lambda: torch.randn(8, 8)[torch.randn(8, 8) > 0].sum()  # type: ignore[return-value]


def _looping(device: torch.device) -> Step:
    def step() -> None:
        x = torch.randn(8)
        while x.norm() > 1:
            x = x * 0.5

    return step


def _numpy(device: torch.device) -> Step:
    return lambda: np.asarray(torch.randn(8)).sum()  # type: ignore[return-value]


class _Doubled(torch.autograd.Function):
    """Computes outside PyTorch, as a kernel in Triton or CUDA does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(2 * x.detach().numpy())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def _own_function(device: torch.device) -> Step:
    return lambda: _Doubled.apply(torch.randn(8, requires_grad=True)).sum().backward()  # type: ignore


_LIBRARY = torch.library.Library("tuner_tests", "DEF")
_LIBRARY.define("doubled(Tensor x) -> Tensor")
_LIBRARY.impl("doubled", lambda x: 2 * x, "CPU")


def _own_operator(device: torch.device) -> Step:
    return lambda: torch.ops.tuner_tests.doubled(torch.randn(8)).sum()  # type: ignore[no-any-return]


def _broken(device: torch.device) -> Step:
    def step() -> None:
        raise ValueError("this is broken")

    return step


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_masked, r"a boolean mask or nonzero\(\) makes a shape that depends on data"),
        (_looping, "a loop depends on the value of a tensor"),
        (_numpy, "NumPy needs the values of a tensor"),
        (_own_function, "NumPy needs the values of a tensor"),
        (_own_operator, "the custom operator tuner_tests::doubled has no fake implementation"),
        (_broken, "ValueError: this is broken"),
    ],
)
def test_what_cannot_be_traced_says_why_and_where(build: Any, reason: str) -> None:
    with pytest.raises(Untraceable, match=reason) as caught:
        trace_build(build, CPU)
    assert "test_trace.py:" in caught.value.message


class _Scaled(torch.autograd.Function):
    """Made of PyTorch's own operators: seen like any other code."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x)
        return gradient * (share + x * share * (1 - share))


def test_a_function_of_ones_own_is_traced_where_it_is_made_of_operators() -> None:
    """Baseline: the profiler."""

    def build(device: torch.device) -> Step:
        layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

        def step() -> None:
            x = torch.randn(2048, 256)
            for layer in layers:
                x = _Scaled.apply(layer(x))
            x.pow(2).mean().backward()

        return step

    assert peak_of_trace(trace_build(build, CPU)) == pytest.approx(real_peak(build), rel=0.005)


def test_cuda_in_any_spelling_traces_without_a_gpu() -> None:
    def build(device: torch.device) -> Step:
        model = nn.Sequential(nn.Linear(8, 8).cuda(), nn.Linear(8, 8).to("cuda:0"), nn.Linear(8, 8)).to(
            device
        )

        def step() -> None:
            x = torch.randn(4, 8, device="cuda").to(torch.device("cuda", 0)).cuda()
            F.mse_loss(model(x), torch.zeros(4, 8, device=device)).backward()

        return step

    assert peak_of_trace(trace_build(build, CUDA), "cuda") > 0


def test_random_states_and_patches_are_restored() -> None:
    apply, initialiser = nn.Module._apply, nn.init.kaiming_uniform_
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    trace_build(ZOO["sizes_from_tensors"], CPU)
    with pytest.raises(Untraceable):
        trace_build(_broken, CPU)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert (nn.Module._apply, nn.init.kaiming_uniform_) == (apply, initialiser)


def test_setup_that_reads_tensors_is_predicted_like_the_same_sizes_written_out() -> None:
    """A neutral answer to .item() would shape another model, silently."""

    def build_with(sizes: Any) -> Any:
        def build(device: torch.device) -> Step:
            model = nn.Linear(sizes()[0], sizes()[1])

            def step() -> None:
                model(torch.randn(32, 64)).sum().backward()

            return step

        return build

    read = trace_build(build_with(lambda: (torch.tensor([0.5, 2.0]) * 128).int().tolist()), CPU)
    written = trace_build(build_with(lambda: (64, 256)), CPU)
    assert peak_of_trace(read) == peak_of_trace(written)


def test_multi_tensor_optimizers_on_cuda_take_one_more_set_of_temporaries() -> None:
    """CUDA takes foreach=True by default (torch/optim/optimizer.py): 8 weights of 4 MiB against 1."""

    def build_with(foreach: bool | None) -> Any:
        def build(device: torch.device) -> Step:
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8))).to(device)
            optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)

            def step() -> None:
                optimizer.zero_grad()
                model(torch.randn(8, 1024, device=device)).sum().backward()
                optimizer.step()

            return step

        return build

    default, single = (
        peak_of_trace(trace_build(build_with(foreach), CUDA), "cuda") for foreach in (None, False)
    )
    assert 4 * 8 * 2**20 * 0.6 < default - single < 4 * 8 * 2**20


@pytest.mark.parametrize("held", [True, False])
def test_a_gradient_that_somebody_holds_is_added_beside(held: bool) -> None:
    """Baseline: the profiler. The engine adds in place only into what nobody else can see."""

    def build(device: torch.device) -> Step:
        layer = nn.Linear(256, 256, bias=False).requires_grad_(False)
        leaf = torch.randn(4096, 256, requires_grad=True)
        gradient = torch.randn(4096, 256)

        def step() -> None:
            leaf.grad = None
            x = leaf * 1.0
            y = x + layer(x)
            if held:
                y.backward(gradient)
            else:
                (y * 2.0).backward(gradient)

        return step

    assert peak_of_trace(trace_build(build, CPU)) == pytest.approx(real_peak(build), rel=0.001)


def test_layers_dropped_by_a_random_number_are_taken_to_run() -> None:
    """`torch.rand([]) < layerdrop`, as in OPT: skipping every layer would predict far too little."""

    def build_with(layerdrop: float | None) -> Any:
        def build(device: torch.device) -> Step:
            layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

            def step() -> None:
                x = torch.randn(1024, 256)
                for layer in layers:
                    if layerdrop is None or not torch.rand([]) < layerdrop:
                        x = layer(x)
                x.sum().backward()

            return step

        return build

    dropping, plain = (trace_build(build_with(share), CPU) for share in (0.1, None))
    assert peak_of_trace(dropping) == pytest.approx(peak_of_trace(plain), rel=0.001)
    assert any("a random number drawn at test_trace.py" in note for note in dropping.notes)


def test_a_gradient_that_blas_cannot_read_is_copied() -> None:
    """Baseline: the profiler. The sum of a layer's output sends back one number, expanded."""

    def build(device: torch.device) -> Step:
        layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(2)))
        return lambda: layers(torch.randn(8192, 512)).sum().backward()

    assert peak_of_trace(trace_build(build, CPU)) == pytest.approx(real_peak(build), rel=0.001)
