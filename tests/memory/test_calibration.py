"""Calibration, judged by simulated studies whose truth it does not know."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy import stats

from tests.memory.simulated import BUDGET, CONTEXT, Ahead, Floats, Random, sizes, step_ahead, under_a_budget
from tuner.memory.calibration import COMPILED, CONVOLUTIONS, PLAIN, Calibration, Measured, Says
from tuner.memory.predictive import LEVELS, Predictive, heavy_tailed, student_quantile
from tuner.units import GIB, MIB

CPU = Calibration.prior("cpu")
# Priors of the tests' own, so that other figures for CUDA change none of these.
NARROW = replace(Calibration.prior("cuda"), relative_spread=0.03, quantiles=heavy_tailed())
WIDE = replace(NARROW, relative_spread=0.06)
PRIORS = {"narrow": NARROW, "wide": WIDE}


def normal(mean: float, deviation: float) -> object:
    return lambda rng, n: mean + deviation * rng.standard_normal(n)


def as_the_prior_says(rng: Random, n: int) -> Floats:
    """A bias of each study, and noise."""
    return 0.02 * rng.standard_normal() + 0.02 * rng.standard_normal(n)


def outliers(rng: Random, n: int) -> Floats:
    error = 0.01 * rng.standard_normal(n)
    error[rng.choice(n, 2, replace=False)] += 0.5
    return error


def step(rng: Random, n: int) -> Floats:
    return 0.01 * rng.standard_normal(n) + np.where(np.arange(n) >= n // 2, 0.05, 0.0)


def walk(rng: Random, n: int) -> Floats:
    return 0.01 * rng.standard_normal(n) + np.cumsum(0.003 * rng.standard_normal(n))


SCENARIOS = {
    "as the prior says": as_the_prior_says,
    "unbiased": normal(0, 0.02),
    "almost exact": normal(0, 0.002),
    "biased up": normal(0.04, 0.01),
    "biased down": normal(-0.04, 0.02),
    "biased beyond the prior": normal(0.2, 0.02),
    "noisy beyond the prior": normal(0, 0.06),
    "heavy tails": lambda rng, n: 0.015 * rng.standard_t(2, n),
    "biased with heavy tails": lambda rng, n: 0.04 + 0.01 * rng.standard_t(2, n),
    "two outliers": outliers,
    "skewed": lambda rng, n: 0.02 * (rng.exponential(1, n) - 0.7),
    "all sizes equal": normal(0.03, 0.01),
    "a step": step,
    "a random walk": walk,
}
BEYOND = {"biased beyond the prior", "noisy beyond the prior"}
BIASED = {"biased up", "biased down", "biased beyond the prior", "all sizes equal", "biased with heavy tails"}
QUIET = {"as the prior says", "unbiased", "almost exact", "biased up", "biased down", "all sizes equal"}


@cache
def simulated(prior: str, scenario: str) -> Ahead:
    return step_ahead(PRIORS[prior], SCENARIOS[scenario], equal_sizes=scenario == "all sizes equal")


every_scenario = pytest.mark.parametrize("scenario", SCENARIOS)
every_prior = pytest.mark.parametrize("prior", PRIORS)


@every_prior
@every_scenario
def test_calibration_never_gets_worse_than_none(prior: str, scenario: str) -> None:
    """Baseline: the prior's own error on the same trials; 5 % is what a useless correction may cost."""
    found = simulated(prior, scenario)
    for trials in (slice(1, 6), slice(6, 20), slice(20, None)):
        # 1 MiB: an error of no matter, where the prior is almost exact.
        assert found.error[:, trials].mean() <= 1.05 * found.uncalibrated_error[:, trials].mean() + MIB
    if scenario in BIASED:
        assert found.error[:, 5:].mean() < 0.6 * found.uncalibrated_error[:, 5:].mean()


@every_prior
@every_scenario
def test_the_band_covers_what_it_says(prior: str, scenario: str) -> None:
    """Baseline: 95 %. Early, and within ten trials of a step, 88 %, unless truth is beyond the prior."""
    covered = simulated(prior, scenario).covered
    assert covered[:, 10:].mean() >= 0.93
    if scenario not in BEYOND:
        for trials in (slice(0, 5), slice(5, 10), slice(10, 50)):
            assert covered[:, trials].mean() >= 0.88


@every_prior
@pytest.mark.parametrize("scenario", sorted(QUIET))
def test_the_band_is_at_most_a_tenth_wide_where_noise_is_two_percent(prior: str, scenario: str) -> None:
    """Baseline: 4 standard deviations of 2 % are 8 %."""
    assert np.median(simulated(prior, scenario).width[:, 20:]) <= 0.10


@pytest.mark.parametrize("scenario", ["as the prior says", "unbiased", "heavy tails"])
def test_the_truth_is_spread_evenly_over_the_predicted_distribution(scenario: str) -> None:
    """Baseline: the uniform distribution, by scipy's Kolmogorov-Smirnov distance."""
    found = simulated("narrow", scenario).probability_of_truth[:, 10:].ravel()
    assert stats.kstest(found, "uniform").statistic < 0.04


@every_prior
def test_a_step_of_five_percent_is_followed_within_ten_trials(prior: str) -> None:
    signed = simulated(prior, "a step").signed.mean(axis=0)
    assert signed[50] < -0.03
    assert abs(signed[60:].mean()) < 0.01
    assert simulated(prior, "a step").covered[:, 62:].mean() >= 0.93


def in_bins(said: Floats, fitted: Floats) -> dict[float, tuple[float, float]]:
    """Return what was said and how many fitted, on average, around 0.1, 0.5 and 0.9."""
    edges = {0.1: (0.05, 0.2), 0.5: (0.35, 0.65), 0.9: (0.8, 0.95)}
    inside = {middle: (said >= low) & (said < high) for middle, (low, high) in edges.items()}
    assert all(where.sum() > 100 for where in inside.values())
    return {middle: (said[where].mean(), fitted[where].mean()) for middle, where in inside.items()}


@pytest.mark.parametrize("saved", [0.0, 0.06])
def test_of_those_at_ninety_percent_ninety_fit(saved: float) -> None:
    """Studies with biases as the prior says, whose pruned trials nobody sees."""
    said, fitted = under_a_budget(NARROW, as_the_prior_says, saved=saved)
    for mean, share in in_bins(said, fitted).values():
        assert share == pytest.approx(mean, abs=0.06)
    assert fitted[said < 0.05].mean() < 0.02
    assert fitted[said > 0.95].mean() > 0.98


def test_trials_that_ran_out_of_memory_mend_what_completed_ones_alone_get_wrong() -> None:
    """Those that completed are the lucky ones: from them alone too much seems to fit."""
    gaps = {}
    for bounds in (True, False):
        said, fitted = under_a_budget(NARROW, normal(0, 0.03), bounds=bounds, least=7000, most=8700)
        mean, share = in_bins(said, fitted)[0.5]
        gaps[bounds] = mean - share
    assert gaps[False] > 0.06
    assert abs(gaps[True]) < 0.05


def test_out_of_memory_alone_teaches() -> None:
    """The truth is 10 % above the estimates; nothing is known of trials that completed."""
    said, fitted = under_a_budget(NARROW, normal(0.1, 0.02), completions=False)
    blind, _ = under_a_budget(NARROW, normal(0.1, 0.02), completions=False, bounds=False)
    assert np.mean((said - fitted) ** 2) < 0.5 * np.mean((blind - fitted) ** 2)


@pytest.mark.parametrize("count", range(1, 6))
def test_bounds_that_say_nothing_change_nothing(count: int) -> None:
    """An out-of-memory far below what was expected anyway; a completion far below its cap."""
    size = 8 * GIB
    trials = [Measured(CONTEXT, size, CONTEXT + size // 2, Says.REQUIRED_MORE)] * count
    trials += [Measured(CONTEXT, size, CONTEXT + 2 * size, Says.REQUIRED_AT_MOST)] * count
    learned = NARROW.updated(trials)
    assert (learned.offset_bytes, learned.factor) == (NARROW.offset_bytes, NARROW.factor)
    assert learned.quantiles == pytest.approx(NARROW.quantiles, abs=1e-6)


def test_bounds_are_respected() -> None:
    """Trials needed 15 % more than was estimated: the next of that size is not thought to fit."""
    size = (BUDGET - CONTEXT) * 100 // 105
    trials = [Measured(CONTEXT, size, CONTEXT + size * 115 // 100, Says.REQUIRED_MORE)] * 6
    chances = [
        NARROW.updated(trials[:count]).fits_probability(
            CONTEXT, size, context_spread_bytes=0, budget_bytes=BUDGET
        )
        for count in (0, 3, 6)
    ]
    assert chances[0] > 0.9
    assert chances[1] < 0.5
    assert chances[2] < 0.05


def test_without_trials_the_prior_speaks() -> None:
    assert CPU.updated([]) == CPU
    assert CPU.updated([Measured(0, GIB, 2 * GIB, mix=CONVOLUTIONS)]) == CPU


def test_mixes_of_operators_are_calibrated_apart() -> None:
    trials = [Measured(CONTEXT, GIB, CONTEXT + GIB * 11 // 10, mix=mix) for mix in (PLAIN, COMPILED)] * 5
    compiled = Calibration.prior("cuda", compiled=True).updated(trials)
    assert compiled.trials == 5
    assert compiled.mix == COMPILED


def test_convolutions_are_less_certain_than_the_rest_and_compiled_code_least() -> None:
    mixes = [{}, {"convolutions": True}, {"compiled": True}]
    spreads = [Calibration.prior("cuda", **mix).relative_spread for mix in mixes]
    assert spreads == sorted(set(spreads))
    assert [Calibration.prior("cpu", **mix).relative_spread for mix in mixes] == [0.02] * 3


def test_an_uncertain_context_is_learned() -> None:
    """The context is 150 MiB larger than the profile says, give or take 200."""
    rng = np.random.default_rng(0)
    trials = [
        Measured(CONTEXT, size, CONTEXT + 150 * MIB + round(size * (1 + 0.01 * rng.standard_normal())))
        for size in sizes(rng, 20).astype(int).tolist()
    ]
    learned = NARROW.updated(trials, context_spread_bytes=200 * MIB)
    assert learned.offset_bytes == pytest.approx(150 * MIB, abs=30 * MIB)
    assert learned.factor == pytest.approx(1, abs=0.02)
    assert learned.context_weight < 0.2


def test_a_few_outliers_do_not_move_the_centre_far() -> None:
    usual = [Measured(0, 100 * MIB, 112 * MIB)] * 17
    outliers = [Measured(0, 100 * MIB, 400 * MIB)] * 3
    learned = CPU.updated(outliers + usual)
    assert learned.expected_bytes(0, 100 * MIB) == pytest.approx(112 * MIB, abs=4 * MIB)


def test_a_calibration_can_be_printed_as_json() -> None:
    learned = CPU.updated([Measured(0, GIB, GIB)])
    fields = json.loads(json.dumps(learned.to_json()))
    assert Calibration(**{**fields, "quantiles": tuple(fields["quantiles"])}) == learned


def test_quantiles_of_the_t_distribution_are_scipys() -> None:
    found = [student_quantile(level) for level in LEVELS]
    assert found == pytest.approx(stats.t.ppf(LEVELS, 4), abs=1e-9)
    prior = heavy_tailed()
    assert prior[LEVELS.index(0.975)] == pytest.approx(stats.norm.ppf(0.975))


def test_a_normal_distribution_is_held_exactly() -> None:
    scores = np.linspace(-4, 4, 50)
    predictive = Predictive(tuple(stats.norm.ppf(LEVELS)))
    assert [predictive.cdf(score) for score in scores] == pytest.approx(stats.norm.cdf(scores), abs=1e-9)
    assert predictive.quantile(0.03) == pytest.approx(stats.norm.ppf(0.03))


@pytest.mark.parametrize("count", [1, 5, 39, 200])
def test_quantiles_after_scores_cover_as_conformal_ones_do(count: int) -> None:
    """Scores three times as wide as the prior's. Baseline: 95 %, once 39 scores make it possible."""
    rng = np.random.default_rng(count)
    prior, covered = Predictive(heavy_tailed()), []
    for _ in range(400):
        *seen, new = (3 * rng.standard_normal(count + 1)).tolist()
        quantiles = Predictive(prior.after(sorted((score, 1.0) for score in seen), counts_as=5))
        covered.append(quantiles.quantile(0.025) <= new <= quantiles.quantile(0.975))
        assert list(quantiles.quantiles) == sorted(quantiles.quantiles)
    expected = 0.93 if count >= 39 else 0.4
    assert np.mean(covered) >= expected
    assert stats.binomtest(sum(covered), 400, 0.95).pvalue > 0.01 or count < 39
