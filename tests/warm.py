"""The command `tuner` in processes that are forked from one in which the slow imports are done.

Hundreds of tests run the command; importing PyTorch, Optuna and SQLAlchemy each time would be most of
their time. Each run is a process of its own with its own folder, variables and output.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PROCESSES = multiprocessing.get_context("forkserver")
PRELOAD = ["tests.warm_imports", "tests.e2e.killed_study"]
PROCESSES.set_forkserver_preload(PRELOAD)


def run_tuner(
    arguments: Sequence[str], cwd: Path, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `tuner` with these arguments; return what a subprocess would.

    Raises:
        subprocess.TimeoutExpired: It took too long, and was killed.
    """
    with tempfile.TemporaryDirectory(prefix="tuner-output-") as folder:
        outputs = Path(folder) / "out", Path(folder) / "err"
        process = PROCESSES.Process(target=_command, args=(list(arguments), str(cwd), environment, outputs))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout)
        out, err = (path.read_text(encoding="utf-8", errors="replace") for path in outputs)
        return subprocess.CompletedProcess(list(arguments), process.exitcode, out, err)


def _command(arguments: list[str], cwd: str, environment: dict[str, str], outputs: tuple[Path, Path]) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in zip((1, 2), outputs, strict=True):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = ["tuner", *arguments]
    from tuner.cli.main import main

    try:
        main()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
