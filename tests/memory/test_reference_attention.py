"""Attention written by hand, what is alive before backward, against `memory_allocated` on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reference.attention import Row, predicted_bytes, rows
from tuner.units import MIB


@pytest.mark.reference
def test_attention_is_predicted_within_a_hundredth(reference: Path) -> None:
    """Tolerance 1 % of allocated bytes; compiled rows are traced eagerly."""
    measured = rows(reference)
    errors = {row[:4]: predicted_bytes(row) / row.measured_bytes - 1 for row in measured}
    assert len(errors) == 20
    assert {row: error for row, error in errors.items() if abs(error) > 0.01} == {}


def test_attention_of_16384_positions_is_two_score_matrices() -> None:
    """Baseline: 2 × 8 × 16,384² floats, 2 workspaces of 32 MiB, 6 tensors of 8 × 16,384 × 16; 0.1 %."""
    matrices, small = 2 * 8 * 16_384**2 * 4, 6 * 8 * 16_384 * 16 * 4
    by_hand = matrices + small + 2 * 32 * MIB
    assert predicted_bytes(Row(16_384, 16, 8, compiled=False, measured_bytes=0)) == pytest.approx(
        by_hand, rel=0.001
    )
