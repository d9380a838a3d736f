"""The pages: what they show, and a sentence instead of an exception where they cannot."""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import Any

import pytest
import streamlit as st
from sqlalchemy.engine.default import DefaultDialect
from streamlit.testing.v1 import AppTest

from tests.app import data
from tests.app.conftest import PAGES, page, path_of, said


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def contents(url: str) -> bytes:
    return path_of(url).read_bytes()


def rows(url: str, statement: str) -> list[Any]:
    connection = sqlite3.connect(path_of(url))
    try:
        with connection:
            return connection.execute(statement).fetchall()
    finally:
        connection.close()


def test_front_counts_and_best(url: str) -> None:
    data.fill(url)
    app = page()
    assert app.title[0].value == "Front"
    assert "accuracy (maximize)" in said(app)
    assert metrics(app) == {
        "best accuracy": f"{data.value(data.FRONT[-1]):.4g}",
        "budget": "1.00 GiB",
        "completed": str(data.COMPLETED),
        "pruned before launch": str(len(data.PRUNED)),
        "out of memory": str(len(data.OUT_OF_MEMORY)),
    }
    assert len(app.get("plotly_chart")) == 1
    assert list(app.dataframe[0].value["trial"]) == data.FRONT


def test_best_of_a_study_that_minimizes(url: str) -> None:
    data.fill(url, direction="minimize")
    assert metrics(page())["best accuracy"] == "0.4"


def test_trials_are_filtered(url: str) -> None:
    data.fill(url)
    app = page("trials")
    assert said(app).count(f"{data.TRIALS} of {data.TRIALS} trials") == 1
    outcomes = Counter(app.dataframe[0].value["outcome"])
    assert (outcomes["running"], outcomes["pruned_memory"], outcomes["error"]) == (1, 7, 3)
    download = app.get("download_button")
    assert [button.proto.label for button in download] == [
        "Download as CSV",
        "Download as JSON",
        "Download as Parquet",
    ]
    app.multiselect[0].set_value(["pruned_memory", "out_of_memory"]).run()
    assert list(app.dataframe[0].value["trial"]) == [*data.PRUNED, *data.OUT_OF_MEMORY]
    app.text_input[0].set_value("ADAM").run()
    odd = [number for number in (*data.PRUNED, *data.OUT_OF_MEMORY) if number % 2]
    assert list(app.dataframe[0].value["trial"]) == odd
    app.multiselect[0].set_value([])
    app.text_input[0].set_value("").run()
    next(toggle for toggle in app.toggle if toggle.label == "Only the front").set_value(True).run()
    assert list(app.dataframe[0].value["trial"]) == data.FRONT


@pytest.mark.parametrize("text", ["[", "\\", "(?P<", "%", "'; DROP TABLE tuner_study; --", "[256, 128]"])
def test_search_is_text_not_a_pattern(url: str, text: str) -> None:
    data.fill(url)
    app = page("trials")
    app.text_input[0].set_value(text).run()
    assert not app.exception
    found = [number for number in range(data.TRIALS) if text == "[" or text == "[256, 128]"]
    assert list(app.dataframe[0].value["trial"]) == [number for number in found if number % 4 == 3]


@pytest.mark.parametrize(
    ("number", "outcome", "reason"),
    [
        (0, "completed", "Warning: the loader was slow"),
        (data.INFINITE, "completed", "Trial"),
        (data.PRUNED[0], "pruned memory", f"Reason: {data.HOSTILE}: trial 25 would not fit"),
        (data.OUT_OF_MEMORY[0], "out of memory", "Reason: refused an allocation"),
        (data.ERRORS[0], "error", "Reason: ValueError: no such layer"),
        (data.RUNNING, "running", "nothing was reported"),
    ],
)
def test_trial(url: str, number: int, outcome: str, reason: str) -> None:
    data.fill(url)
    app = page("trial", study="digits", trial=str(number))
    assert reason in said(app)
    assert metrics(app)["outcome"] == outcome
    params = app.dataframe[1].value
    assert list(params.columns[:2]) == ["parameter", "value"]
    shown = dict(zip(params["parameter"], params["value"], strict=True))
    assert shown == {name: str(value) for name, value in data.params(number).items()}
    assert "budget" in list(app.dataframe[0].value["quantity"])


def test_trial_shows_its_log_and_traceback(url: str) -> None:
    data.fill(url)
    log = path_of(url).parent / "runs" / str(data.ERRORS[0]) / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("<script>alert(1)</script>")
    assert any("not on this host" in code.value for code in page("trial", trial="0").code)
    codes = [code.value for code in page("trial", trial=str(data.ERRORS[0])).code]
    assert "Trace of the workload: ValueError" in codes
    assert any("<script>" in code for code in codes), [path.name for path in log.parent.iterdir()]


@pytest.mark.parametrize(
    ("name", "study"),
    [
        *((name, "x'; DROP TABLE tuner_study; --") for name in PAGES),
        *(("front", study) for study in ("", "é\u202e" * 500, "../../etc")),
    ],
)
def test_hostile_study_in_the_address(url: str, name: str, study: str) -> None:
    data.fill(url, numbers=range(5))
    app = page(name, study=study)
    assert "There is no study of that name here" in said(app)
    assert rows(url, "SELECT count(*) FROM tuner_study") == [(1,)]
    assert rows(url, "SELECT count(*) FROM tuner_trial") == [(5,)]


@pytest.mark.parametrize(
    "trial", ["-1", "1e9", "abc", "5", "9" * 5000, "²", "0; DROP TABLE tuner_trial", "0x1", "1.0"]
)
def test_hostile_trial_in_the_address(url: str, trial: str) -> None:
    data.fill(url, numbers=range(5))
    app = page("trial", trial=trial)
    assert "There is no trial of that number" in said(app)
    assert metrics(app)["outcome"] == "completed"
    assert rows(url, "SELECT count(*) FROM tuner_trial") == [(5,)]


@pytest.mark.parametrize(
    ("name", "study"),
    [
        *((name, data.HOSTILE) for name in PAGES),
        *((name, ":red[x] **b** $x$ ![x](https://evil.invalid/x.png)") for name in PAGES),
    ],
)
def test_names_are_shown_as_text(url: str, name: str, study: str) -> None:
    data.fill(url, name=study, numbers=range(5), metric=study)
    app = page(name, study=study)
    assert not app.exception
    assert app.sidebar.selectbox[0].value == study
    assert name in ("trial", "compare") or study in app.text[0].value
    assert not any(markdown.proto.allow_html for markdown in app.markdown)
    labels = [widget.label for widget in [*app.selectbox, *app.metric]]
    assert not any(study in label for label in labels if study != data.HOSTILE), labels


@pytest.mark.parametrize(
    ("name", "param"),
    [
        *((name, "trial") for name in PAGES),
        *(
            ("trials", param)
            for param in ("outcome", "on front", "reason", "seconds", "accuracy", "peak MiB")
        ),
    ],
)
def test_param_named_as_a_column(url: str, name: str, param: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "params", lambda number: {param: ["text", 3][number % 2]})
    data.fill(url)
    app = page(name)
    assert not app.exception
    if name == "trials":
        table = app.dataframe[0].value
        assert list(table["trial"]) == list(range(data.TRIALS))
        assert set(table[f"param {param}"]) == {"text", "3"}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("numbers", [(), data.PRUNED, (data.RUNNING, data.INFINITE), data.OVER])
def test_study_without_a_front(url: str, name: str, numbers: Any) -> None:
    data.fill(url, numbers=numbers)
    text = said(page(name))
    if not numbers and name in ("front", "trials", "trial"):
        assert "The study has no trials yet." in text
    elif name == "front":
        assert "The front is empty" in text


@pytest.mark.parametrize("name", PAGES)
def test_app_never_writes(url: str, name: str) -> None:
    data.fill(url)
    before = contents(url)
    said(page(name))
    assert contents(url) == before
    files = {path.name for path in path_of(url).parent.iterdir()}
    assert files <= {"tuner.db", "tuner.db-wal", "tuner.db-shm", "tuner.db.migration.lock"}


def test_a_page_takes_few_statements(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many trials there are: none is read by itself."""
    data.fill(url)
    others = [f"other {number}" for number in range(4)]
    for other in others:
        data.fill(url, name=other, numbers=range(5))
    for name in PAGES:
        app = page(name, study="digits")
        st.cache_data.clear()
        statements = counted(monkeypatch)
        if name == "compare":
            app.multiselect[0].set_value(["digits", *others])
        said(app.run())
        assert 0 < len(statements) <= 20, (name, statements)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statements that are run from now on; those that begin and end transactions are left out."""
    statements: list[str] = []
    execute = DefaultDialect.do_execute

    def do_execute(self: Any, cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        if not statement.startswith("BEGIN"):
            statements.append(statement)
        execute(self, cursor, statement, parameters, context)

    monkeypatch.setattr(DefaultDialect, "do_execute", do_execute)
    monkeypatch.setattr(
        DefaultDialect,
        "do_execute_no_params",
        lambda self, cursor, statement, context=None: (
            statements.append(statement) or cursor.execute(statement)
        ),
    )
    return statements


def test_a_selection_in_the_address_is_shown(url: str) -> None:
    data.fill(url)
    app = page(selected="3,5,x,-1,999999")
    assert "Selected: 3 trials" in "".join(header.value for header in app.subheader)
    assert list(app.dataframe[0].value["trial"]) == [3, 5]


def test_predictions_are_compared(url: str) -> None:
    data.fill(url)
    app = page("predictions")
    shown = metrics(app)
    assert shown["launches saved"] == str(len(data.PRUNED))
    assert shown["wrongly pruned"] == "not audited"
    table = app.dataframe[0].value
    errors = [
        abs(data.predicted_mib(number) / data.peak_mib(number) - 1)
        for number in (*data.WITHIN, data.INFINITE, *data.OVER)
    ]
    assert table["trials"].tolist() == [len(errors)]
    assert table["mean absolute error %"].iloc[0] == pytest.approx(100 * sum(errors) / len(errors))
    assert table["in the band %"].iloc[0] == 0


def test_devices_show_who_waited(url: str) -> None:
    data.fill(url)
    app = page("devices")
    assert len(app.get("plotly_chart")) == 1
    assert [header.value for header in app.subheader] == ["cpu@here", "Waiting and use"]
    table = app.dataframe[0].value
    assert table["launches"].tolist() == [data.TRIALS - len(data.PRUNED)]
    assert table["mean waiting seconds"].tolist() == [1.0]


def test_two_studies_are_compared(url: str) -> None:
    data.fill(url, name="first")
    data.fill(url, name="second", seed=7, budget_bytes=512 * data.MIB)
    app = page("compare", study="second", studies="second")
    assert "Choose a second study" in said(app)
    app.multiselect[0].set_value(["first", "second"]).run()
    assert not app.exception
    assert len(app.get("plotly_chart")) == 2
    differing = app.dataframe[0].value
    assert set(differing["setting"]) == {"budget", "seed"}
    assert differing.set_index("setting").loc["budget"].to_dict() == {
        "first": "1.00 GiB",
        "second": "512.0 MiB",
    }
