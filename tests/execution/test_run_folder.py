"""The run folder: whole files or none, events up to the last whole line, names that are no paths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.execution import json_files
from tuner.execution.json_files import write_json, write_text
from tuner.execution.run_folder import Request, RunFolder, StopRequest, folder_name
from tuner.records import Outcome, TrialResult

REQUEST = Request(
    workload="/abs/study.py:Net",
    params={"width": 64, "rate": 1e-3, "kind": "plain", "amp": True, "none": None},
    device="cpu",
    reservation_bytes=700 << 20,
    context_bytes=None,
    seed=None,
    threads=2,
    example_steps=(3, 2),
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "a" / "b")


def test_a_request_is_read_as_it_was_written(folder: RunFolder) -> None:
    folder.write_request(REQUEST)

    assert folder.read_request() == REQUEST


def test_a_request_of_another_version_is_refused(folder: RunFolder) -> None:
    folder.write_request(REQUEST)
    path = folder.path / "request.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))

    with pytest.raises(ValueError, match="another version"):
        folder.read_request()


def test_what_is_not_there_yet_is_none_or_empty(folder: RunFolder) -> None:
    assert folder.read_report() is None
    assert folder.stop_request() is None
    assert folder.read_result() is None
    assert folder.read_events() == []
    assert folder.log_tail() == ""


def test_a_report_and_a_reason_to_stop_are_read_as_they_were_written(folder: RunFolder) -> None:
    folder.write_report({"outcome": "completed", "value": float("inf")})
    request = StopRequest(Outcome.TIMED_OUT, "ünicode\nand two lines")
    folder.ask_to_stop(request)

    assert folder.read_report() == TrialResult(Outcome.COMPLETED, value=float("inf"))
    assert folder.stop_request() == request
    assert RunFolder(folder.path).read_report() is not None  # used again, not emptied


@pytest.mark.parametrize("damage", ["", '{"version": 1, "outco', "[1]", '{"version": 1}', "\xff"])
def test_a_damaged_file_is_said_to_be_one(damage: str, folder: RunFolder) -> None:
    (folder.path / "report.json").write_text(damage, encoding="latin-1")
    (folder.path / "request.json").write_text(damage, encoding="latin-1")

    for read in (folder.read_report, folder.read_result, folder.read_request):
        with pytest.raises(ValueError, match=r"damaged|another version"):
            read()


def test_a_driver_that_could_not_write_its_result_leaves_the_workers_report(folder: RunFolder) -> None:
    folder.write_report({"outcome": "completed"})
    (folder.path / "result.json").write_text('{"version": 1, "outco')

    assert folder.read_result() == TrialResult(Outcome.COMPLETED)


def test_a_report_of_another_version_is_no_report(folder: RunFolder) -> None:
    write_json(folder.path / "report.json", {"version": 2, "outcome": "completed"})

    assert folder.read_report() is None


def test_a_reader_sees_the_old_file_or_the_new_one_and_nothing_between(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(path, ["0"] * 200_000)
    finished = threading.Event()
    seen = []

    def read() -> None:
        while not finished.is_set():
            seen.append(path.read_text())

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for number in range(40):
            write_json(path, [str(number % 10)] * 200_000)
        finished.set()
        reading.result()

    whole = {json.dumps([str(digit)] * 200_000) for digit in range(10)}
    assert set(seen) <= whole
    assert len(set(seen)) > 1  # the reader did look while we wrote
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stop"
    write_text(path, "old")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json_files.os, step, full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")

    assert path.read_text() == "old"


def test_a_line_that_is_still_being_written_is_left_out_wherever_it_ends(folder: RunFolder) -> None:
    events = [{"kind": "epoch", "name": "ü", "value": float("inf")}, {"kind": "end", "lines": "a\nb"}]
    path = folder.path / "events.jsonl"
    for event in events:
        folder.append_event(**event)  # type: ignore[arg-type]
    whole = path.read_bytes()
    assert folder.read_events() == events

    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert folder.read_events() == events[: whole[:length].count(b"\n")]


@pytest.mark.parametrize("damage", ['{"kind": "ep\n', "\n", "7\n", '{"kind": "epoch", "na\xffme": \n'])
def test_a_damaged_line_ends_the_events(damage: str, folder: RunFolder) -> None:
    folder.append_event("first")
    with (folder.path / "events.jsonl").open("a", encoding="latin-1") as events:
        events.write(damage)
    folder.append_event("after it")

    assert folder.read_events() == [{"kind": "first"}]


def test_events_that_cannot_be_read_are_none(folder: RunFolder) -> None:
    (folder.path / "events.jsonl").mkdir()
    assert folder.read_events() == []
    folder.log.write_text("a file")
    assert RunFolder(folder.log).read_events() == []  # below a file
    assert RunFolder(folder.log).log_tail() == ""


def test_events_of_several_threads_do_not_mix(folder: RunFolder) -> None:
    def write(thread: int) -> None:
        for number in range(50):
            folder.append_event("epoch", thread=thread, number=number, filler="x" * 5000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))

    events = folder.read_events()
    assert [[e["number"] for e in events if e["thread"] == thread] for thread in range(4)] == [
        list(range(50))
    ] * 4


def test_a_line_that_did_not_fit_on_the_disk_costs_no_other_event(folder: RunFolder) -> None:
    """A limit on the file's size makes the kernel write half a line, as a full disk does."""
    code = """
import os, resource, sys
from pathlib import Path
from tuner.execution.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.append_event("first")
size = os.path.getsize(folder.path / "events.jsonl")
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
try:
    folder.append_event("lost")
except OSError:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
folder.append_event("last")
"""
    subprocess.run([sys.executable, "-c", code, str(folder.path)], check=True)

    kinds = [event["kind"] for event in folder.read_events()]
    assert kinds == ["first", "last"]


def test_the_end_of_a_log_is_whole_lines_of_any_bytes(folder: RunFolder) -> None:
    lines = [f"line {number}".encode() for number in range(100_000)]
    folder.log.write_bytes(b"\n".join([*lines, b"\xff\xfe broken", b"end"]))

    tail = folder.log_tail(lines=3)

    assert tail.split("\n") == ["line 99999", "\ufffd\ufffd broken", "end"]
    assert len(folder.log_tail(lines=10**6)) <= 20_000


STUDY_NAMES = st.text(min_size=1, max_size=600)


@settings(deadline=None)
@given(STUDY_NAMES | st.text("./\\-_aé\0\n", min_size=1, max_size=80))
def test_a_folder_name_is_one_short_plain_component(study: str) -> None:
    name = folder_name(study)

    base = Path("/runs")
    assert (base / name).parent == base
    assert os.path.normpath(base / name) == f"/runs/{name}"  # neither `.` nor `..`
    assert not name.startswith((".", "-"))
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set("/\\:*?\"<>|' ")
    assert len(name) <= 80  # 255 bytes is the least limit of a file system


@settings(deadline=None)
@given(STUDY_NAMES, STUDY_NAMES)
def test_two_studies_never_share_a_folder(one: str, two: str) -> None:
    assert (folder_name(one) == folder_name(two)) == (one == two)


@pytest.mark.parametrize(
    "studies",
    [
        ["../../a", "../a", "a", "/a", "a/", ".a", "a."],
        ["große Größe", "gro-e Gr-e", "große größe"],
        ["x" * 512, "x" * 511, "x" * 60, "x" * 61],
        ["日本", "中国", "-", "."],
    ],
)
def test_names_that_look_alike_get_folders_of_their_own(studies: list[str]) -> None:
    assert len({folder_name(study) for study in studies}) == len(studies)


def test_a_study_that_is_called_like_anothers_folder_has_another_folder() -> None:
    assert folder_name(folder_name("../../a")) != folder_name("../../a")


def test_a_plain_name_stays_as_it_is() -> None:
    assert folder_name("digits_cnn") == "digits_cnn"
    assert folder_name("../../a").startswith("a-")


def test_a_path_that_is_taken_is_never_shared(tmp_path: Path) -> None:
    """A deleted study's report must not become that of a new trial with the same number."""
    first = RunFolder.create(tmp_path / "study" / "00000")
    first.write_report({"outcome": "completed"})
    second = RunFolder.create(tmp_path / "study" / "00000")
    third = RunFolder.create(tmp_path / "study" / "00000")
    assert [second.path.name, third.path.name] == ["00000-2", "00000-3"]
    assert second.read_report() is None
