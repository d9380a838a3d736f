"""Help: it is there for every command, fits a screen, and does not wait for PyTorch."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.conftest import clean_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Tuner = Callable[..., subprocess.CompletedProcess[str]]

# What each command does, in a few words that its help must hold.
COMMANDS = {
    "run": ["search", "budget", "resumed", "--trials", "--storage"],
    "predict": ["predict", "memory", "without|nothing is trained", "--set", "--target"],
    "largest": ["largest value", "fits", "--param", "--over", "--max"],
    "replay": ["replay", "nothing in it is run", "--limit", "--expandable", "--max-split"],
    "targets": ["list", "GPUs", "capacity", "context", "--sources"],
    "doctor": ["check", "this machine", "context", "--remeasure"],
    "studies": ["list", "studies", "--format"],
    "trials": ["list", "trials", "--outcome", "--sort"],
    "pareto": ["metric", "peak memory", "--budget"],
    "best": ["best metric", "budget"],
    "importance": ["metric", "peak memory", "fANOVA"],
    "query": ["SELECT", "tuner_pareto", "--limit", "--timeout", "Nothing can be written"],
    "export": ["CSV", "JSON", "Parquet", "param.NAME"],
    "show": ["prediction", "measured peaks", "settings with their origins", "NUMBER"],
    "rerun": ["again", "nothing is recorded", "exit code 0", "--threads", "--force", "--runs-dir"],
    "stop": ["driver", "end after"],
    "delete": ["delete", "study", "--yes"],
    "clean": ["remove", "run folders", "--dry-run"],
    "app": ["app", "never writes", "--port"],
    "db": ["create, upgrade or inspect", "upgrade", "current"],
    "db upgrade": ["tables", "safe to run again"],
    "db current": ["schema", "needs"],
}
HEAVY = ("torch", "optuna", "sqlalchemy", "streamlit", "alembic", "psycopg", "rich")


def modules_imported(folder: Path, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "tuner", *arguments],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"^import time:.*\|\s*([\w.]+)$", done.stderr, re.MULTILINE))


def test_the_first_page_lists_every_command_with_what_it_does(tuner: Tuner) -> None:
    done = tuner("--help")

    assert (done.returncode, done.stderr) == (0, "")
    listed = dict(re.findall(r"^  ([a-z]+) {2,}(\S.*)$", done.stdout.partition("Commands:")[2], re.MULTILINE))
    assert list(listed) == [name for name in COMMANDS if " " not in name]
    assert all(sentence.endswith(".") and len(sentence) > 10 for sentence in listed.values())


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_says_what_the_command_does_within_100_columns(
    command: str, tmp_path: Path, tuner: Tuner
) -> None:
    done = tuner(*command.split(), "--help", COLUMNS="300")

    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert done.stdout.startswith(f"Usage: tuner {command}".rstrip())
    text = " ".join(done.stdout.split())
    for words in COMMANDS.get(command, ["hyperparameter search", "memory budget"]):
        assert re.search(words, text, re.IGNORECASE), words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_option_says_what_it_is_for(command: str, tuner: Tuner) -> None:
    shown = tuner(*command.split(), "--help").stdout

    options = re.findall(r"^  (-\S.*)$", re.split(r"\n\n", shown.partition("Options:")[2])[0], re.MULTILINE)
    assert options
    # Beside the option, or on the next line where the option is too long.
    for option in options:
        beside = re.search(r"\S {2,}\S", option)
        assert beside or re.search(re.escape(option) + r"\n {4,}\S", shown), option


def test_the_short_form_and_the_version(tuner: Tuner) -> None:
    from importlib.metadata import version

    assert tuner("-h").stdout == tuner("--help").stdout
    assert tuner("run", "-h").stdout == tuner("run", "--help").stdout
    assert tuner("--version").stdout == f"tuner, version {version('vram-tuner')}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["predict", "-h"], ["app", "-h"]]
)
def test_help_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    imported = modules_imported(tmp_path, *arguments)

    assert "click" in imported  # the list is real
    assert not {name for name in imported if name.partition(".")[0] in HEAVY}


def test_the_first_page_imports_no_command(tmp_path: Path) -> None:
    ours = {name for name in modules_imported(tmp_path, "--help") if name.startswith("tuner")}

    assert ours <= {"tuner", "tuner.cli", "tuner.cli.main", "tuner.errors"}


@pytest.mark.parametrize("command", [[], ["db"]], ids=["tuner", "tuner db"])
def test_without_a_command_the_help_can_be_read(command: list[str], tuner: Tuner) -> None:
    done = tuner(*command)

    assert done.returncode in (0, 2)
    assert max(map(len, (done.stdout + done.stderr).splitlines())) <= 100
    assert "upgrade" in done.stdout + done.stderr
