"""Seeds that a seed makes."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, number: int | str) -> int:
    """Return the seed of one trial of a seeded study."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
