"""The wheel: its only top-level name is `tuner`, and it works where there is no checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.conftest import ROOT, clean_environment


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def test_its_only_top_level_name_is_tuner(wheel: Path) -> None:
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"tuner"}


def test_it_holds_migrations_app_studies_and_targets(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("alembic/env.py", "app/main.py", "studies/digits_cnn.py"):
        assert f"tuner/_bundled/{name}" in names
    assert "tuner/memory/targets.toml" in names
    assert "tuner/supervisor.py" in names


def test_the_deprecated_pynvml_distribution_is_not_required(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    required = [
        line.split(":")[1].strip() for line in metadata.splitlines() if line.startswith("Requires-Dist")
    ]
    assert any(line.startswith("nvidia-ml-py") for line in required)
    assert not any(line.startswith("pynvml") for line in required)


def test_it_creates_a_database_without_a_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    command = "import sys; sys.path.insert(0, sys.argv.pop(1)); from tuner.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", command, str(site), "db", "upgrade"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tuner.db").exists()
