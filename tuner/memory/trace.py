"""Run the workload's own step on fake tensors and record every allocation and release.

A trace covers `setup`, at least three training steps (optimizer state appears in the first, and
gradients set to None move the peak, so later steps differ), more until every optimizer has stepped,
and two evaluation steps. What survives from one evaluation step to the next is there as often as
there are steps below a third; what a training step leaves behind is reported as growth.

Limits: no custom C++ operators without a fake implementation, no shapes that depend on data, no
loader worker processes; those raise `Untraceable` with the reason.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from tuner.errors import TunerError, Untraceable
from tuner.memory.fakes import FakeWorld
from tuner.memory.recorder import Block, Recorder
from tuner.memory.rules import HOST, Rules
from tuner.memory.values import NeedsRealValues, is_user_file
from tuner.profiling import peak_of
from tuner.steps import (
    EVAL_STEPS,
    TRAIN_STEPS,
    batches_in,
    each_batch,
    eval_once,
    modules_in,
    named_modules,
    optimizers_in,
    set_training,
    train_once,
)
from tuner.workload import Workload

_IN_TURN = threading.RLock()  # patches are the process's
_LONGEST_WAIT = 64  # training steps for an optimizer to step


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
                _evaluate(
                    recorder,
                    batches,
                    lambda batch: eval_once(workload, state, batch),
                    lambda: workload.eval_steps(params),
                )
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
    """Trace a program; where a branch depends on a tensor's value, both ways, and keep the larger."""
    with _IN_TURN, torch.inference_mode(mode=False), torch.enable_grad():
        trace, guessed = _traced_once(program, rules, branch=True)
        if not guessed:
            return trace
        other, _ = _traced_once(program, rules, branch=False)
    larger = max(trace, other, key=_peak_bytes)
    places = ",".join(guessed).replace(" at", "", 1).strip() or "in an optimizer"
    note = f"a branch depends on the value of a tensor ({places}): both ways were traced, the larger counts"
    return replace(larger, notes=(*larger.notes, note))


def _peak_bytes(trace: Trace) -> int:
    sizes = [block.bytes for block in trace.blocks]
    return peak_of(sizes[event] if event >= 0 else -sizes[~event] for event in trace.events)


def _traced_once(
    program: Callable[[FakeWorld, Recorder], int], rules: Rules, *, branch: bool
) -> tuple[Trace, Collection[str]]:
    """Return a trace, and where truth values were read that nobody knows.

    Raises:
        TunerError: The code cannot be followed on fake tensors.
        Untraceable: So, and it was not foreseen.
    """
    recorder = Recorder(rules.kernels, branch=branch, device=rules.device)
    try:
        with rules.patches(recorder), FakeWorld(rules.substitutes, recorder) as world, recorder:
            growth_bytes = program(world, recorder)
    except TunerError:
        raise
    except Exception as error:
        raise Untraceable(f"{_reason_of(error)}{_place_of(error)}") from error
    trace = Trace(
        blocks=tuple(recorder.blocks),
        events=tuple(_on_device(recorder)),
        growth_bytes=growth_bytes,
        notes=tuple(recorder.notes),
        rules=tuple(recorder.rules),
    )
    return trace, recorder.values.guessed


def _on_device(recorder: Recorder) -> Iterator[int]:
    """Yield the events of what lies on the device."""
    on_device = [block.category != HOST for block in recorder.blocks]
    return (event for event in recorder.events if on_device[max(event, ~event)])


def _setup(
    world: FakeWorld, recorder: Recorder, setup: Callable[[], Any], held_by: Callable[[Any], Any]
) -> Any:
    """Run `setup` on fakes, or on real CPU tensors where it needs their values.

    `held_by` gives what a result holds, modules among it.

    Raises:
        Untraceable: A module was made before, elsewhere.
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
        if not all(isinstance(parameter, FakeTensor) for parameter in module.parameters()):
            raise Untraceable(f"{type(module).__name__} was made outside setup: its gradients would be fakes")
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
    many = batches_in(first)
    shapes = [world.batch_to_fake(batch) for batch in many]
    return [lambda batch=batch: _copied(batch) for batch in shapes]  # type: ignore[misc]


def _copied(batch: Any) -> Any:
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
    _wait_for_optimizers(recorder, state, lambda: one(batches[recorder.step % len(batches)]))
    return max(0, left_bytes[-1] - left_bytes[-2]) if len(left_bytes) > 2 else 0


def _wait_for_optimizers(recorder: Recorder, state: Any, another: Callable[[], None]) -> None:
    """Go on until every optimizer stepped, then twice: with accumulation its state appears late.

    Raises:
        Untraceable: None did within `_LONGEST_WAIT` steps.
    """
    optimizers = optimizers_in(state)

    def waiting() -> bool:
        return any(id(optimizer) not in recorder.stepped for optimizer in optimizers)

    if not waiting():
        return
    for _ in range(_LONGEST_WAIT):
        another()
        if not waiting():
            another()
            another()
            return
    if not recorder.stepped and not recorder.values.guessed:  # the other branch may step
        raise Untraceable(f"no optimizer stepped within {recorder.step} training steps")
    recorder.notes[f"an optimizer did not step within {recorder.step} training steps"] = None


def _evaluate(
    recorder: Recorder, batches: list[Any], step: Callable[[Any], Any], count: Callable[[], int]
) -> None:
    """Run evaluation steps; what they keep is there `count()` times during the last one."""
    left_bytes: list[int] = []

    def one(make_batch: Any, held_bytes: int = 0) -> None:
        recorder.step += 1
        recorder.phase = "inputs"
        batch = make_batch()
        recorder.phase = "eval"
        with recorder.holding(held_bytes, "kept between evaluation steps"):
            step(batch)
        del batch
        left_bytes.append(recorder.live_bytes)

    recorder.step = 0
    each_batch(batches, EVAL_STEPS, one)
    kept_bytes = left_bytes[-1] - left_bytes[-2]
    more = count() - EVAL_STEPS - 1 if kept_bytes > 0 else -1
    if more >= 0:
        one(batches[EVAL_STEPS % len(batches)], kept_bytes * more)


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
        recorder.stepped.add(id(optimizer))
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
