"""What every process does before its baseline is read: the first use of PyTorch's libraries.

Threads start, oneDNN compiles kernels, the allocator takes its first pages. Capped before this, a
CPU child dies in a dozen ways that do not look like memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def warm_up(device: torch.device) -> None:
    """Run a tiny convolution, linear layer, backward pass and optimizer step on `device`."""
    import torch
    from torch import nn

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        loss = model(torch.ones(16, 3, 8, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
