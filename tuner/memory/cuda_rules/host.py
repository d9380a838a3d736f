"""Copies to host memory, which take nothing on the GPU: `.cpu()`, `.to("cpu")` and back.

A copy gets the category `host`, which a CUDA trace leaves out, and so does what is computed of host
tensors alone. Tensors that code makes without naming a device count as the GPU's: most are moved
there, and a batch always is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tuner.memory.fakes import device_kind
from tuner.memory.rules import HOST, Journal, Substitute

NAME = "host copies"


def _cpu(
    journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return _moved(journal, args[0], args[0], "cpu")


def _cuda(
    journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return _moved(journal, args[0], args[0], "cuda")


def _to(journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kinds = [kind for kind in map(device_kind, (*args[1:], kwargs.get("device"))) if kind]
    rest = (torch.device("cpu") if device_kind(argument) else argument for argument in args[1:])
    options = {**kwargs, "device": torch.device("cpu")} if device_kind(kwargs.get("device")) else kwargs
    result = function(args[0], *rest, **options)
    return _moved(journal, args[0], result, kinds[0]) if kinds else result


def _moved(journal: Journal, source: torch.Tensor, result: torch.Tensor, kind: str) -> torch.Tensor:
    if (kind == "cpu") == journal.is_on_host(source):
        return result
    journal.rules.setdefault(NAME)
    copy = source.clone() if result is source else result
    journal.settle(copy, HOST if kind == "cpu" else "activations")
    return copy


def _pinned(
    journal: Journal, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return args[0]


HOST_COPIES: dict[Any, Substitute] = {
    torch.Tensor.cpu: _cpu,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.to: _to,
    torch.Tensor.pin_memory: _pinned,
}
