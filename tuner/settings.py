"""Settings: a flag, else `TUNER_*`, else `[tool.tuner]` or `tuner.toml`, else a default.

Each value keeps its origin, so that a person can see why a study ran as it did.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import UsageError
from tuner.records import Record
from tuner.units import parse_bytes, parse_seconds


@dataclass(frozen=True)
class Setting(Record):
    """A resolved setting and where it came from: `flag`, a variable, a file, or `default`."""

    value: Any
    origin: str


@dataclass(frozen=True)
class _Spec:
    parse: Callable[[str], Any]
    default: Any
    help: str


def _whole(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"'{text}' is not a whole number") from None
    if number < 0:
        raise UsageError(f"'{text}' is negative")
    return number


def _jobs(text: str) -> int:
    jobs = _whole(text)
    if jobs == 0:
        raise UsageError("with 0 jobs no trial would ever run")
    return jobs


def _seed(text: str) -> int:
    seed = _whole(text)
    if seed >= 1 << 63:
        raise UsageError(f"a seed is less than 2^63, not {seed}")
    return seed


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"'{text}' is not a share", hint="a share is a number from 0 to 1, such as 0.1")
    return share


def _switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"'{text}' is neither true nor false")


def _checkpoints(text: str) -> str:
    if text not in ("front", "all", "none"):
        raise UsageError(f"checkpoints cannot be kept as '{text}'", hint="known: front, all, none")
    return text


def _options(text: str) -> dict[str, str]:
    options = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not name or not equals or not value:
            raise UsageError(f"'{part}' is no option", hint="an option is written as name=value")
        options[name.replace("-", "_")] = value
    return options


SPECS: dict[str, _Spec] = {
    "storage": _Spec(str, "sqlite:///tuner.db", "database URL"),
    "runs_dir": _Spec(str, "tuner-runs", "folder of the run folders"),
    "target": _Spec(str, None, "devices: cpu, cuda, cuda:N, cuda:N,M; by default the best present"),
    "budget": _Spec(parse_bytes, None, "device bytes one trial may take"),
    "pool": _Spec(parse_bytes, None, "device bytes all trials on a device may take together"),
    "jobs": _Spec(_jobs, None, "the most trials that run at once; by default memory decides"),
    "trials": _Spec(_whole, 30, "launched trials in the study"),
    "study_name": _Spec(str, None, "study to create or resume; by default the workload's name"),
    "seed": _Spec(_seed, None, "makes a CPU run repeatable"),
    "single": _Spec(_switch, default=False, help="one objective, with memory as a constraint"),
    "sampler": _Spec(
        str, None, "how configurations are drawn; by default memory-aware, tpe with one objective"
    ),
    "sampler_option": _Spec(_options, {}, "its options, name=value pairs separated by commas"),
    "warm_start": _Spec(str, None, "study to learn from"),
    "max_failures": _Spec(_whole, None, "failed launches before the study stops"),
    "trial_timeout": _Spec(parse_seconds, None, "seconds one trial may take"),
    "timeout": _Spec(parse_seconds, None, "seconds after which no further trial is started"),
    "threads": _Spec(_whole, None, "intra-op threads per trial; by default all cores"),
    "audit": _Spec(_share, 0.0, "share of the pruned configurations to launch all the same"),
    "keep_checkpoints": _Spec(_checkpoints, "front", "which weights to keep: front, all, none"),
    "pruner": _Spec(str, "none", "when trials are stopped early: none, median, percentile, asha"),
    "pruner_option": _Spec(_options, {}, "options of the pruner: name=value,name=value"),
    "port": _Spec(_whole, 8501, "port of the app"),
}


def resolve(flags: Mapping[str, Any], names: list[str] | None = None) -> dict[str, Setting]:
    """Return each named setting (by default all) from the first place that has it.

    Args:
        flags: Values from the command line, as text or parsed; None means not given.
        names: The settings wanted.

    Raises:
        UsageError: A value cannot be read, or a file holds an unknown setting.
    """
    from_file, file_name = _file_settings()
    resolved = {}
    for name in names or list(SPECS):
        spec, variable = SPECS[name], f"TUNER_{name.upper()}"
        if flags.get(name) is not None:
            resolved[name] = Setting(_parsed(spec, flags[name]), "flag")
        elif os.environ.get(variable):
            resolved[name] = Setting(_named(spec, os.environ[variable], variable), variable)
        elif name in from_file:
            resolved[name] = Setting(_named(spec, from_file[name], f"{name} in {file_name}"), file_name)
        else:
            resolved[name] = Setting(spec.default, "default")
    return resolved


def _parsed(spec: _Spec, value: Any) -> Any:
    return spec.parse(value) if isinstance(value, str) else value


def _named(spec: _Spec, value: Any, place: str) -> Any:
    try:
        return spec.parse(_as_text(value))
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", hint=error.hint) from None


def _as_text(value: Any) -> str:
    """Return a value from a file as a flag would have it; options may be a list or a table."""
    if isinstance(value, dict):
        return ",".join(f"{name}={option}" for name, option in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _file_settings() -> tuple[dict[str, Any], str]:
    """Return the settings of this folder's first file that has any, and the file's name.

    Raises:
        UsageError: The file cannot be read, or holds an unknown setting.
    """
    for file_name, keys in (("tuner.toml", ()), ("pyproject.toml", ("tool", "tuner"))):
        path = Path(file_name)
        if not path.is_file():
            continue
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{file_name} cannot be read: {error}") from error
        for key in keys:
            values = values.get(key, {})
            if not isinstance(values, dict):
                raise UsageError(f"{file_name}: [{key}] is not a table")
        normalised = {name.replace("-", "_"): value for name, value in values.items()}
        unknown = sorted(set(normalised) - set(SPECS))
        if unknown:
            raise UsageError(
                f"{file_name} has no setting '{unknown[0]}'",
                hint=f"known settings: {', '.join(sorted(SPECS))}",
            )
        if normalised:
            return normalised, file_name
    return {}, ""
