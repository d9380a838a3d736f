"""`tuner predict`: the peak memory of one configuration, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tuner.cli.options import format_option
from tuner.cli.predicting import (
    Setup,
    band_text,
    predicting,
    prediction_options,
    print_pairs,
    progress,
    values_of,
)
from tuner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tuner.memory.single_changes import Change, SingleChanges
    from tuner.records import Prediction
    from tuner.stand_in import Draw


# Fragmentation and what calibration adds are in it, so that the categories add up.
_CATEGORY_TITLES = {"workspace": "workspace, slack"}


@click.command("predict", short_help="Predict the peak memory of one configuration.")
@click.argument("study", metavar="STUDY")
@prediction_options
@click.option("--explain", is_flag=True, help="Show what takes the memory, what was assumed, what to change.")
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
    from tuner.cli.output import emit_one
    from tuner.stand_in import draw

    with predicting(study, flags) as setup:
        drawn = draw(setup.loaded.workload, values_of(assignments))
        prediction = setup(drawn.params)
        changes = _changes(setup, drawn, prediction) if explain else None
    if form == "table":
        _print(setup, drawn.params, prediction)
        if explain:
            _explain(prediction)
        if changes is not None:
            _print_changes(changes)
        return
    fields = {"params": drawn.params, "target": setup.target.name, **prediction.to_json()}
    if explain:
        fields |= _changes_as_fields(changes)
    emit_one(fields, form)


def _changes(setup: Setup, drawn: Draw, prediction: Prediction) -> SingleChanges | None:
    """Return what to change where a configuration does not surely fit; else None."""
    from tuner.memory.capacity import is_traced, surely_fits
    from tuner.memory.single_changes import single_changes

    if setup.budget_bytes is None or not is_traced(prediction) or surely_fits(prediction):
        return None
    with progress() as show:

        def predict(params: dict[str, Any]) -> Prediction:
            from tuner.cli.output import short_params

            show(f"what to change: {short_params(params)}")
            return setup(params)

        return single_changes(setup.loaded.workload, drawn, predict)


def _print(setup: Setup, params: dict[str, Any], prediction: Prediction) -> None:
    from tuner.cli.output import short_params

    rows = [
        ("configuration", short_params(params)),
        ("target", setup.target.name),
        ("allocated", format_bytes(prediction.allocated_bytes)),
        ("reserved", format_bytes(prediction.reserved_bytes)),
        ("device", band_text(prediction.device)),
        ("required", band_text(prediction.required)),
    ]
    if setup.budget_bytes is not None:
        probability = prediction.fits_probability
        chance = "unknown" if probability is None else f"{probability:.1%}"
        rows += [("budget", format_bytes(setup.budget_bytes)), ("fits", f"{chance}: {prediction.verdict}")]
    else:
        rows.append(("budget", "none, so no verdict; give one with --budget"))
    if prediction.peak_at is not None:
        at = prediction.peak_at
        rows.append(("peak at", f"{at.phase}, step {at.step}{f', module {at.module}' if at.module else ''}"))
    if prediction.method == "untraceable":
        rows.append(("because", prediction.assumptions[0]))
    rows.append(("took", format_seconds(prediction.seconds)))
    print_pairs(rows)


def _explain(prediction: Prediction) -> None:
    if prediction.allocated_bytes is not None:
        _explain_peak(prediction)
    if prediction.rules:
        click.echo("\nrules applied (docs/memory-model.md)")
        click.echo(click.wrap_text(", ".join(prediction.rules), 80, "  ", "  "))
    click.echo("\nassumed, and not seen")
    for sentence in prediction.assumptions or ("nothing beyond the docs (docs/memory-model.md)",):
        click.echo(click.wrap_text(sentence, 80, "  - ", "    "))


def _explain_peak(prediction: Prediction) -> None:
    total = sum(prediction.categories.values())
    click.echo("\nat the peak")
    for name, size_bytes in sorted(prediction.categories.items(), key=lambda item: -item[1]):
        click.echo(
            f"  {_CATEGORY_TITLES.get(name, name.replace('_', ' ')):<16} {format_bytes(size_bytes):>11} "
            f"{size_bytes / total:>6.1%}"
        )
    click.echo("\nlargest tensors at the peak")
    for tensor in prediction.largest:
        operator = tensor.operator.removeprefix("aten.").removesuffix(".default")
        click.echo(
            f"  {format_bytes(tensor.bytes):>10}  {tensor.category:<15} {operator:<24.24} {tensor.module}"
        )


def _print_changes(found: SingleChanges) -> None:
    if found.changes:
        click.echo("\nwhat to change: any one of these surely fits the budget")
        for change in found.changes:
            _print_change(change)
    else:
        click.echo("\nwhat to change: no change of one parameter alone surely fits the budget")
    if found.not_enough:
        click.echo("\nnot surely enough alone, at best")
        for change in found.not_enough:
            _print_change(change)
    if found.no_effect:
        click.echo(f"\nno effect on memory: {', '.join(found.no_effect)}")


def _print_change(change: Change) -> None:
    from tuner.cli.output import short_params

    before, after = (
        short_params({change.param: value}).partition("=")[2] for value in (change.before, change.after)
    )
    required = change.prediction.required
    needs = format_bytes(None if required is None else required.expected)
    how = "" if change.share is None else f"{change.share:.0%} {_direction(change)}"
    chance = change.prediction.fits_probability
    fits = "" if chance is None else f"  fits {chance:.0%}"
    click.echo(f"  {change.param:<16} {f'{before} → {after}':<22} {how:<9} {needs:>11}{fits}")


def _direction(change: Change) -> str:
    return "less" if change.after < change.before else "more"


def _changes_as_fields(found: SingleChanges | None) -> dict[str, Any]:
    """Return the documented keys; None where there is nothing to change."""
    if found is None:
        return {"single_changes": None, "not_enough": None, "no_effect": None}
    return {
        "single_changes": [_change_as_fields(change) for change in found.changes],
        "not_enough": [_change_as_fields(change) for change in found.not_enough],
        "no_effect": list(found.no_effect),
    }


def _change_as_fields(change: Change) -> dict[str, Any]:
    prediction = change.prediction
    return {
        "param": change.param,
        "before": change.before,
        "after": change.after,
        "share": change.share,
        "required_bytes": None if prediction.required is None else prediction.required.to_json(),
        "fits_probability": prediction.fits_probability,
        "verdict": prediction.verdict,
    }
