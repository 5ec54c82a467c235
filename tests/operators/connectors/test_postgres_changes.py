"""`hf.PostgresChanges` at a real server: each change once, behind restarts; a slot that is lost is told by name."""

from __future__ import annotations

import datetime
import decimal
import itertools
import struct
from typing import Any

import psycopg2
import psycopg2.extras
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.operators.connectors.postgres.change_rows import ChangeRows, column_of, read_type
from holdfast.operators.connectors.postgres.changes import SlotReader
from holdfast.operators.connectors.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    MalformedMessageError,
    Relation,
    RelationColumn,
    Truncate,
    Update,
    decode,
)
from holdfast.operators.connectors.postgres.slot import SlotSplit, lsn_of, lsn_text
from holdfast.operators.connectors.postgres.table import TableColumn
from holdfast.operators.sources.splits import AssignedSplit
from tests.servers.postgres import VERSIONS, PostgresServer
from tests.servers.process import HOST, wait_until

SECRET = hf.Secret("TEST_PG_PASSWORD")
numbers = itertools.count()

# ------------------------------------------------------------------------------------------------------------------- the decoder


def text(value: str) -> bytes:
    return b"t" + struct.pack(">i", len(value)) + value.encode()


def row(*values: bytes) -> bytes:
    return struct.pack(">h", len(values)) + b"".join(values)


OID = struct.pack(">i", 77)
MESSAGES: list[tuple[bytes, Any]] = [
    (b"B" + struct.pack(">qqi", 5, 6, 7), Begin(5, 6, 7)),
    (b"C" + struct.pack(">bqqq", 0, 5, 9, 6), Commit(5, 9)),
    (
        b"R" + OID + b"shop\0orders\0d" + struct.pack(">h", 1) + b"\x01id\0" + struct.pack(">ii", 20, -1),
        Relation(77, "shop", "orders", (RelationColumn("id", 20, -1, True),)),
    ),
    (b"I" + OID + b"N" + row(text("1"), b"n"), Insert(77, (b"1", None))),
    (b"U" + OID + b"N" + row(text("1"), b"u"), Update(77, (b"1", UNCHANGED), None, None)),
    (b"U" + OID + b"K" + row(text("1")) + b"N" + row(text("2")), Update(77, (b"2",), (b"1",), None)),
    (b"U" + OID + b"O" + row(text("1")) + b"N" + row(text("2")), Update(77, (b"2",), None, (b"1",))),
    (b"D" + OID + b"K" + row(text("größe")), Delete(77, ("größe".encode(),))),
    (b"T" + struct.pack(">i", 2) + b"\0" + OID + OID, Truncate((77, 77))),
    (b"M\0" + b"anything", None),
    (b"Y" + OID + b"public\0mood\0", None),
]


@pytest.mark.parametrize(("content", "message"), MESSAGES, ids=[chr(each[0][0]) + str(at) for at, each in enumerate(MESSAGES)])
def test_messages_are_decoded_and_cut_ones_are_refused(content: bytes, message: Any) -> None:
    if message is not None and "größe" in str(content.decode(errors="replace")):
        content = b"D" + OID + b"K" + struct.pack(">h", 1) + b"t" + struct.pack(">i", 7) + "größe".encode()
    assert decode(content) == message
    for size in range(len(content)) if message is not None else range(0):
        with pytest.raises(MalformedMessageError):
            decode(content[:size])


def test_what_is_no_message_is_refused() -> None:
    for wrong in (b"", b"Z", b"I" + OID + b"X" + row(text("1")), b"I" + OID + b"N" + row(b"x")):
        with pytest.raises(MalformedMessageError):
            decode(wrong)


def test_rows_that_were_passed_on_are_skipped_when_their_transaction_comes_again() -> None:
    columns = pa.schema([("id", pa.int64())])
    relation = Relation(7, "public", "t", (RelationColumn("id", 20, -1, True),))
    messages: list[Any] = [Begin(100, 0, 1), relation, *(Insert(7, (str(each).encode(),)) for each in range(3)), Commit(100, 140)]
    messages += [Begin(150, 0, 2), Insert(7, (b"3",)), Commit(150, 180)]

    def read(position: tuple[int, ...]) -> list[int]:
        rows = ChangeRows(["public.t"], columns, position)
        for message in messages:
            rows.take(message)
        batch, positions, _ = rows.drain()
        assert rows.position == (180, 0)
        assert rows.last_commit_lsn == 150
        assert positions is None or positions.tolist()[-1] == [150, 1]
        return [] if batch is None else batch.column("id").to_pylist()

    assert read(()) == [0, 1, 2, 3]
    assert read((100, 2)) == [2, 3]
    assert read((100, 3)) == [3]
    assert read((140, 0)) == [3]
    assert read((150, 1)) == []


def test_a_position_is_the_same_row_when_the_source_reads_other_tables() -> None:
    tables = [Relation(oid, "public", name, (RelationColumn("id", 20, -1, True),)) for oid, name in ((7, "a"), (8, "b"))]
    messages: list[Any] = [Begin(100, 0, 1), *tables]
    for number in range(3):
        messages += [Insert(7, (b"%d" % number,)), Insert(8, (b"%d" % number,))]

    def read(names: list[str], position: tuple[int, ...]) -> tuple[list[tuple[str, int]], list[list[int]]]:
        rows = ChangeRows(names, pa.schema([("id", pa.int64())]), position)
        for message in messages:
            rows.take(message)
        batch, positions, _ = rows.drain()
        assert batch is not None
        assert positions is not None
        return list(zip(batch.column("table").to_pylist(), batch.column("id").to_pylist(), strict=True)), positions.tolist()

    found, positions = read(["public.a"], ())
    assert found == [("public.a", 0), ("public.a", 1), ("public.a", 2)]
    assert read(["public.a", "public.b"], tuple(positions[1]))[0] == [("public.b", 1), ("public.a", 2), ("public.b", 2)]


def test_values_are_read_as_their_types() -> None:
    cases: list[tuple[str, dict[str, Any], str, Any]] = [
        ("bool", {}, "t", True),
        ("int8", {}, "-9223372036854775808", -(2**63)),
        ("float8", {}, "1e-05", 1e-5),
        ("numeric", {"modifier": (10 << 16 | 2) + 4}, "-12.30", decimal.Decimal("-12.30")),
        ("numeric", {}, "1e400", "1e400"),
        ("bytea", {}, "\\x00ff", b"\0\xff"),
        ("date", {}, "1999-12-31", datetime.date(1999, 12, 31)),
        ("time", {}, "01:02:03.5", datetime.time(1, 2, 3, 500_000)),
        ("timestamp", {}, "2026-01-02 03:04:05.006", datetime.datetime(2026, 1, 2, 3, 4, 5, 6000)),
        ("timestamptz", {}, "2026-01-02 03:04:05+00", datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)),
        ("jsonb", {}, '{"a": 1}', '{"a": 1}'),
    ]
    for kind, options, sent, wanted in cases:
        column = TableColumn("c", kind, kind, **options)
        assert column_of([sent.encode(), None, UNCHANGED], read_type(column)).to_pylist() == [wanted, None, None]
    with pytest.raises(pa.ArrowInvalid):
        column_of([b"infinity"], pa.timestamp("us"))
    assert lsn_of(lsn_text(0x1_0000_00FF)) == 0x1_0000_00FF


# -------------------------------------------------------------------------------------------------------------------- at a server


class Table:
    """A table, a publication and a slot of their own."""

    def __init__(self, server: PostgresServer, columns: str = "id int8 PRIMARY KEY, v text") -> None:
        self.server = server
        self.name = f"changed{next(numbers)}"
        self.slot = f"slot_{self.name}"
        self.run(f"CREATE TABLE {self.name} ({columns})")
        self.run(f"CREATE PUBLICATION {self.name} FOR TABLE {self.name}")

    def run(self, *statements: str) -> None:
        """In one transaction."""
        connection = psycopg2.connect(self.server.dsn)
        with connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement.format(self.name))
        connection.close()

    def source(self, **options: Any) -> hf.PostgresChanges:
        dsn = f"postgresql://postgres@{HOST}:{self.server.port}/postgres"
        options = {"slot": self.slot, "publication": self.name, "password": SECRET, "snapshot": "never", **options}
        kind = options.pop("kind", hf.PostgresChanges)
        made: hf.PostgresChanges = kind(dsn, options.pop("tables", self.name), **options)
        return made

    def confirmed(self) -> int:
        found = self.server.execute("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = %s", self.slot)
        return lsn_of(found[0][0])

    def drop_slot(self) -> None:
        self.server.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", self.slot)
        wait_until(lambda: not self.server.execute(ACTIVE, self.slot), what="the slot is free")
        self.server.execute("SELECT pg_drop_replication_slot(%s)", self.slot)


ACTIVE = "SELECT 1 FROM pg_replication_slots WHERE slot_name = %s AND active"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job under test waits for each fetch."""
    monkeypatch.setattr("holdfast.operators.connectors.postgres.changes.WAIT_S", 0.02)


@pytest.fixture
def table(postgres: PostgresServer) -> Any:
    table = Table(postgres)
    yield table
    if postgres.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", table.slot):
        table.drop_slot()


def rows_of(out: hf.testing.Output, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(found[name] for name in names) for found, _ in out.committed()]


def until_it_reads(job: hf.testing.Job, table: Table) -> None:
    def is_read() -> bool:
        job.advance(by_ms=100)
        return bool(table.server.execute(ACTIVE, table.slot))

    wait_until(is_read, what="the slot is read")


def until(job: hf.testing.Job, out: hf.testing.Output, count: int) -> None:
    def come() -> bool:
        job.advance(by_ms=100)
        job.checkpoint()
        return len(out.committed()) >= count

    wait_until(come, what=f"{count} rows")


def test_each_change_comes_once_and_the_slot_moves_behind_checkpoints(table: Table) -> None:
    with hf.testing.Job() as job:
        out = job.output(job.environment.from_source(table.source()).uid("changes"))
        job.start()
        until_it_reads(job, table)
        begin = table.confirmed()
        table.run("INSERT INTO {} VALUES (1, 'one'), (2, NULL)", "UPDATE {} SET v = 'two' WHERE id = 2")
        until(job, out, 3)
        table.run("UPDATE {} SET id = 3 WHERE id = 1", "DELETE FROM {} WHERE id = 2")
        table.run("ROLLBACK", "TRUNCATE {}")
        until(job, out, 7)
        job.restart()
        assert table.confirmed() > begin
        table.run("INSERT INTO {} VALUES (9, 'nine')")
        until(job, out, 8)
        assert rows_of(out, "op", "id", "v") == [
            ("insert", 1, "one"),
            ("insert", 2, None),
            ("update", 2, "two"),
            ("delete", 1, None),
            ("insert", 3, "one"),
            ("delete", 2, None),
            ("truncate", None, None),
            ("insert", 9, "nine"),
        ]
        assert {found[0] for found in rows_of(out, "table")} == {f"public.{table.name}"}
        assert all(stamp.tzinfo is not None for (stamp,) in rows_of(out, "committed_at"))


def test_large_values_that_did_not_change_are_named(table: Table) -> None:
    table.run("ALTER TABLE {} ALTER v SET STORAGE EXTERNAL", "ALTER TABLE {} ADD n int8")
    with hf.testing.Job() as job:
        out = job.output(job.environment.from_source(table.source()).uid("changes"))
        job.start()
        until_it_reads(job, table)
        table.run("INSERT INTO {} VALUES (1, repeat('x', 10000), 1)")
        table.run("UPDATE {} SET n = 2")
        table.run("ALTER TABLE {} REPLICA IDENTITY FULL")
        table.run("UPDATE {} SET n = 3")
        until(job, out, 3)
        large = "x" * 10_000
        assert rows_of(out, "n", "v", "unchanged") == [(1, large, None), (2, None, ["v"]), (3, large, None)]


def test_an_update_of_the_key_deletes_the_old_one_where_whole_rows_are_sent_too(table: Table) -> None:
    table.run("ALTER TABLE {} REPLICA IDENTITY FULL")
    source = table.source()
    source.create_enumerator().discover()
    reader = SlotReader(source, job_id="job", attempt=1)
    reader.add_splits([AssignedSplit(SlotSplit(table.slot))])
    table.run("INSERT INTO {} VALUES (1, 'a')", "UPDATE {} SET v = 'b'", "UPDATE {} SET id = 2")
    found: list[tuple[Any, ...]] = []

    def come() -> bool:
        for each in reader.fetch():
            found.extend(tuple(row[name] for name in ("op", "id", "v")) for row in (each.columns or pa.table({})).to_pylist())
        return len(found) >= 4

    wait_until(come, what="the changes")
    assert found == [("insert", 1, "a"), ("update", 1, "b"), ("delete", 1, "b"), ("insert", 2, "b")]
    reader.close()


def test_a_column_that_comes_and_one_that_goes(table: Table) -> None:
    with hf.testing.Job() as job:
        out = job.output(job.environment.from_source(table.source()).uid("changes"))
        job.start()
        until_it_reads(job, table)
        table.run("INSERT INTO {} VALUES (1, 'a')", "ALTER TABLE {} ADD more int8", "INSERT INTO {} VALUES (2, 'b', 7)")
        table.run("ALTER TABLE {} DROP v", "INSERT INTO {} VALUES (3, 8)")
        until(job, out, 3)
        assert rows_of(out, "id", "v") == [(1, "a"), (2, "b"), (3, None)]


def test_a_slot_that_is_gone_or_was_moved_is_told(table: Table) -> None:
    with hf.testing.Job() as job:
        out = job.output(job.environment.from_source(table.source()).uid("changes"))
        job.start()
        until_it_reads(job, table)
        table.run("INSERT INTO {} VALUES (1, 'a')")
        until(job, out, 1)
        location = job.stop()
        wait_until(lambda: not table.server.execute(ACTIVE, table.slot), what="the slot is free")
        table.run("INSERT INTO {} VALUES (2, 'b')")
        table.server.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", table.slot)

        def go_on() -> None:
            job.restart(from_=location)
            until(job, out, 2)

        with pytest.raises(hf.SourceDataLostError, match="another client has moved it") as moved:
            go_on()
        assert (moved.value.connector, moved.value.split) == ("postgres", table.slot)
        table.drop_slot()
        with pytest.raises(hf.SourceDataLostError, match="the slot is not there any more"):
            go_on()


def test_an_older_attempt_is_ended_and_others_are_not(table: Table) -> None:
    source = table.source()
    source.create_enumerator().discover()
    assigned = AssignedSplit(SlotSplit(table.slot))
    old, new = SlotReader(source, job_id="job", attempt=1), SlotReader(source, job_id="job", attempt=2)
    foreign = SlotReader(source, job_id="other", attempt=3)
    old.add_splits([assigned])
    with pytest.raises(hf.InvalidConfigError, match="in use by another client"):
        foreign.add_splits([assigned])
    new.add_splits([assigned])
    with pytest.raises(hf.StorageUnavailableError, match="terminating connection"):
        wait_until(lambda: bool(old.fetch()), what="it is found out")
    with pytest.raises(hf.FencedError, match="read by attempt 2"):
        SlotReader(source, job_id="job", attempt=1).add_splits([assigned])
    table.run("INSERT INTO {} VALUES (1, 'a')")
    found: list[Any] = []

    def come() -> bool:
        found.extend(each for each in new.fetch() if each.num_rows)
        return bool(found)

    wait_until(come, what="a row")
    assert found[0].columns.column("id").to_pylist() == [1]
    for each in (old, new, foreign):
        each.close()


def test_a_server_that_was_restored_from_a_backup_is_not_read_on(table: Table) -> None:
    source = table.source()
    source.create_enumerator().discover()
    ahead = lsn_of("FFFF/0")
    reader = SlotReader(source, job_id="job", attempt=1)
    with pytest.raises(hf.SourceDataLostError, match=r"behind FFFF/0 are lost: the server's log ends at .*restored from a backup"):
        reader.add_splits([AssignedSplit(SlotSplit(table.slot), (ahead, 0))])
    reader.close()


def test_what_is_wrong_is_told_before_the_job_runs(table: Table) -> None:
    with pytest.raises(hf.InvalidConfigError, match="there is no table missing"):
        table.source(tables="missing")
    with pytest.raises(hf.InvalidConfigError, match="slot has 1"):
        table.source(slot="A slot")
    other = Table(table.server, "id text PRIMARY KEY")
    with pytest.raises(hf.InvalidConfigError, match=r"column id of .* has the name of another one"):
        table.source(tables=[table.name, other.name])
    with pytest.raises(hf.InvalidConfigError, match=f"publication {other.name} does not have public.{table.name}"):
        table.source(publication=other.name).create_enumerator().discover()


def test_a_value_that_its_type_lacks_is_a_dead_letter(table: Table) -> None:
    table.run("ALTER TABLE {} ADD day date")
    with hf.testing.Job() as job:
        stream = job.environment.from_source(table.source()).uid("changes")
        out, letters = job.output(stream), job.output(stream.side_output(hf.DEAD_LETTERS))
        job.start()
        until_it_reads(job, table)
        table.run("INSERT INTO {} VALUES (1, 'a', '2026-01-02'), (2, 'b', 'infinity'), (3, 'c', NULL)")
        until(job, out, 2)
        assert rows_of(out, "id", "day") == [(1, datetime.date(2026, 1, 2)), (3, None)]
        assert "infinity" in rows_of(letters, "error")[0][0]


@pytest.mark.endurance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_all_that_a_source_promises(version: int) -> None:
    """Each run reads a copy of the slot, which was made before the changes."""
    with PostgresServer(version) as server:
        table = Table(server)
        server.execute(f"SELECT pg_create_logical_replication_slot('{table.slot}', 'pgoutput')")
        expected = []
        for first in range(0, 60, 6):
            table.run(*(f"INSERT INTO {{}} VALUES ({each}, 'v{each}')" for each in range(first, first + 6)))
            expected += [(each, f"v{each}") for each in range(first, first + 6)]
        copies = itertools.count()

        def make_source() -> hf.PostgresChanges:
            for (name,) in server.execute("SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'copy%%'"):
                server.execute("SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s", name)
                wait_until(lambda name=name: not server.execute(ACTIVE, name), what="the slot is free")  # type: ignore[misc]
                server.execute("SELECT pg_drop_replication_slot(%s)", name)
            copy = f"copy{next(copies)}"
            server.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", table.slot, copy)
            return table.source(slot=copy)

        hf.testing.check_source(make_source, expected, row=lambda found: (found["id"], found["v"]), points_max=4)


# --------------------------------------------------------------------------------------- tables that go, and that come


def until_it_fails(job: hf.testing.Job, match: str) -> None:
    def fails() -> bool:
        job.advance(by_ms=100)
        job.checkpoint()
        return False

    with pytest.raises(hf.SourceDataLostError, match=match):
        wait_until(fails, what="it fails")


GONE = {
    "renamed": (("ALTER TABLE {0} RENAME TO {0}_old", "INSERT INTO {0}_old VALUES (2, 'b')"), "is called .*_old from here on"),
    "renamed without a change": (("ALTER TABLE {0} RENAME TO {0}_old",), "is called .*_old now"),
    "dropped": (("DROP TABLE {}",), "was dropped: changes of it are lost"),
    "made anew": (("DROP TABLE {}", "CREATE TABLE {} (id int8 PRIMARY KEY, v text)"), "dropped, and another table has its name"),
    "taken out": (("ALTER PUBLICATION {0} DROP TABLE {0}",), "the publication does not have"),
    "put back": (("ALTER PUBLICATION {0} DROP TABLE {0}", "ALTER PUBLICATION {0} ADD TABLE {0}"), "was taken out .* and put back"),
    "filtered": (("ALTER PUBLICATION {0} SET TABLE {0} WHERE (id > 1)",), "its rows or columns in it were changed"),
}


@pytest.mark.parametrize("name", GONE)
def test_a_table_that_goes_fails_the_job_by_name_behind_its_last_change(
    table: Table, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.operators.connectors.postgres.changes.LOOK_S", 0.0)
    statements, match = GONE[name]
    with hf.testing.Job() as job:
        out = job.output(job.environment.from_source(table.source()).uid("changes"))
        job.start()
        until_it_reads(job, table)
        table.run("INSERT INTO {} VALUES (1, 'a')")
        table.run(*statements)
        until_it_fails(job, match)
        assert rows_of(out, "id") in ([], [(1,)])


@pytest.mark.parametrize("snapshot", ["initial", "never"])
def test_tables_that_are_added_and_renamed_behind_a_savepoint(postgres: PostgresServer, snapshot: str) -> None:
    table, other = Table(postgres), Table(postgres, "id int8 PRIMARY KEY, w text")
    other.run("INSERT INTO {} VALUES (7, 'old')")
    new = f"{table.name}_new"
    with hf.testing.Job() as first, hf.testing.Job() as job:
        out = first.output(first.environment.from_source(table.source(snapshot=snapshot)).uid("changes"))
        first.start()
        until_it_reads(first, table)
        table.run("INSERT INTO {} VALUES (1, 'a')")
        until(first, out, 1)
        location = first.stop()
        wait_until(lambda: not table.server.execute(ACTIVE, table.slot), what="the slot is free")
        table.run("INSERT INTO {} VALUES (2, 'b')", f"ALTER TABLE {{}} RENAME TO {new}")
        table.server.execute(f"ALTER PUBLICATION {table.name} ADD TABLE {other.name}")
        other.run("INSERT INTO {} VALUES (8, 'new')")
        source = table.source(tables=[new, other.name], snapshot=snapshot)
        out = job.output(job.environment.from_source(source).uid("changes"))
        job.start(from_=location, sinks="fork")
        expected = [(new, 2), *([(other.name, 7)] if snapshot == "initial" else []), (other.name, 8), (other.name, 9)]
        until(job, out, len(expected) - 1)
        other.run("INSERT INTO {} VALUES (9, 'last')")
        until(job, out, len(expected))
        job.restart()
        assert [(name.removeprefix("public."), number) for name, number in rows_of(out, "table", "id")] == expected
    table.drop_slot()


def test_a_table_that_is_added_has_to_be_published(table: Table) -> None:
    other = Table(table.server, "id int8 PRIMARY KEY, w text")
    (split,) = table.source().create_enumerator().discover()
    reader = SlotReader(table.source(tables=[table.name, other.name]), job_id="job", attempt=1)
    with pytest.raises(hf.InvalidConfigError, match=f"does not have public.{other.name}: .*ADD TABLE"):
        reader.add_splits([AssignedSplit(split)])
    reader.close()
