"""The rows that tables had, in front of their changes: whoever keeps rows by what comes has the tables' own, whatever happens in
between. A row that came twice, or a change of one that did not come, fails."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import psycopg2
import psycopg2.errors
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.connectors.postgres import initial
from holdfast.operators.connectors.postgres.changes import SlotReader, SlotSourceReader
from holdfast.operators.connectors.postgres.slot import (
    ChunkMarks,
    ChunkRecords,
    LateChange,
    LateMarks,
    SlotSplit,
    SnapshotMarks,
    SnapshotProgress,
    timeline_problem,
)
from holdfast.operators.sources.splits import ReaderContext, SourceReader, SplitRecords
from tests.operators.connectors.test_postgres_changes import ACTIVE, Table, rows_of, until
from tests.servers.postgres import VERSIONS, PostgresServer
from tests.servers.process import wait_until

COLUMNS = "a text COLLATE \"C\", b int4, v text, n int4, PRIMARY KEY (a, b)"
CLOSED_MS = 20


class Gate:
    """Lets so many reads through."""

    left = 0


class Gated(SlotSourceReader):
    def poll(self, rows_max: int) -> SplitRecords | int | None:
        if Gate.left < 1:
            return CLOSED_MS
        polled = super().poll(rows_max)
        Gate.left -= isinstance(polled, SplitRecords)
        return polled


class GatedChanges(hf.PostgresChanges):
    def create_reader(self, context: ReaderContext) -> SourceReader[SlotSplit]:
        return Gated(SlotReader(self, job_id=context.job_id, attempt=context.attempt))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.operators.connectors.postgres.changes.WAIT_S", 0.02)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "ROWS_FIRST", 4)
    monkeypatch.setattr(initial, "ROWS_MAX", 4)


@pytest.fixture
def table(postgres: PostgresServer) -> Any:
    table = Table(postgres, COLUMNS)
    yield table
    if postgres.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", table.slot):
        table.drop_slot()


def kept(rows: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
    """What a table of the changes (op, a, b, v, unchanged) has. A row that has moved has the value of the one that went."""
    found: dict[tuple[Any, ...], Any] = {}
    gone: Any = None
    for op, a, b, v, unchanged in rows:
        if op == "truncate":
            found.clear()
        elif op == "delete":
            gone = found.pop((a, b))
        elif op == "insert":
            assert (a, b) not in found, f"{(a, b)} came twice"
            found[a, b] = gone if "v" in (unchanged or ()) else v
            gone = None
        else:
            assert (a, b) in found, f"a change of {(a, b)}, which did not come"
            found[a, b] = found[a, b] if "v" in (unchanged or ()) else v
    return found


def change(table: Table, rng: random.Random, *, moves: bool = True) -> None:
    """A transaction with a few changes of any rows."""
    statements = []
    for _ in range(rng.randint(1, 3)):
        key, number = rng.choice("äbCd"), rng.randint(0, 6)
        where = f"a = '{key}' AND b = {number}"
        other = rng.choice("äbCd")
        statements.append(
            rng.choice(
                [
                    f"INSERT INTO {{}} VALUES ('{key}', {number}, repeat('{rng.random()}', 150)) ON CONFLICT DO NOTHING",
                    f"UPDATE {{}} SET v = repeat('{rng.random()}', 150) WHERE {where}",
                    f"UPDATE {{}} SET n = {number} WHERE {where}",
                    f"DELETE FROM {{}} WHERE {where}",
                    f"UPDATE {{}} t SET a = '{other}' WHERE {where} AND NOT EXISTS "
                    f"(SELECT 1 FROM {{}} o WHERE o.a = '{other}' AND o.b = {number})"
                    if moves
                    else f"UPDATE {{}} SET v = NULL WHERE {where}",
                ]
            )
        )
    with contextlib.suppress(psycopg2.errors.UniqueViolation):  # another writer has moved a row there meanwhile: nothing is changed
        table.run(*[each.replace("{}", table.name) for each in statements])


def fill(table: Table) -> None:
    """With values that are not sent again while they stay the same."""
    table.run("ALTER TABLE {} ALTER v SET STORAGE EXTERNAL")
    rows = [f"('{key}', {number}, repeat('first', 500))" for key in "bdäC" for number in range(5)]
    table.run(f"INSERT INTO {{}} VALUES {', '.join(rows)}")


def run(table: Table, rng: random.Random, *, full: bool, between: Callable[[], None] = lambda: None) -> None:
    """A job that is stopped and restarted in the midst of the first reading, and changes at any time."""
    if full:
        table.run("ALTER TABLE {} REPLICA IDENTITY FULL")
    fill(table)
    source = table.source(snapshot="initial", kind=GatedChanges)
    Gate.left = 0
    with hf.testing.Job(batch_rows=3) as job:
        out = job.output(job.environment.from_source(source).uid("changes"))
        job.start()
        for _ in range(5):
            Gate.left = rng.randint(0, 3)
            change(table, rng, moves=not full)
            between()
            job.advance(by_ms=100)
            match rng.randint(0, 3):
                case 0:
                    job.checkpoint()
                case 1:
                    job.checkpoint()
                    change(table, rng, moves=not full)
                    job.restart()
                case 2:
                    job.restart()
        Gate.left = 1_000_000
        between()
        table.run("INSERT INTO {} VALUES ('end', 0, NULL)")

        def has_come() -> bool:
            job.advance(by_ms=100)
            job.checkpoint()
            return ("end",) in rows_of(out, "a")

        wait_until(has_come, what="the last row")
        found = rows_of(out, "op", "a", "b", "v", "unchanged")
    expected = {(a, b): v for a, b, v in table.server.execute(f"SELECT a, b, v FROM {table.name}")}
    assert kept(found) == expected


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.endurance) for seed in range(2, 40))])
def test_a_job_that_is_restarted_in_the_midst_has_the_table(table: Table, seed: int) -> None:
    run(table, random.Random(seed), full=seed % 2 == 0)


@pytest.mark.endurance
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_that_is_restarted_anywhere_has_the_table_while_others_write(version: int) -> None:
    """Transactions begin and end while snapshots are made."""
    with PostgresServer(version) as server:
        for seed in range(20):
            table, full, over = Table(server, COLUMNS), seed % 2 == 0, threading.Event()
            rng = random.Random(seed + 1_000)

            def write(table: Table = table, rng: random.Random = rng, full: bool = full, over: threading.Event = over) -> None:
                while not over.is_set():
                    change(table, rng, moves=not full)

            thread = threading.Thread(target=write)

            def between(thread: threading.Thread = thread, over: threading.Event = over) -> None:
                if not thread.is_alive() and not over.is_set() and thread.ident is None:
                    thread.start()
                elif Gate.left > 1_000:
                    over.set()
                    thread.join()

            try:
                run(table, random.Random(seed), full=full, between=between)
            finally:
                over.set()
            table.drop_slot()


@pytest.mark.endurance
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("small_chunks")
def test_all_that_a_source_promises() -> None:
    """Each run reads the tables by a slot of its own; the server is restarted, too."""
    with PostgresServer() as server:
        table, number = Table(server, "id int8 PRIMARY KEY, v text"), itertools.count()
        table.run("INSERT INTO {} SELECT n, 'v' || n FROM generate_series(1, 30) n")

        def make_source() -> hf.PostgresChanges:
            for (name,) in server.execute("SELECT slot_name FROM pg_replication_slots"):
                server.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", name)
                wait_until(lambda name=name: not server.execute(ACTIVE, name), what="the slot is free")  # type: ignore[misc]
                server.execute("SELECT pg_drop_replication_slot(%s)", name)
            return table.source(snapshot="initial", slot=f"run{next(number)}")

        expected = [(each, f"v{each}") for each in range(1, 31)]
        hf.testing.check_source(make_source, expected, row=lambda row: (row["id"], row["v"]), points_max=4, server=server)


def test_rows_are_read_as_their_changes_are(postgres: PostgresServer) -> None:
    kinds = (
        "id int4 PRIMARY KEY, t text, c char(4), f bool, n numeric(6, 2), y bytea, d date, s timestamptz, x float8, i interval, "
        "l int[], g int4 GENERATED ALWAYS AS (id * 2) STORED"
    )
    table = Table(postgres, kinds)
    rows = (
        "(1, E'quote \"\" \\' \\\\ \\n\\r\\n,;\\t', 'ab', true, -1.50, '\\x00ff', '2026-01-02', '2026-01-02 03:04:05.5+01', "
        "1e-300, '1 day', '{1,NULL}')"
    )
    names = "(id, t, c, f, n, y, d, s, x, i, l)"
    with hf.testing.Job() as job:
        stream = job.environment.from_source(table.source(snapshot="initial")).uid("changes")
        out, letters = job.output(stream), job.output(stream.side_output(hf.DEAD_LETTERS))
        table.run(f"INSERT INTO {{}} {names} VALUES {rows}".replace("{1,NULL}", "{{1,NULL}}"))
        table.run("INSERT INTO {} (id, t) VALUES (2, ''), (3, NULL)", "INSERT INTO {} (id, d) VALUES (4, 'infinity')")
        table.run("INSERT INTO {} (id) VALUES (5)")
        job.start()
        until(job, out, 4)
        table.run(f"INSERT INTO {{0}} {names} SELECT id + 10{names[3:].replace(')', '')} FROM {{0}} WHERE id < 4")
        until(job, out, 7)
        found = [{**row, "id": row["id"] % 10, "committed_at": None, "g": None} for row, _ in out.committed()]
        assert found[:3] == found[4:]
        assert (found[0]["c"], found[0]["f"], found[0]["y"]) == ("ab  ", True, b"\0\xff")
        assert found[0]["d"] == datetime.date(2026, 1, 2)
        assert [row["t"] for row in found[1:3]] == ["", None]
        assert found[3]["id"] == 5
        ((error, position),) = rows_of(letters, "error", "position")
        assert "infinity" in error
        assert position[1] == 3
    table.drop_slot()


def test_what_the_publication_leaves_out_is_not_read(postgres: PostgresServer) -> None:
    table, other = Table(postgres, COLUMNS), Table(postgres, "a int8 PRIMARY KEY")
    fill(table)
    other.run("INSERT INTO {} VALUES (7)")
    table.run(f"ALTER PUBLICATION {{}} SET TABLE {{}} (a, b) WHERE (b > 2), {other.name}".replace("{}", table.name))
    other.run("ALTER TABLE {} RENAME a TO other")
    source = table.source(snapshot="initial", tables=[table.name, other.name])
    with hf.testing.Job() as job:
        out = job.output(job.environment.from_source(source).uid("changes"))
        job.start()
        until(job, out, 9)
        found = rows_of(out, "table", "a", "b", "v", "other")
        assert found == [(f"public.{table.name}", a, b, None, None) for a in "Cbdä" for b in (3, 4)] + [
            (f"public.{other.name}", None, None, None, 7)
        ]
    table.drop_slot()


def test_nothing_stays_at_the_server_and_the_tables_can_be_changed(table: Table) -> None:
    fill(table)
    with hf.testing.Job() as job:
        out = job.output(job.environment.from_source(table.source(snapshot="initial")).uid("changes"))
        job.start()
        until(job, out, 20)
        table.run("SET lock_timeout = '1s'", "ALTER TABLE {} ADD more text", "TRUNCATE {}")
        until(job, out, 21)
        assert rows_of(out, "op")[-1] == ("truncate",)
        slots = table.server.execute("SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'holdfast_snapshot%%'")
        assert not slots


def test_tables_that_can_not_be_read_in_parts_are_refused_by_name(postgres: PostgresServer) -> None:
    table = Table(postgres, "id int8, v text")
    with pytest.raises(hf.InvalidConfigError, match=f"public.{table.name} has no primary key"):
        table.source(snapshot="initial")
    assert table.source(snapshot="never").snapshot == "never"
    with pytest.raises(hf.InvalidConfigError, match='snapshot is "initial" or "never"'):
        table.source(snapshot="always")


def test_another_server_with_a_slot_of_that_name_is_refused(table: Table) -> None:
    source = table.source()
    (split,) = source.create_enumerator().discover()
    assert split.system.isdigit()
    reader = SlotReader(source, job_id="job", attempt=1)
    foreign = SlotSplit(split.split_id, system="77", timeline=1)
    with pytest.raises(hf.SourceDataLostError, match=rf"the server is another one \(system {split.system}, it was 77\)"):
        reader.add_splits([hf.AssignedSplit(foreign, (5, 0))])
    reader.close()


HISTORY = "1\t0/3000000\tno recovery target specified\n\n2\t1/40\tbefore 2026\n"


@pytest.mark.parametrize(
    ("timeline", "lsn", "problem"),
    [
        (1, 0x3000000, None),
        (1, 0x3000001, "the server was promoted (timeline 3) when it had the log up to 0/3000000 only"),
        (2, 0x1_00000040, None),
        (4, 1, "the server is on timeline 3, which does not go on from timeline 4: it was restored from a backup"),
    ],
)
def test_the_log_of_a_promoted_server_goes_on_where_it_was_left(timeline: int, lsn: int, problem: str | None) -> None:
    assert timeline_problem(timeline, lsn, 3, HISTORY) == problem


def test_progress_is_that_of_the_row_at_which_a_checkpoint_stands() -> None:
    begin = SnapshotProgress(("s.a", "s.b"))
    keys = [pa.array([b"k1", b"k2"])]
    half = begin.behind(("id",), ("k2",))
    marks = SnapshotMarks(begin)
    marks.add(ChunkRecords("s", marks=ChunkMarks(99, 0, begin, ("id",), keys, (99, 2), half)))
    marks.add(ChunkRecords("s", marks=ChunkMarks(99, 2, half, ("id",), [pa.array([b"k3"])], (99, 3), begin.next_table)))
    last = ChunkMarks(99, 3, SnapshotProgress(("s.b",)), ("id",), [pa.array([], pa.binary())], (100, 0), None)
    marks.add(ChunkRecords("s", marks=last))
    assert marks.at(()) == begin
    assert marks.at((90, 5)) == begin
    assert marks.at((99, 1)) == begin.behind(("id",), ("k1",))
    assert marks.at((99, 2)) == half
    assert marks.at((99, 3)) == SnapshotProgress(("s.b",))
    assert marks.at((100, 0)) is None
    assert marks.at((120, 1)) is None


def test_late_rows_are_those_of_the_row_at_which_a_checkpoint_stands() -> None:
    begin = SnapshotProgress(("s.a",), ("id",), ("k9",), (("k1",),))
    marks = SnapshotMarks(begin)
    changes = [LateChange((40, 2), ("k2",), True), LateChange((40, 3), ("k1",), False), LateChange((50, 1), ("k3",), True)]
    marks.add(ChunkRecords("s", late=changes))
    both = begin.with_late([("k2",), ("k3",)])
    marks.add(ChunkRecords("s", marks=LateMarks(99, 0, both, [1, 2], (99, 2), begin.with_late(()))))
    found = [marks.at(each) for each in [(40, 1), (40, 2), (40, 3), (49, 0), (50, 1), (99, 0), (99, 1), (99, 2)]]
    late: list[tuple[str, ...]] = [("k1",), ("k1", "k2"), ("k2",), ("k2",), ("k2", "k3"), ("k2", "k3"), ("k3",), ()]
    assert found == [begin.with_late([(each,) for each in names]) for names in late]


@pytest.fixture
def half_read(table: Table, small_chunks: None) -> tuple[SlotReader, Any]:
    """A reader behind a restart: 16 rows were given."""
    fill(table)
    source = table.source(snapshot="initial")
    (split,) = source.create_enumerator().discover()
    progress = SnapshotProgress(source.tables, ("a", "b"), ("d", "4"))
    return SlotReader(source, job_id="job", attempt=1), hf.AssignedSplit(SlotSplit(split.split_id, snapshot=progress))


def read_all(reader: SlotReader, end: str) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []

    def come() -> bool:
        for records in reader.fetch():
            rows = [] if records.columns is None else records.columns.to_pylist()
            found.extend((row["op"], row["a"], row["b"], row["v"] and row["v"][:5], row["unchanged"]) for row in rows)
        return any(row[1] == end for row in found)

    wait_until(come, what="the last row")
    return found


def test_a_row_that_moves_without_its_value_is_read_by_its_key(table: Table, half_read: Any) -> None:
    reader, assigned = half_read
    move = "UPDATE {} SET a = '%s' WHERE a = '%s' AND b = %d"
    table.run(move % ("A", "ä", 0), move % ("A", "ä", 1), move % ("B", "b", 0), move % ("y", "b", 1))
    table.run("UPDATE {} SET v = repeat('later', 500) WHERE a = 'A' AND b = 0", "UPDATE {} SET n = 1 WHERE a = 'B'")
    table.run("DELETE FROM {} WHERE a = 'A' AND b = 1")
    reader.add_splits([assigned])
    table.run("INSERT INTO {} VALUES ('z', 0)")
    found = read_all(reader, "z")
    late = [("insert", "A", 0, "later", None), ("insert", "B", 0, "first", None)]
    rest = [("insert", "y", 1, "first", None), *(("insert", "ä", number, "first", None) for number in (2, 3, 4))]
    assert found == [("delete", "b", 0, None, None), ("delete", "b", 1, None, None), *late, *rest, ("insert", "z", 0, None, None)]
    reader.close()


def test_too_many_rows_that_move_without_their_values_are_refused(
    table: Table, half_read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial, "LATE_MAX", 1)
    reader, assigned = half_read
    table.run("UPDATE {} SET a = 'A' WHERE a = 'ä'")
    reader.add_splits([assigned])
    with pytest.raises(hf.InvalidConfigError, match=rf"1 rows of public.{table.name} .* of v .*REPLICA IDENTITY FULL"):
        read_all(reader, "z")
    reader.close()


def test_chunks_are_of_some_bytes(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the server knows how large rows are or not."""
    monkeypatch.setattr(initial, "CHUNK_BYTES", 4_000)
    table.run("ALTER TABLE {} ADD j jsonb", "ALTER TABLE {} ALTER v SET STORAGE EXTERNAL")
    table.run("INSERT INTO {} SELECT 'plain', n, repeat('x', 3000) FROM generate_series(1, 5) n")
    packed = "jsonb_build_object('a', repeat('y', 3000))"
    table.run(f"INSERT INTO {{}} SELECT 'squeezed', n, NULL, n, {packed} FROM generate_series(1, 5) n")
    source = table.source(snapshot="initial")
    reader = SlotReader(source, job_id="job", attempt=1)
    reader.add_splits([hf.AssignedSplit(split) for split in source.create_enumerator().discover()])
    table.run("INSERT INTO {} VALUES ('z', 0)")
    sizes, keys = [], []
    while "z" not in keys:
        for records in reader.fetch():
            rows = [] if records.columns is None else records.columns.to_pylist()
            keys += [row["a"] for row in rows]
            sizes.append(sum(len(row["v"] or "") + len(row["j"] or "") for row in rows))
    assert keys == ["plain"] * 5 + ["squeezed"] * 5 + ["z"]
    assert max(sizes) < 10_000
    reader.close()
