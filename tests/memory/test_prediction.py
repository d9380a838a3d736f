"""From estimate to verdict: bands, probabilities, verdicts."""

from __future__ import annotations

import pytest

from benchmarks.zoo import ZOO
from tuner.memory.calibration import Calibration
from tuner.memory.prediction import Estimate, estimate, predict, untraceable, verdict_of
from tuner.memory.target_rules import rules_for
from tuner.memory.targets import resolve_target
from tuner.memory.trace import trace_build
from tuner.records import Verdict
from tuner.units import GIB, MIB

CPU = resolve_target("cpu")
PRIOR = Calibration.prior("cpu")


def estimate_of(size: int) -> Estimate:
    return Estimate(size, size, size, categories={"activations": size})


def test_the_probability_agrees_with_the_band() -> None:
    """Baseline: the band's own levels, 2.5 % and 97.5 %."""
    band = predict(estimate_of(500 * MIB), CPU, PRIOR, context_bytes=400 * MIB, budget_bytes=None).required
    assert band is not None
    for budget_bytes, level in ((band.low, 0.025), (band.expected, 0.5), (band.high, 0.975)):
        prediction = predict(
            estimate_of(500 * MIB), CPU, PRIOR, context_bytes=400 * MIB, budget_bytes=budget_bytes
        )
        assert prediction.fits_probability == pytest.approx(level, abs=0.001)


@pytest.mark.parametrize(
    ("budget", "verdict"), [(500 * MIB, "prune"), (912 * MIB, "try"), (2 * GIB, "launch"), (None, None)]
)
def test_verdicts(budget: int | None, verdict: str | None) -> None:
    prediction = predict(estimate_of(500 * MIB), CPU, PRIOR, context_bytes=400 * MIB, budget_bytes=budget)
    assert prediction.verdict == verdict


def test_verdicts_change_at_five_and_ninety_five_percent() -> None:
    assert [verdict_of(p) for p in (0.049, 0.05, 0.95, 0.951)] == ["prune", "try", "try", "launch"]


def test_what_cannot_be_traced_is_tried_whatever_the_budget() -> None:
    prediction = predict(untraceable("a loop"), CPU, PRIOR, context_bytes=GIB, budget_bytes=1)
    assert prediction.verdict is Verdict.TRY
    assert prediction.device is None
    assert "a loop" in prediction.assumptions[0]


@pytest.mark.parametrize(
    ("name", "mix"), [("mlp", "plain"), ("cnn", "convolutions"), ("conv1d", "convolutions")]
)
@pytest.mark.parametrize("target", ["cpu", "rtx-3090"])
def test_convolutions_are_noticed(name: str, mix: str, target: str) -> None:
    resolved = resolve_target(target)
    found = estimate(trace_build(ZOO[name], rules_for(resolved)), resolved)
    assert found.mix == mix
    prediction = predict(found, resolved, PRIOR, context_bytes=GIB, budget_bytes=None)
    assert prediction.mix == mix


def test_growth_is_said() -> None:
    found = Estimate(MIB, MIB, MIB, growth_bytes=1000)
    prediction = predict(found, CPU, PRIOR, context_bytes=MIB, budget_bytes=None)
    assert any("grows with steps: 1000 bytes" in sentence for sentence in prediction.assumptions)


def test_another_allocator_is_not_predicted_and_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.memory.peak import predict_peak

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    found = predict_peak(ZOO["mlp"], "rtx-3090", budget="8GiB")
    assert (found.method, found.verdict) == ("untraceable", Verdict.TRY)
    assert "PYTORCH_ALLOC_CONF" in found.assumptions[0]
