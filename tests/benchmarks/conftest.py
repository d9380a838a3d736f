"""Running `benchmarks/gpu_check.py` as a person would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

Check = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def gpu_check(tmp_path: Path) -> Check:
    """Run the script in an empty folder, with further environment variables."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "benchmarks" / "gpu_check.py")
        return subprocess.run(
            [sys.executable, "-P", script, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **environment},
        )

    return run
