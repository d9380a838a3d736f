"""Configurations that people give: queues, warm starts, and choices that changed (cases D23, D27)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tests.search.stand_ins import BUDGET, CONTEXT, Widths, completed, fits, run_loop, session_on
from tuner.errors import UsageError
from tuner.records import Outcome
from tuner.search.events import Goal
from tuner.search.known_points import Space, check_choices, read_queue, translated
from tuner.search.optuna_storage import optuna_trials
from tuner.search.optuna_study import MEMORY
from tuner.search.plain_choices import PlainChoices
from tuner.search.sampling.history import WARM
from tuner.search.warm_start import take_in
from tuner.store.engine import parse_url
from tuner.workload import Maximize, Workload


class Net(Workload):
    objective = Maximize("score")

    def suggest(self, trial: Any) -> dict[str, Any]:
        params = {
            "width": trial.suggest_int("width", 2, 64),
            "rate": trial.suggest_float("rate", 1e-4, 1e-1, log=True),
            "hidden": trial.suggest_categorical("hidden", [(128,), (256, 128), None]),
        }
        if params["hidden"] is None:
            params["depth"] = trial.suggest_int("depth", 1, 4)
        return params


def write(folder: Path, text: str) -> Path:
    (folder / "queue.json").write_text(text)
    return folder / "queue.json"


def test_a_queue_is_read_with_the_numbers_that_people_write(tmp_path: Path) -> None:
    """As text, as YAML 1.1 reads 1e-4; a whole number as 64.0; a choice that is a list (case D32)."""
    entries = [{"rate": "1e-3", "width": 64.0}, {"hidden": [256, 128]}, {"hidden": None, "depth": "2"}]
    found = read_queue(write(tmp_path, json.dumps(entries)), Space.of(Net()))
    assert found == [
        {"rate": 0.001, "width": 64},
        {"hidden": "[256, 128]"},
        {"hidden": "null", "depth": 2},
    ]
    assert isinstance(found[0]["width"], int)
    assert len(read_queue(write(tmp_path, '{"width": 3}'), Space.of(Net()))) == 1


FAULTY = {
    "unknown name": ('[{"width": 3}, {"wdth": 3}]', "entry 2: there is no parameter 'wdth'"),
    "too large": ('[{"width": 65}]', "entry 1: width cannot be 65"),
    "no whole number": ('[{"width": 3.5}]', "width cannot be 3.5"),
    "a word": ('[{"rate": "fast"}]', "rate cannot be 'fast'"),
    "a truth value": ('[{"width": true}]', "width cannot be True"),
    "no choice": ('[{"hidden": [1]}]', "hidden cannot be [1]"),
    "another branch": ('[{"hidden": [128], "depth": 2}]', "with these values 'depth' is not asked for"),
    "twice": ('[{"width": 3, "width": 4}]', "'width' is there twice"),
    "no JSON": ("width: 3", "cannot be read"),
    "no list": ("3", "holds no list of configurations"),
}


@pytest.mark.parametrize(("text", "message"), FAULTY.values(), ids=FAULTY)
def test_a_faulty_queue_is_refused_with_file_entry_and_reason(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        read_queue(write(tmp_path, text), Space.of(Net()))
    assert str(tmp_path / "queue.json") in caught.value.message
    assert message in caught.value.message


def test_queued_configurations_come_first_once_and_are_pruned_where_they_do_not_fit(
    sqlite_url: str, tmp_path: Path
) -> None:
    """Widths up to 16 fit; 20 is queued all the same; half a configuration is completed."""
    queue = ({"width": 5, "rate": 0.5}, {"width": 20, "rate": 0.25}, {"width": 7})
    with session_on(sqlite_url, tmp_path, seed=1, queue=queue) as session:
        assert take_in(session) == ["3 configurations are queued"]
        assert take_in(session) == ["0 configurations are queued, 3 were known already"]
        launcher, _ = run_loop(session, Goal(trials=4))
        trials = session.reader.trials(session.study.id)
    assert launcher.launched[0] == {"width": 5, "rate": 0.5}
    assert launcher.launched[1]["width"] == 7
    assert [trial.outcome for trial in trials[:3]] == ["completed", "pruned_memory", "completed"]
    assert trials[1].params == {"width": 20, "rate": 0.25}
    assert len(launcher.launched) == 4


def test_a_queued_configuration_that_was_tried_is_passed_over(sqlite_url: str, tmp_path: Path) -> None:
    """Case D23: by the search itself, after it was queued a second time by hand."""
    with session_on(sqlite_url, tmp_path, seed=1) as session:
        session.optuna.enqueue([{"width": 5, "rate": 0.5}])
        session.optuna._study.enqueue_trial({"width": 5, "rate": 0.5})
        launcher, watcher = run_loop(session, Goal(trials=3))
    assert len({json.dumps(params) for params in launcher.launched}) == 3
    assert watcher.notes == ["a queued configuration had been tried before"]


def test_a_search_ends_when_every_configuration_was_tried(sqlite_url: str, tmp_path: Path) -> None:
    """Case D23: a choice of two, and three trials."""

    class Two(Widths):
        def suggest(self, trial: Any) -> dict[str, Any]:
            return {"width": trial.suggest_categorical("width", [4, 8])}

    with session_on(sqlite_url, tmp_path, seed=1, workload=Two()) as session:
        launcher, watcher = run_loop(session, Goal(trials=3))
    assert sorted(params["width"] for params in launcher.launched) == [4, 8]
    assert watcher.notes == [
        "all 2 configurations that were drawn have been tried: the search ends with 2 of 3 trials"
    ]


def test_d27_changed_choices_are_named_before_anything_runs() -> None:
    space = Space(Net(), {"batch": CategoricalDistribution([64, 128, 256]), "rate": FloatDistribution(0, 1)})
    same = optuna.trial.create_trial(
        value=0.0, params={"batch": 64, "rate": 2.0},
        distributions={"batch": CategoricalDistribution([64, 128, 256]), "rate": FloatDistribution(0, 5)},
    )  # fmt: skip
    check_choices("s", [same], space)  # ranges may change
    changed = optuna.trial.create_trial(
        value=0.0, params={"batch": 64}, distributions={"batch": CategoricalDistribution([64, 128])}
    )
    with pytest.raises(UsageError) as caught:
        check_choices("s", [changed], space)
    assert caught.value.message == (
        "in study 's' batch was one of 64, 128; the workload now has one of 64, 128, 256"
    )
    assert "--warm-start s" in (caught.value.hint or "")
    kind = optuna.trial.create_trial(
        value=0.0, params={"batch": 64}, distributions={"batch": IntDistribution(1, 64)}
    )
    with pytest.raises(UsageError, match="a whole number from 1 to 64"):
        check_choices("s", [kind], space)


def test_d27_tuples_and_none_survive_two_trials_in_a_database(sqlite_url: str) -> None:
    """Plain Optuna refuses the second trial: its list is no tuple."""
    chosen = set()
    study = optuna.create_study(storage=sqlite_url, sampler=optuna.samplers.RandomSampler(seed=1))
    for _ in range(12):
        trial = study.ask()
        chosen.add(Net().suggest(PlainChoices(trial))["hidden"])
        study.tell(trial, 0.0)
    assert chosen == {(128,), (256, 128), None}
    assert {trial.params["hidden"] for trial in study.trials} == {"[128]", "[256, 128]", "null"}


def test_a_warm_start_informs_the_search_and_is_on_no_front(sqlite_url: str, tmp_path: Path) -> None:
    with session_on(sqlite_url, tmp_path, seed=1, name="first") as session:
        run_loop(session, Goal(trials=8), lambda params: completed(params))
    with session_on(sqlite_url, tmp_path, seed=2, name="second", warm_start="first") as session:
        assert take_in(session) == ["8 trials of study 'first' inform the search"]
        assert take_in(session) == []
        run_loop(session, Goal(trials=3))
        ours = session.reader.trials(session.study.id)
        front = session.reader.front(session.study.id)
    warm = [trial for trial in optuna_trials(parse_url(sqlite_url), "second") if WARM in trial.user_attrs]
    assert [trial.user_attrs[WARM] for trial in warm] == [f"first/{number}" for number in range(8)]
    for trial in warm:
        assert trial.values == [trial.params["width"] / 20, CONTEXT + fits(trial.params)]
        assert trial.constraints[MEMORY] == pytest.approx((trial.values[1] - BUDGET) / BUDGET)
    assert [trial.number for trial in ours] == [8, 9, 10]
    assert {trial.number for trial in front} <= {8, 9, 10}
    assert all(trial.outcome == Outcome.COMPLETED for trial in ours)


def test_what_lies_outside_of_the_space_is_left_out() -> None:
    def trial(**params: Any) -> optuna.trial.FrozenTrial:
        asked = {name: FloatDistribution(-1e9, 1e9) for name in params}
        return optuna.trial.create_trial(value=0.0, params=params, distributions=asked)

    inside = trial(width=8.0, rate=1e-2, hidden=0.0)

    class Plain(Workload):
        objective = Maximize("score")

        def suggest(self, trial: Any) -> dict[str, Any]:
            return {"width": trial.suggest_int("width", 2, 64), "rate": trial.suggest_float("rate", 0, 1)}

    trials = [inside, trial(width=8.5, rate=0.5), trial(width=8.0), trial(width=65.0, rate=0.1)]
    ((kept, draw),) = translated(trials, Space.of(Plain()))
    assert kept is inside
    assert draw.answers == {"width": 8, "rate": 1e-2}


def test_a_warm_start_from_another_objective_or_from_nothing_is_refused(
    sqlite_url: str, tmp_path: Path
) -> None:
    with session_on(sqlite_url, tmp_path, warm_start="nothing") as session:
        with pytest.raises(UsageError, match="there is no study 'nothing'"):
            take_in(session)
    with session_on(sqlite_url, tmp_path, warm_start="widths") as session:
        with pytest.raises(UsageError, match="from itself"):
            take_in(session)
