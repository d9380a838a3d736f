"""Case D35, a database's password: in no output, no row, no file of a run, and no process of a trial."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, inspect, make_url, text

from tests.conftest import TINY, Tuner

if TYPE_CHECKING:
    from pathlib import Path

PASSWORD = "p@ss:w/rd%?"
ENCODED = "p%40ss%3Aw%2Frd%25%3F"
# Runs of characters that no other text holds: "/rd%" would do, "rd" would not.
FRAGMENTS = [PASSWORD[i : i + 4] for i in range(len(PASSWORD) - 3)]
FRAGMENTS += [ENCODED[i : i + 5] for i in range(len(ENCODED) - 4)]

# What a process of ours can be seen by others to be: its own arguments and variables, and its parent's.
SPY = """
def _look_around():
    import pathlib
    for pid in (os.getpid(), os.getppid()):
        for name in ("cmdline", "environ"):
            seen = pathlib.Path(f"/proc/{pid}/{name}").read_bytes()
            pathlib.Path(f"seen-{pid}-{name}").write_bytes(seen)


"""


def leaks(where: str, shown: str | bytes) -> list[str]:
    """Return the fragments of the password in a text."""
    plain = shown if isinstance(shown, str) else shown.decode("utf-8", "replace")
    return [f"{where}: {piece}" for piece in FRAGMENTS if piece in plain]


def rows_of(url: str) -> dict[str, str]:
    """Return every table of a database as text; a row itself would shorten its own."""
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    try:
        with engine.connect() as connection:
            return {
                name: str([tuple(row) for row in connection.execute(text(f'SELECT * FROM "{name}"'))])
                for name in inspect(engine).get_table_names()
            }
    finally:
        engine.dispose()


@pytest.mark.parametrize("place", ["flag, in the query", "TUNER_STORAGE", "tuner.toml"])
def test_no_fragment_of_a_password_is_left_by_a_run(
    place: str, tuner: Tuner, tmp_path: Path, postgresql_url: str
) -> None:
    url = make_url(postgresql_url).set(password=PASSWORD).render_as_string(hide_password=False)
    if "query" in place:
        url = f"{postgresql_url}&password={ENCODED}"
    assert leaks("the URL", url), "the server takes any password, and is given this one"
    source = TINY.read_text(encoding="utf-8")
    file = tmp_path / "tiny.py"
    file.write_text(
        source.replace("@dataclass\n", f"{SPY}@dataclass\n", 1).replace(
            "        generator =", "        _look_around()\n        generator =", 1
        )
    )
    flags, variables = [], {}
    if place == "TUNER_STORAGE":
        variables = {"TUNER_STORAGE": url}
    elif place == "tuner.toml":
        (tmp_path / "tuner.toml").write_text(f'storage = "{url}"\n')
    else:
        flags = ["--storage", url]
    found = []
    commands = [("run", "tiny.py", "--trials", "1", "--seed", "1"), ("show", "tiny", "0", "-f", "json")]
    if place == "TUNER_STORAGE":
        commands += [("show", "tiny", "0"), ("rerun", "tiny", "0"), ("--debug", "show", "tiny", "5")]
    for arguments in commands:
        done = tuner(*arguments, *flags, **variables)
        assert done.returncode == (2 if "5" in arguments else 0), done.stderr
        found += leaks(f"output of {arguments}", done.stdout + done.stderr)
    tables = rows_of(url)
    assert "postgresql://localhost/" in tables["tuner_driver"], "the database itself is named"
    found += [leak for name, rows in tables.items() for leak in leaks(f"table {name}", rows)]
    seen = list(tmp_path.glob("seen-*"))
    assert len(seen) >= 4, "the trial's process and its supervisor were looked at"
    assert all(b"TUNER_STORAGE=" not in path.read_bytes() for path in seen)
    files = [path for path in (tmp_path / "tuner-runs").rglob("*") if path.is_file() and path.suffix != ".pt"]
    assert {"request.json", "report.json", "log.txt"} <= {path.name for path in files}
    found += [leak for path in [*seen, *files] for leak in leaks(path.name, path.read_bytes())]
    assert found == []


@pytest.mark.parametrize("place", ["flag", "TUNER_STORAGE", "tuner.toml"])
@pytest.mark.parametrize("command", ["run", "show", "rerun"])
def test_a_raw_password_is_refused_without_a_fragment_of_it(
    place: str, command: str, tuner: Tuner, tmp_path: Path
) -> None:
    url = f"postgresql://someone:{PASSWORD}@db.example.org/results"
    flags, variables = [], {}
    if place == "TUNER_STORAGE":
        variables = {"TUNER_STORAGE": url}
    elif place == "tuner.toml":
        (tmp_path / "tuner.toml").write_text(f'storage = "{url}"\n')
    else:
        flags = ["--storage", url]
    arguments = [TINY] if command == "run" else ["tiny", "0"]
    done = tuner("--debug", command, *arguments, *flags, **variables)  # with the traceback, too
    assert done.returncode == 2, done.stderr
    assert "percent-encode it" in done.stderr
    assert leaks("output", done.stdout + done.stderr) == []
