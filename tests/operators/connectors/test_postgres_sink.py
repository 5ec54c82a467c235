"""`hf.PostgresSink` at a real server: rows exact behind every mishap, compared by SQL; what is wrong is told by name, early."""

from __future__ import annotations

import datetime
import decimal
import os
import pickle
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

import holdfast as hf
from tests.servers.postgres import PASSWORD, VERSIONS, PostgresServer
from tests.servers.process import HOST, wait_until
from tests.servers.proxy import Break, Cut, Direction, Proxy

SECRET = hf.Secret("TEST_PG_PASSWORD")
UTC = datetime.UTC


def dsn_of(server: PostgresServer, *, port: int = 0, user: str = "postgres") -> str:
    return f"postgresql://{user}@{HOST}:{port or server.port}/postgres"


def sink_of(server: PostgresServer, table: str, **options: Any) -> hf.PostgresSink:
    options.setdefault("password", SECRET)
    port = options.pop("port", 0)
    return hf.PostgresSink(dsn_of(server, port=port), table, **options)


def target_of(server: PostgresServer, table: str, schema: pa.Schema, **options: Any) -> hf.CommitTarget:
    """As a worker gets it."""
    target = sink_of(server, table, **options).target
    target.check(schema)
    copy: hf.CommitTarget = pickle.loads(pickle.dumps(target))
    return copy


def owner(attempt: int = 1, known: hf.CommitPosition | None = None, *, reopens: bool = False) -> hf.CommitOwner:
    restored = 0 if known is None else known.checkpoint_id
    return hf.CommitOwner("orders", "job", attempt, f"nonce{attempt}", known, (), restored, reopens=reopens)


NUMBERS = pa.schema([("i", pa.int64())])


def numbers(*values: int) -> Iterator[pa.RecordBatch]:
    for value in values:
        yield pa.record_batch({"i": [value]}, schema=NUMBERS)


def stored(server: PostgresServer, table: str) -> list[int]:
    return [row[0] for row in server.execute(f"SELECT i FROM {table} ORDER BY i")]


@pytest.fixture
def table(postgres: PostgresServer, request: pytest.FixtureRequest) -> str:
    name = f"t{abs(hash(request.node.nodeid))}"
    postgres.execute(f"CREATE TABLE {name} (i int8)")
    return name


# ----------------------------------------------------------------------------------------------------------------------- the kit


def kit_of(server: PostgresServer, **options: Any) -> tuple[Callable[[str], hf.PostgresSink], Callable[[str], list[Any]]]:
    key = "PRIMARY KEY" if options else "NOT NULL"

    def make_sink(name: str) -> hf.PostgresSink:
        server.execute(f"CREATE TABLE IF NOT EXISTS {name} (n serial, id int8 {key}, text text)")
        return sink_of(server, name, **options)

    def read_rows(name: str) -> list[Any]:
        return server.execute(f"SELECT id, text FROM {name} ORDER BY n")

    return make_sink, read_rows


@pytest.mark.parametrize("scenario", ["fails behind call 1, apply"])
def test_some_of_what_exactly_once_promises(postgres: PostgresServer, scenario: str) -> None:
    make_sink, read_rows = kit_of(postgres)
    prefix = f"some{abs(hash(scenario))}"
    passed = hf.testing.check_sink(
        lambda name: make_sink(prefix + name), lambda name: read_rows(prefix + name), only=scenario
    )
    assert scenario in passed


def test_an_upsert_that_is_sent_rows_again_overwrites_them(postgres: PostgresServer) -> None:
    """With allow_output_repeat."""
    make_sink, read_rows = kit_of(postgres, mode="upsert", key="id")
    scenario = "older and foreign snapshots"
    passed = hf.testing.check_sink(
        lambda name: make_sink("again" + name), lambda name: read_rows("again" + name), overwrites=True, only=scenario
    )
    assert scenario in passed


@pytest.mark.endurance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [{}, {"mode": "upsert", "key": "id"}], ids=["append", "upsert"])
def test_all_that_exactly_once_promises(version: int, options: dict[str, Any]) -> None:
    with PostgresServer(version) as server:
        make_sink, read_rows = kit_of(server, **options)
        assert len(hf.testing.check_sink(make_sink, read_rows, overwrites=bool(options), points="all")) > 50


# ------------------------------------------------------------------------------------------------------------- rows, by their types


def test_rows_of_every_type_arrive_as_they_are(postgres: PostgresServer) -> None:
    postgres.execute("CREATE TYPE mood AS ENUM ('sad', 'happy')")
    postgres.execute("CREATE DOMAIN short AS varchar(5) CHECK (VALUE <> '')")
    postgres.execute('CREATE SCHEMA "Shop"')
    postgres.execute(
        'CREATE TABLE "Shop"."Every type" (b bool, s int2, i int4, l int8, f float4, d float8, n numeric(20, 3), t text, v short, '
        "c char(3), y bytea, day date, clock time, at timestamp, tz timestamptz, span interval, j json, jb jsonb, u uuid, ub uuid, "
        "m mood, ints int8[], texts text[], at_ms timestamptz, own int8 GENERATED ALWAYS AS IDENTITY, twice int8 GENERATED "
        "ALWAYS AS (l * 2) STORED, more text DEFAULT 'more')"
    )
    ident = uuid.UUID("01234567-89ab-cdef-0123-456789abcdef")
    moment = datetime.datetime(2026, 2, 3, 4, 5, 6, 789012)
    batch = pa.record_batch(
        {
            "b": [True, None],
            "s": pa.array([-3, None], pa.int8()),
            "i": pa.array([7, None], pa.uint16()),
            "l": pa.array([2**61, None], pa.int64()),
            "f": pa.array([1.5, None], pa.float32()),
            "d": pa.array([2.5, None], pa.float32()),
            "n": pa.array([decimal.Decimal("-1234.567"), None], pa.decimal128(12, 3)),
            "t": pa.array(["größer 漢字", None]).dictionary_encode(),
            "v": pa.array(["short", None], pa.large_string()),
            "c": pa.array(["abc", None], pa.string_view()),
            "y": pa.array([b"\x00\xff", None]),
            "day": pa.array([datetime.date(1999, 12, 31), None]),
            "clock": pa.array([datetime.time(1, 2, 3, 4), None], pa.time64("us")),
            "at": pa.array([moment, None], pa.timestamp("us")),
            "tz": pa.array([moment, None], pa.timestamp("us", "Europe/Berlin")),
            "span": pa.array([datetime.timedelta(days=-2, microseconds=5), None], pa.duration("us")),
            "j": pa.array(['{"a": 1}', None]),
            "jb": pa.array(['{"a": [1, null]}', None]),
            "u": pa.array([str(ident), None]),
            "ub": pa.array([ident.bytes, None], pa.binary(16)),
            "m": pa.array(["happy", None]),
            "ints": pa.array([[1, None, 3], None], pa.list_(pa.int64())),
            "texts": pa.array([["a", None], None], pa.list_(pa.string())),
            "at_ms": pa.array([1_700_000_000_123, None], pa.timestamp("ms", "UTC")),
        }
    )
    target = target_of(postgres, "Shop.Every type", batch.schema)
    first = target.open(owner())
    target.apply(iter([target.stage(batch)]), first, first.moved(1))
    target.close()
    row, nulls = postgres.execute('SELECT * FROM "Shop"."Every type" ORDER BY own')
    assert tuple(bytes(value) if isinstance(value, memoryview) else value for value in row) == (
        *(True, -3, 7, 2**61, 1.5, 2.5, decimal.Decimal("-1234.567"), "größer 漢字", "short", "abc"),
        *(b"\x00\xff", datetime.date(1999, 12, 31), datetime.time(1, 2, 3, 4), moment, moment.replace(tzinfo=UTC)),
        *(datetime.timedelta(days=-2, microseconds=5), {"a": 1}, {"a": [1, None]}, str(ident), str(ident), "happy"),
        *([1, None, 3], ["a", None], datetime.datetime(2023, 11, 14, 22, 13, 20, 123000, UTC), 1, 2**62, "more"),
    )
    assert nulls == (*(None,) * 24, 2, None, "more")


def test_an_upsert_keeps_the_last_row_of_each_key(postgres: PostgresServer) -> None:
    postgres.execute('CREATE TABLE upserted (a int8, "The key" text, v text, n int8 DEFAULT 7, UNIQUE ("The key", a))')
    schema = pa.schema([("a", pa.int64()), ("The key", pa.string()), ("v", pa.string()), ("gone", pa.bool_())])

    def batch(*rows: tuple[int, str, str | None, bool | None]) -> pa.RecordBatch:
        return pa.record_batch([list(column) for column in zip(*rows, strict=True)], schema=schema)

    target = target_of(postgres, "upserted", schema, mode="upsert", key=["a", "The key"], delete_when="gone")
    expected = target.open(owner())

    def apply(number: int, *batches: pa.RecordBatch) -> list[tuple[Any, ...]]:
        nonlocal expected
        target.apply(iter([target.stage(each) for each in batches]), expected, expected.moved(number))
        expected = expected.moved(number)
        return postgres.execute('SELECT a, "The key", v, n FROM upserted ORDER BY a, "The key"')

    found = apply(1, batch((1, "x", "old", None), (2, "x", "two", False)), batch((1, "x", "new", False), (1, "y", None, False)))
    assert found == [(1, "x", "new", 7), (1, "y", None, 7), (2, "x", "two", 7)]
    postgres.execute("UPDATE upserted SET n = 8 WHERE a = 2")
    found = apply(2, batch((2, "x", "again", False), (1, "x", None, True), (3, "x", "never", False), (3, "x", None, True)))
    assert found == [(1, "y", None, 7), (2, "x", "again", 8)], "what is not in the rows stays; deleted last is deleted"
    found = apply(3, batch((1, "y", None, True), (1, "y", "back", False), (9, "x", None, True)))
    assert found == [(1, "y", "back", 7), (2, "x", "again", 8)], "a key that is not there is deleted without harm"
    target.close()


def test_a_condition_in_sql_says_what_is_deleted(postgres: PostgresServer) -> None:
    postgres.execute("CREATE TABLE stock (item text PRIMARY KEY, pieces int8 NOT NULL)")
    schema = pa.schema([("item", pa.string()), ("pieces", pa.int64())])
    target = target_of(postgres, "stock", schema, mode="upsert", key="item", delete_when="pieces <= 0")
    first = target.open(owner())
    rows = pa.record_batch({"item": ["nut", "bolt", "nut"], "pieces": [3, 4, 0]}, schema=schema)
    target.apply(iter([target.stage(rows)]), first, first.moved(1))
    target.close()
    assert postgres.execute("SELECT * FROM stock") == [("bolt", 4)]


def test_of_a_row_that_deletes_its_key_nothing_else_has_to_fit(postgres: PostgresServer) -> None:
    postgres.execute("CREATE TABLE fitting (k int8 PRIMARY KEY, v varchar(3) NOT NULL, u uuid, j jsonb)")
    schema = pa.schema([("k", pa.int64()), ("v", pa.string()), ("u", pa.string()), ("j", pa.string()), ("gone", pa.bool_())])
    target = target_of(postgres, "fitting", schema, mode="upsert", key="k", delete_when="gone")
    first = target.open(owner())
    uuid = "12345678-1234-1234-1234-123456789abc"
    written = {"k": [1, 2], "v": ["a", "b"], "u": [uuid, None], "j": ["{}", None], "gone": [False, False]}
    target.apply(iter([target.stage(pa.record_batch(written, schema=schema))]), first, first.moved(1))
    deleted = {"k": [1, 3], "v": ["too long", "c"], "u": ["none", uuid], "j": ["{", "1"], "gone": [True, False]}
    target.apply(iter([target.stage(pa.record_batch(deleted, schema=schema))]), first.moved(1), first.moved(2))
    target.close()
    assert postgres.execute("SELECT k, v, u::text FROM fitting ORDER BY k") == [(2, "b", None), (3, "c", uuid)]


# ---------------------------------------------------------------------------------------------------------------- what is wrong


def test_what_does_not_fit_is_told_before_the_job_runs(postgres: PostgresServer, table: str) -> None:
    cases: list[tuple[str, pa.Schema, dict[str, Any]]] = [
        ("column i: double does not fit bigint", pa.schema([("i", pa.float64())]), {}),
        ("column j: the table has no such column", pa.schema([("j", pa.int64())]), {}),
        (r"unique index on exactly \(i\)", NUMBERS, {"mode": "upsert", "key": "i"}),
    ]
    for reason, schema, options in cases:
        with pytest.raises(hf.InvalidConfigError, match=reason):
            sink_of(postgres, table, **options).create_writer(schema)
    with pytest.raises(hf.InvalidConfigError, match="there is no table missing"):
        sink_of(postgres, "missing").create_writer(NUMBERS)
    with pytest.raises(hf.InvalidConfigError, match="no table of this server"):
        sink_of(postgres, "pg_catalog.pg_tables").create_writer(NUMBERS)
    for wrong in ({"mode": "upsert"}, {"mode": "merge"}, {"key": "i"}, {"delete_when": "i"}, {"silence_max_ms": 0}):
        with pytest.raises(hf.InvalidConfigError):
            sink_of(postgres, table, **wrong)


def test_rights_are_looked_at_before_the_job_runs(postgres: PostgresServer, table: str) -> None:
    postgres.execute(f"CREATE ROLE poor LOGIN PASSWORD '{PASSWORD}'")
    sink = hf.PostgresSink(dsn_of(postgres, user="poor"), table, password=SECRET)
    with pytest.raises(hf.InvalidConfigError, match=f"lacks the right of INSERT on {table}"):
        sink.create_writer(NUMBERS)


def test_a_server_that_refuses_or_is_not_there(postgres: PostgresServer, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WRONG", "hunter2")
    with pytest.raises(hf.InvalidConfigError, match="password authentication failed") as wrong:
        sink_of(postgres, table, password=hf.Secret("WRONG")).create_writer(NUMBERS)
    assert "hunter2" not in str(wrong.value)
    nowhere = hf.PostgresSink(f"host={HOST} port={postgres.port} user=postgres dbname=nowhere", table, password=SECRET)
    with pytest.raises(hf.InvalidConfigError, match='database "nowhere" does not exist'):
        nowhere.create_writer(NUMBERS)
    with Proxy() as proxy:
        proxy.refuse()
        with pytest.raises(hf.StorageUnavailableError, match="can't be reached"):
            sink_of(postgres, table, port=proxy.port).create_writer(NUMBERS)


def test_no_password_is_kept_anywhere(postgres: PostgresServer, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for dsn in (postgres.dsn, f"host={HOST} password='{PASSWORD}'"):
        with pytest.raises(hf.InvalidConfigError, match=r"hf.Secret\('VARIABLE'\)") as raised:
            hf.PostgresSink(dsn, table)
        assert PASSWORD not in str(raised.value)
    with pytest.raises(hf.InvalidConfigError, match="dsn is none") as raised:
        hf.PostgresSink(f"postgresql://u:{PASSWORD}@[", table)
    assert PASSWORD not in str(raised.value)
    monkeypatch.setenv("TEST_PG_DSN", postgres.dsn)
    sink = hf.PostgresSink(hf.Secret("TEST_PG_DSN"), table)
    target = sink.target
    target.check(NUMBERS)
    first = target.open(owner())
    target.apply(numbers(1), first, first.moved(1))
    for text in (pickle.dumps(target), repr(target).encode(), repr(sink).encode(), target.place.encode(), first.encode()):
        assert PASSWORD.encode() not in text
    assert "$TEST_PG_DSN" in target.place
    target.close()


def test_a_row_that_a_constraint_refuses_changes_nothing(postgres: PostgresServer) -> None:
    postgres.execute("CREATE TABLE strict (i int8 CHECK (i < 10))")
    target = target_of(postgres, "strict", NUMBERS)
    first = target.open(owner())
    with pytest.raises(hf.InvalidRowError, match="violates check constraint"):
        target.apply(numbers(1, 20), first, first.moved(1))
    assert stored(postgres, "strict") == []
    second = target.open(owner(1, first))
    assert second.checkpoint_id == 0
    target.apply(numbers(1, 2), second, second.moved(1))
    target.close()
    assert stored(postgres, "strict") == [1, 2]


# ------------------------------------------------------------------------------------------------------------ owners that wake late


class Paused:
    """Rows that stop behind the first, as a process does that is paused in the middle of its transaction."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def rows(self, *values: int) -> Iterator[pa.RecordBatch]:
        yield from numbers(values[0])
        self.reached.set()
        assert self.go_on.wait(60)
        yield from numbers(*values[1:])


def test_an_owner_that_is_paused_with_the_lock_is_ended_by_its_successor(postgres: PostgresServer, table: str) -> None:
    old, new = target_of(postgres, table, NUMBERS), target_of(postgres, table, NUMBERS)
    first = old.open(owner(1))
    paused, failed = Paused(), []

    def apply() -> None:
        try:
            old.apply(paused.rows(1, 2), first, first.moved(1))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=apply)
    thread.start()
    assert paused.reached.wait(60)
    second = new.open(owner(2, first))  # waits for nobody
    assert second.checkpoint_id == 0
    new.apply(numbers(1, 2), second, second.moved(1))
    paused.go_on.set()
    thread.join(60)
    assert isinstance(failed[0], hf.FencedError)
    assert stored(postgres, table) == [1, 2]
    new.close()


CHILD = """
import pickle, sys, time
import pyarrow as pa
import holdfast as hf
target = pickle.load(sys.stdin.buffer)
first = target.open(hf.CommitOwner("orders", "job", 1, "nonce1", None, (), 0))
def rows():
    yield pa.record_batch({"i": [1]})
    print("within", flush=True)
    time.sleep(600)
target.apply(rows(), first, first.moved(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.endurance)])
def test_a_process_that_is_stopped_or_killed_in_a_commit(postgres: PostgresServer, number: signal.Signals) -> None:
    name = f"ended{number.value}"
    postgres.execute(f"CREATE TABLE {name} (i int8)")
    target = target_of(postgres, name, NUMBERS)
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ})
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(pickle.dumps(target))
        child.stdin.close()
        assert child.stdout.readline() == b"within\n"
        child.send_signal(number)
        second = target.open(owner(2))
        assert second.checkpoint_id == 0
        target.apply(numbers(1, 2), second, second.moved(1))
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        target.close()
    assert stored(postgres, name) == [1, 2]


# ------------------------------------------------------------------------------------------------------------ answers that are lost


def commit_all(target: hf.CommitTarget, chunks: Sequence[Sequence[int]]) -> None:
    """As the committer does it: behind an error that leaves open what happened, the target says how far it got."""
    position = None
    errors: list[Exception] = []
    while len(errors) < 8:
        try:
            position = target.open(owner(1, position, reopens=position is not None))
            while position.checkpoint_id < len(chunks):
                wanted = position.moved(position.checkpoint_id + 1)
                target.apply(numbers(*chunks[position.checkpoint_id]), position, wanted)
                position = wanted
            return
        except Exception as error:
            errors.append(error)
            target._silence_max_ms *= 2  # type: ignore[attr-defined]  # a busy machine is silent for long, too
    raise AssertionError(f"it was never done: {errors}")


CHUNKS = [(1, 2, 3), (4,), (5, 6)]


def cut_at(server: PostgresServer, proxy: Proxy, name: str, cut: Cut) -> bool:
    """Whether there was such a chunk."""
    server.execute(f"CREATE TABLE {name} (i int8)")
    target = target_of(server, name, NUMBERS, silence_max_ms=200 if cut.how is Break.SWALLOW else 15_000)
    target._login = type(target._login)(dsn_of(server, port=proxy.port), SECRET)  # type: ignore[attr-defined]
    proxy.cut(cut)
    commit_all(target, CHUNKS)
    was_cut = proxy.was_cut
    proxy.heal()
    target.close()
    assert stored(server, name) == [1, 2, 3, 4, 5, 6], cut
    return was_cut


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that swallows what is sent is given up soon."""
    monkeypatch.setattr("holdfast.operators.connectors.postgres.session.CONNECT_TIMEOUT_S", 2)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", list(Break))
def test_a_connection_that_breaks_in_a_commit(postgres: PostgresServer, how: Break) -> None:
    with Proxy(postgres.port) as proxy:
        for chunk in (2, 9):
            for delivered in (False, True):
                cut = Cut(chunk, Direction.TO_CLIENT, how, delivered)
                assert cut_at(postgres, proxy, f"broken_{how}_{chunk}_{delivered}".lower(), cut)


@pytest.mark.endurance
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("how", list(Break))
@pytest.mark.parametrize("direction", [Direction.TO_SERVER, Direction.TO_CLIENT])
def test_a_connection_that_breaks_anywhere(postgres: PostgresServer, how: Break, direction: Direction) -> None:
    with Proxy(postgres.port) as proxy:
        for delivered in (False, True):
            chunk, name = 1, f"any_{how}_{direction}_{delivered}".lower()
            while cut_at(postgres, proxy, f"{name}_{chunk}", Cut(chunk, direction, how, delivered)):
                chunk += 1
            assert chunk > 15


def test_a_server_that_dies_in_a_commit(table: str, postgres: PostgresServer) -> None:
    target = target_of(postgres, table, NUMBERS)
    first = target.open(owner(1))
    target.apply(numbers(1), first, first.moved(1))

    def dying() -> Iterator[pa.RecordBatch]:
        yield from numbers(2)
        postgres.restart()
        yield from numbers(3)

    with pytest.raises(Exception, match=r"closed|terminat|connection|recovery"):
        target.apply(dying(), first.moved(1), first.moved(2))
    second = target.open(owner(1, first.moved(1)))
    assert second.checkpoint_id == 1
    target.apply(numbers(2, 3), second, second.moved(2))
    target.close()
    assert stored(postgres, table) == [1, 2, 3]


def test_a_statement_that_takes_long_is_waited_for(postgres: PostgresServer) -> None:
    """A trigger holds each row up for as long as the watch looks four times."""
    postgres.execute("CREATE TABLE slow (i int8)")
    body = "BEGIN PERFORM pg_sleep(0.4); RETURN NEW; END"
    postgres.execute(f"CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$")
    postgres.execute("CREATE TRIGGER wait BEFORE INSERT ON slow FOR EACH ROW EXECUTE FUNCTION wait()")
    target = target_of(postgres, "slow", NUMBERS, silence_max_ms=100)
    first = target.open(owner())
    target.apply(numbers(1), first, first.moved(1))
    target.close()
    assert stored(postgres, "slow") == [1]


def test_two_sinks_that_start_at_once_share_the_table_of_positions(postgres: PostgresServer) -> None:
    postgres.execute("CREATE SCHEMA fresh")
    targets = []
    for name in ("fresh.a", "fresh.b", "fresh.c"):
        postgres.execute(f"CREATE TABLE {name} (i int8)")
        targets.append(target_of(postgres, name, NUMBERS))
    threads = [threading.Thread(target=target.open, args=(owner(),)) for target in targets]
    for thread in threads:
        thread.start()
    wait_until(lambda: not any(thread.is_alive() for thread in threads), what="all are open")
    for target in targets:
        target.close()
    assert len(postgres.execute("SELECT * FROM fresh.holdfast_positions")) == 3
