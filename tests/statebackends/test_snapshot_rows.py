"""States as streams of batches: the same rows whatever the backend, the format and the parallelism; damage is named."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError, NotFoundError
from holdfast.statebackends.factory import BackendKind
from holdfast.statebackends.handles import FileHandle, KeyedStateHandle, KeyGroupRange, OperatorState, StateMeta
from holdfast.statebackends.snapshot import rows as conversion
from holdfast.statebackends.snapshot import table_file as tables
from holdfast.statebackends.state_processor.contents import StoredSnapshot, check_contents
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.storage.checksums import checksum_of
from tests.statebackends.snapshot_harness import KEY, KINDS, SOME, UID, Contents, write

FORMS = [(kind, parallelism, canonical) for kind in KINDS for parallelism in (1, 3) for canonical in (False, True)]


def rows(snapshot: StoredSnapshot, state: str, key_groups: KeyGroupRange | None = None) -> list[dict[str, Any]]:
    stored = snapshot.state(UID, state)
    with snapshot.reader() as reader:
        schema = state_schema(reader, stored)
        batches = list(state_batches(reader, stored, schema, key_groups))
    assert all(batch.schema.equals(schema) for batch in batches)
    return pa.Table.from_batches(batches, schema).to_pylist()


def group(key: str) -> int:
    return KEY.key_group(key, 8)


@pytest.mark.parametrize(("kind", "parallelism", "canonical"), FORMS)
def test_rows_are_the_same_in_every_form(tmp_path: Path, kind: Any, parallelism: int, canonical: bool) -> None:
    folder = "savepoint-7" if canonical else "job/chk-7"
    found = write(tmp_path, folder, SOME, kind=kind, parallelism=parallelism, canonical=canonical)
    assert found.is_self_contained is canonical
    assert {(r["key"], r["value"]) for r in rows(found, "count")} == set(SOME.count.items())
    assert {(r["key"], r["position"], r["value"]) for r in rows(found, "seen")} == {
        ("AA", 0, "one"),
        ("WN", 0, "two"),
        ("WN", 1, "three"),
    }
    assert {(r["key"], r["map_key"], r["value"]) for r in rows(found, "tags")} == {
        ("AA", "t", 1),
        ("AA", "u", 2),
        ("UA", "t", 3),
    }
    assert {(r["key"], r["namespace"], r["sum_v"]) for r in rows(found, "windows")} == {
        ("AA", 60, 5),
        ("AA", 120, 6),
        ("WN", 60, 7),
    }
    assert {(r["key"], r["time"]) for r in rows(found, "_timers")} == SOME.timers
    labels = {r["key"]: {label: set(members) for label, members in r["value"]} for r in rows(found, "labels")}
    assert labels == SOME.labels
    for state in ("count", "labels", "seen", "tags", "windows", "_timers"):
        groups = [(row["key_group"], group(row["key"])) for row in rows(found, state)]
        assert groups == sorted(groups)
        assert all(stored == derived for stored, derived in groups)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_operator_state_has_rows_by_subtask_with_its_json(tmp_path: Path, parallelism: int) -> None:
    contents = Contents(positions=[["a", 1], {"b": 2}, b"raw"], rules=["r"])
    found = write(tmp_path, "job/chk-7", contents, parallelism=parallelism)
    entries = rows(found, "positions")
    assert {(row["value"], row["json"]) for row in entries} == {
        (msgspec.msgpack.encode(["a", 1]), '["a",1]'),
        (msgspec.msgpack.encode({"b": 2}), '{"b":2}'),
        (msgspec.msgpack.encode(b"raw"), None),
    }
    assert [row["subtask"] for row in rows(found, "rules")] == list(range(parallelism))
    with pytest.raises(InvalidConfigError, match="has no key groups"):
        rows(found, "rules", KeyGroupRange(0, 1))


@pytest.mark.parametrize(("kind", "parallelism", "canonical"), FORMS)
@pytest.mark.parametrize("wanted", [KeyGroupRange(0, 8), KeyGroupRange(2, 5), KeyGroupRange(6, 7), KeyGroupRange(3, 3)])
def test_some_key_groups(tmp_path: Path, kind: Any, parallelism: int, canonical: bool, wanted: KeyGroupRange) -> None:
    keys = {f"k{number}": number for number in range(40)}
    found = write(tmp_path, "chk-7", Contents(count=keys), kind=kind, parallelism=parallelism, canonical=canonical)
    assert {row["key"] for row in rows(found, "count", wanted)} == {key for key in keys if group(key) in wanted}


def test_inline_parts_are_read(tmp_path: Path) -> None:
    found = write(tmp_path, "job/chk-7", SOME, kind="rocksdb", inline_threshold=1 << 20)
    assert not [path for path in (tmp_path / "state/job/chk-7").iterdir() if path.name != "_metadata"]
    assert {row["key"] for row in rows(found, "count")} == set(SOME.count)


def test_large_files_are_copied_and_the_copies_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.statebackends.state_processor.reading.MEMORY_BYTES_MAX", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    kinds: tuple[BackendKind, ...] = ("filesystem", "rocksdb")
    for number, kind in enumerate(kinds):
        found = write(tmp_path, f"job/chk-{number}", SOME, kind=kind)
        assert {row["key"] for row in rows(found, "count")} == set(SOME.count)
        with found.reader() as reader:
            stored = found.state(UID, "count")
            stream: Any = state_batches(reader, stored, state_schema(reader, stored))
            next(stream)
            assert any((tmp_path / "scratch").iterdir())
        stream.close()
    assert not any((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("table_format", ["arrow", "parquet"])
@pytest.mark.parametrize("sort_rows_max", [1, 7, 1 << 20])
@pytest.mark.parametrize(("text", "binary"), [(pa.large_string(), pa.large_binary()), (pa.string_view(), pa.binary_view())])
def test_an_edited_table_may_be_in_any_order_and_wider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table_format: str, sort_rows_max: int, text: pa.DataType, binary: pa.DataType
) -> None:
    monkeypatch.setattr(tables, "SORT_ROWS_MAX", sort_rows_max)
    monkeypatch.setattr(tables, "BATCH_ROWS", 5)
    keys = [f"k{number}" for number in range(40)]
    edited = pa.table(
        {
            "comment": ["mine"] * 40,
            "value": pa.array(range(40), pa.int64()),
            "key": pa.array(keys, text),
            "key_group": pa.array([group(key) for key in keys], pa.int64()),
            "namespace": pa.array([b""] * 40, binary),
        }
    )
    found = with_table(write(tmp_path, "savepoint-7", Contents(), canonical=True), edited, table_format)
    assert {row["key"]: row["value"] for row in rows(found, "count")} == {key: n for n, key in enumerate(keys)}
    groups = [row["key_group"] for row in rows(found, "count")]
    assert groups == sorted(groups)
    some = rows(found, "count", KeyGroupRange(2, 4))
    assert {row["key"] for row in some} == {key for key in keys if group(key) in (2, 3)}


def with_table(snapshot: StoredSnapshot, table: pa.Table, table_format: str = "parquet") -> StoredSnapshot:
    """The snapshot with another file for the state `count`."""
    sink = pa.BufferOutputStream()
    if table_format == "parquet":
        pq.write_table(table, sink)
    else:
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return with_part(snapshot, sink.getvalue().to_pybytes(), table_format)


def with_part(snapshot: StoredSnapshot, data: bytes, table_format: str = "parquet") -> StoredSnapshot:
    Path(snapshot.location, "edited").write_bytes(data)
    meta = snapshot.state(UID, "count").meta
    handle = KeyedStateHandle(KeyGroupRange(0, 8), table_format, (meta,), (FileHandle("edited", len(data), checksum_of(data)),))
    return with_keyed(snapshot, handle)


def with_keyed(snapshot: StoredSnapshot, *handles: KeyedStateHandle) -> StoredSnapshot:
    operator = snapshot.metadata.operators[0]
    subtask = msgspec.structs.replace(operator.subtasks[0], keyed=handles)
    changed: OperatorState = msgspec.structs.replace(operator, subtasks=(subtask, *operator.subtasks[1:]))
    metadata = msgspec.structs.replace(snapshot.metadata, operators=(changed,))
    return StoredSnapshot(metadata, snapshot.storage, snapshot.folder)


@pytest.mark.parametrize("broken", ["no key group", "null key", "wrong type", "not a table", "null key group", "no value"])
@pytest.mark.parametrize("table_format", ["arrow", "parquet"])
def test_what_is_no_table_of_the_state_is_named(tmp_path: Path, broken: str, table_format: str) -> None:
    columns: dict[str, Any] = {
        "key_group": pa.array([group("AA")], pa.int32()),
        "key": ["AA"],
        "namespace": [b""],
        "value": pa.array([1], pa.int64()),
    }
    match broken:
        case "no key group":
            del columns["key_group"]
        case "null key":
            columns["key"] = pa.array([None], pa.utf8())
        case "wrong type":
            columns["value"] = ["text"]
        case "null key group":
            columns["key_group"] = pa.array([None], pa.int32())
        case "no value":
            del columns["value"]
    snapshot = write(tmp_path, "savepoint-7", Contents(), canonical=True)
    if broken == "not a table":
        found = with_part(snapshot, b"something else altogether", table_format)
    else:
        found = with_table(snapshot, pa.table(columns), table_format)
    with pytest.raises(CorruptStateError, match=r"operator 'totals', state 'count': edited: subtask 0: not a table") as caught:
        rows(found, "count")
    assert (caught.value.operator, caught.value.path) == (UID, "edited")


def test_unknown_names_say_what_there_is(tmp_path: Path) -> None:
    found = write(tmp_path, "job/chk-7", SOME)
    with pytest.raises(NotFoundError, match="it has: totals"):
        found.state("nothing", "count")
    with pytest.raises(NotFoundError, match="it has: _timers, count, labels"):
        found.state(UID, "nothing")
    with pytest.raises(InvalidConfigError, match="of which operator"):
        list(found.states(None, "count"))


def handle(**fields: Any) -> KeyedStateHandle:
    defaults: dict[str, Any] = {
        "key_groups": KeyGroupRange(0, 8),
        "format": "rocksdb",
        "states": (StateMeta("count", "value", "int", "utf8"),),
        "parts": (FileHandle("f", 1, "x"),),
        "names": ("000001.sst",),
    }
    return KeyedStateHandle(**{**defaults, **fields})


LOW, HIGH = KeyGroupRange(0, 4), KeyGroupRange(4, 8)
LISTED = StateMeta("count", "list", "int", "utf8")


@pytest.mark.parametrize(
    ("handles", "reason"),
    [
        ([handle(names=())], "1 parts with 0 names"),
        ([handle(names=("../evil",))], "'../evil' is not the name of a file"),
        ([handle(names=("..",))], "is not the name of a file"),
        ([handle(names=("é" * 128,))], "is not the name of a file"),
        ([handle(names=("a", "a"), parts=(FileHandle("f", 1, "x"),) * 2)], "two files of one name"),
        ([handle(format="parquet", parts=())], "0 parts of 1 states"),
        ([handle(format="feather")], "unknown format 'feather'"),
        ([handle(key_groups=KeyGroupRange(0, 9))], "key groups [0, 9) of 8"),
        ([handle(key_groups=KeyGroupRange(5, 4))], "key groups [5, 4) of 8"),
        ([handle(), handle(key_groups=KeyGroupRange(7, 8))], "has key group 7 twice"),
        ([handle(states=(StateMeta("rules", "value", "int", "utf8"),))], "keyed state and operator state at once"),
        ([handle(key_groups=LOW), handle(states=(LISTED,), key_groups=HIGH)], "subtasks differ in what state 'count' is"),
    ],
)  # fmt: skip
def test_records_that_do_not_fit_together_are_refused(tmp_path: Path, handles: list[KeyedStateHandle], reason: str) -> None:
    found = with_keyed(write(tmp_path, "job/chk-7", Contents()), *handles)
    with pytest.raises(CorruptStateError) as caught:
        check_contents(found)
    assert reason in caught.value.message
    assert caught.value.operator == UID
    assert "_metadata" in caught.value.message


@pytest.mark.parametrize("meta", [StateMeta("count", "value", "int", None), StateMeta("count", "value", "int", "nothing")])
def test_a_key_type_that_is_none_is_named(tmp_path: Path, meta: StateMeta) -> None:
    found = with_keyed(write(tmp_path, "job/chk-7", Contents()), handle(states=(meta,)))
    with pytest.raises(CorruptStateError, match="operator 'totals', state 'count': "):
        rows(found, "count")


@pytest.mark.parametrize("text", ["frobnicate", "list<int", "map<int>", "optional<" * 3_000])
def test_a_type_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    found = with_keyed(write(tmp_path, "job/chk-7", Contents()), handle(states=(StateMeta("count", "map", text, "utf8"),)))
    with pytest.raises(CorruptStateError, match="operator 'totals', state 'count': type: "):
        rows(found, "count")


@pytest.mark.parametrize("path", ["../other/file", "/etc/passwd", "a/../../b", "x\0y", ".."])
def test_a_path_out_of_a_savepoint_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "state/other").mkdir(parents=True)
    (tmp_path / "state/other/file").write_bytes(b"x")
    snapshot = write(tmp_path, "savepoint-7", Contents(), canonical=True)
    meta = snapshot.state(UID, "count").meta
    part = FileHandle(path, 1, checksum_of(b"x"))
    found = with_keyed(snapshot, handle(format="parquet", states=(meta,), parts=(part,), names=()))
    with pytest.raises(CorruptStateError) as caught:
        rows(found, "count")
    assert (caught.value.operator, caught.value.reason) == (UID, "path")


def test_memory_is_bounded_by_batches(tmp_path: Path) -> None:
    """A state of 40 MB is read with a small part of it in memory at any time."""
    count = 1 << 20
    keys = pa.array(np.arange(count).astype(np.str_), pa.utf8())
    groups = KEY.column([keys], max_parallelism=8).key_groups
    order = np.argsort(groups, kind="stable")
    columns = {
        "key_group": groups,
        "key": keys,
        "namespace": pa.array([b""] * count, pa.binary()),
        "value": np.random.default_rng(1).integers(0, 1 << 62, count),
    }
    table = pa.table(columns).take(order)
    found = with_table(write(tmp_path, "savepoint-7", Contents(), canonical=True), table)
    del table, keys, columns
    pool = pa.system_memory_pool()
    previous = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        before, seen = pool.bytes_allocated(), 0
        stored = found.state(UID, "count")
        with found.reader() as reader:
            peak = 0
            for batch in state_batches(reader, stored, state_schema(reader, stored)):
                seen += batch.num_rows
                peak = max(peak, pool.bytes_allocated() - before)
    finally:
        pa.set_memory_pool(previous)
    assert seen == count
    assert peak < 16 << 20


def test_batches_have_a_bounded_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, number in itertools.product(("snapshot.table_file", "state_processor.rows"), (1, 3)):
        monkeypatch.setattr(f"holdfast.statebackends.{module}.BATCH_ROWS", number)
    contents = Contents(seen={f"k{n}": ["x"] * n for n in range(8)}, positions=list(range(9)))
    for number, kind in enumerate(KINDS):
        found = write(tmp_path, f"job/chk-{number}", contents, kind=kind)
        for state, count in (("seen", 28), ("positions", 9)):
            stored = found.state(UID, state)
            with found.reader() as reader:
                sizes = [batch.num_rows for batch in state_batches(reader, stored, state_schema(reader, stored))]
            assert sum(sizes) == count
            assert max(sizes) <= 3


@pytest.mark.parametrize("canonical", [False, True])
def test_rows_are_the_same_however_many_are_converted_in_one_step(
    tmp_path: Path, canonical: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"user-{number}" for number in range(7)]
    contents = Contents(
        count={name: number for number, name in enumerate(names)},
        labels={name: {"x": {name, "a"}} for name in names},
        seen={name: [name] * number for number, name in enumerate(names)},
        tags={name: dict.fromkeys(names, number) for number, name in enumerate(names)},
    )
    found = []
    for number, at_hand in enumerate((1_024, 3, 1)):
        monkeypatch.setattr(conversion, "ROWS_AT_HAND", at_hand)
        folder = f"savepoint-{number}" if canonical else f"job/chk-{number}"
        snapshot = write(tmp_path, folder, contents, canonical=canonical)
        found.append([rows(snapshot, state) for state in ("count", "labels", "seen", "tags")])
    assert found[0] == found[1] == found[2]
    assert [len(each) for each in found[0]] == [7, 7, 21, 49]
