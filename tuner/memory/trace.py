"""Run the workload's own step on fake tensors and record every allocation and release.

A trace covers `setup`, at least three training steps (optimizer state appears in the first, and
gradients set to None move the peak, so later steps differ) and two evaluation steps. What survives
from one evaluation step to the next is multiplied by the number of evaluation steps; what a
training step leaves behind is reported as growth.

Limits: no custom C++ operators without a fake implementation, no shapes that depend on data, no
loader worker processes; those raise `Untraceable` with the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, UnsupportedOperatorException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from tuner.errors import TunerError, Untraceable
from tuner.memory.fakes import FakeWorld
from tuner.memory.recorder import Block, Recorder
from tuner.memory.rules import Rules
from tuner.memory.values import NeedsRealValues, is_user_file
from tuner.steps import (
    EVAL_STEPS,
    TRAIN_STEPS,
    each_batch,
    eval_once,
    modules_in,
    named_modules,
    optimizers_in,
    set_training,
    train_once,
)
from tuner.workload import Workload

HOST = "host"  # the category of what a CUDA program keeps in host memory


@dataclass(frozen=True)
class Trace:
    """Everything a program allocates and releases, in order.

    Attributes:
        blocks: Every allocation with its size, category and maker.
        events: `i` allocates `blocks[i]`, `~i` releases it.
        growth_bytes: What the last training step left behind that the one before had not.
        notes: Assumptions made, a sentence each.
        rules: Names of the target's rules that applied.
    """

    blocks: tuple[Block, ...]
    events: tuple[int, ...]
    growth_bytes: int
    notes: tuple[str, ...]
    rules: tuple[str, ...] = ()


def trace_workload(
    workload: Workload,
    params: dict[str, Any],
    rules: Rules,
) -> Trace:
    """Trace `setup`, training and evaluation steps of one configuration.

    Args:
        workload: What to trace.
        params: Its configuration.
        rules: How the target differs from the CPU fakes; it need not be present.

    Raises:
        Untraceable: The code cannot be followed on fake tensors; the message says why.
    """

    def program(world: FakeWorld, recorder: Recorder) -> int:
        state = _setup(
            world, recorder, lambda: workload.setup(params, torch.device(rules.device)), lambda state: state
        )
        batches = _batches(
            world, recorder, lambda: workload.example_batch(params, torch.device(rules.device))
        )
        with _observed(recorder, state):
            set_training(state, training=True)
            growth = _train(recorder, state, batches, lambda batch: train_once(workload, state, batch))
            if workload.has_eval_step:
                set_training(state, training=False)
                recorder.phase = "eval"
                kept = _evaluate(recorder, batches, lambda batch: eval_once(workload, state, batch))
                if kept > 0:
                    more = max(0, workload.eval_steps(params) - EVAL_STEPS)
                    recorder.pass_through_peak(kept * more, "kept between evaluation steps")
        return growth

    return _traced(program, rules)


def trace_build(
    build: Callable[[torch.device], Callable[[], Any]],
    rules: Rules,
    steps: int = TRAIN_STEPS,
) -> Trace:
    """Trace `steps` calls of the step that `build(device)` returns.

    Raises:
        Untraceable: The code cannot be followed on fake tensors; the message says why.
    """

    def program(world: FakeWorld, recorder: Recorder) -> int:
        step = _setup(world, recorder, lambda: build(torch.device(rules.device)), _closed_over)
        state = _closed_over(step)
        with _observed(recorder, state):
            return _train(recorder, state, [None], lambda _: step(), steps=steps)

    return _traced(program, rules)


def _traced(program: Callable[[FakeWorld, Recorder], int], rules: Rules) -> Trace:
    recorder = Recorder(rules.kernels)
    try:
        with rules.patches(recorder), FakeWorld(rules.substitutes, recorder) as world, recorder:
            growth_bytes = program(world, recorder)
    except TunerError:
        raise
    except Exception as error:
        raise Untraceable(f"{_reason_of(error)}{_place_of(error)}") from error
    return Trace(
        blocks=tuple(recorder.blocks),
        events=tuple(recorder.events if rules.device == "cpu" else _on_device(recorder)),
        growth_bytes=growth_bytes,
        notes=tuple(recorder.notes),
        rules=tuple(recorder.rules),
    )


def _on_device(recorder: Recorder) -> Iterator[int]:
    """Yield the events of what lies on the device."""
    on_device = [block.category != HOST for block in recorder.blocks]
    return (event for event in recorder.events if on_device[max(event, ~event)])


def _setup(
    world: FakeWorld, recorder: Recorder, setup: Callable[[], Any], held_by: Callable[[Any], Any]
) -> Any:
    """Run `setup` on fakes, or on real CPU tensors where it needs their values.

    `held_by` gives what a result holds, modules among it.
    """
    try:
        state = setup()
    except NeedsRealValues:
        recorder.forget()
        with world.real():
            real = setup()
        state = world.to_fake(real)
        recorder.notes["setup was run on real CPU tensors, since it reads the values of tensors"] = None
    for module in modules_in(held_by(state)):
        recorder.see_existing(module.named_parameters(), "parameters")
        recorder.see_existing(module.named_buffers(), "buffers")
    for optimizer in optimizers_in(held_by(state)):
        recorder.see_existing((("", tensor) for tensor in _state_tensors(optimizer)), "optimizer_state")
    return state


def _batches(world: FakeWorld, recorder: Recorder, example: Callable[[], Any]) -> list[Callable[[], Any]]:
    """Return makers of batches: each step gets a new one, as it would from a loader."""
    recorder.phase = "inputs"
    try:
        first = example()
    except NeedsRealValues:
        with world.real():
            first = example()
    many = first if isinstance(first, list) else [first]
    shapes = [world.batch_to_fake(batch) for batch in many]
    return [lambda batch=batch: _copied(batch) for batch in shapes]  # type: ignore[misc]


def _copied(batch: Any) -> Any:
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _train(
    recorder: Recorder,
    state: Any,
    batches: list[Any],
    step: Callable[[Any], Any],
    steps: int = TRAIN_STEPS,
) -> int:
    """Run training steps; return the bytes that the last one left behind."""
    left_bytes: list[int] = []

    def one(make_batch: Any) -> None:
        recorder.step += 1
        recorder.phase = "inputs"
        batch = make_batch() if make_batch is not None else None
        recorder.phase = "forward"
        step(batch)
        _settle(recorder, state)
        del batch
        left_bytes.append(recorder.live_bytes)

    each_batch(batches, max(steps, len(batches)), one)
    return max(0, left_bytes[-1] - left_bytes[-2]) if len(left_bytes) > 2 else 0


def _evaluate(recorder: Recorder, batches: list[Any], step: Callable[[Any], Any]) -> int:
    """Run evaluation steps; return the bytes kept from one to the next."""
    left_bytes: list[int] = []

    def one(make_batch: Any) -> None:
        recorder.step += 1
        recorder.phase = "inputs"
        batch = make_batch()
        recorder.phase = "eval"
        step(batch)
        del batch
        left_bytes.append(recorder.live_bytes)

    recorder.step = 0
    each_batch(batches, EVAL_STEPS, one)
    return max(0, left_bytes[-1] - left_bytes[-2])


def _settle(recorder: Recorder, state: Any) -> None:
    """Give gradients and optimizer state their category, and the name of their parameter."""
    for module in modules_in(state):
        for name, parameter in module.named_parameters():
            recorder.settle(parameter.grad, "gradients", name)
    for optimizer in optimizers_in(state):
        _settle_optimizer(recorder, optimizer)


def _settle_optimizer(recorder: Recorder, optimizer: torch.optim.Optimizer) -> None:
    for parameter, values in optimizer.state.items():
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                recorder.settle(leaf, "optimizer_state", recorder.name_of(parameter))
    for group in optimizer.param_groups:
        if not (group.get("capturable") or group.get("fused")):
            for parameter in group["params"]:
                for value in optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor) and value.dim() == 0:
                        recorder.settle(value, HOST)  # step counters are not where parameters are


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(list(optimizer.state.values())):
        if isinstance(leaf, torch.Tensor):
            yield leaf


@contextlib.contextmanager
def _observed(recorder: Recorder, state: Any) -> Iterator[None]:
    """Tell the recorder which module runs and when an optimizer steps."""
    recorder.module_names = {id(module): name for name, module in named_modules(state)}

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                recorder.settle(parameter.grad, "gradients")
        recorder.phase = "optimizer"

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.phase = "forward"
        _settle_optimizer(recorder, optimizer)

    with contextlib.ExitStack() as hooks:
        for handle in (
            register_module_forward_pre_hook(lambda module, args: recorder.enter_module(module)),
            register_module_forward_hook(lambda module, args, out: recorder.leave_module(), always_call=True),
            register_optimizer_step_pre_hook(before_step),
            register_optimizer_step_post_hook(after_step),
        ):
            hooks.callback(handle.remove)
        yield


def _closed_over(step: Callable[[], Any]) -> list[Any]:
    """Return what a step function holds: its closure, `self`, and partial arguments."""
    held: list[Any] = [getattr(step, "__self__", None), *getattr(step, "args", ())]
    function = getattr(step, "func", step)
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):
            held.append(cell.cell_contents)
    return held


def _reason_of(error: Exception) -> str:
    """Return why code cannot be traced, in the words of who wrote it where we know them."""
    text = str(error).strip().split("\n", 1)[0][:300]
    if isinstance(error, DynamicOutputShapeException):
        name = str(error.func).split(".")[1]
        return f"a boolean mask or {name}() makes a shape that depends on data"
    if isinstance(error, UnsupportedOperatorException):
        name = "::".join(str(error.func).split(".")[:2])
        return f"the custom operator {name} has no fake implementation (torch.library.register_fake)"
    if isinstance(error, RuntimeError) and ".numpy() is not supported" in text:
        return "NumPy needs the values of a tensor"
    return f"{type(error).__name__}: {text}"


def _place_of(error: BaseException) -> str:
    """Return ` at file.py:line` of the deepest frame of user code in a traceback."""
    place, traceback = "", error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if is_user_file(name):
            place = f" at {name.rsplit('/', 1)[-1]}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
