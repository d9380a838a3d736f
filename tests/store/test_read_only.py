"""A user's query reads, and can do nothing else: on a real SQLite file and a real PostgreSQL server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app import data
from tuner.errors import UsageError
from tuner.store.engine import parse_url
from tuner.store.read_only import Answer, run_query


@pytest.fixture
def filled(storage: str) -> str:
    data.fill(storage, "digits")
    return storage


def ask(url: str, statement: str, most_rows: int | None = None, seconds: float = 30) -> Answer:
    return run_query(parse_url(url), statement, most_rows=most_rows, seconds=seconds)


def test_a_query_gives_columns_and_rows(filled: str) -> None:
    answer = ask(
        filled, "SELECT outcome, count(*) AS trials FROM tuner_trials GROUP BY outcome ORDER BY 1;  "
    )
    assert answer.columns == ("outcome", "trials")
    assert dict(answer.rows)["completed"] == data.COMPLETED
    assert not answer.truncated


def test_with_and_json_and_recursion_are_queries(filled: str) -> None:
    counted = ask(
        filled,
        "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 5) SELECT max(x) FROM n",
    )
    assert counted.rows == [(5,)]
    assert len(ask(filled, "SELECT * FROM tuner_memory").rows) > 0


def test_rows_are_limited(filled: str) -> None:
    answer = ask(filled, "SELECT number FROM tuner_trials ORDER BY number", most_rows=3)
    assert (answer.rows, answer.truncated) == ([(0,), (1,), (2,)], True)
    assert not ask(filled, "SELECT number FROM tuner_trials", most_rows=data.TRIALS).truncated


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM tuner_trial",
        "UPDATE tuner_trial SET value = 1",
        "INSERT INTO tuner_metric SELECT * FROM tuner_metric",
        "DROP TABLE tuner_trial",
        "CREATE TABLE stolen AS SELECT * FROM tuner_trial",
        "CREATE TEMP TABLE stolen (x int)",
        "COMMIT",
        "SET TRANSACTION READ WRITE",
        "WITH gone AS (DELETE FROM tuner_trial RETURNING id) SELECT * FROM gone",
        "SELECT 1; DELETE FROM tuner_trial",
        "COMMIT; DROP TABLE tuner_trial",
        "VACUUM",
    ],
)
def test_whatever_writes_is_refused_and_nothing_changes(filled: str, statement: str) -> None:
    with pytest.raises(UsageError):
        ask(filled, statement)
    assert ask(filled, "SELECT count(*) FROM tuner_trial").rows == [(data.TRIALS,)]


def test_no_other_file_is_written_or_opened(tmp_path: Path, sqlite_url: str) -> None:
    """`mode=ro` alone would allow the first; the baseline is a connection without the authorizer."""
    data.fill(sqlite_url, "digits")
    target = tmp_path / "other.db"
    for statement in (
        f"ATTACH '{target}' AS other",
        f"VACUUM INTO '{target}'",
        "PRAGMA query_only = OFF",
        "SELECT load_extension('x')",
    ):
        with pytest.raises(UsageError, match=r"only a SELECT|cannot be run"):
            ask(sqlite_url, statement)
    assert not target.exists()


def test_a_server_runs_no_program_and_writes_no_file(postgresql_url: str, tmp_path: Path) -> None:
    """In a read-only transaction alone, a superuser's COPY would run both."""
    data.fill(postgresql_url, "digits")
    for statement in (
        f"COPY (SELECT 1) TO PROGRAM 'touch {tmp_path}/touched'",
        f"COPY (SELECT 1) TO '{tmp_path}/touched'",
        "SELECT nextval('tuner_study_id_seq')",
    ):
        with pytest.raises(UsageError):
            ask(postgresql_url, statement)
    assert not (tmp_path / "touched").exists()


def test_a_slow_query_is_ended(storage: str) -> None:
    data.fill(storage, "digits", range(3))
    endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(UsageError, match=r"longer than 0\.3 s"):
        ask(storage, endless, seconds=0.3)


def test_what_cannot_be_parsed_says_why(filled: str) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        ask(filled, "SELECT * FROM nowhere")
    with pytest.raises(UsageError, match="empty"):
        ask(filled, "  ")
