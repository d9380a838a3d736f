"""`tuner replay`: a recorded memory history, replayed as it was and under other settings."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import format_option
from tuner.errors import UsageError
from tuner.units import MIB, format_bytes, parse_bytes

if TYPE_CHECKING:
    from tuner.memory.allocator_settings import AllocatorSettings
    from tuner.memory.replay import Replay
    from tuner.memory.snapshot import DeviceHistory
    from tuner.memory.snapshot_views import Recorded

_LARGEST = 10
_WIDTH = 80


@click.command("replay", short_help="Replay a memory snapshot of PyTorch's.")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--device", metavar="N", type=int, help="The GPU  [default: the one with most events]")
@click.option("--limit", metavar="SIZE", help="Would it run with at most this reserved, such as 16GiB?")
@click.option("--expandable", is_flag=True, help="What if expandable_segments were True?")
@click.option("--max-split", metavar="SIZE", help="What if max_split_size_mb were this, such as 128MiB?")
@click.option("--alloc-conf", metavar="TEXT", help="What if PYTORCH_ALLOC_CONF were this?")
@format_option
def command(
    file: Path,
    device: int | None,
    limit: str | None,
    expandable: bool,
    max_split: str | None,
    alloc_conf: str | None,
    form: str,
) -> None:
    """Replay the memory history in FILE on a model of PyTorch's caching allocator.

    FILE is what torch.cuda.memory._dump_snapshot wrote; nothing in it is run. Each option is
    replayed alone, and all of them together.

    \b
    Examples:
      tuner replay snapshot.pickle
      tuner replay snapshot.pickle --limit 16GiB --expandable
    """
    from tuner.memory.snapshot_files import read_snapshot

    limit_bytes = None if limit is None else parse_bytes(limit)
    history = _choose(read_snapshot(file), device, file)
    changes = _changes(history.settings, limit, max_split, alloc_conf, expandable=expandable)
    try:
        fields = _fields(history, changes, limit_bytes)
    except ValueError as error:
        raise UsageError(f"{file} contradicts itself: {error}") from None
    fields = {"file": str(file), **fields}
    if form == "table":
        _print(fields)
    else:
        from tuner.cli.output import emit_one

        emit_one(fields, form)


def _choose(histories: list[DeviceHistory], device: int | None, file: Path) -> DeviceHistory:
    if not histories:
        raise UsageError(
            f"{file} holds neither segments nor events", hint="was CUDA used before the snapshot?"
        )
    if device is None:
        return max(histories, key=lambda h: (len(h.events), sum(s.size for s in h.segments)))
    for history in histories:
        if history.device == device:
            return history
    known = ", ".join(str(history.device) for history in histories)
    raise UsageError(f"{file} says nothing of device {device}; known: {known}")


def _changes(
    settings: AllocatorSettings,
    limit: str | None,
    max_split: str | None,
    alloc_conf: str | None,
    *,
    expandable: bool,
) -> dict[str, AllocatorSettings]:
    """Return the settings under each option, and under all of them where there are several."""
    from tuner.memory.allocator_settings import AllocatorSettings

    changes, together = {}, settings
    if limit is not None:
        changes[f"--limit {limit}"] = settings
    if alloc_conf is not None:
        together = AllocatorSettings.parse(alloc_conf)
        changes["--alloc-conf"] = together
    if expandable:
        changes["--expandable"] = replace(settings, expandable_segments=True)
        together = replace(together, expandable_segments=True)
    if max_split is not None:
        split = AllocatorSettings.parse(f"max_split_size_mb:{parse_bytes(max_split) // MIB}").max_split_bytes
        changes[f"--max-split {max_split}"] = replace(settings, max_split_bytes=split)
        together = replace(together, max_split_bytes=split)
    if len(changes) > 1:
        changes["together"] = together
    return changes


def _fields(
    history: DeviceHistory, changes: dict[str, AllocatorSettings], limit_bytes: int | None
) -> dict[str, Any]:
    from tuner.memory.replay import replay
    from tuner.memory.snapshot_views import alive_at, recorded

    as_it_was = replay(history)
    said = recorded(history)
    base = _summary(history, as_it_was, said)
    under = {}
    for name, settings in changes.items():
        limited = name == "together" or name.startswith("--limit")
        found = replay(history, settings=settings, limit_bytes=limit_bytes if limited else None)
        under[name] = _summary(history, found, said)
    chosen = list(under.values())[-1] if under else base
    return {
        "device": history.device,
        "events": len(history.events),
        "history": bool(history.events),
        "settings": asdict(history.settings),
        **chosen,
        "recorded": asdict(said),
        "as_recorded": {
            **base,
            "allocations": as_it_was.allocations,
            "same_addresses": as_it_was.same_addresses,
        },
        "changes": [
            {
                "option": name,
                **found,
                "peak_reserved_difference_bytes": found["peak_reserved_bytes"] - base["peak_reserved_bytes"],
            }
            for name, found in under.items()
        ],
        "largest": [asdict(block) for block in alive_at(history, as_it_was.peak_at, _LARGEST)],
        "notes": list(_notes(history, under)),
    }


def _summary(history: DeviceHistory, found: Replay, said: Recorded) -> dict[str, Any]:
    allocator, failure = found.allocator, found.failure
    return {
        "peak_allocated_bytes": allocator.peak_allocated_bytes,
        "peak_reserved_bytes": allocator.peak_reserved_bytes,
        "allocated_bytes": allocator.allocated_bytes,
        "reserved_bytes": allocator.reserved_bytes,
        "segments": allocator.segments,
        "fragmentation": asdict(allocator.fragmentation()),
        "start_replaced": found.start_replaced,
        "out_of_memory": failure is not None
        and {
            "requested_bytes": failure.requested_bytes,
            "allocated_bytes": failure.allocated_bytes,
            "reserved_bytes": failure.reserved_bytes,
            "limit_bytes": failure.limit_bytes,
            # All that is ever live at once would fit, had it lain side by side.
            "fragmentation": said.side_by_side_bytes <= (failure.limit_bytes or 0),
            "side_by_side_bytes": said.side_by_side_bytes,
            "event": found.failed_at,
            "frame": history.event_frame(found.failed_at) if found.failed_at >= 0 else None,
        },
    }


def _notes(history: DeviceHistory, under: dict[str, Any]) -> list[str]:
    notes = []
    if not history.events:
        notes.append("no history was recorded: the figures are those of the moment of the snapshot")
    if any(found["start_replaced"] for found in under.values()):
        notes.append("blocks older than the history were placed anew, side by side, where an option says so")
    if history.private_segments:
        notes.append(f"{history.private_segments} segments of private pools are replayed as ordinary ones")
    return notes


def _print(fields: dict[str, Any]) -> None:
    base, said = fields["as_recorded"], fields["recorded"]
    click.echo(f"{fields['file']}: device {fields['device']}, {fields['events']:,} events\n")
    click.echo(f"{'':<18}{'replayed':>12}{'snapshot':>12}")
    for name in ("allocated", "reserved"):
        key = f"peak_{name}_bytes"
        click.echo(f"{'peak ' + name:<18}{format_bytes(base[key]):>12}{format_bytes(said[key]):>12}")
    if base["allocations"]:
        share = base["same_addresses"] / base["allocations"]
        click.echo(f"{'same addresses':<18}{share:>12.1%}")
    if said["out_of_memory"]:
        click.echo(f"{'out of memory':<18}{'':>12}{_times(said['out_of_memory'], 'time'):>12}")
    _print_fragmentation(base)
    _print_largest(fields["largest"])
    if fields["changes"]:
        click.echo("\nwhat would change")
        for change in fields["changes"]:
            _print_change(change)
    for note in fields["notes"]:
        click.echo("\n" + click.wrap_text(f"note: {note}", _WIDTH, subsequent_indent="  "))


def _print_fragmentation(base: dict[str, Any]) -> None:
    figures = base["fragmentation"]
    unused = figures["unused_at_peak_bytes"]
    reserved = base["peak_allocated_bytes"] + unused
    click.echo("\nfragmentation")
    click.echo(
        f"  {format_bytes(unused)} reserved but not allocated at the peak ({unused / max(1, reserved):.1%})"
    )
    click.echo(f"  {format_bytes(figures['unused_bytes'])} at the end, in {figures['segments']:,} segments;")
    click.echo(
        f"  the largest free block has {format_bytes(figures['largest_free_bytes'])}; "
        f"{format_bytes(figures['inactive_split_bytes'])} cannot be released"
    )


def _print_largest(blocks: list[dict[str, Any]]) -> None:
    click.echo("\nlargest blocks alive at the peak")
    for block in blocks:
        unknown = "older than the history" if block["older"] else "no Python frame recorded"
        frame = block["frame"] or unknown
        room = _WIDTH - 23
        short = frame if len(frame) <= room else "…" + frame[1 - room :]
        click.echo(f"  {block['count']:>5} × {format_bytes(block['size']):>11}  {short}")


def _print_change(change: dict[str, Any]) -> None:
    failure = change["out_of_memory"]
    click.echo(f"  {change['option']}")
    if not failure:
        difference = change["peak_reserved_difference_bytes"]
        sign = "-" if difference < 0 else "+"
        retries = change["fragmentation"]["retries"]
        click.echo(
            f"    runs; peak reserved {format_bytes(change['peak_reserved_bytes'])} "
            f"({sign}{format_bytes(abs(difference))})"
            + (f", after {_times(retries, 'release')} of free memory" if retries else "")
        )
        return
    requested, live = failure["requested_bytes"], failure["allocated_bytes"]
    where = "at the start" if failure["event"] < 0 else f"at event {failure['event']:,}"
    click.echo(f"    out of memory {where}: {format_bytes(requested)} asked for,")
    click.echo(
        f"    {format_bytes(live)} allocated, {format_bytes(failure['reserved_bytes'])} reserved "
        f"of {format_bytes(failure['limit_bytes'])}"
    )
    alone = format_bytes(failure["side_by_side_bytes"])
    if failure["fragmentation"]:
        click.echo(f"    cause: fragmentation; side by side the peak would take {alone}")
    else:
        click.echo(f"    cause: too much is alive at once; the peak takes {alone} side by side")


def _times(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
