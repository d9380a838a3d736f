"""What the CUDA rules assume of a GPU and its libraries, measured.

Each fact is a list of rows `{what, measured, assumed}`: bytes, text, or None where nothing is
assumed (or nothing could be measured). Each is taken in a fresh process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu_configurations import CONFIGURATIONS
from tuner.measure import nvml
from tuner.measure.nvml import Use
from tuner.memory.cuda_rules import CudaDevice, cuda_rules
from tuner.memory.cuda_rules.attention import Attention, choose_backend
from tuner.memory.cuda_rules.recurrent import GATES, RESERVE_UNITS
from tuner.memory.targets import profile_of, resolve_target
from tuner.memory.trace import trace_build
from tuner.memory.workspaces import cublas_workspace_bytes, cublaslt_workspace_bytes
from tuner.warmup import warm_up

Row = dict[str, Any]
_FLOAT = 4
_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # c10's SDPBackend
# (kind, steps, batch, hidden, layers, directions)
_LAYOUTS = (
    ("lstm", 64, 32, 256, 1, 1),
    ("lstm", 128, 32, 256, 1, 1),
    ("lstm", 64, 64, 256, 1, 1),
    ("lstm", 64, 32, 512, 1, 1),
    ("lstm", 64, 32, 256, 2, 1),
    ("lstm", 64, 32, 256, 1, 2),
    ("lstm", 100, 48, 384, 3, 2),
    ("gru", 64, 32, 256, 1, 1),
    ("gru", 128, 64, 512, 2, 1),
    ("gru", 64, 32, 256, 1, 2),
    ("rnn_tanh", 64, 32, 256, 1, 1),
    ("rnn_tanh", 128, 64, 512, 2, 2),
)


def device_use() -> Use:
    """Return all that is used on the device, by anybody."""
    return _asked(-1)


def used_by_this_process(others_bytes: int | None) -> Use:
    """Return what this process uses, or what the device's use has grown by from `others_bytes`."""
    used = _asked(os.getpid())
    return nvml.grown_since(others_bytes, used) if used.source == nvml.DEVICE_WIDE else used


def _asked(pid: int) -> Use:
    try:
        return nvml.process_use(os.environ.get("CUDA_VISIBLE_DEVICES", "0"), pid)
    except ImportError:
        return Use(None, "nvidia-ml-py is not installed")


def context(device: torch.device) -> list[Row]:
    """The context after a tiny operation, a warm-up, an LSTM, attention.

    Assumed is the profile's lowest and highest, or its figure.
    """
    others_bytes = device_use().bytes
    rows: list[Row] = []

    def note(what: str, assumed: int | None = None) -> None:
        torch.cuda.synchronize(device)
        used = used_by_this_process(others_bytes)
        taken = None if used.bytes is None else used.bytes - torch.cuda.memory_reserved(device)
        rows.append({"what": f"context after {what} ({used.source})", "measured": taken, "assumed": assumed})

    torch.zeros(1, device=device)
    note("a tiny operation")
    warm_up(device)
    properties = torch.cuda.get_device_properties(device)
    profile = resolve_target(profile_of(properties.name, properties.total_memory) or "cuda")
    note("convolution, linear, backward, optimizer step", profile.context_bytes)
    cell = nn.LSTM(64, 64).to(device)
    cell(torch.randn(8, 4, 64, device=device))[0].sum().backward()
    note("an LSTM too")
    query = torch.randn(2, 4, 128, 64, device=device, requires_grad=True)
    F.scaled_dot_product_attention(query, query, query).sum().backward()
    note("attention too")
    return rows


def tracing_context(device: torch.device) -> list[Row]:
    """What tracing takes on a GPU that is visible: nothing, it is assumed."""
    before = device_use()
    capability = CudaDevice.compute_capability
    trace_build(CONFIGURATIONS["adam"].build, cuda_rules(CudaDevice(capability)))
    used = used_by_this_process(before.bytes)
    what = f"device bytes of a process that only traced ({used.source})"
    return [{"what": what, "measured": used.bytes, "assumed": 0}]


def cublas_workspaces(device: torch.device) -> list[Row]:
    """CuBLAS workspaces of the forward thread, of autograd's, of another stream.

    All tensors are gone when it is read, so what stays is the workspaces.
    """
    workspace = cublas_workspace_bytes(torch.cuda.get_device_capability(device))
    left = torch.cuda.memory_allocated
    rows: list[Row] = []

    def note(what: str, before: int, assumed: int) -> None:
        torch.cuda.synchronize(device)
        rows.append({"what": what, "measured": left(device) - before, "assumed": assumed})

    before = left(device)
    _multiply(device)
    note("cuBLAS workspace, forward", before, workspace)
    before = left(device)
    _multiply(device, backward=True)
    note("cuBLAS workspace, backward", before, workspace)
    before = left(device)
    torch.cuda.reset_peak_memory_stats(device)
    inside = _linear_with_bias(device)
    note("cuBLASLt, kept", before, 0)
    rows.append({"what": "cuBLASLt, meanwhile", "measured": inside, "assumed": cublaslt_workspace_bytes()})
    before = left(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        _multiply(device)
    note("cuBLAS workspace, another stream", before, workspace)
    return rows


def _multiply(device: torch.device, *, backward: bool = False) -> None:
    left, right = (torch.randn(256, 256, device=device, requires_grad=backward) for _ in range(2))
    product = left @ right
    if backward:
        product.sum().backward()


def _linear_with_bias(device: torch.device) -> int:
    """Return what a product with a fused bias takes beside its output while it runs."""
    with torch.no_grad():
        x, weight, bias = (torch.randn(*shape, device=device) for shape in ((256, 256), (256, 256), (256,)))
        torch.cuda.reset_peak_memory_stats(device)
        out = F.linear(x, weight, bias)
        inside = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        del out
    return inside


def recurrent_reserve(device: torch.device) -> list[Row]:
    """The reserve and workspace of recurrent layers in cuDNN, for several shapes.

    The reserve is what stays beside output and last states; the workspace is what is gone again.
    """
    rows: list[Row] = []
    for layout in _LAYOUTS:
        kind, steps, batch, hidden, layers, directions = layout
        label = f"{kind} T={steps} B={batch} H={hidden} layers={layers} directions={directions}"
        measured, assumed = _recurrent_memory(device, layout), (*assumed_of(layout), None)
        rows.extend(
            {"what": f"{label}: {part}", "measured": size, "assumed": expected}
            for part, size, expected in zip(
                ("reserve", "workspace", "backward"), measured, assumed, strict=True
            )
        )
    return rows


def assumed_of(layout: tuple[str, int, int, int, int, int]) -> tuple[int, int]:
    """Return the reserve and the forward workspace that the rule takes for a layout."""
    kind, steps, batch, hidden, layers, directions = layout
    units = steps * batch * hidden * _FLOAT
    return RESERVE_UNITS[kind] * layers * directions * units, GATES[kind] * units


def _recurrent_memory(
    device: torch.device, layout: tuple[str, int, int, int, int, int]
) -> tuple[int, int, int]:
    """Return reserve, forward workspace, and what backward takes at its peak beyond its start."""
    kind, steps, batch, hidden, layers, directions = layout
    layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}[kind]
    cell: Any = layer(hidden, hidden, layers, bidirectional=directions == 2).to(device)
    x = torch.randn(steps, batch, hidden, device=device, requires_grad=True)
    first: Any = torch.zeros(layers * directions, batch, hidden, device=device)
    first = (first, first.clone()) if kind == "lstm" else first
    cell(x, first)[0].sum().backward()  # handles and gradients exist from here on
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output, last = cell(x, first)
    live, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    states = last if isinstance(last, tuple) else (last,)
    results = sum(-(-tensor.nbytes // 512) * 512 for tensor in (output, *states))
    gradient = torch.ones_like(output)
    start = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output.backward(gradient)
    return live - before - results, peak - live, torch.cuda.max_memory_allocated(device) - start


def attention_choice(device: torch.device) -> list[Row]:
    """Attention backends that PyTorch chooses, by type, mask, head and length."""
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    cases = [(dtype, head, False, 256) for dtype in (full, half, brain) for head in (64, 72, 128, 256)]
    cases += [(full, 64, True, 256), (half, 64, True, 256), (brain, 64, True, 256), (brain, 64, True, 250)]
    assumed_device = CudaDevice(torch.cuda.get_device_capability(device))
    rows: list[Row] = []
    for dtype, head, masked, length in cases:
        query = torch.randn(2, 4, length, head, device=device, dtype=dtype, requires_grad=True)
        mask = torch.ones(length, length, device=device, dtype=torch.bool) if masked else None
        chosen = torch._fused_sdp_choice(query, query, query, mask, 0.0, False)  # noqa: FBT003
        assumed = choose_backend(Attention(query, query, query, mask), assumed_device)
        what = f"attention {str(dtype).removeprefix('torch.')} head={head} length={length}"
        what += " boolean mask" if masked else ""
        rows.append({"what": what, "measured": _BACKENDS.get(int(chosen), str(chosen)), "assumed": assumed})
    return rows


FACTS: dict[str, Callable[[torch.device], list[Row]]] = {
    "context": context,
    "tracing_context": tracing_context,
    "cublas_workspaces": cublas_workspaces,
    "recurrent_reserve": recurrent_reserve,
    "attention_choice": attention_choice,
}
