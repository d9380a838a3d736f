"""Sizes and durations: against exact fractions, the IEC and SI powers, rich, and timedelta."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.filesize import decimal as rich_decimal

from tuner.errors import UsageError
from tuner.units import format_bytes, format_seconds, parse_bytes, parse_seconds

BINARY = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}  # IEC 80000-13
DECIMAL = {"kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}  # SI
UNITS = {"B": 1, **BINARY, **DECIMAL}


@settings(deadline=None)
@given(st.integers(1, 1 << 53))
def test_a_formatted_size_parses_back_within_half_of_its_last_digit(size_bytes: int) -> None:
    text = format_bytes(size_bytes)

    number, unit = text.split()
    digits = len(number.partition(".")[2])
    tolerance = Fraction(UNITS[unit], 2 * 10**digits) + 1  # one byte: parse_bytes rounds too
    assert abs(parse_bytes(text) - size_bytes) <= (tolerance if digits else 0)


@settings(deadline=None)
@given(st.integers(1, 1 << 60))
def test_a_formatted_size_is_short_and_in_the_largest_unit_that_it_fills(size_bytes: int) -> None:
    number, unit = format_bytes(size_bytes).split()

    larger = [scale for name, scale in BINARY.items() if scale > UNITS[unit] and name != "TiB"]
    assert all(size_bytes < scale for scale in larger)
    assert size_bytes >= UNITS[unit]
    assert len(number.partition(".")[2]) <= 2


@settings(deadline=None)
@given(st.integers(1, 10**9), st.integers(0, 6), st.sampled_from(sorted(UNITS)))
def test_a_size_is_its_number_times_its_unit(number: int, digits: int, unit: str) -> None:
    exact = Fraction(number, 10**digits) * UNITS[unit]
    text = f"{number // 10**digits}.{number % 10**digits:0{digits}d}" if digits else str(number)
    if exact < 1:
        return

    # A double has 53 bits: one part in 2^52 either way, and half a byte of rounding.
    assert abs(parse_bytes(f"{text}{unit}") - exact) <= exact / 2**52 + Fraction(1, 2)


@settings(deadline=None)
@given(st.integers(1000, 10**15 - 1))
def test_decimal_units_are_read_as_rich_writes_them(size_bytes: int) -> None:
    text = rich_decimal(size_bytes).replace(",", "")  # "6.0 GB", one decimal; "1,000.0 kB" just below 1 MB

    unit = DECIMAL[text.split()[1]]
    assert abs(parse_bytes(text) - size_bytes) <= unit * 0.05 + 1


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("700MiB", 734_003_200),
        ("700MB", 700_000_000),
        ("6GiB", 6_442_450_944),
        ("6GB", 6_000_000_000),
        ("1.5GiB", 1_610_612_736),
        (".5KiB", 512),
        ("512", 512),
        ("512B", 512),
        ("  6 gib ", 6_442_450_944),
        ("+1kb", 1000),
    ],
)
def test_mib_are_not_mb_and_case_and_spaces_do_not_matter(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@settings(deadline=None)
@given(st.integers(1, 1 << 53))
def test_a_plain_number_of_bytes_is_exact(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == size_bytes


@pytest.mark.parametrize(
    "text", ["", " ", "6XB", "6Gi", "6 G B", "GiB", "1e9", "nan", "inf", "--5", "1,5GiB", "0x10"]
)
def test_what_is_not_a_size_is_refused_with_the_text_and_examples(text: str) -> None:
    with pytest.raises(UsageError, match=f"'{re.escape(text)}' is not a size") as caught:
        parse_bytes(text)

    assert caught.value.exit_code == 2
    assert caught.value.hint is not None
    assert "700MiB" in caught.value.hint
    assert "6GB (10^9 bytes)" in caught.value.hint


@pytest.mark.parametrize("text", ["0", "-1", "0GiB", "-6GiB", "0.0", "0.4"])
def test_a_size_of_nothing_or_less_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="must be positive") as caught:
        parse_bytes(text)

    assert text in caught.value.message
    assert caught.value.hint is not None


def test_a_number_beyond_every_float_is_refused_not_an_overflow() -> None:
    with pytest.raises(UsageError):
        parse_bytes("9" * 400)


@settings(deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_a_positive_size_or_a_usage_error(text: str) -> None:
    try:
        size_bytes = parse_bytes(text)
    except UsageError:
        return
    assert isinstance(size_bytes, int)
    assert size_bytes > 0


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("90", timedelta(seconds=90)),
        ("90s", timedelta(seconds=90)),
        ("1.5 m", timedelta(minutes=1.5)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        (" 1d ", timedelta(days=1)),
    ],
)
def test_durations_mean_what_timedelta_says(text: str, duration: timedelta) -> None:
    assert parse_seconds(text) == duration.total_seconds()


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "-5m", "1w", "soon", "nan", "inf", "1:30"])
def test_what_is_not_a_duration_is_refused_with_examples(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration") as caught:
        parse_seconds(text)

    assert caught.value.hint is not None
    assert "15m" in caught.value.hint


@settings(deadline=None)
@given(st.floats(0, 10**7))
def test_a_formatted_duration_says_the_time_within_what_it_shows(seconds: float) -> None:
    text = format_seconds(seconds)

    parts = {unit: float(number) for number, unit in re.findall(r"([\d.]+) (s|min|h)\b", text)}
    said = timedelta(hours=parts.get("h", 0), minutes=parts.get("min", 0), seconds=parts.get("s", 0))
    # Half of the last digit shown; minutes beside hours are cut off, not rounded.
    tolerance = 0.05 if seconds < 10 else 60 if "h" in parts else 0.5
    assert abs(said.total_seconds() - seconds) <= tolerance + 1e-6
    assert parts.get("min", 0) < 60


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0.4 s"), (12.0, "12 s"), (185.0, "3 min 5 s"), (7800.0, "2 h 10 min"), (None, "–")],
)
def test_durations_read_as_the_docstring_shows(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


def test_unknown_is_a_dash_and_never_a_number() -> None:
    assert format_bytes(None) == "–"
    assert format_bytes(0) == "0 B"
