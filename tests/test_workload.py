"""Loading a study file: every way in which it can be wrong is one sentence, with a hint."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tuner.errors import WorkloadError
from tuner.workload import Loaders, Maximize, Minimize, Objective, Workload, load_workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TINY = Path(__file__).parent / "workloads" / "tiny.py"
HEAD = "from tuner import Maximize, Workload\n"
NET = HEAD + 'class Net(Workload):\n    objective = Maximize("accuracy")\n'


@pytest.fixture(autouse=True)
def _imports_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading extends sys.path and sys.modules, on purpose."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        module = sys.modules[name]
        if str(tmp_path) in f"{getattr(module, '__file__', '')} {list(getattr(module, '__path__', []))}":
            del sys.modules[name]


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., str]:
    def write(source: str, name: str = "study.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return str(path)

    return write


def refusal(reference: str) -> WorkloadError:
    with pytest.raises(WorkloadError) as caught:
        load_workload(reference)
    assert "\n" not in caught.value.message
    return caught.value


def test_a_study_file_gives_its_one_workload() -> None:
    loaded = load_workload(str(TINY))

    assert type(loaded.workload).__name__ == "Tiny"
    assert loaded.workload.objective == Maximize("score")
    assert loaded.reference == f"{TINY}:Tiny"
    assert loaded.identity == "tiny:Tiny"
    assert loaded.digest == hashlib.sha256(TINY.read_bytes()).hexdigest()


def test_the_reference_loads_the_same_from_another_folder(
    study: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study(NET, "a folder/my study.py")
    first = load_workload("a folder/my study.py")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    again = load_workload(first.reference)

    assert (again.reference, again.identity, again.digest) == (first.reference, first.identity, first.digest)
    assert first.identity == "my study:Net"


def test_path_and_class_choose_one_of_two(study: Callable[..., str]) -> None:
    path = study(NET + "class Other(Net):\n    pass\n")

    assert type(load_workload(f"{path}:Other").workload).__name__ == "Other"
    assert refusal(f"{path}:Nett").message == f"{path} has no workload 'Nett'"
    assert refusal(f"{path}:Nett").hint == "it has: Net, Other"
    error = refusal(path)
    assert error.message == f"{path} has 2 workloads: Net, Other"
    assert error.hint == f"name one: {path}:Net"


def test_module_and_class(study: Callable[..., str]) -> None:
    study(NET, "package_of_ours/nets.py")

    loaded = load_workload("package_of_ours.nets:Net")

    assert loaded.reference == loaded.identity == "package_of_ours.nets:Net"
    assert load_workload("package_of_ours.nets").reference == loaded.reference


def test_a_workload_that_is_only_imported_does_not_count(study: Callable[..., str]) -> None:
    study(NET, "beside.py")
    path = study("from beside import Net\nclass Wide(Net):\n    pass\n")

    assert type(load_workload(path).workload).__name__ == "Wide"


def test_a_second_name_for_the_one_workload_is_not_a_second_workload(study: Callable[..., str]) -> None:
    assert type(load_workload(study(NET + "Best = Net\n")).workload).__name__ == "Net"


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nope.py", "there is no study file nope.py"),
        ("folder/nope.py", "there is no study file folder/nope.py"),
        ("nope.py:Net", "there is no study file nope.py"),
        ("no_such_module_of_ours", "there is no study file or module 'no_such_module_of_ours'"),
        ("no_such_module_of_ours.nets:Net", "there is no study file or module 'no_such_module_of_ours.nets'"),
    ],
)
def test_what_does_not_exist_is_said_with_an_example(reference: str, said: str) -> None:
    error = refusal(reference)

    assert error.message == said
    assert "studies/digits_cnn.py" in (error.hint or "")


@pytest.mark.parametrize("folder", ["folder.py", "folder/", "./folder", "."])
def test_a_folder_is_not_a_study_file(folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)

    assert "is not a Python file" in refusal(folder).message


def test_another_kind_of_file_is_not_a_study_file(study: Callable[..., str]) -> None:
    assert "is not a Python file" in refusal(study("a: 1\n", "study.yaml")).message


def test_a_syntax_error_is_said_with_its_line(study: Callable[..., str]) -> None:
    path = study(NET + "    def suggest(self:\n")

    assert refusal(path).message.startswith(f"{path}:4 has a syntax error: ")


def test_a_syntax_error_in_an_imported_file_names_that_file(study: Callable[..., str]) -> None:
    study("x = 1\n\ndef f(:\n", "broken_helper.py")
    message = refusal(study("import broken_helper\n" + NET)).message

    assert "broken_helper.py:3" in message.replace(", line ", ":")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import no_such_library_of_ours", "ModuleNotFoundError: No module named 'no_such_library_of_ours'"),
        ("raise ValueError('one\\ntwo')", "ValueError: one"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--nope'])", "SystemExit"),
    ],
)
def test_a_file_that_fails_while_it_is_imported_says_how(
    study: Callable[..., str], line: str, said: str
) -> None:
    path = study(f"{line}\n{NET}")

    try:
        error = refusal(path)
    except SystemExit:
        pytest.fail("it ended the command")
    assert f"{path} cannot be imported: " in error.message
    assert said in error.message


@pytest.mark.parametrize(
    ("line", "said"),
    [("import no_such_library_of_ours", "no_such_library_of_ours"), ("def f(:", "SyntaxError")],
)
def test_a_module_that_exists_but_fails_is_not_said_to_be_missing(
    study: Callable[..., str], line: str, said: str
) -> None:
    study(f"{line}\n{NET}", "failing_module.py")

    message = refusal("failing_module:Net").message

    assert "there is no" not in message
    assert said in message


@pytest.mark.parametrize("source", ["", "x = 1\n", HEAD, "class Net:\n    pass\n"])
def test_a_file_without_a_workload(study: Callable[..., str], source: str) -> None:
    path = study(source)

    assert refusal(path).message == f"{path} has no workload"
    assert refusal(path).hint == "a study file holds one subclass of tuner.Workload"


@pytest.mark.parametrize("body", ["pass", 'objective = "accuracy"', "objective = None"])
def test_a_workload_without_an_objective(study: Callable[..., str], body: str) -> None:
    path = study(f"{HEAD}class Net(Workload):\n    {body}\n")

    assert refusal(path).message == f"Net in {path} has no objective"
    assert 'objective = Maximize("accuracy")' in (refusal(path).hint or "")


@pytest.mark.parametrize(
    "init", ["def __init__(self, width): pass", "def __init__(self): raise OSError('no data')"]
)
def test_a_workload_that_cannot_be_made_is_its_own_error(study: Callable[..., str], init: str) -> None:
    assert "Net" in refusal(study(f"{NET}    {init}\n")).message


@pytest.mark.parametrize(
    ("class_name", "study_name"),
    [("DigitsCNN", "digits_cnn"), ("CharGPT", "char_gpt"), ("Tiny", "tiny"), ("HTTPServer", "http_server")],
)
def test_a_study_is_named_after_its_workload_in_snake_case(class_name: str, study_name: str) -> None:
    assert type(class_name, (Workload,), {}).study_name() == study_name
    assert type(class_name, (Workload,), {"name": "mine"}).study_name() == "mine"


def test_what_a_workload_leaves_out_is_said_when_it_is_needed() -> None:
    class Bare(Workload):
        objective = Minimize("loss")

    takes = {"suggest": 1, "setup": 2, "example_batch": 2, "train_step": 2, "loaders": 1}
    for method, arguments in takes.items():
        with pytest.raises(WorkloadError, match=rf"Bare has no {method}\(\)"):
            getattr(Bare(), method)(*[None] * arguments)
    assert (Bare().has_eval_step, Bare().own_fit) == (False, None)


def test_loaders_may_be_a_pair_and_the_evaluation_may_be_missing() -> None:
    class Pair(Workload):
        def loaders(self, params: dict[str, object]) -> object:
            return ([1, 2, 3], [1, 2]) if params else ([1],)

    assert Pair().open_loaders({"a": 1}) == Loaders([1, 2, 3], [1, 2])
    assert (Pair().eval_steps({"a": 1}), Pair().eval_steps({})) == (2, 0)


@pytest.mark.parametrize(
    ("objective", "direction"), [(Maximize("a"), "maximize"), (Minimize("a"), "minimize")]
)
def test_better_follows_the_direction(objective: Objective, direction: str) -> None:
    best = max if direction == "maximize" else min

    assert objective.direction == direction
    for value, than in [(1, 2), (2, 1), (1, 1), (float("-inf"), 0), (float("inf"), 0)]:
        assert objective.better(value, than) == (best(value, than) == value != than)
    assert objective.better(float("-inf"), None)
