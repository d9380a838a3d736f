"""`tuner show`: all that is known of a trial, from real runs in a real repository."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from importlib.metadata import version
from typing import TYPE_CHECKING

import pytest

from tests.conftest import TINY

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.reproducing import Folder


@pytest.fixture
def study(study_in_git: Folder) -> Folder:
    return study_in_git


def sections(text: str) -> dict[str, dict[str, str]]:
    """Return the page as it is laid out: section → title → text, continuation lines joined."""
    found: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    title = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            rows = found.setdefault(line, {})
        elif line[:22].strip():
            title = line[:22].strip()
            rows[title] = line[23:]
        elif line:
            rows[title] += f" {line.strip()}"
    return found


def test_everything_it_takes_to_run_a_trial_again_is_on_the_page(study: Folder) -> None:
    done = study.tuner("show", "tiny", "1")
    assert (done.returncode, done.stderr) == (0, "")
    page = sections(done.stdout)
    assert list(page) == [
        "trial 1 of study 'tiny'", "params", "memory", "predicted at the peak", "metrics per epoch", "run",
        "environment", "settings",
    ]  # fmt: skip
    (params,) = study.sql("SELECT params FROM tuner_trial WHERE number = 1")[0]
    assert page["params"] == {name: str(value) for name, value in json.loads(params).items()}
    assert set(page["metrics per epoch"]) == {"epoch 1", "epoch 2"}
    ((seed,),) = study.sql("SELECT seed FROM tuner_trial WHERE number = 1")
    assert page["run"]["seed"] == str(seed)
    environment = page["environment"]
    assert f"torch {version('torch')}" in environment["versions"]
    assert f"python {platform.python_version()}" in environment["versions"]
    commit = f"{study.git('rev-parse', 'HEAD')}, of {study.path}"
    assert environment["git commit"].replace(" ", "") == commit.replace(" ", ""), "a long path is wrapped"
    assert environment["host"] == socket.gethostname()
    assert environment["threads"] == "1"
    assert environment["command"] == "tuner run tiny.py --trials 2 --seed 1 --threads 1"
    assert page["settings"]["seed"] == "1  (flag)"
    assert page["settings"]["keep checkpoints"] == "front  (default)"


def test_the_page_fits_80_columns(study: Folder, tmp_path: Path) -> None:
    folder = study.copy(tmp_path)
    folder.sql("UPDATE tuner_trial SET reason = ? WHERE number = 0", f"because {'of this ' * 30}{'x' * 200}")
    lines = folder.tuner("show", "tiny", "0").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("x") for line in lines) >= 200, "nothing is cut off"


def test_a_study_file_edited_while_the_study_runs_is_pointed_out(study: Folder) -> None:
    then = hashlib.sha256(TINY.read_bytes()).hexdigest()[:12]
    now = hashlib.sha256(study.file.read_bytes()).hexdigest()[:12]
    before, after = (sections(study.tuner("show", "tiny", n).stdout)["environment"] for n in ("0", "2"))
    assert before["its digest"] == f"{then}, as at the study's creation"
    assert after["its digest"] == f"{now}: CHANGED, it was {then} when the study was created"
    assert after["git commit"].startswith(f"{study.git('rev-parse', 'HEAD')} dirty")


def test_json_holds_all_of_it(study: Folder) -> None:
    fields = study.json("show", "tiny", "2")
    assert fields["number"] == 2
    assert fields["environment"]["workload_digest"] == hashlib.sha256(study.file.read_bytes()).hexdigest()
    assert fields["study"]["workload_digest"] == hashlib.sha256(TINY.read_bytes()).hexdigest()
    driver = fields["driver"]["environment"]
    assert driver["git"] == {
        "root": str(study.path), "commit": study.git("rev-parse", "HEAD"), "dirty": True
    }  # fmt: skip
    assert driver["command"][:3] == ["tuner", "run", "tiny.py"]
    assert driver["settings"]["trials"] == {"value": 3, "origin": "flag"}
    assert fields["prediction"]["verdict"] == "launch"
    assert [epoch["epoch"] for epoch in fields["epochs"]] == [1, 1, 2, 2]
    assert fields["timeline"]["points"]


def test_earlier_attempts_and_failures_are_told(study: Folder, tmp_path: Path) -> None:
    folder = study.copy(tmp_path)
    evidence = {"reason": "asked for 9 GiB"}
    attempts = [{"reservation_bytes": 400 << 20, "outcome": "out_of_memory", "failure": evidence}]
    failure = {"reason": "too much", "requested_bytes": 9 << 30, "phase": "train", "traceback": "Trace:\n  x"}
    folder.sql(
        "UPDATE tuner_trial SET attempt = 2, attempts = ?, failure = ?, waiting_seconds = 75,"
        " growth_bytes = 4096, late_result = '{\"outcome\": \"completed\"}'",
        json.dumps(attempts), json.dumps(failure),
    )  # fmt: skip
    done = folder.tuner("show", "tiny", "0")
    page = sections(done.stdout)
    assert page["earlier attempts"] == {"1": "out_of_memory under 400.0 MiB: asked for 9 GiB"}
    assert page["failed request"] == {"requested": "9.00 GiB", "phase": "train"}
    assert page["memory"]["growth"] == "4.0 KiB per training step"
    late = "completed, which came after the trial had been given up"
    assert page["trial 0 of study 'tiny'"]["late result"] == late
    assert (page["run"]["attempt"], page["run"]["waited"]) == ("2", "1 min 15 s")
    assert done.stdout.endswith("\ntraceback\nTrace:\n  x\n")


def test_a_trial_whose_driver_is_not_known_is_shown_all_the_same(study: Folder, tmp_path: Path) -> None:
    folder = study.copy(tmp_path)
    folder.sql("UPDATE tuner_trial SET driver_id = NULL, environment = NULL")
    done = folder.tuner("show", "tiny", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "command" not in sections(done.stdout)["environment"]
    assert sections(done.stdout)["settings"]["seed"] == "1  (flag)"


def test_an_unknown_number_is_answered_with_those_there_are(study: Folder) -> None:
    done = study.tuner("show", "tiny", "17")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: study 'tiny' has no trial 17\nhint: it has trials 0 to 2\n"
