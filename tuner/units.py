"""Sizes and durations as text: the only place where a number of bytes meets a unit.

Everywhere else bytes are `int` (names end in `_bytes`) and seconds are `float` (`_seconds`).
"""

from __future__ import annotations

import re

from tuner.errors import UsageError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(?P<number>[+-]?(\d+(\.\d*)?|\.\d+))\s*(?P<unit>[A-Za-z]*)\s*")
_SIZE_HINT = "sizes look like 700MiB, 6GiB, 6GB (10^9 bytes) or a plain number of bytes"


def parse_bytes(text: str) -> int:
    """Return the positive number of bytes that `text` names.

    Binary units (KiB, MiB, GiB, TiB) count in powers of 1024, decimal ones (kB, MB, GB, TB) in
    powers of 1000, in any case; no unit means bytes.

    Raises:
        UsageError: `text` is not a size, or the size is not positive.
    """
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _UNITS.get(match["unit"].lower())
    if match is None or unit is None:
        raise UsageError(f"'{text}' is not a size", hint=_SIZE_HINT)
    try:
        size_bytes = round(float(match["number"]) * unit)
    except OverflowError:
        raise UsageError(f"'{text[:80]}' is not a size", hint=_SIZE_HINT) from None
    if size_bytes <= 0:
        raise UsageError(f"a size must be positive, not '{text}'", hint=_SIZE_HINT)
    return size_bytes


def format_bytes(size_bytes: int | None) -> str:
    """Return a size in the largest binary unit that keeps it at 1 or more; '–' for unknown."""
    if size_bytes is None:
        return "–"
    magnitude = abs(size_bytes)
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if magnitude >= unit:
            return f"{size_bytes / unit:.{digits}f} {name}"
    return f"{size_bytes} B"


def parse_seconds(text: str) -> float:
    """Return the positive number of seconds in `text`, such as `90`, `90s`, `15m` or `2h`.

    Raises:
        UsageError: `text` is not a duration, or it is not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(s|m|h|d)?\s*", text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(f"'{text}' is not a duration", hint="durations look like 90, 90s, 15m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2] or "s"]


def format_seconds(seconds: float | None) -> str:
    """Return a duration a person reads at a glance: `0.4 s`, `12 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
