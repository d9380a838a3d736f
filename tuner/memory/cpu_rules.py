"""What a CPU kernel allocates inside itself, which no fake tensor shows.

oneDNN reorders the operands of convolutions and recurrent layers into layouts of its own: whole
activation-sized buffers inside one operator, and for an LSTM a workspace kept until its backward.
Which layout it takes depends on the processor, so a formula would be right on one machine only.
Instead the operator itself is run on this host, on real tensors of the same shapes with two small
batches, below PyTorch's profiler; every buffer is a line `a + b·batch`, extended to the real batch.

Limits: operators other than those in `PROBED` are taken to need their outputs alone; a kernel that
is chosen by batch size is seen as it behaves at the probed batches (at most 32 samples).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tuner.memory.compiled import compiled_runs_eagerly
from tuner.memory.matrices import PRODUCTS, copied_bytes
from tuner.memory.rules import KernelCall, KernelMemory, Rules
from tuner.profiling import peak_of, profiled_peak
from tuner.units import MIB

_aten = torch.ops.aten
# Below 16 oneDNN takes other kernels than later: extended from (4, 8) or (8, 16) to 64 and 1,024,
# single convolutions came out up to 14 % wrong; from (16, 32) on, within 2.2 %.
_PROBE_BATCHES = (16, 32)
_SMALL_PROBE_BATCHES = (4, 8)  # where the usual ones would take more memory than a probe may
_MOST_PROBE_BYTES = 512 * MIB


@dataclass(frozen=True)
class _Probed:
    """One real call: its allocations and releases in order, and its outputs' storages."""

    changes: tuple[int, ...]
    output_bytes: tuple[int | None, ...]

    def memory(self) -> KernelMemory:
        return _beside_outputs(peak_of(self.changes), self.output_bytes)


@dataclass(frozen=True)
class _Batched:
    """Which tensor arguments of an operator carry the batch, as (argument, dimension)."""

    dimensions: tuple[tuple[int, int], ...]
    prepare: Callable[[list[Any]], None] | None = None


def _renew_rnn_workspace(arguments: list[Any]) -> None:
    """Replace the workspace of an RNN's backward by the one that its forward really makes."""
    layer_input, *weights = arguments[:5]
    initial_hidden, initial_cell = arguments[5:7]
    reverse, mode, hidden_size, layers, has_biases, train, bidirectional = arguments[13:20]
    batch_sizes, batch_first = arguments[20:22]
    with torch.enable_grad():  # without it, the forward keeps no workspace
        forward = _aten.mkldnn_rnn_layer.default(
            layer_input,
            *weights,
            initial_hidden,
            initial_cell,
            reverse,
            batch_sizes,
            mode,
            hidden_size,
            layers,
            has_biases,
            bidirectional,
            batch_first,
            train,
        )
    arguments[22] = forward[3]


PROBED: dict[Any, _Batched] = {
    _aten.convolution.default: _Batched(((0, 0),)),
    _aten.convolution_backward.default: _Batched(((0, 0), (1, 0))),
    _aten.mkldnn_rnn_layer.default: _Batched(((0, 1), (5, 0), (6, 0))),
    _aten.mkldnn_rnn_layer_backward.default: _Batched(
        ((0, 1), (5, 0), (6, 0), (7, 1), (8, 0), (9, 0), (10, 1), (11, 0), (12, 0)),
        prepare=_renew_rnn_workspace,
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _Batched(((0, 0), (1, 0), (2, 0))),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _Batched(
        tuple((argument, 0) for argument in range(6))
    ),
    **{
        operator: _Batched(((0, 0),))
        for operator in (
            _aten.upsample_nearest2d.default,
            _aten.upsample_bilinear2d.default,
            _aten.upsample_bicubic2d.default,
            _aten.max_pool2d_with_indices.default,
            _aten.avg_pool2d.default,
        )
    },
    _aten.max_pool2d_with_indices_backward.default: _Batched(((0, 0), (1, 0), (7, 0))),
    _aten.avg_pool2d_backward.default: _Batched(((0, 0), (1, 0))),
}


class OperatorProbe:
    """Finds the hidden memory of operators on this host, once per operator and shapes."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[_Probed]] = {}

    def memory_of(self, call: KernelCall) -> KernelMemory | None:
        """Return what a call takes beyond its fake outputs; None where nothing is hidden."""
        operator, arguments, options = call.operator, call.arguments, call.options
        if operator in PRODUCTS:
            copies = copied_bytes(call, PRODUCTS)
            return KernelMemory(copies, rule="matrix copies") if copies else None
        batched = PROBED.get(operator)
        if batched is None:
            return None
        batch = _batch_of(batched, arguments)
        batches = _probe_batches(batched, arguments)
        if batch <= batches[1]:
            return self._measured(operator, batched, arguments, options, (batch,))[0].memory()
        low, high = self._measured(operator, batched, arguments, options, batches)
        return _extended(low, high, batches, batch)

    def _measured(
        self,
        operator: Any,
        batched: _Batched,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        batches: tuple[int, ...],
    ) -> list[_Probed]:
        of_batch = dict(batched.dimensions)
        signatures = (_signature(argument, of_batch.get(i)) for i, argument in enumerate(arguments))
        whole = _batch_of(batched, arguments)
        named = (
            (name, _signature(options[name], _dimension(options[name], whole))) for name in sorted(options)
        )
        mode = (torch.is_grad_enabled(), torch.get_num_threads())
        key = (operator, batches, mode, *named, *signatures)
        if key not in self._known:
            self._known[key] = [_run(operator, batched, arguments, options, batch) for batch in batches]
        return self._known[key]


def _batch_of(batched: _Batched, arguments: Sequence[Any]) -> int:
    argument, dimension = batched.dimensions[0]
    return int(arguments[argument].shape[dimension])


def _dimension(option: Any, batch: int) -> int | None:
    """Return which dimension of a keyword argument is the batch: a mask [N, …, L, S] may have it."""
    carries = isinstance(option, torch.Tensor) and option.dim() == 4 and option.size(0) == batch
    return 0 if carries else None


def _signature(argument: Any, batch_dimension: int | None) -> Any:
    if isinstance(argument, torch.Tensor):
        shape = [size for dim, size in enumerate(argument.shape) if dim != batch_dimension]
        return tuple(shape), argument.dtype, _layout(argument, batch_dimension)
    return tuple(argument) if isinstance(argument, list) else argument


def _layout(tensor: torch.Tensor, batch_dimension: int | None) -> tuple[str, tuple[int, ...]]:
    """Return how a tensor lies in memory, in terms that do not depend on its batch.

    Strides where the batch is outermost (or absent); else the order of the dimensions.
    """
    strides = tensor.stride()
    if batch_dimension is None or strides[batch_dimension] == max(strides):
        return "strides", strides
    return "order", tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _run(
    operator: Any, batched: _Batched, arguments: Sequence[Any], options: Mapping[str, Any], batch: int
) -> _Probed:
    of_batch = dict(batched.dimensions)
    with _disable_current_modes():
        real = [_real(argument, of_batch.get(i), batch) for i, argument in enumerate(arguments)]
        if batched.prepare is not None:
            batched.prepare(real)
        whole = _batch_of(batched, arguments)
        named = {name: _real(option, _dimension(option, whole), batch) for name, option in options.items()}
        with profiled_peak() as profiled:
            outputs = operator(*real, **named)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        return _Probed(
            changes=tuple(profiled.changes),
            output_bytes=tuple(
                output.untyped_storage().nbytes() if isinstance(output, torch.Tensor) else None
                for output in outputs
            ),
        )


def _real(argument: Any, batch_dimension: int | None, batch: int) -> Any:
    """Return zeros laid out like `argument`, with another batch; other values as they are."""
    if not isinstance(argument, torch.Tensor):
        return argument
    shape = list(argument.shape)
    if batch_dimension is not None:
        shape[batch_dimension] = batch
    kind, layout = _layout(argument, batch_dimension)
    if kind == "strides":
        return torch.empty_strided(shape, layout, dtype=argument.dtype).zero_()
    ordered = torch.zeros([shape[dim] for dim in layout], dtype=argument.dtype)
    return ordered.permute([layout.index(dim) for dim in range(len(layout))])


def _probe_batches(batched: _Batched, arguments: Sequence[Any]) -> tuple[int, int]:
    per_sample = sum(
        arguments[i].numel() * arguments[i].element_size() // max(1, arguments[i].shape[dim])
        for i, dim in batched.dimensions
        if isinstance(arguments[i], torch.Tensor)
    )
    fits = per_sample * _PROBE_BATCHES[1] <= _MOST_PROBE_BYTES
    return _PROBE_BATCHES if fits else _SMALL_PROBE_BATCHES


def _extended(low: _Probed, high: _Probed, batches: tuple[int, int], batch: int) -> KernelMemory:
    """Extend two probes to another batch: every buffer is a line, the peak is over their sums."""
    first, second = batches

    def line(at_low: int, at_high: int) -> int:
        return round(at_high + (at_high - at_low) * (batch - second) / (second - first))

    output_bytes = tuple(
        None if at_low is None or at_high is None else line(at_low, at_high)
        for at_low, at_high in zip(low.output_bytes, high.output_bytes, strict=True)
    )
    if len(low.changes) != len(high.changes):  # another kernel for another batch
        inside_bytes = line(peak_of(low.changes), peak_of(high.changes))
    else:
        inside_bytes = peak_of(map(line, low.changes, high.changes))
    return _beside_outputs(inside_bytes, output_bytes)


def _beside_outputs(inside_bytes: int, output_bytes: tuple[int | None, ...]) -> KernelMemory:
    """Return what a call takes beside its outputs, from its peak with them."""
    scratch_bytes = inside_bytes - sum(filter(None, output_bytes))
    return KernelMemory((scratch_bytes,) if scratch_bytes > 0 else (), output_bytes, rule="cpu kernels")


def cpu_rules(probe: OperatorProbe | None = None) -> Rules:
    """Return the rules of a CPU target; `probe` keeps what it measured from trace to trace."""
    return Rules("cpu", probe or OperatorProbe(), patches=compiled_runs_eagerly)
