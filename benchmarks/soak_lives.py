"""How a driver's memory and descriptors went over one of its lives; for benchmarks/soak.py."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

LEAST_SAMPLES = 50  # in each quarter of a driver's life, for its descriptors to be judged
LEAST_TRIALS = 100  # that a driver must have seen for its growth to be judged


@dataclass
class Incarnation:
    """One life of a driver: finished trials of the study, resident bytes, descriptors by what they are."""

    samples: list[tuple[int, int, Counter[str]]] = field(default_factory=list)

    def slope_bytes(self) -> float | None:
        """Return by how much it grew per trial over its second half; None when it lived too short."""
        later = self.samples[len(self.samples) // 2 :]
        counts = [count for count, _, _ in later]
        if not counts or max(counts) - min(counts) < LEAST_TRIALS / 2:
            return None
        return statistics.linear_regression(counts, [size for _, size, _ in later]).slope

    def leaked_descriptors(self) -> Counter[str] | None:
        """Return what it never had fewer of in its last quarter than in its second, and how many more.

        None when it lived too short.

        How many trials run at once, and how many connections are open, goes up and down; what is
        leaked stays. In its first quarter a driver still opens what it works with.
        """
        quarter = len(self.samples) // 4
        if quarter < LEAST_SAMPLES:
            return None
        return _fewest(self.samples[-quarter:]) - _fewest(self.samples[quarter : 2 * quarter])


def _fewest(samples: list[tuple[int, int, Counter[str]]]) -> Counter[str]:
    """Return the fewest descriptors of each kind."""
    kinds = {kind for _, _, descriptors in samples for kind in descriptors}
    return Counter({kind: min(descriptors[kind] for _, _, descriptors in samples) for kind in kinds})


def descriptors_of(pid: int) -> Counter[str]:
    """Return a process's open descriptors, by what they are: `pipe`, `socket`, or a file's name."""
    found: Counter[str] = Counter()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = link.readlink()
            found[target.name if target.is_absolute() else re.sub(r":\[\d+\]$", "", str(target))] += 1
    return found
