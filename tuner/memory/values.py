"""What code gets that asks a fake tensor for its value.

A fake has none. In a step the answer to a number is neutral (1, or what a constant really is), noted
with its place; a truth value that nobody knows is `branch`, and the step is traced both ways. In
`setup` an answer is refused, since the value may shape the model: a neutral one there would predict
another model, silently.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from tuner.errors import Untraceable

_aten = torch.ops.aten
_ANY_OF = {_aten.logical_or.default, _aten.bitwise_or.Tensor}
_SETTLED = {
    _aten.rand.default,
    _aten.isnan.default,
    _aten.isinf.default,
    _aten.eq.Tensor,
    _aten.ne.Tensor,
    _aten.eq.Scalar,
    _aten.ne.Scalar,
    _aten.mul.Tensor,
    _aten.logical_and.default,
    _aten.bitwise_and.Tensor,
    *_ANY_OF,
}
_LOOP_LIMIT = 10_000  # answers at one place before it must be a loop on a tensor's value
_RANDOM_NUMBER = 0.99
_TORCH_FOLDER = torch.__path__[0]
_OWN_FOLDER = str(Path(__file__).parents[1])


class NeedsRealValues(Untraceable):
    """`setup` asked for the value of a tensor: it must run on real tensors."""


class Values:
    """Answers for the values of fakes.

    Args:
        notes: Where the assumptions made go, a sentence each.
        branch: The answer to a truth value that nobody knows.

    Attributes:
        guessed: Where such a truth value was read: the other answer must be traced as well.
    """

    def __init__(self, notes: dict[str, None], *, branch: bool) -> None:
        self.guessed: dict[str, None] = {}
        self._notes = notes
        self._branch = branch
        self._answers: Counter[str] = Counter()

    def of(self, tensor: torch.Tensor, *, in_step: bool) -> Any:
        """Return the value of a tensor with one element, as `.item()` does.

        Raises:
            NeedsRealValues: It is asked for outside a step.
            Untraceable: It is asked for so often at one place that a loop must depend on it.
        """
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            with _disable_current_modes():
                return constant.item()
        if not isinstance(tensor, FakeTensor):
            return torch.ops.aten._local_scalar_dense.default(tensor)
        place = user_place()
        if not in_step:
            raise NeedsRealValues(f"the value of a tensor is needed{place}")
        if place:  # an optimizer reads one step counter per parameter: no limit for those
            self._answers[place] += 1
            if self._answers[place] > _LOOP_LIMIT:
                raise Untraceable(f"a loop depends on the value of a tensor{place}")
            if tensor.dtype is not torch.bool:
                self._notes[f"the value of a tensor read{place} was taken as 1"] = None
        if tensor.dtype is torch.bool:
            if _called_by("optim/lbfgs.py"):
                raise Untraceable("LBFGS goes on by the values of tensors")
            self.guessed[place] = None
            return self._branch
        neutral = 0 if _called_by("grad_scaler.py") else 1
        return float(neutral) if tensor.dtype.is_floating_point else neutral

    def settle(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Give a value to results that have one in any sound run.

        A random number is near its upper end, as if no layer were dropped (`torch.rand([]) < layerdrop`
        decides whether one runs). No number is infinite or not a number.
        """
        if not isinstance(out, FakeTensor) or func not in _SETTLED:
            return
        if func is _aten.rand.default:
            if out.numel() == 1:
                _make_known(out, _RANDOM_NUMBER)
                self._notes[f"a random number drawn{user_place()} was taken as {_RANDOM_NUMBER}"] = None
        elif (known := _known_truth(func, args)) is not None:
            _make_known(out, known)


def _known_truth(func: Any, args: tuple[Any, ...]) -> bool | None:
    """Return what tests for infinite and for no number say of sound values, or None."""
    if func in (_aten.isnan.default, _aten.isinf.default):
        return False
    if func in (_aten.eq.Tensor, _aten.ne.Tensor):  # x == x, as isfinite and isnan ask
        return func is _aten.eq.Tensor if args[0] is args[1] else None
    if func in (_aten.eq.Scalar, _aten.ne.Scalar):
        return func is _aten.ne.Scalar if args[1] in (math.inf, -math.inf) else None
    values = [constant for argument in args if (constant := getattr(argument, "constant", None)) is not None]
    if len(values) < len(args) or any(value.dtype is not torch.bool for value in values):
        return None
    with _disable_current_modes():
        truths = [bool(value.flatten()[0]) for value in values]
    return any(truths) if func in _ANY_OF else all(truths)


def _make_known(tensor: FakeTensor, value: float | bool) -> None:  # noqa: FBT001
    with _disable_current_modes():
        tensor.constant = torch.full((), value, dtype=tensor.dtype).expand(tensor.shape)
    tensor.fake_mode.fake_tensor_converter.add_constant_storage_mapping(tensor)


def is_user_file(name: str) -> bool:
    """Whether a file is neither PyTorch's nor of this package."""
    return not name.startswith((_TORCH_FOLDER, _OWN_FOLDER, "<"))


def user_place() -> str:
    """Return ` at file.py:line` of the innermost frame outside PyTorch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name):
            return f" at {name.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        if name.startswith(_TORCH_FOLDER + "/optim"):
            return ""
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _called_by(file_name: str) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(file_name):
            return True
        frame = frame.f_back
    return False
