"""Case D21: children start fresh. The driver touches no GPU, and no child has its database."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.conftest import ROOT, TINY, clean_environment, rtx_3060
from tests.workloads.chatty import EPOCHS
from tuner.leftovers import mark_of, owner_of
from tuner.store.engine import open_engine, parse_url

CHATTY = ROOT / "tests" / "workloads" / "chatty.py"
TRIALS = 4
EPOCHS_OF_COMPLETED = """
    SELECT trial.number, count(DISTINCT metric.epoch)
    FROM tuner_trial AS trial JOIN tuner_metric AS metric ON metric.trial_id = trial.id
    WHERE trial.outcome = 'completed' GROUP BY trial.number
"""


def server_programs() -> Path | None:
    """Return the folder of a PostgreSQL server that can be started here with TLS, or None."""
    found = shutil.which("initdb")
    folders = [*([Path(found).parent] if found else []), *Path("/usr/lib/postgresql").glob("*/bin")]
    return next((folder for folder in sorted(folders) if (folder / "initdb").exists()), None)


@pytest.fixture
def tls_url() -> Iterator[str]:
    """The URL of a new PostgreSQL server that takes nothing but TLS; the wheel's is built without."""
    programs, openssl = server_programs(), shutil.which("openssl")
    if programs is None or openssl is None:
        pytest.skip("no PostgreSQL server with TLS can be started here")
    with tempfile.TemporaryDirectory(prefix="tuner-tls-") as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        folder, as_user = (
            Path(name),
            ["setpriv", "--reuid=nobody", "--clear-groups"] if os.getuid() == 0 else [],
        )
        key, certificate, data = folder / "key.pem", folder / "cert.pem", folder / "data"
        subject = ["-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)]
        make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
        subprocess.run(make, check=True, stderr=subprocess.DEVNULL)
        if as_user:
            for path in (folder, key, certificate):
                shutil.chown(path, "nobody")
        initdb = [*as_user, str(programs / "initdb"), "-D", str(data), "-A", "trust", "-U", "tuner"]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 trust\n")
        options = {
            "ssl": "on",
            "ssl_key_file": key,
            "ssl_cert_file": certificate,
            "port": port,
            "fsync": "off",
        }
        settings = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        settings += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        free.close()
        command = [*as_user, str(programs / "postgres"), "-D", str(data), *settings]
        with (folder / "log").open("w") as log, subprocess.Popen(command, cwd=folder, stderr=log) as server:
            wait_for(port)
            yield f"postgresql://tuner@127.0.0.1:{port}/postgres?sslmode=require"
            server.terminate()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("the server does not answer")


def open_files(pid: int) -> set[str]:
    """Return what a process has open, as the kernel names it: a path, `socket:[inode]` and the like."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    return found


def children_of(driver: int) -> list[int]:
    """Return the processes that were started below a driver: they carry its mark."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        mark = mark_of(pid)
        owner = None if mark is None else owner_of(mark)
        if owner is not None and owner.pid == driver:
            found.append(pid)
    return found


def of_database(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("socket:") or "tuner.db" in name}


@pytest.mark.parametrize("kind", ["sqlite", "postgresql with TLS"])
def test_four_trials_write_at_once_and_none_has_the_drivers_database(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names = {"sqlite": "sqlite_url", "postgresql with TLS": "tls_url"}
    url: str = request.getfixturevalue(names[kind])
    arguments = ["--storage", url, "--trials", str(TRIALS), "--jobs", str(TRIALS), "--threads", "1"]
    seen: set[int] = set()
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "tuner", "run", str(CHATTY), *arguments],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        ours: set[str] = set()
        while driver.poll() is None:
            for child in children_of(driver.pid):
                try:
                    theirs = of_database(open_files(child))
                    ours |= of_database(open_files(driver.pid))
                except OSError:
                    continue  # it has just ended
                assert theirs & ours == set()
                seen.add(child)
            time.sleep(0.05)
        _, errors = driver.communicate()

    assert driver.returncode == 0, errors
    assert ours, "the driver's own database was never seen: the check could not fail"
    assert len(seen) >= 2 * TRIALS  # a supervisor and a worker each
    engine = open_engine(parse_url(url))
    with engine.connect() as connection:
        counts = connection.execute(text(EPOCHS_OF_COMPLETED)).all()
        if kind == "postgresql with TLS":
            uses_tls = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            assert connection.execute(text(uses_tls)).scalar_one() is True
    engine.dispose()
    assert [count for _, count in counts] == [EPOCHS] * TRIALS


DRIVER = """
import os, sys
import torch
def touched(*arguments, **options):
    open("touched", "w").close()
    raise AssertionError("the driver touches the GPU")
for name in ("_lazy_init", "init", "mem_get_info", "is_available", "device_count"):
    setattr(torch.cuda, name, touched)
from tuner.scheduling import devices
devices.torch_has_cuda = lambda: True
from tuner.cli.main import main
sys.argv = ["tuner", *sys.argv[1:]]
main()
"""


def test_the_driver_of_a_gpu_study_never_initialises_cuda(tmp_path: Path, nvml_library: str) -> None:
    """From plan to record, on a card that NVML shows; the children find no CUDA and fail."""
    arguments = ["run", str(TINY), "--target", "cuda", "--budget", "1GiB", "--trials", "3", "--jobs", "1"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", DRIVER, *arguments],
        cwd=tmp_path,
        env=clean_environment(**rtx_3060(nvml_library)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert "launched trials failed" in done.stderr, done.stderr
    assert len(list(tmp_path.glob("tuner-runs/*/*/log.txt"))) == 3
    assert not (tmp_path / "touched").exists()
