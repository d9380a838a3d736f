"""LSTM, GRU and RNN layers through cuDNN.

One call runs all layers and directions: it returns output [T, B, D·H] and the last states, keeps an
opaque reserve for backward, and gives the gradients of all weights as one buffer that the
parameters' gradients are views of. The CPU runs other kernels, whose memory differs by gigabytes.

Source: aten/src/ATen/native/cudnn/RNN.cpp (`_cudnn_rnn`, `_cudnn_rnn_backward`), the casts in
aten/src/ATen/cudnn/AutocastRNN.cpp. cuDNN's own sizes
are not public; the reserve is taken as every gate's activation and the cell states of every layer,
direction and step, and the workspace as one layer's gates. See `RESERVE_UNITS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.memory.cuda_rules.casting import is_transformed, under_autocast
from tuner.memory.rules import Journal, Substitute

NAME = "cuDNN recurrent layers"

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
# Units of T · B · H per layer and direction in the reserve: LSTM keeps four gates, the cell state and
# its tanh; GRU three gates, the candidate's recurrent part and the state; a plain RNN its state.
# Inferred from the gradients' formulas, not published: the prediction says so.
RESERVE_UNITS = {"lstm": 6, "gru": 5, "rnn_tanh": 1, "rnn_relu": 1}


class _CudnnRnn(torch.autograd.Function):
    """Allocates what cuDNN does, forward and backward; computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, kind: str, layout: dict[str, Any], steps: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        states, weights = tensors[: layout["states"]], tensors[layout["states"] :]
        contiguous = steps.contiguous()  # batch_first input is transposed, so copied
        layers, directions, hidden = layout["layers"], layout["directions"], layout["hidden"]
        rows = contiguous.numel() // contiguous.size(-1)
        out_size = states[0].size(-1)  # a projection makes it smaller than `hidden`
        output = contiguous.new_empty((*contiguous.shape[:-1], directions * out_size))
        last = [torch.empty_like(state) for state in states]
        units = layers * directions * rows * hidden
        workspace = contiguous.new_empty(GATES[kind] * rows * hidden)
        saved = [steps, *states, *weights, output]
        if layout["training"]:
            saved.append(contiguous.new_empty(RESERVE_UNITS[kind] * units))
        del workspace
        ctx.save_for_backward(*saved)
        ctx.kind, ctx.layout = kind, layout
        return output, *last

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        steps, *rest = ctx.saved_tensors
        layout = ctx.layout
        if not layout["training"]:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        states, weights = rest[: layout["states"]], rest[layout["states"] : -2]
        rows = steps.numel() // steps.size(-1)
        # Transposed batches are copied; the workspace is taken beside the gradients, twice.
        copies = [tensor.contiguous() for tensor in (steps, gradients[0])]
        of_steps = torch.empty_like(steps, memory_format=torch.contiguous_format)
        of_states = [torch.empty_like(state) for state in states]
        workspace = steps.new_empty(GATES[ctx.kind] * rows * layout["hidden"])
        del workspace
        flat = steps.new_zeros(sum(weight.numel() for weight in weights))
        of_weights = [
            part.view(weight.shape)
            for part, weight in zip(flat.split([w.numel() for w in weights]), weights, strict=True)
        ]
        workspace = steps.new_empty(GATES[ctx.kind] * rows * layout["hidden"])
        del workspace, copies
        return None, None, of_steps, *of_states, *of_weights


def _recurrent(kind: str) -> Substitute:
    def run(
        journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        off = not torch.backends.cudnn.enabled or args[0].dtype is torch.float64
        if off or kwargs or is_transformed(args[0]):
            return function(*args, **kwargs)
        journal.rules.setdefault(NAME)
        journal.notes[
            "cuDNN's reserve of a recurrent layer is not published: its gates and states are taken"
        ] = None
        packed = isinstance(args[1], torch.Tensor) and isinstance(args[3], (list, tuple))
        if packed:
            steps, _, state, weights, _, layers, _, training, bidirectional = args
            batch_first = False
        else:
            steps, state, weights, _, layers, _, training, bidirectional, batch_first = args
        states = tuple(state) if isinstance(state, (list, tuple)) else (state,)
        if batch_first:
            steps = steps.transpose(0, 1)
        # Under autocast, all weights are copied into one low-precision buffer at each call.
        steps, states, weights = under_autocast((steps, states, list(weights)))
        directions = 2 if bidirectional else 1
        layout = {
            "states": len(states),
            "layers": layers,
            "directions": directions,
            "hidden": weights[0].size(0) // GATES[kind],
            "training": training,
        }
        output, *last = _CudnnRnn.apply(kind, layout, steps, *states, *weights)  # type: ignore[no-untyped-call]
        return (output.transpose(0, 1) if batch_first else output, *last)

    return run


RECURRENT: dict[Any, Substitute] = {getattr(torch, kind): _recurrent(kind) for kind in GATES}
