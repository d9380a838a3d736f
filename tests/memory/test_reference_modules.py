"""Single modules against Liger-Kernel's benchmark data (BSD-2-Clause): `max_memory_allocated` on GPUs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reference.modules import WITH_LEFTOVERS, Row, predicted_bytes, rows
from tuner.units import MIB

A100, H100, RTX_3090 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090"

# How many rows of each kernel can be predicted from their own configuration.
ASSERTABLE = {
    "cross_entropy": 21, "fused_linear_cross_entropy": 4, "geglu": 16, "kl_div": 10, "layer_norm": 14,
    "megatron_swiglu": 12, "relu_squared": 8, "rms_norm": 6, "rope": 12, "softmax": 16, "tvd": 6,
}  # fmt: skip

# The smallest row of eight kernels, restated from benchmark/data/all_benchmark_data.csv.
RESTATED: list[tuple[str, str, str, str, dict[str, Any], str, int]] = [
    ("cross_entropy", "full", "V", "4096", {"B": 8, "T": 2048}, A100, 1_342_309_376),
    ("fused_linear_cross_entropy", "full", "BT", "4096", {"H": 4096, "V": 128_256}, A100, 6_388_220_928),
    ("layer_norm", "full", "N", "1024", {"M": 4096}, A100, 83_951_616),
    ("rms_norm", "full", "H", "1024", {"M": 2048}, A100, 83_906_560),
    ("tvd", "full", "V", "4096", {"B": 8, "T": 2048}, H100, 2_147_484_672),
    ("softmax", "full", "N", "128", {"dtype": "torch.bfloat16"}, RTX_3090, 3_072),
    ("relu_squared", "full", "N", "128", {"dtype": "torch.bfloat16"}, H100, 4_096),
    ("kl_div", "full", "V", "4096", {"B": 8, "T": 2048}, "NVIDIA H100 PCIe", 1_879_048_192),
]


@functools.cache
def _rows(folder: Path) -> list[Row]:
    return rows(folder)


@pytest.mark.parametrize("restated", RESTATED, ids=lambda restated: restated[0])
def test_eight_kernels_are_predicted_within_a_thousandth(restated: Any) -> None:
    """Tolerance 0.1 % of allocated bytes; the figures are in float32 MiB."""
    kernel, mode, name, x, config, gpu, measured_bytes = restated
    row = Row(kernel, "huggingface", mode, name, x, config, gpu, measured_bytes)
    assert predicted_bytes(row) == pytest.approx(measured_bytes, rel=0.001)


@pytest.mark.reference
@pytest.mark.parametrize("kernel", list(ASSERTABLE))
def test_rows_of_a_kernel_are_predicted_within_a_thousandth(kernel: str, reference: Path) -> None:
    """Tolerance 0.1 % of allocated bytes, row by row."""
    of_kernel = [row for row in _rows(reference) if row.kernel == kernel]
    assert len(of_kernel) == ASSERTABLE[kernel]
    errors = {(row.gpu, row.mode, row.x): predicted_bytes(row) / row.measured_bytes - 1 for row in of_kernel}
    assert {row: error for row, error in errors.items() if abs(error) > 0.001} == {}


@pytest.mark.reference
def test_every_row_of_the_file_is_judged(reference: Path) -> None:
    kernels = {row.kernel for row in _rows(reference)}
    assert kernels == {*ASSERTABLE, *WITH_LEFTOVERS}
    assert (len(_rows(reference)), sum(ASSERTABLE.values())) == (145, 125)


def _leftovers(reference: Path, kernel: str, group: str) -> dict[int, float]:
    """Return measured less predicted of each row of a group, in MiB, by its size."""
    found = [row for row in _rows(reference) if row.kernel == kernel and row.group[1] == group]
    return {row.size: (row.measured_bytes - predicted_bytes(row)) / MIB for row in found}


@pytest.mark.reference
@pytest.mark.parametrize("width", ["768", "4096"])
def test_embedding_rows_differ_from_one_another_as_predicted(width: str, reference: Path) -> None:
    """Memory of earlier work is in all rows of a width, a constant; tolerance 0.01 MiB."""
    leftovers = _leftovers(reference, "embedding", width)
    assert len(leftovers) == 8
    assert max(leftovers.values()) - min(leftovers.values()) < 0.01


@pytest.mark.reference
def test_distillation_rows_differ_from_one_another_as_predicted(reference: Path) -> None:
    """Tolerance 0.02 MiB; 16 MiB at 1,024, where a warm allocator splits blocks that a cold one cannot."""
    leftovers = _leftovers(reference, "distill_jsd_loss", "")
    smallest = leftovers.pop(1024)
    assert sorted(leftovers) == [2048, 4096, 8192]
    assert max(leftovers.values()) - min(leftovers.values()) < 0.02
    assert abs(smallest - leftovers[2048]) < 16
