"""`tuner replay`: real pickles in PyTorch's structure, hostile and broken ones, real traces, each option."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pickle
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tuner.cli.replay import command
from tuner.errors import UsageError
from tuner.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    Tuner = Callable[..., subprocess.CompletedProcess[str]]

BASE = 0x7F00_0000_0000
CPP = {"filename": "??", "line": 0, "name": "torch::unwind"}


def frame(line: int, name: str = "forward") -> list[dict[str, Any]]:
    """A stack as torch records it: C++ first, then Python from the inside out."""
    return [
        CPP,
        {"filename": "net.py", "line": line, "name": name},
        {"filename": "train.py", "line": 1, "name": "main"},
    ]


def entry(action: str, at: int, size: int, line: int = 0) -> dict[str, Any]:
    address = {"device_free": at} if action == "oom" else {"addr": BASE + at}
    return {
        "action": action,
        **address,
        "size": size,
        "stream": 0,
        "time_us": 1_700_000_000_000_000 + line,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
        "frames": frame(line) if line else [],
    }


def block(at: int, size: int, state: str, line: int = 0) -> dict[str, Any]:
    return {
        "address": BASE + at,
        "size": size,
        "requested_size": size,
        "state": state,
        "frames": frame(line) if line else [],
    }


def segment(at: int, *blocks: dict[str, Any], device: int = 0) -> dict[str, Any]:
    return {
        "device": device,
        "address": BASE + at,
        "total_size": sum(one["size"] for one in blocks),
        "allocated_size": sum(one["size"] for one in blocks if one["state"] != "inactive"),
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(blocks),
    }


def snapshot(segments: list[dict[str, Any]], *traces: list[dict[str, Any]]) -> dict[str, Any]:
    """The dict of `torch.cuda.memory._snapshot()`, newer keys included."""
    return {
        "segments": segments,
        "device_traces": list(traces),
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": False,
            "pinned_use_cuda_host_register": False,
            "roundup_power2_divisions": {str(1 << power): 0 for power in range(16)},
        },
        "external_annotations": [],
    }


def chopped() -> dict[str, Any]:
    """Case D13: 10 GiB once, 30 blocks of 16 MiB kept, 10 GiB again, in a second segment."""
    small = range(30)
    events = [entry("segment_alloc", 0, 10 * GIB), entry("alloc", 0, 10 * GIB, 7)]
    events += [entry("free_requested", 0, 10 * GIB), entry("free_completed", 0, 10 * GIB)]
    events += [entry("alloc", 16 * MIB * index, 16 * MIB, 8) for index in small]
    events += [entry("segment_alloc", 32 * GIB, 10 * GIB), entry("alloc", 32 * GIB, 10 * GIB, 9)]
    events += [entry("snapshot", 0, 0)]
    kept = [block(16 * MIB * index, 16 * MIB, "active_allocated", 8) for index in small]
    rest = block(480 * MIB, 10 * GIB - 480 * MIB, "inactive")
    held = [segment(0, *kept, rest), segment(32 * GIB, block(32 * GIB, 10 * GIB, "active_allocated", 9))]
    return snapshot(held, events)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def write(data: Any) -> Path:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
        return path

    return write


def replayed(tuner: Tuner, path: Path, *options: str) -> dict[str, Any]:
    done = tuner("replay", path, *options, "-f", "json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_refusal(done: subprocess.CompletedProcess[str], said: str) -> None:
    error, *hints = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert len(hints) <= 1
    assert done.stdout == ""
    assert done.returncode == 2


def test_a_snapshot_is_replayed_with_its_frames(tuner: Tuner, write: Callable[[Any], Path]) -> None:
    """By the published rules: 10 GiB + 480 MiB live at the peak, two segments of 10 GiB."""
    found = replayed(tuner, write(chopped()))
    assert found["peak_allocated_bytes"] == 10 * GIB + 480 * MIB
    assert found["peak_reserved_bytes"] == 20 * GIB
    assert found["segments"] == 2
    assert found["out_of_memory"] is False
    assert found["recorded"]["peak_reserved_bytes"] == 20 * GIB
    assert found["as_recorded"]["same_addresses"] == found["as_recorded"]["allocations"] == 32
    assert found["largest"] == [
        {"count": 1, "size": 10 * GIB, "frame": "net.py:9:forward", "older": False},
        {"count": 30, "size": 16 * MIB, "frame": "net.py:8:forward", "older": False},
    ]


def test_a_limit_names_fragmentation_and_expandable_segments_mend_it(
    tuner: Tuner, write: Callable[[Any], Path]
) -> None:
    path = write(chopped())
    failure = replayed(tuner, path, "--limit", "16GiB")["out_of_memory"]
    assert failure["fragmentation"] is True
    assert (failure["requested_bytes"], failure["allocated_bytes"]) == (10 * GIB, 480 * MIB)
    assert (failure["limit_bytes"], failure["frame"]) == (16 * GIB, "net.py:9:forward")
    both = replayed(tuner, path, "--limit", "16GiB", "--expandable")
    assert both["out_of_memory"] is False
    assert [bool(change["out_of_memory"]) for change in both["changes"]] == [True, False, False]
    assert both["peak_reserved_bytes"] == 10 * GIB + 480 * MIB


def test_a_limit_below_what_is_alive_is_no_fragmentation(tuner: Tuner, write: Callable[[Any], Path]) -> None:
    failure = replayed(tuner, write(chopped()), "--limit", "10GiB")["out_of_memory"]
    assert failure["fragmentation"] is False


def test_a_bound_on_splitting_keeps_the_large_segment_whole(
    tuner: Tuner, write: Callable[[Any], Path]
) -> None:
    """The 30 blocks get segments of their own (16 MiB each); the second 10 GiB use the first segment."""
    found = replayed(tuner, write(chopped()), "--max-split", "128MiB")
    assert found["peak_reserved_bytes"] == 10 * GIB + 480 * MIB
    assert found["changes"][0]["peak_reserved_difference_bytes"] == 480 * MIB - 10 * GIB
    assert replayed(tuner, write(chopped()), "--alloc-conf", "max_split_size_mb:128")["segments"] == 31


def test_the_table_says_what_would_change(tuner: Tuner, write: Callable[[Any], Path]) -> None:
    done = tuner("replay", write(chopped()), "--limit", "16GiB", "--expandable", "--max-split", "128MiB")
    assert done.returncode == 0, done.stderr
    for text in ("peak reserved", "20.00 GiB", "net.py:8:forward", "cause: fragmentation", "together"):
        assert text in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()[1:]) <= 80  # the first names the file


def test_several_devices(tuner: Tuner, write: Callable[[Any], Path]) -> None:
    """By default the one with most events; device 2 has segments and no events."""
    quiet = segment(0, block(0, 20 * MIB, "active_allocated"), device=2)
    data = snapshot([quiet, *chopped()["segments"]], chopped()["device_traces"][0], [])
    path = write(data)
    assert replayed(tuner, path)["device"] == 0
    found = replayed(tuner, path, "--device", "2")
    assert (found["history"], found["peak_reserved_bytes"]) == (False, 20 * MIB)
    check_refusal(tuner("replay", path, "--device", "1"), "device 1; known: 0, 2")


def test_without_history_the_segments_are_shown(tuner: Tuner, write: Callable[[Any], Path]) -> None:
    path = write(snapshot(chopped()["segments"]))
    assert "no history was recorded" in tuner("replay", path).stdout
    found = replayed(tuner, path)
    assert (found["peak_allocated_bytes"], found["peak_reserved_bytes"]) == (10 * GIB + 480 * MIB, 20 * GIB)
    assert found["largest"][0]["frame"] == "net.py:9:forward"


def test_an_out_of_memory_that_was_recorded_is_shown(tuner: Tuner, write: Callable[[Any], Path]) -> None:
    data = chopped()
    data["device_traces"][0].append(entry("oom", MIB, 4 * GIB))
    assert "1 time" in tuner("replay", write(data)).stdout


@pytest.mark.parametrize("protocol", range(6))
def test_a_hostile_pickle_runs_nothing(tuner: Tuner, tmp_path: Path, protocol: int) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/ran",)

    path = tmp_path / "hostile.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [Hostile()]}, protocol))
    check_refusal(tuner("replay", path), f"wants to import {os.system.__module__}.system")
    assert not (tmp_path / "ran").exists()
    pickle.loads(path.read_bytes())
    assert (tmp_path / "ran").exists()  # it does run where globals are allowed


def test_a_pickle_that_asks_for_gigabytes_is_refused(tuner: Tuner, tmp_path: Path) -> None:
    """LONG_BINPUT with index 2^32 - 1: the unpickler's memo would take 64 GiB."""
    path = tmp_path / "bomb.pickle"
    path.write_bytes(b"\x80\x04K\x01r\xff\xff\xff\xff.")
    check_refusal(tuner("replay", path), "more memory than")


@pytest.mark.parametrize("keep", [0, 1, 100, -1], ids=lambda keep: f"{keep} bytes")
def test_a_truncated_pickle_is_one_line(tuner: Tuner, write: Callable[[Any], Path], keep: int) -> None:
    check_refusal(
        tuner("replay", write(pickle.dumps(chopped())[:keep])), "cannot be read as a memory snapshot"
    )


def test_a_truncated_gzip_is_one_line(tuner: Tuner, write: Callable[[Any], Path]) -> None:
    check_refusal(tuner("replay", write(gzip.compress(b'{"events": []' * 99)[:40])), "cut short")


BROKEN: list[tuple[Any, str]] = [
    (b"not a snapshot", "cannot be read"),
    (b'{"events": [', "cannot be read"),
    (b"[" * 100_000, "cannot be read"),
    ({"a": 1}, "no 'segments'"),
    (3, "no 'segments'"),
    ({"segments": 3}, "segments is no list"),
    ({"segments": [3]}, "a segment is no dict"),
    ({"segments": [{"address": "x", "blocks": []}]}, "'address' is 'x'"),
    (
        {"segments": [{"address": 0, "total_size": 1 << 80, "segment_type": "small", "blocks": []}]},
        "'total_size'",
    ),
    (
        {"segments": [{"address": 0, "total_size": 512, "segment_type": "odd", "blocks": []}]},
        "neither small nor",
    ),
    ({"segments": [], "device_traces": 3}, "device_traces is no list"),
    ({"segments": [], "device_traces": [[{"action": 3}]]}, "no action"),
    ({"segments": [], "device_traces": [[[1, 2]]]}, "an event is neither"),
    ({"segments": [], "events": [["alloc", -1, 512, 0]]}, "'addr' is '-1'"),
    (
        {"segments": [segment(0, {**block(0, MIB, "active_allocated"), "state": "?"})]},
        "in a state other than",
    ),
    ({"segments": [segment(0, block(MIB, MIB, "inactive"))]}, "a gap or an overlap"),
    ({"segments": [], "events": [["free_completed", 0, 512, 0]]}, "contradicts itself"),
    ({"segments": [], "device_traces": []}, "neither segments nor events"),
]


@pytest.mark.parametrize(("data", "said"), BROKEN, ids=[said for _, said in BROKEN])
def test_a_broken_snapshot_is_one_line(
    tuner: Tuner, write: Callable[[Any], Path], data: Any, said: str
) -> None:
    check_refusal(tuner("replay", write(data)), said)


ACTIONS = ("alloc", "free_requested", "free_completed", "segment_free", "segment_map", "segment_unmap")
LEAVES = st.sampled_from(
    [None, -1, 0, 512, 1 << 49, 1 << 62, 1 << 70, True, 0.5, "x", [], {}, (1, 2), *ACTIONS]
)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=2, max_size=5), LEAVES), min_size=1, max_size=4)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_ends_in_figures_or_one_error(
    write: Callable[[Any], Path], damage: list[tuple[list[int], Any]]
) -> None:
    """Values somewhere in the structure are replaced, with those of other types among them."""
    data = chopped()
    for path, leaf in damage:
        where: Any = data
        for step in path[:-1]:
            keys = list(where) if isinstance(where, dict) else list(range(len(where)))
            below = where[keys[step % len(keys)]] if keys else None
            if not isinstance(below, (dict, list)) or not below:
                break
            where = below
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        where[keys[path[-1] % len(keys)]] = leaf
    found = CliRunner().invoke(command, [str(write(data)), "--limit", "16GiB", "--expandable"])
    assert found.exception is None or isinstance(found.exception, UsageError)


def test_bad_options_are_one_line(tuner: Tuner, write: Callable[[Any], Path], tmp_path: Path) -> None:
    path = write(chopped())
    check_refusal(tuner("replay", tmp_path / "absent"), "No such file")
    check_refusal(tuner("replay", tmp_path), "Is a directory")
    check_refusal(tuner("replay", path, "--limit", "lots"), "'lots' is not a size")
    check_refusal(tuner("replay", path, "--max-split", "5MiB"), "at least 20")
    check_refusal(tuner("replay", path, "--alloc-conf", "split:1"), "known: backend")


@pytest.mark.reference
@pytest.mark.parametrize("name", ["linear3-grad", "llama-finetune", "expandable-b"])
def test_the_references_json_is_read(tuner: Tuner, reference: Path, tmp_path: Path, name: str) -> None:
    """Baseline: the manifest; tolerance: none. Compressed or not."""
    packed = reference / "allocator" / f"{name}.json.gz"
    rows = csv.DictReader((reference / "allocator" / "manifest.csv").read_text().splitlines())
    manifest = next(row for row in rows if row["name"] == name)
    peak_mib = float(manifest["peak_reserved_mib"] or manifest["final_reserved_mib"])
    plain = tmp_path / "trace.json"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    for path in (packed, plain):
        found = replayed(tuner, path)
        assert found["peak_reserved_bytes"] == peak_mib * MIB
        assert found["recorded"]["peak_allocated_bytes"] / MIB == pytest.approx(
            float(manifest["peak_allocated_mib"]), abs=0.001
        )


def test_a_pickle_of_50000_events_takes_seconds(tuner: Tuner, write: Callable[[Any], Path]) -> None:
    """Start of Python included; frames are shared between entries, as in real snapshots."""
    events, stack = [], frame(5)
    for index in range(12_500):
        at = (index % 400) * 64 * MIB
        events += [entry("segment_alloc", at, 20 * MIB), entry("alloc", at, 20 * MIB)]
        events += [entry("free_requested", at, 20 * MIB), entry("free_completed", at, 20 * MIB)]
        events += [entry("segment_free", at, 20 * MIB)]
    for one in events:
        one["frames"] = stack
    assert len(events) >= 50_000
    found = replayed(tuner, write(snapshot([], events)))
    assert (found["events"], found["peak_reserved_bytes"]) == (len(events), 20 * MIB)
