"""Cases D10, D11 and D12 of real users: what a trace does not see is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tuner.memory.calibration import COMPILED, PLAIN, Calibration, Measured
from tuner.memory.peak import predict_peak
from tuner.records import Prediction, Verdict
from tuner.units import GIB


def checkpointed_blocks(*, compiled: bool) -> Prediction:
    """Predict five checkpointed blocks of linear, norm and GELU in bf16."""

    def build(device: torch.device) -> Callable[[], None]:
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2048, 2048), nn.LayerNorm(2048), nn.GELU()) for _ in range(5)
        ).to(device, torch.bfloat16)

        def forward(x: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

        run = torch.compile(forward) if compiled else forward

        def step() -> None:
            x = torch.empty(16384, 2048, device=device, dtype=torch.bfloat16, requires_grad=True)
            run(x).sum().backward()

        return step

    return predict_peak(build, "a100-40gb")


def one_linear_64_times(*, compiled: bool, autocast: bool) -> Prediction:
    """Predict one linear applied to 64 slices, all outputs kept."""

    def build(device: torch.device) -> Callable[[], None]:
        linear, x = nn.Linear(2048, 2048).to(device), torch.empty(50, 64, 2048, device=device)
        run = torch.compile(linear) if compiled else linear

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                torch.stack([run(x[:, index]) for index in range(64)]).sum().backward()

        return step

    return predict_peak(build, "a100-40gb")


@pytest.mark.parametrize(
    "predicted",
    [
        checkpointed_blocks,
        lambda compiled: one_linear_64_times(compiled=compiled, autocast=False),
        lambda compiled: one_linear_64_times(compiled=compiled, autocast=True),
    ],
)
def test_a_compiled_step_is_marked_and_less_certain(predicted: Callable[..., Prediction]) -> None:
    """Case D10: an eager trace is no evidence for a compiled run; the band is wider, the mix its own."""
    eager, compiled = predicted(compiled=False), predicted(compiled=True)

    assert (eager.mix, compiled.mix) == (PLAIN, COMPILED)
    assert any("the step is compiled" in note for note in compiled.assumptions)
    assert not any("the step is compiled" in note for note in eager.assumptions)
    assert eager.device is not None
    assert compiled.device is not None
    assert compiled.device.high - compiled.device.low > eager.device.high - eager.device.low


def test_eager_trials_say_nothing_about_compiled_ones() -> None:
    """Case D10: measured peaks are kept apart."""
    eager = [Measured(GIB, GIB, 3 * GIB, mix=PLAIN)] * 20
    for mix, trials in ((PLAIN, 20), (COMPILED, 0)):
        assert Calibration.of_mix("cuda", mix).updated(eager).trials == trials


def test_a_prediction_says_that_convolution_workspaces_are_not_seen() -> None:
    """Case D11: input and output of 2 GiB each; the library then asked for 48.01 GiB, which no tensor shows.

    What becomes of such a trial is in tests/execution/test_cases.py.
    """

    def build(device: torch.device) -> Callable[[], torch.Tensor]:
        convolution = nn.ConvTranspose2d(1, 1, 1, bias=False).to(device, torch.half)
        x = torch.empty(1024, 1, 1024, 1024, device=device, dtype=torch.half)
        return lambda: convolution(x)

    found = predict_peak(build, "v100-16gb", 1, budget="15.78GiB")

    assert sum(tensor.bytes for tensor in found.largest) == pytest.approx(4 * GIB, rel=0.001)
    assert found.verdict is not Verdict.PRUNE
    assert any("not seen: cuDNN's workspaces" in note for note in found.assumptions)


def lstm(change: Callable[[nn.LSTM], None]) -> Prediction:
    """Predict a step of LSTM(512, 256) over 299 steps of batch 512, its target as large as its output."""

    def build(device: torch.device) -> Callable[[], None]:
        model = nn.LSTM(512, 256).to(device)
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, target = (torch.empty(299, 512, size, device=device) for size in (512, 256))

        def step() -> None:
            optimizer.zero_grad()
            F.mse_loss(model(x)[0], target).backward()
            optimizer.step()

        return step

    return predict_peak(build, "rtx-3090")


def test_an_lstm_says_that_its_reserve_is_assumed() -> None:
    """Case D12: between 1.3 and 2.6 GiB allocated."""
    found = lstm(lambda model: None)

    assert 1.3 * GIB < (found.allocated_bytes or 0) < 2.6 * GIB
    assert any("reserve of a recurrent layer is not published" in note for note in found.assumptions)


def _replace(model: nn.LSTM) -> None:
    model.weight_hh_l0 = nn.Parameter(torch.empty(1024, 256))


def _tie(model: nn.LSTM) -> None:
    model.bias_hh_l0 = model.bias_ih_l0


@pytest.mark.parametrize("change", [_replace, _tie])
def test_weights_that_are_not_one_chunk_cost_a_copy_at_most(change: Callable[[nn.LSTM], None]) -> None:
    """Case D12: replaced or tied after construction, they are packed again on each call."""
    whole, changed = lstm(lambda model: None), lstm(change)

    weights_bytes = sum(weight.numel() * 4 for weight in nn.LSTM(512, 256).parameters())
    assert whole.allocated_bytes is not None
    assert changed.allocated_bytes is not None
    assert abs(changed.allocated_bytes - whole.allocated_bytes) <= weights_bytes
