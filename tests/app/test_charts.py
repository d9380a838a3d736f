"""The figures and the table, from records that were read back from a database."""

from __future__ import annotations

import json

import pytest

from app.charts import category_figure, front_figure, metrics_figure
from app.loaders import table_of
from tests.app import data
from tuner.store.engine import parse_url
from tuner.store.opening import reading
from tuner.store.rows import MetricRecord, StudyRecord, TrialRecord

Read = tuple[StudyRecord, list[TrialRecord]]


@pytest.fixture
def read(sqlite_url: str) -> Read:
    """A study and its trials."""
    data.fill(sqlite_url, metric=data.HOSTILE)
    with reading(parse_url(sqlite_url)) as reader:
        study = reader.study("digits")
        assert [trial.number for trial in reader.front(study.id)] == data.FRONT  # as made by hand
        return study, reader.trials(study.id)


def traces(read: Read, front: list[int]) -> dict[str, dict[int, tuple[float, object]]]:
    """Where each trace of the figure draws each trial."""
    return {
        trace.name: {shown[0]: (x, y) for shown, x, y in zip(trace.customdata, trace.x, trace.y, strict=True)}
        for trace in front_figure(*read, front).data
    }


def test_budget_line(read: Read) -> None:
    figure = front_figure(*read, data.FRONT)
    assert figure.layout.shapes
    for line in figure.layout.shapes:
        assert (line.type, line.x0, line.x1) == ("line", data.BUDGET_MIB, data.BUDGET_MIB)
    assert [note.text for note in figure.layout.annotations] == ["budget"]
    assert figure.layout.annotations[0].x == data.BUDGET_MIB


@pytest.mark.parametrize("front", [data.FRONT, data.FRONT[:1], [4, 1, 0]])
def test_front_is_the_one_that_is_given(read: Read, front: list[int]) -> None:
    drawn = traces(read, front)["front"]
    assert list(drawn) == sorted(front)  # by memory, which grows with the number here
    assert drawn == {number: (data.peak_mib(number), data.value(number)) for number in front}


def test_no_front_no_trace(read: Read) -> None:
    assert "front" not in traces(read, [])


def test_each_trial_is_in_its_place(read: Read) -> None:
    drawn = traces(read, data.FRONT)
    for name, numbers in (("fits the budget", data.WITHIN), ("over the budget", data.OVER)):
        assert drawn[name] == {number: (data.peak_mib(number), data.value(number)) for number in numbers}
    for name, numbers, place in (
        ("pruned memory", data.PRUNED, data.predicted_mib),
        ("out of memory", data.OUT_OF_MEMORY, data.peak_mib),
        ("error", data.ERRORS, data.peak_mib),
    ):
        assert drawn[name] == {number: (place(number), name) for number in numbers}
    everywhere = {number for trace in drawn.values() for number in trace}
    assert everywhere == set(range(data.TRIALS)) - {data.INFINITE, data.RUNNING}


def test_staircase_steps_where_memory_is_spent(read: Read) -> None:
    front = next(trace for trace in front_figure(*read, data.FRONT).data if trace.name == "front")
    assert front.line.shape == "hv"


def test_names_are_escaped(read: Read) -> None:
    metric = MetricRecord(1, data.HOSTILE, 1.0, 1.0, None)
    for figure in (front_figure(*read, data.FRONT), metrics_figure([metric]), category_figure(read[1][0])):
        text = json.dumps(json.loads(figure.to_json()), ensure_ascii=False)
        assert "<img" not in text
    assert "&lt;img" in front_figure(*read, data.FRONT).to_json().replace("\\u0026", "&")


def test_metrics_over_epochs() -> None:
    metrics = [MetricRecord(e, name, e / 2, 1.0, None) for e in (1, 2) for name in ("loss", "accuracy")]
    drawn = {trace.name: (list(trace.x), list(trace.y)) for trace in metrics_figure(metrics).data}
    assert drawn == {"loss": ([1, 2], [0.5, 1.0]), "accuracy": ([1, 2], [0.5, 1.0])}


def test_table_has_one_type_per_column(read: Read) -> None:
    table = table_of(*read, data.FRONT)
    assert len(table) == data.TRIALS
    for name in table.columns:
        assert len({type(value) for value in table[name].dropna()}) <= 1, name
    for number in range(data.TRIALS):
        given = data.params(number).get("batch_size")
        shown = table["batch_size"].iloc[number]
        assert shown == str(given) if given is not None else shown != shown or shown is None
    assert list(table["trial"][table["on front"]]) == data.FRONT
    assert table["peak MiB"].iloc[0] == data.peak_mib(0)
    assert table["predicted MiB"].iloc[data.PRUNED[0]] == data.predicted_mib(data.PRUNED[0])


def test_table_can_be_sent_to_a_browser(read: Read) -> None:
    import pyarrow  # Streamlit brings it

    assert pyarrow.Table.from_pandas(table_of(*read, data.FRONT)).num_rows == data.TRIALS
