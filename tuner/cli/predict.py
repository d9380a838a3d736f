"""`tuner predict`: the peak memory of one configuration, without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import format_option
from tuner.errors import UsageError
from tuner.settings import resolve
from tuner.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from tuner.memory.targets import Target
    from tuner.records import Band, Prediction
    from tuner.workload import LoadedWorkload


@click.command("predict", short_help="Predict the peak memory of one configuration.")
@click.argument("study", metavar="STUDY")
@click.option(
    "--set", "assignments", metavar="NAME=VALUE", multiple=True, help="A parameter; repeat for more."
)
@click.option(
    "--target",
    metavar="NAME",
    help="cpu, cuda or a profile such as a100-40gb  [default: cuda if there is one, else cpu]",
)
@click.option(
    "--budget",
    metavar="SIZE",
    help="Judge against this, such as 6GiB  [default: the workload's own, or the whole GPU]",
)
@click.option("--explain", is_flag=True, help="Show what takes the memory, and what was assumed.")
@click.option("--threads", metavar="N", help="Intra-op threads of the trial  [default: all cores]")
@format_option
def command(study: str, assignments: tuple[str, ...], explain: bool, form: str, **flags: Any) -> None:
    """Predict how much memory one configuration of STUDY takes, by tracing its own step.

    Nothing is trained and no GPU is needed: the step runs on tensors without data. Parameters that
    are not set take the middle of their range, or their first choice.

    \b
    Examples:
      tuner predict studies/digits_cnn.py --set width=64 --set batch_size=1024
      tuner predict studies/char_gpt.py --target a100-40gb --budget 30GiB --explain
    """
    from tuner.execution.launcher import visible_threads
    from tuner.scheduling.devices import choose_place, present_target
    from tuner.stand_in import configuration
    from tuner.workload import load_workload

    value = {name: s.value for name, s in resolve(flags, ["target", "budget", "threads"]).items()}
    target = present_target(value["target"] or choose_place(None).target)
    loaded = load_workload(study)
    params = configuration(loaded.workload, _values(assignments))
    budget_bytes = value["budget"] or _default_budget(loaded, target)
    prediction = _predict(loaded, params, target, budget_bytes, value["threads"] or visible_threads())
    if form == "table":
        _print(params, prediction, target, budget_bytes, explain=explain)
    elif form == "json":
        click.echo(json.dumps({"params": params, "target": target.name, **prediction.to_json()}, indent=2))
    else:
        from tuner.cli.output import emit_one

        emit_one({"params": params, "target": target.name, **prediction.to_json()}, form)


def _values(assignments: tuple[str, ...]) -> dict[str, str]:
    values = {}
    for assignment in assignments:
        name, separator, text = assignment.partition("=")
        if not separator or not name:
            raise UsageError(f"--set takes NAME=VALUE, not '{assignment}'")
        values[name.strip()] = text.strip()
    return values


def _default_budget(loaded: LoadedWorkload, target: Target) -> int | None:
    """Return the workload's own budget on a CPU, the whole card of a GPU's profile."""
    if target.kind == "cuda":
        return target.capacity_bytes
    default = loaded.workload.default_budget
    return parse_bytes(default) if default else None


def _predict(
    loaded: LoadedWorkload, params: dict[str, Any], target: Target, budget_bytes: int | None, threads: int
) -> Prediction:
    import tempfile

    from tuner.memory.calibration import Calibration
    from tuner.memory.prediction import predict
    from tuner.memory.predictor import Predictor

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with Predictor(loaded.reference, target.profile, log=log, threads=threads) as predictor:
            context_bytes = predictor.context_bytes(params) if target.kind == "cpu" else None
            found = predictor.estimate(params)
            return predict(
                found,
                target,
                Calibration.of_mix(target.kind, found.mix),
                context_bytes=context_bytes,
                budget_bytes=budget_bytes,
            )


def _print(
    params: dict[str, Any], prediction: Prediction, target: Target, budget_bytes: int | None, *, explain: bool
) -> None:
    from tuner.cli.output import short_params

    rows = [
        ("configuration", short_params(params)),
        ("target", target.name),
        ("allocated", format_bytes(prediction.allocated_bytes)),
        ("reserved", format_bytes(prediction.reserved_bytes)),
        ("device", _band(prediction.device)),
        ("required", _band(prediction.required)),
    ]
    if budget_bytes is not None:
        probability = prediction.fits_probability
        chance = "unknown" if probability is None else f"{probability:.1%}"
        rows += [("budget", format_bytes(budget_bytes)), ("fits", f"{chance}: {prediction.verdict}")]
    if prediction.peak_at is not None:
        at = prediction.peak_at
        rows.append(("peak at", f"{at.phase}, step {at.step}{f', module {at.module}' if at.module else ''}"))
    rows.append(("took", format_seconds(prediction.seconds)))
    for title, text in rows:
        click.echo(f"{title:<14} {text}")
    if explain:
        _explain(prediction)
    elif prediction.method == "untraceable":
        click.echo(f"{'because':<14} {prediction.assumptions[0]}")


def _band(band: Band | None) -> str:
    if band is None:
        return "unknown"
    return f"{format_bytes(band.expected)}  ({format_bytes(band.low)} to {format_bytes(band.high)})"


def _explain(prediction: Prediction) -> None:
    total = sum(prediction.categories.values())
    click.echo("\nat the peak")
    for name, size_bytes in sorted(prediction.categories.items(), key=lambda item: -item[1]):
        click.echo(
            f"  {name.replace('_', ' '):<16} {format_bytes(size_bytes):>11} {size_bytes / total:>6.1%}"
        )
    click.echo("\nlargest tensors at the peak")
    for tensor in prediction.largest:
        operator = tensor.operator.removeprefix("aten.").removesuffix(".default")
        click.echo(
            f"  {format_bytes(tensor.bytes):>11}  {tensor.category:<16} {operator:<28} {tensor.module}"
        )
    click.echo("\nassumed")
    for sentence in prediction.assumptions or ("nothing beyond the docs (docs/memory-model.md)",):
        click.echo(f"  - {sentence}")
