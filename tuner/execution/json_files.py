"""JSON files that a reader sees whole or not at all, and whose damage is one kind of error."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_fields(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is damaged.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is damaged: it holds no fields")
    return fields


@contextlib.contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Make one kind of error of all that wrong fields lead to.

    Raises:
        ValueError: They led to one.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees all of it or nothing."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Write a file aside and rename it, on disk before it is seen."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    Path(aside).replace(path)
