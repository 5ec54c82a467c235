"""`holdfast inspect` on snapshots of every format, whole and damaged; written by the same code that writes checkpoints."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from holdfast.api.cli.main import app
from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.ha.records import AbortRecord, SavepointRecord, encode_record
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.factory import create_keyed_backend
from holdfast.statebackends.handles import (
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.rocksdb.database import RocksStore
from holdfast.statebackends.rocksdb.row_keys import row_key
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.serialization.state_serializer import StateSerializer
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.snapshot.parts import write_part
from holdfast.statebackends.snapshot.rows import KeyedRows
from holdfast.statebackends.snapshot.tables import encode_keyed_table
from holdfast.statebackends.state import (
    ColumnAggregate,
    ColumnarStateDescriptor,
    ListStateDescriptor,
    MapStateDescriptor,
    StateDescriptor,
    ValueStateDescriptor,
)
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow

runner = CliRunner()
GROUPS = KeyGroupRange(0, 128)
KEY = KeyType.of(str)
KEYS = ("AA", "UA", "WN")
VALUES: dict[str, list[Any]] = {"total": [1, 2, 3], "recent": [[1], [2, 3], [4]], "by_day": [{1: "a"}, {2: "b"}, {3: "c"}]}
DESCRIPTORS: tuple[StateDescriptor, ...] = (
    ValueStateDescriptor("total", int),
    ListStateDescriptor("recent", int),
    MapStateDescriptor("by_day", int, str),
)


@dataclass
class Unpickled:
    """Leaves a mark when it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["inspect", *arguments])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result.stdout if code == 0 else result.stderr


def target(folder: str, inline: int) -> SnapshotTarget:
    return SnapshotTarget(7, folder, "op-0-1-n", canonical=True, inline_threshold=inline)


def open_tables(storage: LocalStorage, folder: str, table_format: str, inline: int) -> KeyedStateHandle:
    rows = KeyedRows(KEY, 128, "op")
    encoded = [KEY.encode(key) for key in KEYS]
    metas, parts = [], []
    for descriptor in DESCRIPTORS:
        codec = StateSerializer.of(descriptor, KEY)
        table = rows.table(codec, [(b"", encoded, VALUES[descriptor.name])])
        data = encode_keyed_table(table, "parquet" if table_format == "parquet" else "arrow")
        metas.append(codec.meta)
        parts.append(run_flow(write_part(memoryview(data), descriptor.name, target(folder, inline)), storage))
    return KeyedStateHandle(GROUPS, table_format, tuple(metas), tuple(parts))


def native_files(storage: LocalStorage, folder: str, scratch: Path) -> KeyedStateHandle:
    store = RocksStore(str(scratch / "db"), write_buffer_bytes=1 << 20, block_cache_bytes=1 << 20)
    metas = []
    for descriptor in DESCRIPTORS:
        codec = StateSerializer.of(descriptor, KEY)
        metas.append(codec.meta)
        state_id = store.state_id(descriptor.name)
        for key, value in zip(KEYS, VALUES[descriptor.name], strict=True):
            group, encoded = KEY.key_group(key, 128), KEY.encode(key)
            if descriptor.kind == "map":
                rows = [(codec.encode_entry(k), codec.encode(v)) for k, v in value.items()]
            else:
                rows = [(b"", codec.encode(value))]
            store.write((row_key(group, state_id, encoded, b"", map_key), data) for map_key, data in rows)
    names = store.link_copy(str(scratch / "copy"))
    store.close()
    parts = [run_flow(write_part((scratch / "copy" / name).read_bytes(), name, target(folder, 0)), storage) for name in names]
    return KeyedStateHandle(GROUPS, "rocksdb", tuple(metas), tuple(parts), tuple(names))


def offsets(storage: LocalStorage, folder: str) -> OperatorListHandle:
    entries = [msgspec.msgpack.encode(["a.parquet", 10]), b"\xc1raw"]
    part = run_flow(write_part(msgspec.msgpack.encode(entries), "list-positions", target(folder, 1_000)), storage)
    return OperatorListHandle(StateMeta("positions", "operator_list", "bytes"), part, len(entries))


def write_snapshot(root: Path, folder: str, *keyed: KeyedStateHandle, kind: Any = "checkpoint") -> Path:
    storage = LocalStorage(root)
    state = OperatorSubtaskState(keyed, (offsets(storage, folder),))
    operator = OperatorState("totals", "a" * 32, "Totals", 1, 128, (state,))
    empty = OperatorState("filter", "b" * 32, "Filter", 1, 128, (OperatorSubtaskState(),))
    metadata = SnapshotMetadata(
        job_id="0" * 32,
        job_name="flights",
        checkpoint_id=7,
        kind=kind,
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=0,
        completion_timestamp_ms=5,
        operators=(operator, empty),
    )
    place = root / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "_metadata").write_bytes(encode_metadata(metadata))
    return place


@pytest.fixture(params=["arrow", "parquet", "inline", "rocksdb"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    storage, folder = LocalStorage(tmp_path / "state"), "job/chk-7"
    if request.param == "rocksdb":
        keyed = native_files(storage, folder, tmp_path)
    else:
        inline = 1 << 20 if request.param == "inline" else 0
        keyed = open_tables(storage, folder, "arrow" if request.param == "inline" else request.param, inline)
    return write_snapshot(tmp_path / "state", folder, keyed)


def test_summary(checkpoint: Path) -> None:
    output = run(str(checkpoint))
    assert output.startswith("checkpoint 7 of flights (" + "0" * 32)
    assert all(word in output for word in ("totals", "filter", "recent", "by_day", "positions", "map<int,str>", "utf8"))
    assert run(str(checkpoint / "_metadata")) == output


def test_summary_as_json(checkpoint: Path) -> None:
    summary = json.loads(run(str(checkpoint), "--json", "--verify"))
    assert (summary["job_name"], summary["checkpoint_id"], summary["verified"]) == ("flights", 7, True)
    totals = summary["operators"][0]
    assert [state["name"] for state in totals["states"]] == ["by_day", "positions", "recent", "total"]
    assert totals["states"][1]["entries"] == 2
    assert totals["size"] > 0


@pytest.mark.parametrize(
    ("state", "columns", "expected"),
    [
        ("total", ("key", "value"), {("AA", 1), ("UA", 2), ("WN", 3)}),
        ("recent", ("key", "position", "value"), {("AA", 0, 1), ("UA", 0, 2), ("UA", 1, 3), ("WN", 0, 4)}),
        ("by_day", ("key", "map_key", "value"), {("AA", 1, "a"), ("UA", 2, "b"), ("WN", 3, "c")}),
    ],
)
def test_rows_of_keyed_state(checkpoint: Path, state: str, columns: tuple[str, ...], expected: set[tuple[Any, ...]]) -> None:
    document = json.loads(run(str(checkpoint), "--state", "totals", state, "--json"))
    assert {tuple(row[column] for column in columns) for row in document["rows"]} == expected
    assert all(row["key_group"] == KEY.key_group(row["key"], 128) for row in document["rows"])
    assert document["truncated"] is False
    table = run(str(checkpoint), "--state", "totals", state)
    assert "KEY_GROUP" in table


def test_rows_are_limited(checkpoint: Path) -> None:
    document = json.loads(run(str(checkpoint), "--state", "totals", "total", "--limit", "2", "--json"))
    assert (len(document["rows"]), document["truncated"]) == (2, True)
    assert "the first 2 rows" in run(str(checkpoint), "--state", "totals", "total", "--limit", "2")


def test_rows_of_operator_state(checkpoint: Path) -> None:
    rows = json.loads(run(str(checkpoint), "--state", "totals", "positions", "--json"))["rows"]
    assert rows == [
        {"subtask": 0, "position": 0, "value": ["a.parquet", 10]},
        {"subtask": 0, "position": 1, "value": b"\xc1raw".hex()},
    ]


def test_nothing_in_the_snapshot_is_changed(checkpoint: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(checkpoint.rglob("*")) if path.is_file()}
    run(str(checkpoint), "--state", "totals", "total")
    assert before == {path: path.read_bytes() for path in sorted(checkpoint.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("uid", "state", "known"), [("nothing", "total", "filter, totals"), ("totals", "nothing", "recent, total")]
)
def test_unknown_operator_or_state_names_what_there_is(checkpoint: Path, uid: str, state: str, known: str) -> None:
    message = run(str(checkpoint), "--state", uid, state, code=2)
    assert known in message
    assert message.count("\n") == 1


def test_a_moved_savepoint_is_read(tmp_path: Path) -> None:
    keyed = open_tables(LocalStorage(tmp_path / "sp"), "savepoint-7", "parquet", 0)
    place = write_snapshot(tmp_path / "sp", "savepoint-7", keyed, kind="savepoint")
    moved = shutil.move(place, tmp_path / "elsewhere")
    assert run(str(moved), "--verify").startswith("savepoint 7 of flights")


def test_a_savepoints_pointer_is_followed(tmp_path: Path) -> None:
    keyed = open_tables(LocalStorage(tmp_path / "sp"), "savepoint-7", "parquet", 0)
    place = write_snapshot(tmp_path / "sp", "savepoint-7", keyed, kind="savepoint")
    pointer = tmp_path / "state" / "job" / "chk-7"
    pointer.mkdir(parents=True)
    for location in (str(place), f"file://{place}"):
        (pointer / "_metadata").write_bytes(encode_record(SavepointRecord(7, location, CheckpointKind.SAVEPOINT, 0, 1, "n")))
        assert run(str(pointer)).startswith("savepoint 7 of flights")


def test_a_pointer_to_a_pointer_is_refused(tmp_path: Path) -> None:
    pointer = tmp_path / "chk-7"
    pointer.mkdir()
    (pointer / "_metadata").write_bytes(encode_record(SavepointRecord(7, str(pointer), CheckpointKind.SAVEPOINT, 0, 1, "n")))
    assert "CorruptStateError" in run(str(pointer), code=2)


def test_an_aborted_checkpoint_says_why(tmp_path: Path) -> None:
    (tmp_path / "_metadata").write_bytes(encode_record(AbortRecord(7, FailureReason.EXPIRED, 1, "n", "too slow")))
    assert "checkpoint 7 was aborted (expired): too slow" in run(str(tmp_path), code=2)


def test_no_snapshot_there(tmp_path: Path) -> None:
    assert "holds no snapshot" in run(str(tmp_path), code=2)
    assert "holds no snapshot" in run(str(tmp_path / "missing"), code=2)


@pytest.mark.parametrize("damage", ["truncated", "newer"])
def test_a_damaged_or_newer_metadata_is_named(checkpoint: Path, damage: str) -> None:
    path = checkpoint / "_metadata"
    content = path.read_bytes()
    path.write_bytes(content[:-40] if damage == "truncated" else content.replace(b'"version":1', b'"version":9', 1))
    message = run(str(checkpoint), code=2)
    assert str(path) in message
    assert ("UnsupportedVersionError" if damage == "newer" else "CorruptStateError") in message


@pytest.mark.parametrize("checkpoint", ["arrow", "parquet", "rocksdb"], indirect=True)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing"])
def test_a_damaged_file_is_named(checkpoint: Path, damage: str) -> None:
    files = [path for path in checkpoint.iterdir() if path.name != "_metadata" and path.stat().st_size]
    assert files
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
        if damage == "missing":
            path.unlink()
    for arguments in (("--verify",), ("--state", "totals", "total")):
        message = run(str(checkpoint), *arguments, code=2)
        assert "operator 'totals'" in message
        assert "job/chk-7/op-0-1-n-" in message
        assert message.endswith("[CorruptStateError]\n")


def test_pickled_values_are_not_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = pickle.dumps(Unpickled(str(mark)))
    store = RocksStore(str(tmp_path / "db"), write_buffer_bytes=1 << 20, block_cache_bytes=1 << 20)
    group = KEY.key_group("AA", 128)
    store.write([(row_key(group, store.state_id("evil"), KEY.encode("AA"), b""), evil)])
    names = store.link_copy(str(tmp_path / "copy"))
    store.close()
    storage = LocalStorage(tmp_path / "state")
    parts = tuple(
        run_flow(write_part((tmp_path / "copy" / name).read_bytes(), name, target("job/chk-7", 0)), storage) for name in names
    )
    meta = StateMeta("evil", "value", "pickled", KEY.text)
    place = write_snapshot(tmp_path / "state", "job/chk-7", KeyedStateHandle(GROUPS, "rocksdb", (meta,), parts, tuple(names)))
    rows = json.loads(run(str(place), "--state", "totals", "evil", "--json"))["rows"]
    assert bytes.fromhex(rows[0]["value"]) == evil
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["memory", "filesystem", "rocksdb"])
@pytest.mark.parametrize("canonical", [True, False])
def test_what_the_backends_write_is_read(tmp_path: Path, kind: Any, canonical: bool) -> None:
    aggregates = (ColumnAggregate("count", None, "flights"), ColumnAggregate("max", "delay", "worst", pa.float64()))
    columnar = ColumnarStateDescriptor("days", aggregates)
    backend = create_keyed_backend(
        kind,
        descriptors=(DESCRIPTORS[0], DESCRIPTORS[2], columnar),
        key_type=KEY,
        key_groups=GROUPS,
        max_parallelism=128,
        operator="totals",
        subtask=0,
        local_dir=str(tmp_path / "local"),
    )
    for key, value in zip(KEYS, VALUES["by_day"], strict=True):
        backend.set_current_key(KEY.encode(key), KEY.key_group(key, 128))
        backend.get_state(DESCRIPTORS[0]).update(len(key))
        for map_key, map_value in value.items():
            backend.get_state(DESCRIPTORS[2]).put(map_key, map_value)
    keys = KEY.column([pa.array(KEYS)], max_parallelism=128)
    backend.columnar_state(columnar, ["carrier"]).update(keys, 86_400_000, [None, pa.array([1.5, 2.5, 3.5])])
    pending = backend.snapshot(7)
    folder = "savepoint-7" if canonical else "job/chk-7"
    where = SnapshotTarget(7, folder, "totals-0-1-n", canonical=canonical, inline_threshold=100)
    handles = run_flow(pending.flow(where), LocalStorage(tmp_path / "state"))
    pending.release()
    backend.dispose()
    place = write_snapshot(tmp_path / "state", folder, *handles)
    shown = json.loads(run(str(place), "--json", "--verify"))
    assert [state["name"] for state in shown["operators"][0]["states"]] == ["by_day", "days", "positions", "total"]
    for state, expected in (
        ("total", {("AA", 2), ("UA", 2), ("WN", 2)}),
        ("by_day", {("AA", "a"), ("UA", "b"), ("WN", "c")}),
    ):
        rows = json.loads(run(str(place), "--state", "totals", state, "--json"))["rows"]
        assert {(row["key"], row["value"]) for row in rows} == expected
    rows = json.loads(run(str(place), "--state", "totals", "days", "--json"))["rows"]
    assert {(row["key"], row["namespace"], row["flights"], row["worst"]) for row in rows} == {
        ("AA", 86_400_000, 1, 1.5),
        ("UA", 86_400_000, 1, 2.5),
        ("WN", 86_400_000, 1, 3.5),
    }
