"""What a trial has to have reached by which epoch to go on: made by the driver, heeded by the worker.

The driver knows the other trials, the worker knows its own epoch. So the driver writes limits into
the run folder, before the launch and again whenever another trial has ended, and the worker looks
at them when it reports. A trial thus ends at the very epoch that decides, however short its epochs
are, and a seeded study with one trial at a time ends each at the same epoch again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Self

from tuner.records import Record


@dataclass(frozen=True)
class Limit(Record):
    """What has to be reached by one epoch.

    Attributes:
        value: The worst best-so-far of the objective with which a trial goes on.
        told: What it is, for a sentence: `the median 0.72 of 8 trials`.
    """

    value: float
    told: str


@dataclass(frozen=True)
class Limits:
    """The limits of one trial.

    Attributes:
        maximize: Whether more of the objective is better.
        by_epoch: Limits by epoch, from 1; an epoch that is left out has none.
    """

    maximize: bool
    by_epoch: dict[int, Limit] = field(default_factory=dict)

    def reason_to_stop(self, epoch: int, best: float | None) -> str | None:
        """Return why a trial ends at this epoch, or None while it goes on.

        Args:
            epoch: The epoch that has ended, from 1.
            best: The best of the objective so far; None where there was no number yet.
        """
        limit = self.by_epoch.get(epoch)
        if limit is None:
            return None
        side = "below" if self.maximize else "above"
        if best is None or math.isnan(best):
            return f"epoch {epoch}: no number yet, {side} {limit.told}"
        worse = best < limit.value if self.maximize else best > limit.value
        return f"epoch {epoch}: {best:.4g}, {side} {limit.told}" if worse else None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-ready values."""
        epochs = {str(epoch): limit.to_json() for epoch, limit in self.by_epoch.items()}
        return {"maximize": self.maximize, "by_epoch": epochs}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Return the limits that `to_json` wrote."""
        by_epoch = {int(epoch): Limit(**limit) for epoch, limit in fields["by_epoch"].items()}
        return cls(fields["maximize"], by_epoch)
