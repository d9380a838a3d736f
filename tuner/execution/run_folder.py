"""The folder of one trial: how driver and worker talk, through named files.

    request.json    driver → worker, before the start
    events.jsonl    worker → driver, a line per event, append only
    report.json     worker → driver, at the end; written aside and renamed
    result.json     what the driver made of it, before it is recorded in the database
    stop            driver → worker: as what to end, and why; looked for at each report
    limits.json     driver → worker: what to have reached by which epoch; looked for at each report
    log.txt         what the child printed
    best.pt         weights of the best epoch

JSON with a version, no pickle.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from tuner.execution.json_files import damage_told, read_fields, write_json
from tuner.execution.limits import Limits
from tuner.records import Outcome, Owner, TrialResult

VERSION = 1


@dataclass(frozen=True)
class Request:
    """What a worker is told.

    Attributes:
        workload: The reference that `load_workload` takes.
        params: The configuration.
        device: `cpu` or `cuda`.
        reservation_bytes: The cap on device bytes; None for no cap.
        context_bytes: On a CPU, what counts as taken before training; None: what is measured then.
            A seeded study gives its frozen context, so that a trial near the cap ends the same way
            again. On a GPU, what the context is taken to be where NVML does not tell.
        seed: Seeds every random generator; None leaves them as they start.
        threads: Intra-op threads.
        example_steps: (training, evaluation) steps of the profile on a CPU target.
        visible_device: What the worker sees as its only GPU (a UUID); None on a CPU.
        attempt: From 1; a second one has the whole budget.
        token: Whose folder it is, see `trial_token`; None where no study's.
    """

    workload: str
    params: dict[str, Any]
    device: str
    reservation_bytes: int | None
    context_bytes: int | None
    seed: int | None
    threads: int
    example_steps: tuple[int, int]
    visible_device: str | None = None
    attempt: int = 1
    token: str | None = None


@dataclass(frozen=True)
class StopRequest:
    """As what a trial shall end, and why."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True)
class RunFolder:
    """The named files of one trial's folder."""

    path: Path

    @property
    def log(self) -> Path:
        """What the child printed."""
        return self.path / "log.txt"

    @property
    def checkpoint(self) -> Path:
        """Weights of the best epoch."""
        return self.path / "best.pt"

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make a new folder: where the path is taken, with a number behind it.

        A report that another trial left there must never be taken for this one's.
        """
        fresh, attempt = path, 1
        while True:
            try:
                fresh.mkdir(parents=True)
            except FileExistsError:
                attempt += 1
                fresh = path.with_name(f"{path.name}-{attempt}")
            else:
                return cls(fresh.resolve())

    def write_request(self, request: Request) -> None:
        """Write what the worker shall do."""
        write_json(self.path / "request.json", {"version": VERSION, **asdict(request)})

    def read_request(self) -> Request:
        """Return what the worker shall do.

        Raises:
            OSError: There is none, or it cannot be read.
            ValueError: It is damaged, or of another version.
        """
        fields = read_fields(self.path / "request.json")
        if fields.pop("version", None) != VERSION:
            raise ValueError(f"the request in {self.path} is of another version")
        with damage_told(self.path / "request.json"):
            return Request(**{**fields, "example_steps": tuple(fields["example_steps"])})

    def append_event(self, kind: str, **fields: Any) -> None:
        """Add one event; a line is written at once or not at all.

        Raises:
            OSError: The disk is full.
        """
        line = json.dumps({"kind": kind, **fields}) + "\n"
        descriptor = os.open(self.path / "events.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            data = line.encode()
            if (written := os.write(descriptor, data)) < len(data):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / "events.jsonl"))
        finally:
            os.close(descriptor)

    def read_events(self) -> list[dict[str, Any]]:
        """Return the events so far, none where they cannot be read.

        A last line that is still being written is left out; a damaged one ends them.
        """
        try:
            text = (self.path / "events.jsonl").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        events: list[dict[str, Any]] = []
        with contextlib.suppress(ValueError):
            for line in text.split("\n")[:-1]:
                event = json.loads(line)
                if not isinstance(event, dict) or "kind" not in event:
                    break
                events.append(event)
        return events

    def write_report(self, report: dict[str, Any]) -> None:
        """Write the trial's result."""
        write_json(self.path / "report.json", {"version": VERSION, **report})

    def read_report(self) -> TrialResult | None:
        """Return the trial's result as the worker wrote it, or None while there is none.

        Raises:
            OSError: It cannot be read.
            ValueError: It is damaged.
        """
        return self._read("report.json")

    def write_result(self, result: TrialResult) -> None:
        """Keep what became of the trial, before it is recorded: the write-ahead."""
        write_json(self.path / "result.json", {"version": VERSION, **result.to_json()})

    def read_result(self) -> TrialResult | None:
        """Return what became of the trial, by its driver or else by its worker; None if neither said.

        Raises:
            OSError: It cannot be read.
            ValueError: It is damaged.
        """
        try:
            return self._read("result.json") or self.read_report()
        except (OSError, ValueError):
            reported = self.read_report()
            if reported is None:
                raise
            return reported

    def ask_to_stop(self, request: StopRequest) -> None:
        """Ask the worker to stop at its next report."""
        write_json(self.path / "stop", asdict(request))

    def stop_request(self) -> StopRequest | None:
        """Return as what the worker shall end, or None while it may go on."""
        try:
            fields = json.loads((self.path / "stop").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return StopRequest(Outcome(fields["outcome"]), fields["reason"])

    def write_limits(self, limits: Limits) -> None:
        """Write what the worker shall have reached by which epoch; the latest counts."""
        write_json(self.path / "limits.json", {"version": VERSION, **limits.to_json()})

    def read_limits(self) -> Limits | None:
        """Return what the worker shall have reached by which epoch; None where nothing can be read.

        Early stopping saves time: that it cannot be done is no reason for a trial to end.
        """
        try:
            fields = read_fields(self.path / "limits.json")
            if fields.pop("version", None) != VERSION:
                return None
            with damage_told(self.path / "limits.json"):
                return Limits.from_json(fields)
        except (OSError, ValueError):
            return None

    def _read(self, name: str) -> TrialResult | None:
        try:
            fields = read_fields(self.path / name)
        except FileNotFoundError:
            return None
        if fields.pop("version", None) != VERSION:
            return None
        with damage_told(self.path / name):
            return TrialResult.from_json(fields)

    def log_tail(self, lines: int = 40, most_bytes: int = 20_000) -> str:
        """Return the end of the log."""
        try:
            with self.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - most_bytes))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


def folder_name(study: str) -> str:
    """Return a folder's name for a study: readable, unique, and never a path."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", study).strip(".-")[:60]
    if readable == study and not re.search(r"-[0-9a-f]{8}$", study):
        return readable
    return f"{readable or 'study'}-{hashlib.sha256(study.encode()).hexdigest()[:8]}"


def trial_token(trial_id: int, driver_id: int, owner: Owner) -> str:
    """Return what tells one trial's folder from every other's: the same path may lie on another host.

    Ids count within one database, a process is unique over hosts, reboots and reused pids.
    """
    process = "/".join((owner.host, owner.boot_id, str(owner.pid), owner.started))
    return f"trial {trial_id} of driver {driver_id}, {process}"
