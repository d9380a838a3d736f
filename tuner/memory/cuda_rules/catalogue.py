"""Every rule of CUDA targets: what it changes, where that is written, what it does not see."""

from __future__ import annotations

from typing import NamedTuple


class Rule(NamedTuple):
    """A rule, for people.

    Attributes:
        name: As a prediction lists it.
        effect: What it changes.
        source: Where CUDA's behaviour is written or was measured.
        limits: What it does not see.
    """

    name: str
    effect: str
    source: str
    limits: str


CATALOGUE = ()
