"""What a user writes: search space, model, one training step, data, objective.

The step that is traced is the step that is trained: one function, so that a prediction cannot
describe other code. PyTorch is imported by the study file, not here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from tuner.errors import WorkloadError

if TYPE_CHECKING:
    import optuna
    import torch


@dataclass(frozen=True)
class Objective:
    """A metric by name and whether more of it is better."""

    metric: str
    maximize: bool

    @property
    def direction(self) -> str:
        """`maximize` or `minimize`, as Optuna spells it."""
        return "maximize" if self.maximize else "minimize"

    def better(self, value: float, than: float | None) -> bool:
        """Whether `value` improves on `than`; anything improves on None."""
        if than is None:
            return True
        return value > than if self.maximize else value < than


def Maximize(metric: str) -> Objective:  # noqa: N802 - reads as a type in a class body
    """Return the objective that wants as much of `metric` as possible."""
    return Objective(metric, maximize=True)


def Minimize(metric: str) -> Objective:  # noqa: N802 - reads as a type in a class body
    """Return the objective that wants as little of `metric` as possible."""
    return Objective(metric, maximize=False)


class Loaders(NamedTuple):
    """Iterables of batches; `eval` may be None."""

    train: Any
    eval: Any = None


class Workload:
    """The contract of a study file: subclass this once per file.

    Class attributes:
        objective: What to search for: `Maximize("accuracy")`, `Minimize("loss")`.
        name: The default name of its studies; by default the class's name in snake case.
        default_budget: The memory budget when none is given, such as `"700MiB"`; by default
            what is free on the device less 5 %.
        epochs: Passes over the training data in the default training loop.
        patience: Epochs without a better objective before the default loop stops; None: never.
        memory_free: Names of params that never change memory, such as a learning rate. A
            configuration that differs in these alone is not traced again. One prediction in twenty
            that rests on an earlier trace is checked; where the claim is wrong, the list is
            switched off.
    """

    objective: ClassVar[Objective]
    name: ClassVar[str] = ""
    default_budget: ClassVar[str | None] = None
    epochs: ClassVar[int] = 3
    patience: ClassVar[int | None] = None
    memory_free: ClassVar[frozenset[str] | tuple[str, ...]] = ()

    def suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        """Return the configuration to try, by Optuna's define-by-run calls on `trial`."""
        raise WorkloadError(f"{type(self).__name__} has no suggest()")

    def setup(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return the state of a run: a container or object that holds model and optimizer."""
        raise WorkloadError(f"{type(self).__name__} has no setup()")

    def example_batch(self, params: dict[str, Any], device: torch.device) -> Any:
        """Return the largest batch the run will see, or a list of several of different shapes.

        Shapes and dtypes are enough: the values are never read while tracing.
        """
        raise WorkloadError(f"{type(self).__name__} has no example_batch()")

    def train_step(self, state: Any, batch: Any) -> Any:
        """Run forward, backward and update; may return metrics (name → number or tensor)."""
        raise WorkloadError(f"{type(self).__name__} has no train_step()")

    def eval_step(self, state: Any, batch: Any) -> Any:
        """Return metrics of one batch (name → mean over the batch); may be left out."""
        raise WorkloadError(f"{type(self).__name__} has no eval_step()")

    def loaders(self, params: dict[str, Any]) -> Any:
        """Return `Loaders(train, eval)`, or that pair as a tuple."""
        raise WorkloadError(f"{type(self).__name__} has no loaders()")

    def eval_steps(self, params: dict[str, Any]) -> int:
        """Return the number of evaluation batches; by default the evaluation loader's length."""
        evaluation = self.open_loaders(params).eval
        return len(evaluation) if evaluation is not None else 0

    def open_loaders(self, params: dict[str, Any]) -> Loaders:
        """Return what `loaders` gives, as `Loaders`."""
        loaders = self.loaders(params)
        return loaders if isinstance(loaders, Loaders) else Loaders(*loaders)

    @property
    def has_eval_step(self) -> bool:
        """Whether the workload evaluates at all."""
        return type(self).eval_step is not Workload.eval_step

    @property
    def own_fit(self) -> Any:
        """The workload's own `fit(run)`, or None for the default training loop."""
        return getattr(self, "fit", None)

    @classmethod
    def study_name(cls) -> str:
        """The name a study of this workload gets by default."""
        return (
            cls.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()
        )


@dataclass(frozen=True)
class LoadedWorkload:
    """A workload and where it came from.

    Attributes:
        workload: An instance, ready to use.
        reference: How a child process loads it again: `/abs/path.py:Class` or `module:Class`.
        identity: What a study remembers: `file-or-module:Class`, without folders.
        digest: SHA-256 of the study file's source.
    """

    workload: Workload
    reference: str
    identity: str
    digest: str


def load_workload(reference: str) -> LoadedWorkload:
    """Load the workload that `path.py`, `path.py:Class` or `package.module:Class` names.

    Raises:
        WorkloadError: There is no such file or module, it cannot be imported, or it does not
            hold exactly one workload and no class was named.
    """
    place, _, class_name = reference.partition(":")
    is_path = place.endswith((".py", ".")) or "/" in place
    module = _module_at(Path(place)) if is_path else _module_named(place)
    cls = _the_workload(module, class_name or None, place)
    if not isinstance(getattr(cls, "objective", None), Objective):
        raise WorkloadError(
            f"{cls.__name__} in {place} has no objective",
            hint='add a line such as: objective = Maximize("accuracy")',
        )
    where = str(Path(place).resolve()) if is_path else place
    source = Path(module.__file__ or "").read_bytes() if module.__file__ else b""
    return LoadedWorkload(
        workload=_made(cls, place),
        reference=f"{where}:{cls.__name__}",
        identity=f"{Path(place).stem if is_path else place}:{cls.__name__}",
        digest=hashlib.sha256(source).hexdigest(),
    )


def _made(cls: type[Workload], place: str) -> Workload:
    try:
        return cls()
    except Exception as error:
        raise WorkloadError(
            f"{cls.__name__} in {place} cannot be made: {type(error).__name__}: {_one_line(error)}"
        ) from error


def _module_at(path: Path) -> ModuleType:
    if not path.exists():
        raise WorkloadError(
            f"there is no study file {path}", hint="give a path such as studies/digits_cnn.py"
        )
    if path.is_dir() or path.suffix != ".py":
        raise WorkloadError(f"{path} is not a Python file", hint="a study file ends in .py")
    name = f"tuner_study_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # a study may import the files beside it
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = path if error.filename in (None, str(path.resolve())) else error.filename
        raise WorkloadError(f"{where}:{error.lineno} has a syntax error: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"{path} cannot be imported: {type(error).__name__}: {_one_line(error)}"
        ) from error
    return module


def _module_named(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise WorkloadError(
                f"{name} cannot be imported: {type(error).__name__}: {_one_line(error)}"
            ) from error
        raise WorkloadError(
            f"there is no study file or module '{name}'",
            hint="give a path such as studies/digits_cnn.py, or package.module:Class",
        ) from error
    except (Exception, SystemExit) as error:
        raise WorkloadError(
            f"{name} cannot be imported: {type(error).__name__}: {_one_line(error)}"
        ) from error


def _the_workload(module: ModuleType, class_name: str | None, place: str) -> type[Workload]:
    found = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Workload)
        and value is not Workload
        and value.__module__ == module.__name__
    }
    known = ", ".join(sorted(found)) or "none"
    if class_name is not None:
        if class_name not in found:
            raise WorkloadError(f"{place} has no workload '{class_name}'", hint=f"it has: {known}")
        return found[class_name]
    if not found:
        raise WorkloadError(
            f"{place} has no workload", hint="a study file holds one subclass of tuner.Workload"
        )
    if len(set(found.values())) > 1:
        raise WorkloadError(
            f"{place} has {len(found)} workloads: {known}", hint=f"name one: {place}:{min(found)}"
        )
    return next(iter(found.values()))


def _one_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
