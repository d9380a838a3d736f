"""`tuner targets`: list the GPUs that can be predicted for."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import format_option
from tuner.units import MIB

if TYPE_CHECKING:
    from tuner.memory.targets import Target

_NOT_MEASURED = "not measured"


@click.command("targets", short_help="List the GPUs that can be predicted for.")
@click.option("--sources", is_flag=True, help="Say where each figure comes from.")
@format_option
def command(sources: bool, form: str) -> None:
    """List the GPUs that `tuner predict --target NAME` knows, with what is known of each.

    Capacity is what PyTorch can get of the memory. Context is what a process takes on the GPU
    before its first tensor, with its standard deviation; where nobody has published it, it is
    predicted from a range, and the band is wider. A star marks a GPU of this machine, which is
    also called cuda:N; `tuner doctor` measures its context.

    Other spellings of a name are understood, such as 3090 or "NVIDIA GeForce RTX 3090", and
    sm_NN stands for any GPU of that compute capability.
    """
    from tuner.cli.output import Column, emit, size

    rows = target_rows()
    columns = [
        Column("target", "shown"),
        Column("GPU", "gpu", lambda gpu: gpu.removeprefix("NVIDIA ").removeprefix("GeForce ")),
        size("capacity", "capacity_bytes"),
        Column("cc", "compute_capability", right=True),
        Column("context", "context", right=True),
    ]
    if form == "table":
        emit(rows, columns, form, empty="")
        if any(row["present"] for row in rows):
            click.echo("* on this machine")
        if sources:
            _print_sources(rows)
        return
    data = [{key: value for key, value in row.items() if key not in ("shown", "context")} for row in rows]
    emit(data, [Column(key, key) for key in data[0]], form, empty="")


def target_rows() -> list[dict[str, Any]]:
    """Return a row for each GPU of this machine and for each profile."""
    from tuner.measure import nvml
    from tuner.memory.targets import profile_names, resolve_target
    from tuner.scheduling.devices import target_of

    devices = nvml.devices()
    present = [target_of(d, devices.driver, name=f"cuda:{d.index}") for d in devices.found]
    profiles_here = {target.profile for target in present}
    return [
        *(_row(target, present=True) for target in present),
        *(_row(resolve_target(name), present=name in profiles_here) for name in profile_names()),
    ]


def _row(target: Target, *, present: bool) -> dict[str, Any]:
    capability = target.compute_capability
    context = (
        f"{target.context_bytes / MIB:.0f} ± {target.context_spread_bytes / MIB:.0f} MiB"
        if (target.context_measured and target.context_bytes is not None)
        else _NOT_MEASURED
    )
    return {
        "target": target.name,
        "shown": f"{target.name} *" if present else target.name,
        "gpu": target.gpu,
        "present": present,
        "capacity_bytes": target.capacity_bytes,
        "capacity_source": target.capacity_source,
        "compute_capability": None if capability is None else "{}.{}".format(*capability),
        "context": context,
        "context_bytes": target.context_bytes if target.context_measured else None,
        "context_spread_bytes": target.context_spread_bytes,
        "context_range_bytes": target.context_range_bytes,
        "context_source": target.context_source,
        "cublas_workspace_bytes": target.cublas_workspace_bytes,
    }


def _print_sources(rows: list[dict[str, Any]]) -> None:
    """Print where each figure comes from; the range that stands in for a context only once."""
    for row in rows:
        click.echo(f"\n{row['target']}")
        _print_source("capacity", row["capacity_source"] or "unknown")
        _print_source("context", row["context_source"] if row["context_bytes"] else _NOT_MEASURED)
    (assumed,) = {row["context_source"] for row in rows if not row["context_bytes"]}
    click.echo("\nwhere the context is not measured")
    _print_source("context", assumed.removeprefix(f"{_NOT_MEASURED}; "))


def _print_source(what: str, source: str) -> None:
    start = f"  {what:<9} "
    click.echo(
        textwrap.fill(
            source, 80, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
        )
    )
