"""What differs between the conditions a trial ran under and those of this moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.execution.run_folder import Request
from tuner.records import Record
from tuner.scheduling.devices import Place
from tuner.search.environment import VARIABLES, digest_of, git_state, host_environment
from tuner.store.rows import DriverRecord, StudyRecord, TrialRecord

_DIRTY = "dirty"
_CHILDS = ("python", "torch", "tuner")  # versions that the trial's own process told


@dataclass(frozen=True)
class Change(Record):
    """A condition that is not what it was when the trial ran, as text."""

    what: str
    then: str
    now: str

    @property
    def text(self) -> str:
        """The change in a sentence."""
        if self.then == self.now:
            return f"{self.what} is {self.now}, as then: what was not committed may have changed"
        return f"{self.what} was {self.then}, and is {self.now}"


def changes_since(
    study: StudyRecord,
    trial: TrialRecord,
    driver: DriverRecord | None,
    *,
    file: Path,
    request: Request,
    place: Place,
) -> list[Change]:
    """Return what is not as it was, as far as it is known what it was.

    Code, versions, device, host, threads and the variables that change figures are compared. A
    commit that was dirty is always among them: what was not committed may have been anything.

    Args:
        study: The trial's study.
        trial: The trial.
        driver: Who drove it, or None.
        file: The study file.
        request: How it will run now.
        place: Where it will run now.
    """
    child = trial.environment
    then = {
        "study file": _short(child.get("workload_digest") or study.workload_digest),
        "threads": child.get("threads"),
        **({} if place.kind == "cpu" else {"device": _device(child.get("device_name"), trial.device)}),
        **(_of_child(child) if driver is None else _of_driver(driver.environment)),
    }
    here = host_environment()
    now = {
        "study file": _short(digest_of(file)),
        "threads": request.threads,
        "device": _device(place.name, place.key),
        **_of_driver({**here, "git": git_state(file)}),
        **(_of_child({"python": here["python"], **here["packages"]}) if driver is None else {}),
    }
    changes = [
        Change(what, str(was), str(now.get(what) or "unknown"))
        for what, was in then.items()
        if was is not None
    ]
    return [change for change in changes if change.then != change.now or _DIRTY in change.then.split()]


def _of_driver(environment: dict[str, Any]) -> dict[str, Any]:
    """Return what figures depend on in a driver's environment."""
    if not environment:
        return {}
    variables = environment.get("variables", {})
    return {
        "git commit": _commit(environment.get("git")),
        "python": environment.get("python"),
        **environment.get("packages", {}),
        "host": environment.get("host"),
        "processor": environment.get("processor"),
        "GPU driver": environment.get("gpu_driver"),
        **{name: variables.get(name, "not set") for name in VARIABLES},
    }


def _of_child(child: dict[str, Any]) -> dict[str, Any]:
    """Return the versions that a trial's own process told, where no driver's are known.

    Without what PyTorch was built for ("+cu130"): the metadata of a package may leave that out.
    """
    return {name: str(child[name]).partition("+")[0] for name in _CHILDS if child.get(name)}


def _short(digest: str | None) -> str | None:
    return None if digest is None else digest[:12]


def _device(name: str | None, key: str | None) -> str | None:
    return ", ".join(filter(None, [name, key])) or None


def _commit(git: dict[str, Any] | None) -> str | None:
    if git is None:
        return None
    return f"{(git['commit'] or 'none yet')[:12]}{f' {_DIRTY}' if git['dirty'] else ''}"
