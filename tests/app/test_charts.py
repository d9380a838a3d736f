"""The figures and the table, from records that were read back from a database."""

from __future__ import annotations

import json
import math

import pandas as pd
import plotly.graph_objects as go
import pytest

from app.front_chart import FrontView, front_figure
from app.loaders import table_of
from app.trial_charts import category_figure, metrics_figure
from tests.app import data
from tuner.store.engine import parse_url
from tuner.store.opening import reading
from tuner.store.overview import Overview, Table
from tuner.store.rows import MetricRecord

BUDGET_BYTES = data.BUDGET_MIB * data.MIB


class Read:
    """A study and what is read of it."""

    def __init__(self, url: str) -> None:
        with reading(parse_url(url)) as reader:
            self.study = reader.study("digits")
            assert [trial.number for trial in reader.front(self.study.id)] == data.FRONT  # as made by hand
            self.trials = reader.trials(self.study.id)
            self.overview = Overview(reader.engine)
            self.points = {
                param: frame(self.overview.points(self.study.id, param=param))
                for param in (None, "lr", "optimizer", "batch_size")
            }
            self.fronts = {
                budget: frame(self.overview.front(self.study.id, budget_bytes=budget))
                for budget in (0, BUDGET_BYTES // 2, BUDGET_BYTES, 4 * BUDGET_BYTES)
            }

    def figure(self, budget_bytes: int = BUDGET_BYTES, **view: object) -> go.Figure:
        seen = FrontView(budget_bytes, **view)  # type: ignore[arg-type]
        return front_figure(self.study, self.points[seen.param], self.fronts[budget_bytes], seen)


def frame(table: Table) -> pd.DataFrame:
    return pd.DataFrame(dict(table.columns))


@pytest.fixture
def read(sqlite_url: str) -> Read:
    data.fill(sqlite_url, metric=data.HOSTILE)
    return Read(sqlite_url)


def traces(figure: go.Figure) -> dict[str, dict[int, tuple[float, object]]]:
    """Where each trace of the figure draws each trial."""
    return {
        trace.name: {
            int(shown[0]): (x, y) for shown, x, y in zip(trace.customdata, trace.x, trace.y, strict=True)
        }
        for trace in figure.data
    }


def test_budget_line(read: Read) -> None:
    figure = read.figure()
    assert figure.layout.shapes
    for line in figure.layout.shapes:
        assert (line.type, line.x0, line.x1) == ("line", data.BUDGET_MIB, data.BUDGET_MIB)
    assert [note.text for note in figure.layout.annotations] == ["budget"]
    assert figure.layout.annotations[0].x == data.BUDGET_MIB


@pytest.mark.parametrize("budget_bytes", [BUDGET_BYTES // 2, BUDGET_BYTES, 4 * BUDGET_BYTES])
def test_a_budget_that_is_moved_moves_line_and_front(read: Read, budget_bytes: int) -> None:
    figure = read.figure(budget_bytes)
    fitting = [n for n in (*data.WITHIN, *data.OVER) if data.peak_mib(n) * data.MIB <= budget_bytes]
    expected = [
        n
        for n in fitting
        if not any(
            (data.value(m) >= data.value(n) and data.peak_mib(m) < data.peak_mib(n))
            or (data.value(m) > data.value(n) and data.peak_mib(m) <= data.peak_mib(n))
            for m in (*fitting, data.INFINITE)
            if m != data.INFINITE
        )
    ]
    drawn = traces(figure)
    assert list(drawn["front"]) == expected
    assert drawn["front"] == {n: (data.peak_mib(n), data.value(n)) for n in expected}
    assert set(drawn["fits the budget"]) == set(fitting)
    assert figure.layout.shapes[0].x0 == budget_bytes / data.MIB
    own = budget_bytes == BUDGET_BYTES
    assert figure.layout.annotations[0].text == ("budget" if own else "what if")


def test_no_front_no_trace(read: Read) -> None:
    assert "front" not in traces(read.figure(0))


def test_each_trial_is_in_its_place(read: Read) -> None:
    figure = read.figure()
    drawn = traces(figure)
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
    pruned = next(trace for trace in figure.data if trace.name == "pruned memory")
    assert list(pruned.error_x.array) == list(pruned.error_x.arrayminus) == [1.0] * len(data.PRUNED)


@pytest.mark.parametrize("param", ["lr", "optimizer", "batch_size"])
def test_a_param_colours_every_completed_trial(read: Read, param: str) -> None:
    """Numbers on a scale, texts and what is mixed by a colour each."""
    figure = read.figure(param=param)
    colored = [
        trace
        for trace in figure.data
        if trace.name not in ("front", "pruned memory", "out of memory", "error")
    ]
    assert {int(n[0]) for trace in colored for n in trace.customdata} == {*data.WITHIN, *data.OVER}
    scales = [trace for trace in colored if trace.marker.showscale]
    assert len(scales) == (1 if param == "lr" else 0)
    if param == "optimizer":
        assert {trace.name for trace in colored} == {"adam", "sgd"}


def test_axes_are_logarithmic_when_asked(read: Read) -> None:
    figure = read.figure(log_memory=True, log_value=True)
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert figure.layout.annotations[0].x == pytest.approx(math.log10(data.BUDGET_MIB))
    assert figure.layout.yaxis2.type != "log", "outcomes are no numbers"


@pytest.mark.parametrize(("count", "kind"), [(999, "scatter"), (1001, "scattergl")])
def test_many_points_are_drawn_by_webgl(read: Read, count: int, kind: str) -> None:
    rows = pd.concat([read.points[None].iloc[[0]]] * count)
    figure = front_figure(read.study, rows, read.fronts[BUDGET_BYTES], FrontView(BUDGET_BYTES))
    assert figure.data[0].type == kind
    assert len(figure.data[0].x) == count


def test_ties_are_shown_once(read: Read) -> None:
    front = read.fronts[BUDGET_BYTES]
    twice = pd.concat([front, front.assign(number=front["number"] + 1000)]).sort_values(
        ["memory_bytes", "number"]
    )
    figure = front_figure(read.study, read.points[None], twice, FrontView(BUDGET_BYTES))
    assert list(traces(figure)["front"]) == data.FRONT


def test_staircase_steps_where_memory_is_spent(read: Read) -> None:
    front = next(trace for trace in read.figure().data if trace.name == "front")
    assert front.line.shape == "hv"


def test_names_are_escaped(read: Read) -> None:
    metric = MetricRecord(1, data.HOSTILE, 1.0, 1.0, None)
    for figure in (read.figure(), metrics_figure([metric]), category_figure(read.trials[0])):
        text = json.dumps(json.loads(figure.to_json()), ensure_ascii=False)
        assert "<img" not in text
    assert "&lt;img" in read.figure().to_json().replace("\\u0026", "&")


def test_metrics_over_epochs() -> None:
    metrics = [MetricRecord(e, name, e / 2, 1.0, None) for e in (1, 2) for name in ("loss", "accuracy")]
    drawn = {trace.name: (list(trace.x), list(trace.y)) for trace in metrics_figure(metrics).data}
    assert drawn == {"loss": ([1, 2], [0.5, 1.0]), "accuracy": ([1, 2], [0.5, 1.0])}


def test_table_has_one_type_per_column(read: Read) -> None:
    table = table_of(read.study, read.trials, data.FRONT)
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

    assert pyarrow.Table.from_pandas(table_of(read.study, read.trials, data.FRONT)).num_rows == data.TRIALS
