"""From estimate to verdict: bands, probabilities, calibration."""

from __future__ import annotations

import random
from statistics import NormalDist, median

import pytest

from tuner.memory.calibration import Calibration, Measured
from tuner.memory.prediction import Estimate, predict, untraceable, verdict_of
from tuner.memory.targets import resolve_target
from tuner.records import Verdict
from tuner.units import GIB, MIB

CPU = resolve_target("cpu")
PRIOR = Calibration.prior("cpu")


def estimate_of(size: int) -> Estimate:
    return Estimate(size, size, size, categories={"activations": size})


def test_the_probability_is_the_normal_one_of_the_band() -> None:
    """Baseline: statistics.NormalDist fitted to the band's own quantiles."""
    prediction = predict(estimate_of(500 * MIB), CPU, PRIOR, context_bytes=400 * MIB, budget_bytes=930 * MIB)
    band = prediction.required
    assert band is not None
    sigma = (band.high - band.low) / (2 * NormalDist().inv_cdf(0.975))
    expected = NormalDist(band.expected, sigma).cdf(930 * MIB)
    assert prediction.fits_probability == pytest.approx(expected, abs=0.001)


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


def test_growth_is_said() -> None:
    found = Estimate(MIB, MIB, MIB, growth_bytes=1000)
    prediction = predict(found, CPU, PRIOR, context_bytes=MIB, budget_bytes=None)
    assert any("grows with steps: 1000 bytes" in sentence for sentence in prediction.assumptions)


def test_calibration_moves_to_the_truth_and_never_gets_worse_than_none() -> None:
    """Simulated truth: 40 MiB above the context with 5 MiB of noise, 50 studies of 30 trials each."""
    rng, worse, errors = random.Random(0), 0, []
    for _ in range(50):
        measured = []
        for _ in range(30):
            size = rng.randrange(10, 500) * MIB
            truth = 400 * MIB + size + round(rng.gauss(40, 5) * MIB)
            measured.append(Measured(400 * MIB, size, truth))
        learned = PRIOR.updated(measured)
        error = abs(learned.offset_bytes - 40 * MIB)
        errors.append(error)
        worse += error > abs(PRIOR.offset_bytes - 40 * MIB)
    assert worse == 0
    assert median(errors) < 6 * MIB


def test_calibration_without_trials_is_the_prior() -> None:
    assert PRIOR.updated([]) == PRIOR


def test_a_few_outliers_do_not_move_the_centre_far() -> None:
    usual = [Measured(0, 100 * MIB, 112 * MIB)] * 17
    outliers = [Measured(0, 100 * MIB, 400 * MIB)] * 3
    assert abs(PRIOR.updated(usual + outliers).offset_bytes - 12 * MIB) < 2 * MIB
