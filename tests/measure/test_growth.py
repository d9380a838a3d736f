"""Growth per step, against SciPy's Theil–Sen and on series whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from scipy.stats import theilslopes

from tuner.measure.growth import StepSize, StepSizes, growth_per_step, theil_sen
from tuner.units import KIB, MIB

BASE = 300 * MIB
Series = Callable[[int, random.Random], float]


def judged(series: Series, *, steps: int, epoch_steps: int, seed: int = 1, least: int = MIB) -> int | None:
    """Return what is said of resident bytes, in whole pages, after so many steps."""
    sizes, rng = StepSizes(least), random.Random(seed)
    for step in range(1, steps + 1):
        held = int(BASE + series(step, rng)) // 4096 * 4096
        sizes.step(lambda held=held: held)  # type: ignore[misc]
        if step % epoch_steps == 0:
            sizes.epoch_ended()
    return sizes.growth_bytes()


@pytest.mark.parametrize("seed", range(5))
def test_the_slope_is_scipys(seed: int) -> None:
    rng = random.Random(seed)
    points = [StepSize(step, int(9000 * step + rng.gauss(0, 1e5))) for step in range(100, 228)]
    by_scipy = theilslopes([p.bytes for p in points], [p.step for p in points]).slope
    assert theil_sen(points) == pytest.approx(by_scipy, rel=1e-12)


@pytest.mark.parametrize("steps", [60, 300, 1000, 20_000])
@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_a_leak_of_64_kib_is_found_under_noise_and_outliers(steps: int, epochs: int, noise: float) -> None:
    """Noise of 200 KiB, and every tenth reading 8 MiB too high: the slope within 5 %."""

    def series(step: int, rng: random.Random) -> float:
        outlier = 8 * MIB if noise and rng.random() < 0.1 else 0
        return 64 * KIB * step + rng.gauss(0, noise * MIB) + outlier

    found = judged(series, steps=steps, epoch_steps=steps // epochs)
    assert found == pytest.approx(64 * KIB, rel=0.05)


@pytest.mark.parametrize(
    "series",
    [
        lambda step, rng: 0,
        lambda step, rng: 48 * step,  # what Python keeps of a history of losses
        lambda step, rng: rng.gauss(0, 5 * MIB),
        lambda step, rng: rng.choice([0, 60 * MIB]),  # two shapes of batches in turn
        lambda step, rng: 40 * MIB * (1 - math.exp(-step / 100)),  # a cache that fills up
        lambda step, rng: 2 * MIB * math.log(step),  # fragmentation
        lambda step, rng: 50 * MIB if step > 500 else 0,  # one thing that stays
        lambda step, rng: -20 * KIB * step,
        lambda step, rng: 10 * MIB * math.sin(step / 40),
    ],
    ids=["flat", "history", "noise", "two sizes", "cache", "fragmentation", "one step", "falling", "waves"],
)
@pytest.mark.parametrize("epochs", [1, 5])
def test_what_is_no_leak_is_not_flagged(series: Series, epochs: int) -> None:
    for seed in range(10):
        assert judged(series, steps=1000, epoch_steps=1000 // epochs, seed=seed) == 0


def test_the_first_epoch_is_not_steady() -> None:
    """It fills caches by 100 KiB a step; the epochs after it leave nothing."""
    assert judged(lambda step, rng: 100 * KIB * min(step, 250), steps=1000, epoch_steps=250) == 0


def test_too_few_steps_say_nothing() -> None:
    assert judged(lambda step, rng: MIB * step, steps=39, epoch_steps=39) is None
    assert judged(lambda step, rng: MIB * step, steps=48, epoch_steps=48) == pytest.approx(MIB, rel=0.01)


def test_new_shapes_say_nothing_and_a_smaller_last_batch_does_not_matter() -> None:
    def points(shapes: Callable[[int], int]) -> list[StepSize]:
        return [StepSize(step, BASE + 64 * KIB * step, shapes(step)) for step in range(300)]

    assert growth_per_step(points(lambda step: 1 + step // 5), MIB) is None
    assert growth_per_step(points(lambda step: 1 + (step == 299)), MIB) == 64 * KIB


def test_readings_are_few_whatever_the_length() -> None:
    sizes, read = StepSizes(MIB), []
    for _ in range(1_000_000):
        sizes.step(lambda: read.append(1) or BASE)
    assert len(read) < 512 + 256 * 12  # twelve doublings
