"""Documentation that can be wrong: README's commands and workload, generated pages, SQL, links."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, Tuner

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_generated_pages_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_readme_commands_run(tuner: Tuner) -> None:
    """Every `tuner` command of README with fewer trials; `app` and `importance` have their own tests."""
    lines = [line.split("#")[0].strip() for block in blocks(README, "sh") for line in block.splitlines()]
    commands = [shlex.split(line.removeprefix(".venv/bin/")) for line in lines if "tuner " in line]
    commands = [words[1:] for words in commands if words[0] == "tuner"]
    commands = [words for words in commands if words[0] not in ("app", "importance")]
    assert {words[0] for words in commands} == {
        "run",
        "predict",
        "largest",
        "targets",
        "doctor",
        "pareto",
        "show",
        "rerun",
        "query",
        "export",
    }
    commands.sort(key=lambda words: words[0] != "run")  # README shows the demo's front first
    for words in commands:
        absolute = [str(ROOT / word) if word.startswith("studies/") else word for word in words]
        if words[0] == "run":
            absolute[absolute.index("--trials") + 1] = "1"
        if words[0] == "rerun":  # the one that was launched; README's number may be a pruned one here
            absolute[-1] = str(json.loads(tuner("best", words[1], "-f", "json").stdout)["number"])
        done = tuner(*absolute)
        assert done.returncode == 0, (words, done.stderr)


def test_readme_workload_runs_as_it_stands(tuner: Tuner, tmp_path: Path) -> None:
    workload = next(block for block in blocks(README, "python") if "class Wine" in block)
    assert len([line for line in workload.splitlines() if line]) <= 30, "README promises 30 lines"
    (tmp_path / "wine.py").write_text(workload)
    done = tuner("run", "wine.py", "--trials", "1", "--budget", "2GiB")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = re.compile(r"(?:`|^)make ([a-z-]+)", re.MULTILINE)
    named = {name for page in PAGES for name in code.findall(page.read_text("utf-8"))}
    assert {"demo", "test", "check", "venv", "bench", "bench-accuracy", "soak", "docs", "format"} == named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+?)\)", prose):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
