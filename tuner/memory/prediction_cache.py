"""Estimates that were made before, so that the same structure is not traced twice.

::

    params ──find()──► nothing    trace, keep()
                  └──► a hit ─┬─► served
                              └─► every 20th: trace again, check() ──► the list is off, said loudly

A key holds everything that a trace depends on: the code (fingerprint), the target, the threads on
a CPU, and the params less those that the workload names as `memory_free`. What it does not see:
data files, environment variables and modules outside the workload's folder or package.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from tuner.memory.prediction import Estimate
from tuner.units import format_bytes

CHECK_EVERY = 20  # hits between two that are traced again
MOST_ENTRIES = 512  # the latest used; a study of thousands of trials asks for few of them again
_FOREIGN = {"site-packages", "dist-packages"}  # installed packages, when an environment lies in the folder


class Fingerprint:
    """The digest of the code that a workload's trace runs, and of the versions below it.

    Covers every module that is loaded from the folder of the study file, or from its package, read
    when it is first seen loaded. Made and read where the workload is loaded.

    Args:
        module: The module that holds the workload.
    """

    def __init__(self, module: ModuleType) -> None:
        self._roots = _roots(module)
        self._seen: set[str] = set()
        self._digests: dict[str, str] = {}

    def hexdigest(self) -> str:
        """Return the digest of what is loaded now, as hexadecimal text."""
        for name in sys.modules.keys() - self._seen:
            self._seen.add(name)
            # Not getattr: a lazy module would import something.
            file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
            if isinstance(file, str) and (path := self._ours(file)) is not None:
                self._digests[path] = _file_digest(path)
        whole = json.dumps([_versions(), sorted(self._digests.items())])
        return hashlib.sha256(whole.encode()).hexdigest()

    def _ours(self, file: str) -> str | None:
        """Return the real path of a module's file when it lies below a root and exists."""
        folder = _real_folder(str(Path(file).parent))
        for root in self._roots:
            if folder.is_relative_to(root) and not _FOREIGN & set(folder.relative_to(root).parts):
                path = folder / Path(file).name
                return str(path) if path.is_file() else None
        return None


@lru_cache(4096)  # modules share few folders, and resolving one asks the file system
def _real_folder(folder: str) -> Path:
    return Path(folder).resolve()


def _file_digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        return str(error)


def _roots(module: ModuleType) -> set[Path]:
    """Return the folder of a module's file, or of the outermost package that it lies in."""
    folder = Path(module.__file__ or "").resolve().parent
    while (folder / "__init__.py").exists() and (folder.parent / "__init__.py").exists():
        folder = folder.parent
    package = sys.modules.get(module.__name__.partition(".")[0])
    return {folder, *(Path(path).resolve() for path in getattr(package, "__path__", ()))}


@lru_cache(maxsize=1)
def _versions() -> tuple[str, ...]:
    import tuner

    return (platform.python_version(), metadata.version("torch"), tuner.__version__)


@dataclass(frozen=True)
class Hit:
    """An estimate found in the cache.

    Attributes:
        estimate: As it may be served.
        traced: The estimate as it was traced.
        exact: Whether the very same params were traced, `memory_free` ones included.
        due: Whether it is this hit's turn to be traced again and checked.
    """

    estimate: Estimate
    traced: Estimate
    exact: bool
    due: bool


class PredictionCache:
    """The estimates of one predictor, in its process.

    Args:
        target: The target's name.
        threads: Intra-op threads; they matter on a CPU only.
        on_warning: Called with a sentence when the `memory_free` list proves wrong.
    """

    def __init__(self, target: str, threads: int, on_warning: Callable[[str], None]) -> None:
        self._place = (target.lower(), threads if target.lower() == "cpu" else None)
        self._on_warning = on_warning
        self._fingerprint: str | None = None
        self._memory_free: frozenset[str] = frozenset()
        self._entries: dict[tuple[Any, ...], tuple[str, Estimate]] = {}
        self._hits = 0
        self.problem: str | None = None

    def code_is(self, fingerprint: str | None, memory_free: Iterable[str] = ()) -> None:
        """Take note of the code that traces now; None: not known, so nothing is found."""
        self._fingerprint = fingerprint
        if self.problem is None:
            self._memory_free = frozenset(memory_free)

    def find(self, params: dict[str, Any]) -> Hit | None:
        """Return the hit for a configuration, or None when it has to be traced."""
        start = time.perf_counter()
        if self._fingerprint is None or (found := self._entries.pop(self._key(params), None)) is None:
            return None
        self._entries[self._key(params)] = found  # the latest used is the last
        whole, traced = found
        exact = whole == _text(params)
        self._hits += 1
        names = ", ".join(sorted(self._memory_free & params.keys()))
        note = () if exact else (f"traced with another value of what never changes memory here: {names}",)
        estimate = replace(traced, notes=traced.notes + note, seconds=time.perf_counter() - start)
        return Hit(self._marked(estimate), traced, exact, due=self._hits % CHECK_EVERY == 0)

    def keep(self, params: dict[str, Any], traced: Estimate) -> Estimate:
        """Keep what was traced for a configuration; return it, marked when the list is off."""
        self._entries[self._key(params)] = (_text(params), traced)
        if len(self._entries) > MOST_ENTRIES:
            del self._entries[next(iter(self._entries))]
        return self._marked(traced)

    def check(self, params: dict[str, Any], hit: Hit, traced: Estimate) -> Estimate:
        """Compare a hit with a new trace of the same configuration; return what to answer."""
        if traced.allocated_bytes == hit.traced.allocated_bytes:
            return self._marked(traced)
        difference = (
            f"{format_bytes(traced.allocated_bytes)} instead of {format_bytes(hit.traced.allocated_bytes)}"
        )
        if hit.exact:
            self._distrust(f"the same configuration traced again takes {difference}: params do not tell all")
        else:
            names = ", ".join(sorted(self._memory_free & params.keys()))
            self._distrust(
                f"memory_free is wrong: another value of {names} takes {difference}; "
                "the list is ignored from now on"
            )
        return self.keep(params, traced)

    def _distrust(self, problem: str) -> None:
        """Switch the list off; each entry then stands for the configuration it was traced for alone."""
        self.problem = problem
        self._memory_free = frozenset()
        self._entries = {
            (*key[:-1], whole): (whole, traced) for key, (whole, traced) in self._entries.items()
        }
        self._on_warning(problem)

    def _marked(self, estimate: Estimate) -> Estimate:
        if self.problem is None:
            return estimate
        return replace(estimate, notes=(*estimate.notes, self.problem))

    def _key(self, params: dict[str, Any]) -> tuple[Any, ...]:
        kept = {name: value for name, value in params.items() if name not in self._memory_free}
        return (self._fingerprint, *self._place, _text(kept))


def _text(params: dict[str, Any]) -> str:
    return json.dumps(params, sort_keys=True, default=repr)
