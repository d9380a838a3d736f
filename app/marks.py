"""Colours and marks that all figures share."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

# Colours that people with colour-blindness tell apart (Okabe and Ito, 2008).
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
COLORS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", GREY)
# Above so many points SVG is slow. A page holds about eight WebGL plots: none of ours has more than two.
MOST_AS_SVG = 1000


def scatter(count: int, **arguments: Any) -> Any:
    """Return a trace of points, in WebGL where its figure has many."""
    return (go.Scattergl if count > MOST_AS_SVG else go.Scatter)(**arguments)
