"""`tuner rerun`: real trials trained again; what differs is found, and nothing is recorded."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from tests.conftest import clean_environment, processes_with

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.reproducing import Folder


@pytest.fixture
def study(study_in_git: Folder, tmp_path: Path) -> Folder:
    """A copy of the study that the test may change."""
    return study_in_git.copy(tmp_path)


def dump(folder: Folder) -> list[str]:
    with closing(sqlite3.connect(folder.path / "tuner.db")) as connection:
        return list(connection.iterdump())


def test_a_seeded_trial_agrees_and_nothing_is_recorded(study: Folder) -> None:
    before = dump(study)
    done = study.tuner("rerun", "tiny", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line[:16].strip(): line.split() for line in done.stdout.splitlines()}
    assert lines["score"][1] == lines["score"][2]
    assert lines["score"][-1] == lines["allocated peak"][-1] == "equal"
    assert lines["outcome"][1:] == ["completed", "completed"]
    assert done.stdout.splitlines()[-1] == "agrees"
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "epoch 2: score" in done.stderr
    assert dump(study) == before
    assert (study.path / "tuner-runs" / "tiny" / "rerun-00002" / "log.txt").exists()


def test_another_result_than_recorded_is_found(study: Folder) -> None:
    study.sql(
        "UPDATE tuner_trial SET value = value - 0.25, allocated_bytes = allocated_bytes + 4 WHERE number = 2"
    )
    study.sql(
        "UPDATE tuner_metric SET value = value - 0.25 WHERE name = 'score' AND epoch = 2 AND trial_id = 3"
    )
    done = study.tuner("rerun", "tiny", "2")
    assert done.returncode == 1
    verdict = done.stdout[done.stdout.index("differs:") :].replace("\n ", "")
    assert "(+0.25), first in epoch 2" in verdict
    assert "the allocator's peak was" in verdict
    assert "(-4 bytes)" in verdict


def test_other_code_and_threads_are_warned_of_before_and_found_after(study: Folder) -> None:
    text = study.file.read_text(encoding="utf-8")
    study.file.write_text(text.replace("Adam(model.parameters())", "Adam(model.parameters(), lr=0.1)"))
    found = study.tuner("rerun", "tiny", "2", "--threads", "2", "-f", "json")
    assert found.returncode == 1
    warnings = [line for line in found.stderr.splitlines() if line.startswith("warning: ")]
    assert any(line.startswith("warning: study file was ") for line in warnings)
    assert "warning: threads was 1, and is 2" in warnings
    assert found.stderr.index("warning: study file") < found.stderr.index("epoch 1")


def test_json_names_what_changed(study: Folder) -> None:
    study.sql(
        """UPDATE tuner_driver SET environment = json_set(environment, '$.packages.torch', '1.13.1',
        '$.host', 'elsewhere', '$.variables.OMP_NUM_THREADS', '7')"""
    )
    fields = study.json("rerun", "tiny", "1")
    changes = {change["what"]: change["then"] for change in fields["changes"]}
    assert {"torch": "1.13.1", "host": "elsewhere", "OMP_NUM_THREADS": "7"}.items() <= changes.items()
    assert "study file" in changes, "it was edited after trial 1"
    assert fields["agrees"] is True
    assert fields["then"]["value"] == fields["now"]["value"]
    assert fields["then"]["epochs"] == fields["now"]["epochs"]


def test_a_trial_that_ran_out_of_memory_does_so_again(study: Folder) -> None:
    done = study.tuner("run", "tiny.py", "--study-name", "hungry", "--trials", "1", TINY_MODES="hungry")
    assert study.sql("SELECT outcome FROM tuner_trials WHERE study = 'hungry'") == [("out_of_memory",)], done
    again = study.tuner("rerun", "hungry", "0")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "out_of_memory      out_of_memory" in again.stdout


def test_a_pruned_trial_is_refused_and_launched_when_forced(study: Folder) -> None:
    study.sql("UPDATE tuner_trial SET outcome = 'pruned_memory', reason = 'predicted to need 9 GiB', "
              "reservation_bytes = NULL, environment = NULL WHERE number = 1")  # fmt: skip
    refused = study.tuner("rerun", "tiny", "1")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.splitlines()[0] == (
        "error: trial 1 of study 'tiny' was never launched: predicted to need 9 GiB"
    )
    forced = study.tuner("rerun", "tiny", "1", "--force")
    assert forced.returncode == 0, forced.stderr
    assert "completed" in forced.stdout
    assert forced.stdout.splitlines()[-1] == "nothing to compare with"


def test_what_cannot_be_run_again_is_one_clear_line(study: Folder) -> None:
    study.sql("UPDATE tuner_trial SET outcome = NULL WHERE number = 0")
    for arguments, line in (
        (["tiny", "0"], "error: trial 0 of study 'tiny' is still running"),
        (["tiny", "9"], "error: study 'tiny' has no trial 9"),
        (["tina", "0"], "error: there is no study 'tina'"),
    ):
        done = study.tuner("rerun", *arguments)
        assert (done.returncode, done.stdout, done.stderr.splitlines()[0]) == (2, "", line)
    study.file.unlink()
    gone = study.tuner("rerun", "tiny", "1")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert gone.stderr.startswith(f"error: the study's workload is not there any more: {study.file}:Tiny")
    assert not list(study.path.glob("tuner-runs/tiny/rerun-*"))


def test_ctrl_c_leaves_no_child(study: Folder) -> None:
    study.sql("UPDATE tuner_trial SET params = json_set(params, '$.mode', 'slow') WHERE number = 2")
    driver = subprocess.Popen(
        [sys.executable, "-P", "-m", "tuner", "rerun", "tiny", "2"],
        cwd=study.path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not list(study.path.glob("tuner-runs/tiny/rerun-*/events.jsonl")):
        assert time.monotonic() < deadline, "it was not launched within 60 s"
        time.sleep(0.1)
    children = processes_with(str(study.file))
    assert children
    driver.send_signal(signal.SIGINT)
    out, err = driver.communicate(timeout=30)
    assert driver.returncode == 130, err
    assert err.splitlines()[-1] == "error: interrupted: the trial's process is gone, nothing was recorded"
    assert out == ""
    assert processes_with(str(study.file)) == []
