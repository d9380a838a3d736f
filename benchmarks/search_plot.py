"""Draws what benchmarks/search_quality.py measured with two objectives.

Run as: python benchmarks/search_plot.py docs/measurements/search_quality.json docs/search-quality.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def main(source: Path, target: Path) -> None:
    """Draw a box per policy, of its median area on each pair of table and cap, best on top."""
    found = json.loads(source.read_text())["two"]
    policies = sorted(found["policies"], key=lambda policy: -float(found["policies"][policy]["rank"]))
    policies = [policy for policy in policies if "±" not in policy]
    areas = [
        [float(np.median(cell[policy]["reached"])) for cell in found["cells"].values()] for policy in policies
    ]
    figure = Figure(figsize=(6.8, 3.0), layout="constrained")
    axes = figure.add_subplot()
    axes.boxplot(
        areas,
        orientation="horizontal",
        tick_labels=policies,
        widths=0.55,
        medianprops={"color": "#009E73", "linewidth": 2},
        showfliers=False,
    )
    for place, values in enumerate(areas, 1):
        axes.plot(values, [place] * len(values), ".", color="#0072B2", alpha=0.5, markersize=5)
    axes.set_xlabel("area under the feasible hypervolume in 60 launches")
    axes.set_xlim(0, 1)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
