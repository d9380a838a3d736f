"""A database with our schema, its writer and reader, and a real process that can own a study."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import URL, Engine, text

from tuner.processes import this_process
from tuner.records import Owner
from tuner.store import migrations
from tuner.store.drivers import Drivers
from tuner.store.engine import open_engine, parse_url
from tuner.store.reader import Reader
from tuner.store.reservations import Reservations
from tuner.store.rows import NewStudy
from tuner.store.slots import Slots
from tuner.store.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = NewStudy(
    name="plain",
    workload="studies/digits_cnn.py:DigitsCnn",
    workload_reference="/somewhere/studies/digits_cnn.py:DigitsCnn",
    workload_digest="0" * 64,
    target="cpu",
    device_name=None,
    budget_bytes=1 << 30,
    metric="accuracy",
    direction="maximize",
    single=False,
    seed=None,
    context_bytes=None,
    settings={},
    tuner_version="0.1.0",
)


class Store:
    """An open database and short ways to fill it."""

    def __init__(self, url: URL) -> None:
        self.url = url
        self.engine: Engine = open_engine(url)
        migrations.upgrade(self.engine)
        self.writer, self.reader = Writer(self.engine), Reader(self.engine)
        self.drivers, self.slots = Drivers(self.engine), Slots(self.engine)
        self.reservations = Reservations(self.engine)
        self._drivers: dict[int, int] = {}

    def new_study(self, name: str = "plain", **changes: Any) -> NewStudy:
        return dataclasses.replace(_PLAIN, name=name, **changes)

    def study(self, name: str = "plain", **changes: Any) -> int:
        return self.writer.create_study(self.new_study(name, **changes))

    def trial(self, study_id: int, number: int = 0, **params: Any) -> int:
        return self.writer.add_trial(study_id, number, params, driver_id=self.driver(study_id))

    def driver(self, study_id: int) -> int:
        """Return this process as a driver of the study."""
        if study_id not in self._drivers:
            self._drivers[study_id] = self.drivers.join(study_id, this_process())
        return self._drivers[study_id]

    def sql(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """Run one statement past our own code and return its rows, if it has any."""
        with self.engine.begin() as connection:
            result = connection.execute(text(statement), values)
            return [tuple(row) for row in result] if result.returns_rows else []


@pytest.fixture
def store(storage: str) -> Iterator[Store]:
    opened = Store(parse_url(storage))
    yield opened
    opened.engine.dispose()


@pytest.fixture
def living() -> Iterator[tuple[Owner, subprocess.Popen[str]]]:
    """A process that lives until it is killed, and the identity that it gives itself."""
    code = (
        "import json, sys; from tuner.processes import this_process;"
        "print(json.dumps(this_process().to_json()), flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Owner(**json.loads(process.stdout.readline())), process
