"""`tuner doctor`: check this machine, and measure the context of its GPUs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner.cli.options import format_option, storage_option
from tuner.settings import resolve

if TYPE_CHECKING:
    from tuner.cli.checks import Check
    from tuner.measure.contexts import ContextProbe

_SIGNS = {"ok": "ok", "warning": "warning", "failure": "FAILURE"}


@click.command("doctor", short_help="Check this machine, and measure the context of its GPUs.")
@storage_option
@click.option("--runs-dir", metavar="DIR", help="Where run folders go  [default: tuner-runs]")
@click.option("--remeasure", is_flag=True, help="Measure the context again, whatever is known.")
@format_option
@click.pass_context
def command(
    ctx: click.Context, storage: str | None, runs_dir: str | None, remeasure: bool, form: str
) -> None:
    """Check this machine: what predictions, studies and GPUs need, and what to do where it is missing.

    The context of each GPU (what a process takes before its first tensor) is measured once, in a
    child process, and kept in $TUNER_STATE_DIR, else $XDG_STATE_HOME/vram-tuner, else
    ~/.local/state/vram-tuner. Predictions for cuda:N then use it.

    Ends with 1 where predictions do not work or a GPU is there that cannot be used; warnings do
    not count.
    """
    from tuner.cli.checks import Status
    from tuner.measure.contexts import ChildProbe

    place = resolve({"runs_dir": runs_dir}, ["runs_dir"])["runs_dir"].value
    found = []
    for check in run_checks(ChildProbe(), storage, Path(place), remeasure=remeasure):
        found.append(check)
        if form == "table":
            _print(check)
    failed = sum(1 for check in found if check.status is Status.FAILURE)
    _end(found, form, failed)
    ctx.exit(1 if failed else 0)


def run_checks(
    probe: ContextProbe, storage: str | None, runs_dir: Path, *, remeasure: bool
) -> Iterator[Check]:
    """Yield each check as it is done."""
    from tuner.cli import checks
    from tuner.measure import nvml
    from tuner.measure.contexts import ContextStore

    devices, on_the_bus = nvml.devices(), checks.gpus_on_the_bus()
    torch = checks.check_torch(max(len(devices.found), on_the_bus))
    yield torch
    yield checks.check_pynvml()
    yield checks.check_driver(devices, on_the_bus)
    for device in devices.found:
        yield checks.check_gpu(device)
        if torch.facts.get("cuda") is not None:  # else PyTorch is what to put right first
            yield checks.check_context(device, devices.driver, probe, ContextStore(), remeasure=remeasure)
    yield checks.check_host_memory()
    yield checks.check_disk(runs_dir)
    yield checks.check_database(storage)


def _print(check: Check) -> None:
    for text, start in (
        (check.message, f"{_SIGNS[check.status]:<8} {check.name:<15} "),
        (f"► {check.hint}" if check.hint else "", " " * 25),
    ):
        if text:
            filled = textwrap.fill(
                text, 80, initial_indent=start, subsequent_indent=" " * 25, break_on_hyphens=False
            )
            click.echo(filled)


def _end(found: list[Check], form: str, failed: int) -> None:
    from tuner.cli.output import Column, emit, jsonable

    if form == "json":
        report = {"ok": not failed, "checks": [check.to_json() for check in found]}
        click.echo(json.dumps(jsonable(report), indent=2))
    elif form == "csv":
        columns = [Column(key, key) for key in ("name", "status", "message", "hint")]
        emit([check.to_json() for check in found], columns, form, empty="")
    else:
        warned = sum(1 for check in found if check.status == "warning")
        click.echo(
            f"\n{failed or 'no'} failure{'' if failed == 1 else 's'}, {warned or 'no'} "
            f"warning{'' if warned == 1 else 's'}"
        )
