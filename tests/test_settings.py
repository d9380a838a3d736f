"""Settings: which place wins, where a value came from, and what is refused."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tuner.errors import UsageError
from tuner.settings import SPECS, Setting, resolve

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("TUNER_"):
            monkeypatch.delenv(name)


def one(name: str, **flags: Any) -> Setting:
    return resolve(flags, [name])[name]


# From strongest to weakest: origin, how to set `trials` there, and to what.
PLACES: list[tuple[str, Callable[[pytest.MonkeyPatch], object]]] = [
    ("TUNER_TRIALS", lambda patch: patch.setenv("TUNER_TRIALS", "2")),
    ("tuner.toml", lambda patch: Path("tuner.toml").write_text("trials = 3\n", encoding="utf-8")),
    (
        "pyproject.toml",
        lambda patch: Path("pyproject.toml").write_text("[tool.tuner]\ntrials = 4\n", encoding="utf-8"),
    ),
]


@pytest.mark.parametrize("strongest", range(5))
def test_the_strongest_place_that_has_a_value_wins_and_is_named(
    strongest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, put in PLACES[max(0, strongest - 1) :]:
        put(monkeypatch)

    setting = one("trials", trials="1" if strongest == 0 else None)

    assert setting == Setting(
        [1, 2, 3, 4, 30][strongest],
        ["flag", "TUNER_TRIALS", "tuner.toml", "pyproject.toml", "default"][strongest],
    )


def test_each_setting_is_resolved_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_BUDGET", "6GiB")
    Path("tuner.toml").write_text('seed = 7\nbudget = "1GiB"\n', encoding="utf-8")

    settings = resolve({"trials": "5"})

    assert settings["trials"] == Setting(5, "flag")
    assert settings["budget"] == Setting(6 * 1024**3, "TUNER_BUDGET")
    assert settings["seed"] == Setting(7, "tuner.toml")
    assert settings["storage"] == Setting("sqlite:///tuner.db", "default")
    assert set(settings) == set(SPECS)


@pytest.mark.parametrize(
    "written",
    [
        'pruner_option = "percentile=10, min-trials = 2"',
        'pruner-option = ["percentile=10", "min_trials=2"]',
        "pruner_option = { percentile = 10, min_trials = 2 }",
    ],
)
def test_options_may_be_text_a_list_or_a_table(written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"percentile": "10", "min_trials": "2"}
    Path("tuner.toml").write_text(written, encoding="utf-8")
    assert one("pruner_option") == Setting(wanted, "tuner.toml")
    monkeypatch.setenv("TUNER_PRUNER_OPTION", "percentile=10,min_trials=2")
    assert one("pruner_option") == Setting(wanted, "TUNER_PRUNER_OPTION")
    assert one("pruner_option", pruner_option="min_trials=3").value == {"min_trials": "3"}


@pytest.mark.parametrize("text", ["percentile", "percentile=", "=3", "a=1,b"])
def test_what_is_no_option_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_PRUNER_OPTION", text)
    with pytest.raises(UsageError, match=r"TUNER_PRUNER_OPTION: .* is no option") as caught:
        one("pruner_option")
    assert "name=value" in (caught.value.hint or "")


def test_a_value_means_the_same_wherever_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written = 'budget = "700MiB"\ntimeout = "15m"\nsingle = true\naudit = 0.25\nkeep-checkpoints = "all"\n'
    Path("tuner.toml").write_text(written, encoding="utf-8")
    names = ["budget", "timeout", "single", "audit", "keep_checkpoints"]
    from_file = {name: setting.value for name, setting in resolve({}, names).items()}
    for name, value in tomllib.loads(written).items():
        monkeypatch.setenv(f"TUNER_{name.replace('-', '_').upper()}", str(value))
    from_environment = {name: setting.value for name, setting in resolve({}, names).items()}

    assert from_file == from_environment
    assert from_file == {
        "budget": 734_003_200,
        "timeout": 900.0,
        "single": True,
        "audit": 0.25,
        "keep_checkpoints": "all",
    }


def test_a_size_in_a_file_may_be_a_number_of_bytes() -> None:
    Path("tuner.toml").write_text("budget = 734003200\n", encoding="utf-8")

    assert one("budget") == Setting(734_003_200, "tuner.toml")


def test_a_flag_that_is_off_beats_a_variable_that_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_SINGLE", "yes")

    assert one("single", single=False) == Setting(False, "flag")
    assert one("single", single=None) == Setting(True, "TUNER_SINGLE")


def test_an_empty_variable_is_not_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_TRIALS", "")

    assert one("trials") == Setting(30, "default")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tuner.toml", "bugdet = 1\n"),
        ("pyproject.toml", "[tool.tuner]\nbugdet = 1\n"),
    ],
)
def test_an_unknown_setting_lists_the_known_ones(file: str, text: str) -> None:
    Path(file).write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match=f"{file} has no setting 'bugdet'") as caught:
        resolve({})

    assert caught.value.hint is not None
    assert all(name in caught.value.hint for name in SPECS)


def test_a_pyproject_of_others_is_no_source() -> None:
    Path("pyproject.toml").write_text('[tool.other]\ntrials = 4\n[project]\nname = "x"\n', encoding="utf-8")

    assert one("trials") == Setting(30, "default")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trials", "-5"),
        ("trials", "many"),
        ("trials", "1.5"),
        ("seed", "-1"),
        ("audit", "2"),
        ("audit", "nan"),
        ("single", "maybe"),
        ("timeout", "0"),
        ("budget", "6XB"),
        ("keep_checkpoints", "best"),
    ],
)
def test_a_bad_value_is_refused_everywhere_with_its_place(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=value):
        one(name, **{name: value})

    variable = f"TUNER_{name.upper()}"
    with monkeypatch.context() as patch:
        patch.setenv(variable, value)
        with pytest.raises(UsageError, match=f"^{variable}: .*{value}"):
            one(name)

    Path("tuner.toml").write_text(f'{name} = "{value}"\n', encoding="utf-8")
    with pytest.raises(UsageError, match=rf"^{name} in tuner\.toml: .*{value}"):
        one(name)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tuner.toml", b"trials = [\n"),
        ("tuner.toml", b"study_name = '\xff'\n"),
        ("pyproject.toml", b"[tool.tuner\n"),
        ("pyproject.toml", b"[tool]\ntuner = 5\n"),
        ("pyproject.toml", b"tool = 5\n"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(file: str, content: bytes) -> None:
    Path(file).write_bytes(content)

    with pytest.raises(UsageError, match=file):
        resolve({})


def test_a_setting_as_json_keeps_value_and_origin() -> None:
    assert one("trials", trials="12").to_json() == {"value": 12, "origin": "flag"}
