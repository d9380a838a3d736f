"""When a trial is stopped early: against Optuna's own pruners, and what holds for every rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from tuner.errors import UsageError
from tuner.execution.limits import Limit, Limits
from tuner.search.pruner_options import make_pruner
from tuner.search.pruning import (
    AshaPruner,
    Curve,
    MedianPruner,
    NoPruner,
    PercentilePruner,
    Pruner,
    best_so_far,
    limits_for,
)

EPOCHS = 9
# Few different values, so that ties are common.
VALUES = st.lists(st.integers(-3, 3).map(float), min_size=EPOCHS, max_size=EPOCHS)
RULES = st.one_of(
    st.builds(MedianPruner, startup_trials=st.integers(0, 3), warmup_epochs=st.integers(0, 4)),
    st.builds(
        PercentilePruner,
        percentile=st.sampled_from([0.0, 10.0, 25.0, 75.0, 100.0]),
        startup_trials=st.integers(0, 3),
        min_trials=st.integers(1, 3),
    ),
    st.builds(AshaPruner, reduction_factor=st.integers(2, 4), min_epochs=st.integers(1, 2)),
)


@st.composite
def curves(draw: st.DrawFn, maximize: bool) -> Curve:
    values = draw(VALUES)[: draw(st.integers(1, EPOCHS))]
    needs_bytes = draw(st.one_of(st.none(), st.integers(1, 5)))
    return Curve(needs_bytes, best_so_far(values, maximize=maximize), draw(st.booleans()))


def optuna_stops(
    pruner: optuna.pruners.BasePruner, studies: Sequence[Sequence[float]], *, maximize: bool, first: int
) -> list[int]:
    """Return to which epoch Optuna lets each trial come; steps count from `first`."""
    direction = "maximize" if maximize else "minimize"
    study = optuna.create_study(direction=direction, pruner=pruner)
    came_to = []
    for values in studies:
        trial = study.ask()
        for epoch, best in enumerate(best_so_far(values, maximize=maximize), 1):
            trial.report(best, epoch - 1 + first)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, best)
        came_to.append(epoch)
    return came_to


def our_stops(pruner: Pruner, studies: Sequence[Sequence[float]], *, maximize: bool) -> list[int]:
    """Return to which epoch we let each trial come, where all need the same memory."""
    ended: list[Curve] = []
    for values in studies:
        best = best_so_far(values, maximize=maximize)
        limits = limits_for(pruner, 1, ended, maximize=maximize, by_memory=True)
        stop = next((e for e, b in enumerate(best, 1) if limits.reason_to_stop(e, b)), None)
        ended.append(Curve(1, best[:stop], stop is None))
    return [len(curve.best) for curve in ended]


STUDIES = st.lists(VALUES, min_size=1, max_size=12)


# Optuna counts a trial that is pruned at its last step as pruned, and so do the rules here; that a
# worker does not stop at its last epoch is its own doing, see tests/execution/test_limits.py.
@given(STUDIES, st.booleans(), st.integers(0, 3), st.integers(0, 4))
def test_median_stops_what_optunas_does(
    studies: list[list[float]], maximize: bool, startup: int, warmup: int
) -> None:
    theirs = optuna.pruners.MedianPruner(n_startup_trials=startup, n_warmup_steps=warmup)
    ours = MedianPruner(startup_trials=startup, warmup_epochs=warmup)
    assert our_stops(ours, studies, maximize=maximize) == optuna_stops(
        theirs, studies, maximize=maximize, first=0
    )


@given(STUDIES, st.booleans(), st.sampled_from([0.0, 10.0, 25.0, 33.3, 90.0, 100.0]), st.integers(1, 3))
def test_percentile_stops_what_optunas_does(
    studies: list[list[float]], maximize: bool, percentile: float, least: int
) -> None:
    theirs = optuna.pruners.PercentilePruner(percentile, n_startup_trials=1, n_min_trials=least)
    ours = PercentilePruner(percentile=percentile, startup_trials=1, min_trials=least)
    assert our_stops(ours, studies, maximize=maximize) == optuna_stops(
        theirs, studies, maximize=maximize, first=0
    )


@given(STUDIES, st.booleans(), st.integers(2, 4), st.integers(1, 3))
def test_asha_stops_what_optunas_does(
    studies: list[list[float]], maximize: bool, factor: int, first_rung: int
) -> None:
    theirs = optuna.pruners.SuccessiveHalvingPruner(min_resource=first_rung, reduction_factor=factor)
    ours = AshaPruner(reduction_factor=factor, min_epochs=first_rung)
    assert our_stops(ours, studies, maximize=maximize) == optuna_stops(
        theirs, studies, maximize=maximize, first=1
    )


@given(st.data(), RULES, st.booleans())
def test_the_smallest_is_never_stopped(data: st.DataObject, rule: Pruner, maximize: bool) -> None:
    ended = data.draw(st.lists(curves(maximize), max_size=12))
    smallest = min((c.needs_bytes for c in ended if c.needs_bytes is not None), default=2) - 1
    assert limits_for(rule, smallest, ended, maximize=maximize, by_memory=True).by_epoch == {}


@given(st.data(), RULES, st.booleans())
def test_what_is_not_worse_than_all_that_need_no_more_goes_on(
    data: st.DataObject, rule: Pruner, maximize: bool
) -> None:
    """At every epoch, a trial as good as the best of its comparison set: it may be on the front."""
    ended = data.draw(st.lists(curves(maximize), max_size=12))
    needs_bytes = data.draw(st.integers(1, 5))
    limits = limits_for(rule, needs_bytes, ended, maximize=maximize, by_memory=True)
    pick = max if maximize else min
    for epoch in limits.by_epoch:
        others = [c for c in ended if c.needs_bytes is not None and c.needs_bytes <= needs_bytes]
        best = pick(value for value in (c.at(epoch) for c in others) if value is not None)
        assert limits.reason_to_stop(epoch, best) is None


@given(st.data(), RULES, st.booleans())
def test_what_needs_more_memory_changes_nothing(data: st.DataObject, rule: Pruner, maximize: bool) -> None:
    """Once the study has its startup trials, larger trials never touch the limits of smaller ones."""
    ended = data.draw(st.lists(curves(maximize), max_size=8))
    startup = [Curve(None, (), finished=True)] * 3
    larger = data.draw(st.lists(curves(maximize).map(lambda c: Curve(9, c.best, c.finished)), max_size=4))
    limits = limits_for(rule, 5, [*startup, *ended], maximize=maximize, by_memory=True)
    assert limits_for(rule, 5, [*startup, *ended, *larger], maximize=maximize, by_memory=True) == limits


def test_with_one_objective_memory_does_not_count() -> None:
    ended = [Curve(9, (0.9, 0.95), finished=True)] * 5
    alone = limits_for(MedianPruner(), 1, ended, maximize=True, by_memory=False)
    assert alone.by_epoch == {
        1: Limit(0.9, "the median 0.9 of 5 trials"),
        2: Limit(0.95, "the median 0.95 of 5 trials"),
    }
    assert limits_for(MedianPruner(), 1, ended, maximize=True, by_memory=True).by_epoch == {}
    assert limits_for(MedianPruner(), None, ended, maximize=True, by_memory=True).by_epoch == {}


def test_nothing_is_stopped_before_enough_trials_have_finished() -> None:
    ended = [Curve(1, (0.9,), finished=True)] * 4 + [Curve(1, (0.1,), finished=False)] * 4
    assert limits_for(MedianPruner(), 1, ended, maximize=True, by_memory=True).by_epoch == {}
    ended.append(Curve(1, (0.9,), finished=True))
    assert limits_for(MedianPruner(), 1, ended, maximize=True, by_memory=True).by_epoch != {}


def test_a_trial_that_finished_early_keeps_its_best() -> None:
    patient = Curve(1, (0.2, 0.6), finished=True)
    assert [patient.at(epoch) for epoch in (1, 2, 3, 9)] == [0.2, 0.6, 0.6, 0.6]
    stopped = Curve(1, (0.2, 0.6), finished=False)
    assert [stopped.at(epoch) for epoch in (1, 2, 3)] == [0.2, 0.6, None]


def test_numbers_that_are_none_and_infinite_ones() -> None:
    assert best_so_far([3.0, math.nan, 5.0, 4.0], maximize=True) == (3.0, 3.0, 5.0, 5.0)
    late = best_so_far([math.nan, 2.0, 3.0], maximize=False)
    assert math.isnan(late[0])
    assert late[1:] == (2.0, 2.0)
    ended = [Curve(1, (value,), finished=True) for value in (math.nan, math.inf, -math.inf)]
    rule = MedianPruner(startup_trials=0)
    assert limits_for(rule, 1, ended, maximize=True, by_memory=True).by_epoch == {}  # between -inf and inf
    assert limits_for(rule, 1, ended[:2], maximize=True, by_memory=True).by_epoch[1].value == math.inf


def test_the_reason_is_a_sentence_with_both_figures() -> None:
    ended = [Curve(1, (0.5, 0.6, value), finished=True) for value in (0.70, 0.72, 0.74)]
    limits = limits_for(MedianPruner(startup_trials=3), 1, ended, maximize=True, by_memory=True)
    assert (
        limits.reason_to_stop(3, 0.61)
        == "epoch 3: 0.61, below the median 0.72 of 3 trials that need no more memory"
    )
    assert limits.reason_to_stop(3, 0.72) is None
    assert limits.reason_to_stop(4, -1.0) is None
    losses = limits_for(PercentilePruner(startup_trials=0), 1, ended, maximize=False, by_memory=True)
    reason = losses.reason_to_stop(1, None)
    assert reason == "epoch 1: no number yet, above the best 25 % (0.5) of 3 trials that need no more memory"
    asha = limits_for(AshaPruner(reduction_factor=3), 1, ended, maximize=True, by_memory=False)
    assert asha.reason_to_stop(3, 0.71) == "epoch 3: 0.71, below the best 1 (0.74) of 3 trials"
    assert sorted(asha.by_epoch) == [1, 3]


def test_limits_survive_their_file() -> None:
    limits = Limits(maximize=False, by_epoch={1: Limit(math.inf, "a"), 12: Limit(0.25, "b")})
    assert Limits.from_json(limits.to_json()) == limits


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("none", {}, NoPruner()),
        ("median", {"warmup_epochs": "2"}, MedianPruner(warmup_epochs=2)),
        ("percentile", {"percentile": "12.5", "min_trials": "3"}, PercentilePruner(12.5, min_trials=3)),
        ("asha", {"reduction_factor": "4", "min_epochs": "2"}, AshaPruner(4, 2)),
    ],
)
def test_a_pruner_is_made_of_its_name_and_options(name: str, options: dict[str, str], rule: Any) -> None:
    assert make_pruner(name, options) == rule


@pytest.mark.parametrize(
    ("name", "options", "message", "hint"),
    [
        ("best", {}, "no pruner 'best'", "known: none, median, percentile, asha"),
        ("median", {"percentile": "3"}, "no option 'percentile'", "startup_trials=5, warmup_epochs=0"),
        ("none", {"percentile": "3"}, "no option 'percentile'", "choose one with --pruner"),
        ("percentile", {"percentile": "101"}, "percentile=101: it has to be 0 to 100", None),
        ("percentile", {"percentile": "nan"}, "percentile=nan: it has to be 0 to 100", None),
        ("asha", {"reduction_factor": "1"}, "reduction_factor=1: it has to be at least 2", None),
        ("asha", {"min_epochs": "1.5"}, "min_epochs=1.5: not a whole number", None),
        ("median", {"startup_trials": "few"}, "startup_trials=few: not a whole number", None),
    ],
)
def test_what_is_no_pruner_is_refused_with_what_is(
    name: str, options: dict[str, str], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError) as caught:
        make_pruner(name, options)
    assert message in caught.value.message
    assert hint is None or hint in (caught.value.hint or "")
