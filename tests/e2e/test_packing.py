"""Trials packed by predicted bytes on a CPU budget pool, for real: sampled from /proc the whole time."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from benchmarks.sampling import resident_bytes, rows_of
from tests.conftest import ROOT, clean_environment
from tuner.units import MIB

SIZED = ROOT / "tests" / "workloads" / "sized.py"
POOL_MIB, BUDGET_MIB = 1500, 1200
# With about 290 MiB of a process that has imported PyTorch: 40 %, 40 % and 70 % of the pool.
HELD_MIB = "310,310,760"


def test_two_of_40_and_one_of_70_percent_of_a_pool(tmp_path: Path) -> None:
    arguments = ["--pool", f"{POOL_MIB}MiB", "--budget", f"{BUDGET_MIB}MiB", "--jobs", "3", "--threads", "1"]
    driver = subprocess.Popen(
        [sys.executable, "-P", "-m", "tuner", "run", str(SIZED), "--trials", "3", *arguments],
        cwd=tmp_path,
        env=clean_environment(SIZED_MIB=HELD_MIB, SIZED_SECONDS="8"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    samples = []
    while driver.poll() is None:
        samples.append(resident_bytes(tmp_path))
        time.sleep(0.05)
    assert driver.stderr is not None
    with driver.stderr:
        said = driver.stderr.read()
    assert driver.returncode == 0, said
    trials = rows_of(
        tmp_path,
        "SELECT number, outcome, reservation_bytes, peak_bytes, started_at, ended_at FROM tuner_trial "
        "ORDER BY number",
    )
    assert [row[1] for row in trials] == ["completed"] * 3
    reserved = [row[2] / (POOL_MIB * MIB) for row in trials]
    assert all(0.38 < share < 0.5 for share in reserved[:2]), reserved
    assert 0.68 < reserved[2] < 0.8, reserved
    assert all(row[3] <= row[2] for row in trials), "measured within its reservation"
    spans = [tuple(datetime.fromisoformat(moment) for moment in row[4:]) for row in trials]
    assert max(spans[0][0], spans[1][0]) < min(spans[0][1], spans[1][1]), "the first two run together"
    assert spans[2][0] >= max(spans[0][1], spans[1][1]), "the third alone"
    assert "trial 2 waits for" in said
    assert max(len(sample) for sample in samples) == 2
    assert max(map(sum, samples)) <= POOL_MIB * MIB, "nothing exceeds the pool"
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    assert whole.total_seconds() < 0.9 * sum((end - start).total_seconds() for start, end in spans)
