"""URLs that hide their secrets, engines that cannot write when they must not, errors as sentences."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import URL, text
from sqlalchemy.exc import DBAPIError, OperationalError

from tuner.errors import SchemaError, StoreError, UsageError
from tuner.search.optuna_storage import optuna_storage
from tuner.store import migrations
from tuner.store.drivers import Drivers
from tuner.store.engine import describe_url, open_engine, parse_url, store_errors
from tuner.store.opening import open_existing, reading, writing
from tuner.store.reservations import Reservations
from tuner.store.slots import Claims, Slots
from tuner.store.writer import Writer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.store.conftest import Store

PASSWORD = "p@ss:w/rd%?"
ENCODED = "p%40ss%3Aw%2Frd%25%3F"
READ_ONLY = r"read-?only"  # readonly database, read-only transaction


def pieces(secret: str) -> list[str]:
    """Every run of three characters: what "no fragment" means here (two occur in plain words)."""
    return [secret[i : i + 3] for i in range(len(secret) - 2)]


def assert_hidden(secret: str, *texts: str | None) -> None:
    shown = " ".join(text or "" for text in texts)
    assert [piece for piece in pieces(secret) if piece in shown] == []


def message_of(url: URL, *, read_only: bool = False) -> str:
    """Connect where that must fail; return all that a user sees of the error."""
    engine = open_engine(url, read_only=read_only)
    try:
        with pytest.raises(StoreError) as caught, store_errors(url), engine.connect():
            pass
    finally:
        engine.dispose()
    assert "\n" not in caught.value.message
    return f"{caught.value.message} {caught.value.hint or ''}"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{PASSWORD}@host/database",
        f"postgresql://user:{PASSWORD}@host:5432/database?sslmode=require",
        f"postgresql+psycopg://:{PASSWORD}@host/database",
        "postgresql://user:Zq@Xy@host/database",
        "postgresql://user:Zq/Xy@host/database",
        "postgresql://user:Zq?Xy@host/database",
        "postgresql://user:Zq#Xy@host/database",
        "postgresql://user:Zq%Xy@host/database",
    ],
)
def test_a_raw_password_is_refused_without_a_fragment_of_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_url(url)
    secret = url.partition("://")[2].partition(":")[2].rpartition("@host")[0]
    assert_hidden(secret, caught.value.message, caught.value.hint, str(caught.value.__cause__ or ""))
    assert "%40" in (caught.value.hint or "")


def test_an_encoded_password_is_accepted_and_never_shown() -> None:
    url = parse_url(f"postgres://some_user:{ENCODED}@host:5433/database?application_name=Zq9Xy")
    assert (url.username, url.password, url.host, url.port) == ("some_user", PASSWORD, "host", 5433)
    assert url.drivername == "postgresql+psycopg"
    assert describe_url(url) == "postgresql://host:5433/database"


def test_credentials_in_the_query_are_never_shown() -> None:
    url = parse_url("postgresql://host/database?user=someone&password=Zq9Xy8")
    assert describe_url(url) == "postgresql://host/database"
    assert describe_url(parse_url("sqlite:///tuner.db?key=Zq9Xy8")) == "tuner.db"


@pytest.mark.parametrize("shown", [PASSWORD, ENCODED, "Zq9+Xy%268"])
def test_a_drivers_message_is_shown_without_secrets_in_any_form(shown: str) -> None:
    url = parse_url(f"postgresql://user:{ENCODED}@host/database?options=Zq9+Xy%268")
    with pytest.raises(StoreError) as caught, store_errors(url):
        raise OperationalError("SELECT 1", {}, Exception(f"cannot connect to {shown} at all"))
    assert "cannot connect to *** at all" in caught.value.message


@pytest.mark.parametrize(
    "url", ["postgresql://u/r:Zq9Xy8@host/database", "postgresql://u/r:Zq9Xy8@/database"]
)
def test_a_raw_slash_in_the_user_name_does_not_show_the_password(url: str) -> None:
    try:
        shown = describe_url(parse_url(url))
    except UsageError as error:
        shown = f"{error.message} {error.hint}"
    assert_hidden("Zq9Xy8", shown)


@pytest.mark.parametrize(
    "url",
    ["", "tuner.db", "mysql://user:Zq9Xy8@host/db", "oracle://user:Zq9Xy8@host/db", "postgresql:user:Zq9Xy8",
     "postgresql://user:Zq9Xy8@host:port/db"],
)  # fmt: skip
def test_another_scheme_or_no_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_url(url)
    assert_hidden("Zq9Xy8", caught.value.message, caught.value.hint)
    assert "sqlite:///tuner.db" in (caught.value.hint or "")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite://tuner.db", "sqlite:///:memory:"])
def test_a_sqlite_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="names no file"):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://user:{ENCODED}@127.0.0.1:1/database",
        "postgresql://127.0.0.1:1/database?password=Zq9Xy8Pw",
    ],
)
def test_an_unreachable_host_is_a_sentence_without_the_password(url: str) -> None:
    shown = message_of(parse_url(url))
    assert_hidden("Zq9Xy8Pw", shown)
    assert_hidden(PASSWORD, shown)
    assert "postgresql://127.0.0.1:1/database cannot be used" in shown


def test_what_the_driver_repeats_of_the_url_is_hidden(postgresql_url: str) -> None:
    separator = "&" if "?" in postgresql_url else "?"
    url = parse_url(f"{postgresql_url}{separator}sslmode=Zq9Xy8Pw")
    driver = open_engine(url)
    with pytest.raises(OperationalError, match="Zq9Xy8Pw"):  # the baseline: the driver does repeat it
        driver.connect()
    driver.dispose()
    assert_hidden("Zq9Xy8Pw", message_of(url))
    with pytest.raises(StoreError) as caught, store_errors(parse_url(f"postgresql://u:{ENCODED}@host/db")):
        raise OperationalError("SELECT 1", {}, Exception(f"cannot log in as u with {PASSWORD}"))
    assert_hidden(PASSWORD, caught.value.message)


def test_an_unknown_database_is_named(postgresql_url: str) -> None:
    url = parse_url(postgresql_url).set(database="not_there")
    assert 'database "not_there" does not exist' in message_of(url)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_missing_folder_is_a_sentence_and_stays_missing(tmp_path: Path, *, read_only: bool) -> None:
    url = parse_url(f"sqlite:///{tmp_path}/missing/tuner.db")
    assert "missing/tuner.db cannot be opened: is its folder there" in message_of(url, read_only=read_only)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_a_sentence_and_stays_as_it_is(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("these are notes, and longer than a header of SQLite\n" * 40)
    before = notes.read_bytes()
    with pytest.raises(StoreError, match=r"notes\.txt cannot be used: file is not a database"):
        open_existing(parse_url(f"sqlite:///{notes}"))
    assert notes.read_bytes() == before


@pytest.mark.parametrize("storage", ["sqlite"], indirect=True)
def test_a_full_sqlite_says_so_and_keeps_what_it_has(store: Store) -> None:
    store.study("kept")
    store.sql("PRAGMA max_page_count = 1")  # SQLite takes it as: no larger than now
    large = {"text": "x" * 1_000_000}
    with pytest.raises(OperationalError, match="database or disk is full"):  # the driver's own words
        store.study("lost", settings=large)
    with (
        pytest.raises(StoreError, match=r"tuner\.db cannot be written: the disk is full"),
        store_errors(store.url),
    ):
        store.study("lost", settings=large)
    assert [study.name for study in store.reader.studies()] == ["kept"]
    store.engine.dispose()
    with closing(sqlite3.connect(store.url.database or "")) as other:
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_a_writer_under_another_programs_lock_gets_a_sentence_and_readers_read(sqlite_url: str) -> None:
    url = parse_url(sqlite_url)
    engine = open_engine(url, busy_timeout_seconds=0.05)
    migrations.upgrade(engine)
    with closing(sqlite3.connect(url.database or "", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"tuner\.db is locked by another program"), store_errors(url):
            Writer(engine).delete_study(1)
        with reading(url) as reader:
            assert reader.studies() == []
    Writer(engine).delete_study(1)
    engine.dispose()


def test_a_server_that_vanishes_is_noticed_within_half_a_minute(postgresql_url: str) -> None:
    """What libpq was told, of our connections and of Optuna's; a URL may say something else."""
    for more, probes in (("", "4"), ("&keepalives_count=9", "9")):
        url = parse_url(postgresql_url + more)
        with optuna_storage(url) as storage:
            for engine in (open_engine(url), open_engine(url, read_only=True), storage.engine):
                with engine.connect() as connection:
                    known = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]
                engine.dispose()
                assert (known["tcp_user_timeout"], known["keepalives"]) == ("30000", "1")
                idle, interval = int(known["keepalives_idle"]), int(known["keepalives_interval"])
                assert known["keepalives_count"] == probes
                assert idle + interval * 4 <= 30


def test_reads_go_on_while_another_program_writes(sqlite_url: str) -> None:
    url = parse_url(sqlite_url)
    engine = open_engine(url, busy_timeout_seconds=0.05)
    migrations.upgrade(engine)
    drivers, slots, reservations = Drivers(engine), Slots(engine), Reservations(engine)
    with closing(sqlite3.connect(url.database or "", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert slots.claims(1) == Claims(0, 0)
        assert not slots.asking(1)
        assert drivers.lost(1) == reservations.all() == []
        assert reservations.pid_of(1) is None
    engine.dispose()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_held_exclusively_is_a_sentence(sqlite_url: str, *, read_only: bool) -> None:
    url = parse_url(sqlite_url)
    engine = open_engine(url, read_only=read_only, busy_timeout_seconds=0.05)
    with closing(sqlite3.connect(url.database or "", isolation_level=None)) as other:
        other.execute("CREATE TABLE theirs (n)")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"tuner\.db is locked by another program"), store_errors(url):
            migrations.current_revision(engine)
    engine.dispose()


@pytest.mark.parametrize(("asked", "milliseconds"), [(None, 30_000), (0.25, 250), (0, 0)])
def test_the_busy_timeout_is_the_one_that_was_asked_for(
    sqlite_url: str, asked: float | None, milliseconds: int
) -> None:
    engine = open_engine(parse_url(sqlite_url), busy_timeout_seconds=asked)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == milliseconds
    engine.dispose()


def test_a_read_only_engine_cannot_write(store: Store) -> None:
    study_id = store.study()
    before = store.sql("SELECT * FROM tuner_study")
    engine = open_engine(store.url, read_only=True)
    for write in (
        lambda: Writer(engine).delete_study(study_id),
        lambda: Writer(engine).create_study(store.new_study("another")),
        lambda: Drivers(engine).request_stop(study_id, "now"),
    ):
        with pytest.raises(StoreError, match=READ_ONLY), store_errors(store.url):
            write()
    with engine.connect() as connection, pytest.raises(DBAPIError, match=READ_ONLY):
        connection.execute(text("CREATE TABLE tuner_new (n INTEGER)"))
    engine.dispose()
    assert store.sql("SELECT * FROM tuner_study") == before


def test_a_read_only_engine_creates_no_database(sqlite_url: str, tmp_path: Path) -> None:
    url = parse_url(sqlite_url)
    message_of(url, read_only=True)
    for opening in (open_existing, lambda u: reading(u).__enter__(), lambda u: writing(u).__enter__()):
        with pytest.raises(SchemaError, match="there is no database"):
            opening(url)
    assert list(tmp_path.iterdir()) == []
