"""Texts that may hold a storage URL, made fit to be shown and stored.

A password may come in any of three ways: as the URL of `--storage`, as `TUNER_STORAGE`, or from a
settings file. What is kept of a URL is kind, host and database.
"""

from __future__ import annotations

from typing import Any

from tuner.errors import UsageError
from tuner.store.engine import SHORTEST_SECRET, URL, describe_url, parse_url, secrets_of

HIDDEN = "***"


def shown_url(text: str) -> str:
    """Return a storage URL without user, password and query; `***` for what is none."""
    try:
        url = parse_url(text)
    except UsageError:
        return HIDDEN
    return f"sqlite:///{url.database}" if url.drivername == "sqlite" else describe_url(url)


def masked(value: Any, url: URL) -> Any:
    """Return a JSON-ready value with every text in it made fit to be shown.

    A text that is a URL (behind `--option=`, too) keeps what `shown_url` gives. A text that holds a
    secret of `url`, as it is or percent-encoded, becomes `***` as a whole: with the rest left
    standing, a short secret could be read off what is missing.

    Args:
        value: Any nesting of dictionaries and lists; keys are left alone.
        url: The database in use.
    """
    if isinstance(value, dict):
        return {key: masked(item, url) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(item, url) for item in value]
    return _masked_text(value, url) if isinstance(value, str) else value


def _masked_text(text: str, url: URL) -> str:
    if "://" in text:
        option, separator, rest = text.partition("=")
        if separator and option.startswith("-") and "://" not in option:
            return f"{option}={shown_url(rest)}"
        return shown_url(text)
    secrets = (secret for secret in secrets_of(url) if len(secret) > SHORTEST_SECRET)
    return HIDDEN if any(secret in text for secret in secrets) else text
