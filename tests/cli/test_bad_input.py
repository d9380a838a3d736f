"""Bad input: one `error:` line, at most one hint, the right exit code, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import TINY
from tuner.store import migrations
from tuner.store.engine import open_engine, parse_url
from tuner.store.rows import NewStudy
from tuner.store.writer import Writer

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    Tuner = Callable[..., subprocess.CompletedProcess[str]]

HEAD = "from tuner import Maximize, Workload\n"
BARE = HEAD + 'class Net(Workload):\n    objective = Maximize("a")\n    def suggest(self, trial):\n'
BARE += "        return {}\n"
NET = BARE + "    def loaders(self, params):\n        return [], []\n"
STUDIES = {
    "syntax.py": "def f(:\n",
    "empty.py": "x = 1\n",
    "two.py": NET + "class Other(Net):\n    pass\n",
    "aimless.py": HEAD + "class Net(Workload):\n    pass\n",
    "failing.py": "import no_such_library_of_ours\n",
    "leaving.py": "import sys\nsys.exit(0)\n",
    "unmade.py": NET + "    def __init__(self, width):\n        pass\n",
    "bare.py": BARE,
    "net.py": NET,
}
UNREACHABLE = "postgresql://u:s3cr3t@127.0.0.1:1/db"  # nothing listens on port 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, source in STUDIES.items():
        (tmp_path / name).write_text(source, encoding="utf-8")
    return tmp_path


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def check_refusal(done: subprocess.CompletedProcess[str], *, code: int, said: str) -> None:
    error, *hints = done.stderr.splitlines() or [""]
    assert error.startswith("error: "), done.stderr
    assert said in error
    assert len(hints) <= 1, done.stderr
    assert all(hint.startswith("hint: ") for hint in hints)
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    assert done.stdout == ""
    assert done.returncode == code


# Arguments, and what the error line says; exit code 2: the user can put it right.
USAGE: dict[str, tuple[list[str], str]] = {
    "no such file": (["run", "nope.py"], "there is no study file nope.py"),
    "predict no such file": (["predict", "nope.py"], "there is no study file nope.py"),
    "syntax error": (["run", "syntax.py"], "syntax.py:1 has a syntax error"),
    "no workload": (["run", "empty.py"], "empty.py has no workload"),
    "two workloads": (["run", "two.py"], "two.py has 2 workloads: Net, Other"),
    "no objective": (["run", "aimless.py"], "Net in aimless.py has no objective"),
    "import error": (["run", "failing.py"], "No module named 'no_such_library_of_ours'"),
    "file that exits": (["run", "leaving.py"], "leaving.py cannot be imported"),
    "class with arguments": (["run", "unmade.py"], "Net"),
    "no such class": (["run", "net.py:Nett"], "net.py has no workload 'Nett'"),
    "no argument": (["run"], "Missing argument 'STUDY'"),
    "unknown parameter": (["predict", str(TINY), "--set", "nope=1"], "Tiny has no parameter 'nope'"),
    "parameter without value": (["predict", str(TINY), "--set", "width"], "not 'width'"),
    "parameter not a number": (["predict", str(TINY), "--set", "width=abc"], "not 'abc'"),
    "parameter not a choice": (["predict", str(TINY), "--set", "batch_size=17"], "batch_size cannot be '17'"),
    "budget 0": (["run", str(TINY), "--budget", "0"], "must be positive, not '0'"),
    "budget -1": (["run", str(TINY), "--budget", "-1"], "must be positive, not '-1'"),
    "budget 6XB": (["run", str(TINY), "--budget", "6XB"], "'6XB' is not a size"),
    "predict budget 6XB": (["predict", str(TINY), "--budget", "6XB"], "'6XB' is not a size"),
    "budget of many digits": (["run", "net.py", "--budget", "9" * 400], "size"),
    "budget beyond the device": (["run", str(TINY), "--target", "cpu", "--budget", "900TiB"], "is more than"),
    "mysql": (["run", str(TINY), "--storage", "mysql://u:s3cr3t@h/db"], "SQLite or PostgreSQL"),
    "storage not a URL": (["trials", "x", "--storage", "tuner.db"], "SQLite or PostgreSQL"),
    "storage without a file": (["trials", "x", "--storage", "sqlite://"], "names no file"),
    "unknown command": (["nope"], "there is no command 'nope'; known: run, predict,"),
    "unknown subcommand": (["db", "nope"], "nope"),
    "unknown option": (["run", "net.py", "--nope"], "--nope"),
    "unknown target": (["run", "net.py", "--target", "nope"], "there is no target 'nope'"),
    "predict unknown target": (["predict", "net.py", "--target", "nope"], "there is no target 'nope'"),
    "target of another host": (["run", "net.py", "--target", "a100-40gb"], "not a device of this host"),
    "trials -5": (["run", "net.py", "--trials", "-5"], "'-5' is negative"),
    "audit 2": (["run", "net.py", "--audit", "2"], "'2' is not a share"),
    "timeout soon": (["run", "net.py", "--timeout", "soon"], "'soon' is not a duration"),
    "name of 513": (["run", "net.py", "--study-name", "x" * 513], "1 to 512 characters, not 513"),
    "blank name": (["run", "net.py", "--study-name", " "], "1 to 512 characters"),
    "name that is no text": (["run", "net.py", "--study-name", "\udcff"], "name"),
    "unknown outcome": (["trials", "x", "--outcome", "exploded"], "there is no outcome 'exploded'"),
    "unknown column": (["trials", "x", "--sort", "nope"], "cannot be sorted by 'nope'"),
    "unknown format": (["trials", "x", "-f", "xml"], "xml"),
    "trial not a number": (["show", "x", "one"], "one"),
}


@pytest.mark.parametrize("case", list(USAGE))
def test_bad_input_is_refused_in_one_line_before_anything_is_written(
    case: str, folder: Path, tuner: Tuner
) -> None:
    arguments, said = USAGE[case]
    before = files(folder)

    done = tuner(*arguments)

    check_refusal(done, code=2, said=said)
    assert files(folder) == before
    assert "s3cr3t" not in done.stderr


def test_a_bad_variable_and_a_bad_file_are_named(folder: Path, tuner: Tuner) -> None:
    check_refusal(
        tuner("run", "net.py", TUNER_BUDGET="6XB"), code=2, said="TUNER_BUDGET: '6XB' is not a size"
    )
    (folder / "tuner.toml").write_text("bugdet = 1\n", encoding="utf-8")
    check_refusal(tuner("run", "net.py"), code=2, said="tuner.toml has no setting 'bugdet'")


def test_a_workload_without_data_is_said_and_not_taken_for_a_slow_one(folder: Path, tuner: Tuner) -> None:
    done = tuner("run", "bare.py")

    check_refusal(done, code=done.returncode, said="Net has no loaders()")
    assert done.returncode in (1, 2)
    check_no_database(folder)


def test_a_budget_beyond_the_device_names_both(folder: Path, tuner: Tuner) -> None:
    done = tuner("run", "net.py", "--target", "cpu", "--budget", "900TiB")
    memory = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) / (1 << 20)

    assert "921600.00 GiB" in done.stderr  # 900 · 1024
    said = float(done.stderr.rpartition("(")[2].split()[0])
    assert 0 < said <= memory + 0.01  # GiB, two digits; a cgroup may allow less than the host has


@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["plain", "debug"])
@pytest.mark.parametrize(
    "arguments", [["run", "net.py"], ["trials", "x"], ["delete", "x", "--yes"], ["db", "upgrade"]]
)
def test_a_database_that_cannot_be_reached_is_said_without_its_password(
    arguments: list[str], debug: list[str], folder: Path, tuner: Tuner
) -> None:
    done = tuner(*debug, *arguments, "--storage", UNREACHABLE)

    assert done.returncode == 5
    assert "s3cr3t" not in done.stdout + done.stderr
    if not debug:
        check_refusal(done, code=5, said="postgresql://127.0.0.1:1/db cannot be used: ")
    check_no_database(folder)
    written = [path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert not any("s3cr3t" in text for text in written)


def test_a_password_in_the_environment_is_kept_too(folder: Path, tuner: Tuner) -> None:
    done = tuner("trials", "x", TUNER_STORAGE=UNREACHABLE)

    check_refusal(done, code=5, said="postgresql://127.0.0.1:1/db cannot be used: ")
    assert "s3cr3t" not in done.stdout + done.stderr


def check_no_database(folder: Path) -> None:
    assert not [name for name in files(folder) if ".db" in name or "sqlite" in name]


@pytest.mark.parametrize(
    "command",
    ["trials x", "studies", "pareto x", "best x", "show x 1", "stop x", "delete x --yes", "clean"],
)
def test_without_a_database_nothing_is_created(command: str, folder: Path, tuner: Tuner) -> None:
    before = files(folder)

    check_refusal(tuner(*command.split()), code=5, said="there is no database tuner.db yet")

    assert files(folder) == before


def test_a_folder_that_is_not_there_is_not_made_for_a_database(folder: Path, tuner: Tuner) -> None:
    done = tuner("run", "net.py", "--storage", "sqlite:///nowhere/x.db")

    check_refusal(done, code=5, said="nowhere/x.db cannot be opened")
    assert not (folder / "nowhere").exists()


@pytest.fixture
def with_studies(tmp_path: Path) -> bytes:
    engine = open_engine(parse_url(f"sqlite:///{tmp_path}/tuner.db"))
    migrations.upgrade(engine)
    fields: dict[str, Any] = {
        "workload": "net:Net",
        "workload_reference": "/net.py:Net",
        "workload_digest": "0" * 64,
        "target": "cpu",
        "device_name": "a CPU",
        "budget_bytes": 1 << 30,
        "metric": "a",
        "direction": "maximize",
        "single": False,
        "seed": None,
        "context_bytes": None,
        "settings": {},
        "tuner_version": "0",
    }
    for name in ("digits", "letters"):
        Writer(engine).create_study(NewStudy(name=name, **fields))
    engine.dispose()
    return (tmp_path / "tuner.db").read_bytes()


@pytest.mark.parametrize("command", ["trials", "pareto", "best", "show 1", "stop", "delete --yes"])
def test_an_unknown_study_lists_the_known_ones(
    command: str, with_studies: bytes, tmp_path: Path, tuner: Tuner
) -> None:
    name, *others = command.split()

    done = tuner(name, "NOPE", *others)

    check_refusal(done, code=2, said="there is no study 'NOPE'")
    assert done.stderr.splitlines()[1] == "hint: known studies: letters, digits"
    assert (tmp_path / "tuner.db").read_bytes() == with_studies


def test_a_trial_that_is_not_there_and_an_empty_front_are_said(with_studies: bytes, tuner: Tuner) -> None:
    check_refusal(tuner("show", "digits", "7"), code=2, said="7")
    check_refusal(tuner("best", "digits"), code=3, said="no completed trial within the budget")
    check_refusal(tuner("best", "x" * 513), code=2, said="there is no study 'xxx")
