"""From the plain data of a snapshot file to values, with every field checked.

The structure is that of `torch.cuda.memory._snapshot()`, whose keys grew over the years: missing ones
are made up for, unknown ones are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tuner.errors import UsageError
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.memory.snapshot import STATES, BlockState, DeviceHistory, Event, SegmentState, check_filled

_LARGEST_NUMBER = 1 << 63
_LARGEST_SIZE = 1 << 50  # a thousand times what any device holds
_MOST_ROWS = 20_000_000  # of events, and of blocks: references make a small file hold any number
_TEXT_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_DEFAULT_POOL = (None, (0, 0), [0, 0])
_SEGMENT_ACTIONS = ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
_REPLAYED = frozenset(("alloc", "free_requested", "free_completed", "oom", *_SEGMENT_ACTIONS))


class Malformed(Exception):
    """The data does not have the structure of a snapshot; the message says where."""


def histories(data: Any) -> list[DeviceHistory]:
    """Return what a snapshot says of each device that has segments or events.

    Raises:
        Malformed: The data has another structure.
    """
    if isinstance(data, list):  # torch.cuda.memory_snapshot(): the segments alone
        data = {"segments": data}
    if not isinstance(data, dict) or "segments" not in data:
        raise Malformed("it has no 'segments'")
    settings = _settings(data.get("allocator_settings"))
    traces = [data["events"]] if "events" in data else _list(data.get("device_traces") or [], "device_traces")
    segments = _list(data["segments"], "segments")
    if sum(len(_list(trace, "a device's trace")) for trace in traces) > _MOST_ROWS:
        raise Malformed(f"it has more than {_MOST_ROWS:,} events")
    by_device: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        by_device.setdefault(_number(_dict(segment, "a segment").get("device", 0), "device"), []).append(
            segment
        )
    if sum(len(_list(segment.get("blocks"), "blocks")) for segment in segments) > _MOST_ROWS:
        raise Malformed(f"it has more than {_MOST_ROWS:,} blocks")
    return [
        _history(device, by_device.get(device, []), trace, settings)
        for device, trace in _by_device(traces, by_device)
        if trace or device in by_device
    ]


def _by_device(traces: list[Any], devices: Iterable[int]) -> Iterator[tuple[int, list[Any]]]:
    yield from enumerate(traces)
    yield from ((device, []) for device in sorted(devices) if device >= len(traces))


def _history(
    device: int, segments: list[dict[str, Any]], trace: list[Any], settings: AllocatorSettings
) -> DeviceHistory:
    rows: list[tuple[Event, Any]] = [
        (event, row) for row in trace if (event := _event(row)).action in _REPLAYED
    ]
    events = [event for event, _ in rows]
    maps = any(event.action == "segment_map" for event in events) or settings.expandable_segments
    frames: dict[int, str] = {}
    states = tuple(_segment(segment, frames, expandable=maps) for segment in segments)
    return DeviceHistory(
        device=device,
        segments=states,
        events=events,
        settings=settings,
        event_frame=lambda position: _innermost(rows[position][1]),
        block_frames=frames,
        private_segments=sum(s.get("segment_pool_id") not in _DEFAULT_POOL for s in segments),
    )


def _event(row: Any) -> Event:
    if isinstance(row, dict):
        action, stream = row.get("action"), row.get("stream", 0)
        address, size = row.get("addr", row.get("device_free", 0)), row.get("size", 0)
    elif isinstance(row, (list, tuple)) and len(row) == 4:
        action, address, size, stream = row
    else:
        raise Malformed("an event is neither a dict nor a row of action, address, size and stream")
    if not isinstance(action, str):
        raise Malformed("an event has no action")
    if action not in _REPLAYED:
        return Event(action, 0, 0, 0)
    return Event(action, _number(address, "addr"), _size(size, "size"), _number(stream, "stream"))


def _segment(segment: dict[str, Any], frames: dict[int, str], *, expandable: bool) -> SegmentState:
    address = _number(segment.get("address"), "address")
    at, blocks = address, []
    for row in segment["blocks"]:
        block = _block(row, at)
        at = block.address + block.size
        blocks.append(block)
        frame = _innermost(row)
        if frame is not None:
            frames[block.address] = frame
    kind = segment.get("segment_type", segment.get("type"))
    if kind not in ("small", "large"):
        raise Malformed("a segment is neither small nor large")
    state = SegmentState(
        address=address,
        size=_size(segment.get("total_size"), "total_size"),
        stream=_number(segment.get("stream", 0), "stream"),
        small=kind == "small",
        expandable=bool(segment.get("is_expandable", expandable)),
        blocks=tuple(blocks),
    )
    try:
        check_filled(state)
    except ValueError as error:
        raise Malformed(str(error)) from None
    return state


def _block(row: Any, at: int) -> BlockState:
    if isinstance(row, dict):
        address, size, state = row.get("address", at), row.get("size"), row.get("state")
        requested = row.get("requested_size", size)
    elif isinstance(row, (list, tuple)) and len(row) in (3, 4):
        (address, size, state), requested = row[:3], row[-1] if len(row) == 4 else row[1]
    else:
        raise Malformed("a block is neither a dict nor a row of address, size and state")
    if not isinstance(state, str) or state not in STATES:
        raise Malformed(f"a block is in a state other than {', '.join(STATES)}")
    return BlockState(
        _number(address, "address"),
        _size(size, "size"),
        STATES[state],
        _size(requested, "requested_size"),
    )


def _settings(found: Any) -> AllocatorSettings:
    """Return the settings that a snapshot names; the defaults for what it leaves out."""
    if not isinstance(found, dict):
        return AllocatorSettings()
    settings = AllocatorSettings()
    text = next((found[key] for key in _TEXT_KEYS if isinstance(found.get(key), str)), "")
    with suppress(UsageError):  # a version with other keys: the fields below say most of it
        settings = AllocatorSettings.parse(text)
    split = found.get("max_split_size")
    if isinstance(split, int):
        settings = replace(settings, max_split_bytes=split if 0 < split < _LARGEST_NUMBER else None)
    threshold = found.get("garbage_collection_threshold")
    if isinstance(threshold, (int, float)) and 0 <= threshold < 1:
        settings = replace(settings, garbage_collection_threshold=float(threshold))
    if isinstance(found.get("expandable_segments"), bool):
        settings = replace(settings, expandable_segments=found["expandable_segments"])
    divisions = found.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and len(divisions) == 16:
        steps = tuple(_number(step, "roundup_power2_divisions") for step in divisions.values())
        settings = replace(settings, power2_divisions=steps if any(steps) else ())
    return settings


def _innermost(row: Any) -> str | None:
    """Return the innermost Python frame of an event or a block as `file:line:function`."""
    if not isinstance(row, dict):
        return None
    frames = row.get("frames")
    if frames is None:
        past = row.get("history")  # of blocks, before torch 2.1
        frames = (
            past[0].get("frames") if isinstance(past, list) and past and isinstance(past[0], dict) else None
        )
    for frame in frames if isinstance(frames, (list, tuple)) else ():
        if isinstance(frame, dict) and str(frame.get("filename", "")).endswith((".py", ">")):
            return f"{frame['filename']}:{frame.get('line', '?')}:{frame.get('name', '?')}"
    return None


def _number(value: Any, name: str) -> int:
    if type(value) is int and 0 <= value < _LARGEST_NUMBER:
        return value
    raise Malformed(f"'{name}' is {str(value)[:40]!r}, not a number of bytes or an address")


def _size(value: Any, name: str) -> int:
    size = _number(value, name)
    if size < _LARGEST_SIZE:
        return size
    raise Malformed(f"'{name}' is {size:,} bytes, more than any device has")


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise Malformed(f"{name} is no list")
    return list(value) if isinstance(value, tuple) else value


def _dict(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{name} is no dict")
    return value
