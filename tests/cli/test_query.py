"""`tuner query`, `export`, `importance` and `pareto --plot`, as a person or a script calls them."""

from __future__ import annotations

import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow.parquet as pq
import pytest

from docs.generate import DUCKDB_QUERY
from tests.app import data
from tests.conftest import TINY, Tuner


@pytest.fixture
def study(tmp_path: Path) -> str:
    """A filled database in the folder in which the command runs; the name of its study."""
    data.fill(f"sqlite:///{tmp_path}/tuner.db", "digits")
    return "digits"


def test_query_prints_a_table_json_and_csv(tuner: Tuner, study: str) -> None:
    statement = "SELECT outcome, count(*) AS trials FROM tuner_trials GROUP BY outcome ORDER BY 2 DESC"
    shown = tuner("query", statement)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.split()[:2] == ["outcome", "trials"]
    rows = json.loads(tuner("query", statement, "-f", "json").stdout)
    assert rows[0] == {"outcome": "completed", "trials": data.COMPLETED}
    lines = tuner("query", statement, "-f", "csv").stdout.splitlines()
    assert lines[:2] == ["outcome,trials", f"completed,{data.COMPLETED}"]


def test_query_says_what_it_left_out(tuner: Tuner, study: str) -> None:
    done = tuner("query", "SELECT number FROM tuner_trials", "--limit", "2", "-f", "csv")
    assert done.stdout.splitlines() == ["number", "0", "1"]
    assert done.stderr.strip() == "only the first 2 rows are shown; all of them: --limit 0"
    whole = tuner("query", "SELECT number FROM tuner_trials", "--limit", "0", "-f", "csv")
    assert len(whole.stdout.splitlines()) == data.TRIALS + 1
    assert whole.stderr == ""


def test_columns_of_one_name_are_told_apart(tuner: Tuner, study: str) -> None:
    done = tuner("query", "SELECT 1 AS a, 2 AS a, 3 AS a", "-f", "json")
    assert json.loads(done.stdout) == [{"a": 1, "a 2": 2, "a 3": 3}]


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM tuner_trial", "only a SELECT can be run here"),
        ("SELECT missing FROM tuner_trials", "no such column: missing"),
        ("", "the query is empty"),
    ],
)
def test_what_is_no_query_gets_one_line(tuner: Tuner, study: str, statement: str, says: str) -> None:
    done = tuner("query", statement)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert says in done.stderr
    assert done.stdout == ""


def test_exports_agree_and_are_typed(tuner: Tuner, study: str, tmp_path: Path) -> None:
    for name in ("trials.csv", "trials.json", "trials.parquet"):
        done = tuner("export", study, "-o", name)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert f"{data.TRIALS} trials written to {name}" in done.stderr
    rows = json.loads((tmp_path / "trials.json").read_text())
    table = pq.read_table(tmp_path / "trials.parquet")
    frame = pd.read_csv(tmp_path / "trials.csv")
    assert [row["number"] for row in rows] == list(range(data.TRIALS)) == frame["number"].tolist()
    assert table.column_names == list(rows[0]) == list(frame.columns)
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names}
    assert kinds["param.lr"] == kinds["metric.accuracy"] == "double"
    assert kinds["peak_bytes"] == "int64"
    assert kinds["param.batch_size"] == "string", "64, auto and [256, 128] are text together"
    assert kinds["asked_at"].startswith("timestamp")
    assert {row["param.batch_size"] for row in rows} == {"64", "auto", "[256, 128]", None}
    assert rows[data.INFINITE]["value"] == "inf"
    assert math.isinf(table.column("value")[data.INFINITE].as_py())
    assert list(tmp_path.glob("*.tmp")) == []


def test_an_export_goes_to_standard_output(tuner: Tuner, study: str) -> None:
    done = tuner("export", study, "-o", "-")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [int(row["number"]) for row in rows] == list(range(data.TRIALS))
    assert json.loads(tuner("export", study, "-o", "-", "-f", "json").stdout)[0]["study"] == study


def test_duckdb_reads_an_export(
    tuner: Tuner, study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuner("export", study, "-o", "trials.parquet").returncode == 0
    monkeypatch.chdir(tmp_path)
    with duckdb.connect() as connection:
        found = connection.execute(DUCKDB_QUERY).fetchall()
    assert {row[0]: row[1] for row in found}["completed"] == data.COMPLETED


def test_bad_outputs_get_one_line_and_leave_nothing(tuner: Tuner, study: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    for arguments, says in (
        (("export", study, "-o", "trials.xlsx"), "formats: csv, json, parquet"),
        (("export", study, "-o", "nowhere/trials.csv"), "there is no folder"),
        (("export", "unknown", "-o", "trials.csv"), "known studies: digits"),
        (("pareto", study, "--plot", "front.gif"), "names end in .svg, .png, .pdf"),
    ):
        done = tuner(*arguments)
        assert done.returncode == 2
        assert says in done.stderr
    assert sorted(path for path in tmp_path.iterdir() if not path.name.startswith("tuner.db-")) == [
        path for path in before if not path.name.startswith("tuner.db-")
    ]


def test_a_study_of_any_name_stays_in_its_folder(tuner: Tuner, tmp_path: Path) -> None:
    data.fill(f"sqlite:///{tmp_path}/tuner.db", "../../a", range(3))
    assert tuner("export", "../../a", "-o", "here.csv").returncode == 0
    assert (tmp_path / "here.csv").exists()


def test_the_front_is_drawn(tuner: Tuner, study: str, tmp_path: Path) -> None:
    for name in ("front.svg", "front.png", "front.pdf"):
        done = tuner("pareto", study, "--plot", name)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[:2] == ["#", "accuracy"]
        assert done.stderr.strip() == f"drawn: {name}"
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "front.pdf").read_bytes().startswith(b"%PDF")
    texts = {node.text for node in ET.parse(tmp_path / "front.svg").iter() if node.tag.endswith("}text")}
    assert {"peak device memory (MiB)", "accuracy", "digits", "front", "budget"} <= texts


def test_importance_is_computed_shown_and_stored(tuner: Tuner, tmp_path: Path) -> None:
    """Of a study that was run: fANOVA reads Optuna's side of it."""
    study = str(TINY)
    few = tuner("run", study, "--trials", "2", "--budget", "2GiB", "--study-name", "tiny", "--seed", "1")
    assert few.returncode == 0, few.stderr
    refused = tuner("importance", "tiny")
    assert refused.returncode == 2
    assert "importance needs 4" in refused.stderr
    assert (
        tuner(
            "run", study, "--trials", "6", "--budget", "2GiB", "--study-name", "tiny", "--seed", "1"
        ).returncode
        == 0
    )
    rows = json.loads(tuner("importance", "tiny", "-f", "json").stdout)
    for objective in ("value", "memory"):
        shares = [row[objective] for row in rows if objective in row and row[objective] is not None]
        assert not shares or math.isclose(sum(shares), 1, abs_tol=1e-6)
    stored = json.loads(
        tuner(
            "query", "SELECT objective, name, importance, trials FROM tuner_importance", "-f", "json"
        ).stdout
    )
    assert {(row["objective"], row["name"]): row["importance"] for row in stored} == {
        (objective, row["param"]): row[objective]
        for row in rows
        for objective in ("value", "memory")
        if row.get(objective) is not None
    }
    assert {row["trials"] for row in stored} == {6}
    assert "share of what varies among 6 completed trials" in tuner("importance", "tiny").stdout
