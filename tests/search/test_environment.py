"""What is kept of a driver's surroundings: real git repositories, a password in every place."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import TINY
from tuner.search import git as git_module
from tuner.search.environment import digest_of, driver_environment, study_file
from tuner.search.git import Revision, revision_of
from tuner.search.plan import Plan, make_plan
from tuner.settings import Setting, resolve
from tuner.store.engine import parse_url

if TYPE_CHECKING:
    from pathlib import Path

PASSWORD = "p@ss:w/rd%?"
ENCODED = "p%40ss%3Aw%2Frd%25%3F"


def fragments() -> list[str]:
    """What "no fragment" means: every run of four characters of either form (of five with a %)."""
    raw = [PASSWORD[i : i + 4] for i in range(len(PASSWORD) - 3)]
    return raw + [ENCODED[i : i + 5] for i in range(len(ENCODED) - 4)]


def git(folder: Path, *arguments: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    who = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    done = subprocess.run(
        ["git", *who, "-C", str(folder), *arguments], env=kept, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study file in a folder of its own."""
    folder = tmp_path / "work" / "studies"
    folder.mkdir(parents=True)
    file = folder / "tiny.py"
    file.write_text(TINY.read_text(encoding="utf-8"), encoding="utf-8")
    return file


@pytest.fixture
def repository(study: Path) -> Path:
    """The working tree of a repository in which the study file is committed."""
    root = study.parents[1]
    git(root, "init", "--quiet")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message", "a study")
    return root


def plan_of(file: Path, tmp_path: Path, **flags: Any) -> Plan:
    flags = {"storage": f"sqlite:///{tmp_path}/tuner.db", "target": "cpu", **flags}
    return make_plan(str(file), resolve(flags), 1)


def test_outside_a_repository_there_is_no_revision(study: Path) -> None:
    assert revision_of(study) is None


def test_a_clean_repository_gives_its_commit(repository: Path, study: Path) -> None:
    (repository / "tuner.db").write_text("a database lies there")
    assert revision_of(study) == Revision(str(repository), git(repository, "rev-parse", "HEAD"), dirty=False)


def test_a_change_in_any_tracked_file_makes_it_dirty(repository: Path, study: Path) -> None:
    helper = repository / "helper.py"
    helper.write_text("width = 1\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "a helper")
    assert dirty(study) is False
    helper.write_text("width = 2\n")
    assert dirty(study) is True


def test_a_study_file_that_is_not_tracked_makes_it_dirty(repository: Path, study: Path) -> None:
    other = study.with_name("other.py")
    other.write_text("not committed")
    assert dirty(other) is True
    assert dirty(study) is False


def test_a_repository_without_a_commit_is_dirty(study: Path) -> None:
    root = study.parents[1]
    git(root, "init", "--quiet")
    assert revision_of(study) == Revision(str(root), None, dirty=True)


def test_the_repository_is_the_files_and_not_that_of_a_hook(
    repository: Path, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    monkeypatch.chdir(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    found = revision_of(study)
    assert found is not None
    assert found.root == str(repository)


def test_without_git_nothing_is_known(
    repository: Path, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert revision_of(study) is not None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert revision_of(study) is None


def test_a_git_that_hangs_in_status_leaves_dirty_unknown(
    repository: Path, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    slow.write_text(f'#!/bin/sh\ncase "$*" in *status*) exec sleep 60;; esac\nexec {real} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(git_module, "_MOST_SECONDS", 1.0)
    assert revision_of(study) == Revision(str(repository), commit, dirty=None)


def test_an_environment_says_what_a_person_would_look_up(
    repository: Path, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["tuner", "run", str(study), "--seed", "4"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TUNER_TRIALS", "7")
    monkeypatch.chdir(repository)
    found = driver_environment(plan_of(study, tmp_path, seed="4"))
    assert found["command"] == ["tuner", "run", str(study), "--seed", "4"]
    assert found["cwd"] == str(repository)
    assert found["host"] == socket.gethostname()
    assert found["python"] == platform.python_version()
    assert found["packages"] == {
        "tuner": version("vram-tuner"),
        **{name: version(name) for name in ("torch", "numpy", "optuna", "sqlalchemy")},
    }
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert found["git"] == {
        "root": str(repository), "commit": git(repository, "rev-parse", "HEAD"), "dirty": False
    }  # fmt: skip
    assert found["study_file"] == str(study)
    assert found["workload_digest"] == hashlib.sha256(study.read_bytes()).hexdigest()
    assert found["settings"]["trials"] == {"value": 7, "origin": "TUNER_TRIALS"}
    assert found["settings"]["seed"] == {"value": 4, "origin": "flag"}
    assert found["settings"]["audit"] == {"value": 0.0, "origin": "default"}


def test_an_environment_survives_json(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An argument that is no Unicode: the byte 0xff, as Python hands it over.
    monkeypatch.setattr(sys, "argv", ["tuner", "run", str(study), "--study-name", "caf\udcff"])
    found = driver_environment(plan_of(study, tmp_path))
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    text.encode("utf-8")


def test_gpus_and_their_driver_are_in_it(nvml_library: str, study: Path, tmp_path: Path) -> None:
    """In a process of its own, since the library is found when the process starts."""
    from tests.conftest import ROOT, clean_environment, rtx_3060

    code = "import json; from tuner.search.environment import host_environment as e; print(json.dumps(e()))"
    shown = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=clean_environment(**rtx_3060(nvml_library), PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(shown.stdout)
    assert [(gpu["name"], gpu["total_bytes"]) for gpu in found["gpus"]] == [
        ("NVIDIA GeForce RTX 3060", 12288 << 20)
    ]
    assert found["gpu_driver"]
    assert found["gpu_problem"] is None


def test_it_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from tuner.search.environment import host_environment, git_state\n"
        f"host_environment(), git_state(__import__('pathlib').Path({str(TINY)!r}))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


URLS = {
    "in the authority": f"postgresql://someone:{ENCODED}@db.example.org:5433/results",
    "in the query": f"postgresql://db.example.org:5433/results?user=someone&password={ENCODED}",
    "plus signs": "postgresql://someone:p%40ss+word%21@db.example.org:5433/results",
}


@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
@pytest.mark.parametrize("place", ["flag", "flag=", "TUNER_STORAGE", "tuner.toml"])
def test_no_fragment_of_a_password_is_kept(
    url: str, place: str, study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"flag": ["--storage", url], "flag=": [f"--storage={url}"]}.get(place, [])
    monkeypatch.setattr(sys, "argv", ["tuner", "run", str(study), *arguments])
    if place == "TUNER_STORAGE":
        monkeypatch.setenv("TUNER_STORAGE", url)
    if place == "tuner.toml":
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tuner.toml").write_text(f'storage = "{url}"\n')
    plan = plan_of(study, tmp_path)
    storage = resolve({"storage": url if place.startswith("flag") else None}, ["storage"])["storage"]
    settings = {**plan.settings, "storage": storage}
    found = driver_environment(dataclasses.replace(plan, url=parse_url(url), settings=settings))
    text = json.dumps(found)
    assert [piece for piece in [*fragments(), "ss+word", "ss word", "ss%2Bword"] if piece in text] == []
    assert found["settings"]["storage"] == {
        "value": "postgresql://db.example.org:5433/results",
        "origin": place.rstrip("="),
    }
    assert "db.example.org" in text


def test_a_password_given_in_the_wrong_place_is_hidden_as_a_whole(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = [PASSWORD, ENCODED, f"x{PASSWORD}y", f"host=h password={PASSWORD}", f"mysql://u:{PASSWORD}@h/d"]
    monkeypatch.setattr(sys, "argv", ["tuner", "run", str(study), *secrets])
    plan = plan_of(study, tmp_path)
    settings = {**plan.settings, "study_name": Setting(f"of {PASSWORD}", "flag")}
    found = driver_environment(
        dataclasses.replace(plan, url=parse_url(URLS["in the authority"]), settings=settings)
    )
    assert found["command"] == ["tuner", "run", str(study), *["***"] * len(secrets)]
    assert found["settings"]["study_name"]["value"] == "***"


def test_a_sqlite_url_stays_usable(study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path}/tuner.db"
    monkeypatch.setattr(sys, "argv", ["tuner", "run", str(study), "--storage", url])
    found = driver_environment(plan_of(study, tmp_path, storage=url))
    assert found["command"][-1] == url
    assert found["settings"]["storage"]["value"] == url


def test_the_file_of_a_reference_is_found_without_importing_it(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(study.parent)
    (study.parent / "raises.py").write_text("raise RuntimeError('imported')")
    assert study_file(f"{study}:Tiny") == study
    assert study_file("raises:Some") == study.parent / "raises.py"
    assert study_file("nowhere_at_all:Some") is None
    assert study_file(f"{study.parent}/gone.py:Some") is None
    assert digest_of(study.parent / "gone.py") is None


def dirty(file: Path) -> bool | None:
    found = revision_of(file)
    assert found is not None
    return found.dirty
