"""Case D08 of real users: a huge embedding table, with dense and with sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.memory_accuracy import real_peak, traced_peak
from tests.memory.tracing import estimated, mib_of_steps, tensors_on_cuda
from tests.models import Build
from tuner.memory.cpu_rules import OperatorProbe
from tuner.memory.peak import predict_peak
from tuner.records import Verdict
from tuner.units import MIB

TABLE_MIB = 3906.25  # 2,000,000 · 512 floats
ENTRIES_MIB = 32 * 64 * 512 * 4 / MIB  # of a batch's gradient: 4 MiB


class Bag(nn.Module):
    """The mean of 64 features' rows, then one linear."""

    def __init__(self, rows: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, width, sparse=sparse), nn.Linear(width, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.table(ids).mean(1))
        return result


def dense_adam(model: Bag) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters())]


def sparse_adam(model: Bag) -> list[torch.optim.Optimizer]:
    return [torch.optim.SparseAdam([model.table.weight]), torch.optim.Adam(model.head.parameters())]


def plain_sgd(model: Bag) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def bag(optimizers_of: Callable[[Bag], Any], rows: int = 2_000_000, width: int = 512) -> Build:
    """Build a step of batch 32; the table's gradient is sparse unless Adam wants it dense."""

    def build(device: torch.device) -> Callable[[], None]:
        model = Bag(rows, width, sparse=optimizers_of is not dense_adam).to(device)
        optimizers = optimizers_of(model)

        def step() -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.arange(32 * 64, device=device).view(32, 64)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()

        return step

    return build


def test_a_dense_gradient_makes_five_tables() -> None:
    """Case D08: weight, gradient, two moments and a temporary: 19,531 MiB; tolerance 0.1 %."""
    found = estimated(tensors_on_cuda(bag(dense_adam)))

    assert (found.allocated_bytes or 0) / MIB == pytest.approx(5 * TABLE_MIB, rel=0.001)
    for category, tables in {"parameters": 1, "gradients": 1, "optimizer_state": 2, "temporaries": 1}.items():
        assert found.categories[category] / MIB == pytest.approx(tables * TABLE_MIB, rel=0.001)
    assert predict_peak(bag(dense_adam), "a100-40gb", budget="16GiB").verdict is Verdict.PRUNE
    # The table is what is large: the command's hint is in tests/cli/test_predict.py.
    assert {tensor.bytes for tensor in found.largest[:5]} == {2_000_000 * 512 * 4}


@pytest.mark.parametrize(("optimizers_of", "tables"), [(plain_sgd, 1), (sparse_adam, 3)])
def test_a_sparse_gradient_is_its_entries(optimizers_of: Callable[[Bag], Any], tables: int) -> None:
    """Case D08: the gradient term drops from 3,906 to 4 MiB; tolerance 1 % for its indices."""
    trace = tensors_on_cuda(bag(optimizers_of))
    found = estimated(trace)

    assert found.categories["gradients"] / MIB == pytest.approx(ENTRIES_MIB, rel=0.01)
    # Beside the tables, SparseAdam holds six more sets of entries in its update.
    assert 0 < max(mib_of_steps(trace)) - tables * TABLE_MIB < 8 * ENTRIES_MIB
    assert predict_peak(bag(optimizers_of), "a100-40gb", budget="16GiB").verdict is Verdict.LAUNCH


@pytest.mark.parametrize("optimizers_of", [plain_sgd, sparse_adam])
def test_sparse_gradients_are_traced_to_their_true_peak(optimizers_of: Callable[[Bag], Any]) -> None:
    """Baseline: the profiler over the same three steps on a CPU; tolerance 0.5 %.

    Entries are a fifth of the table here, so that losing a set of them would show.
    """
    build = bag(optimizers_of, rows=10_000, width=256)
    assert traced_peak(build, OperatorProbe()) == pytest.approx(real_peak(build), rel=0.005)
