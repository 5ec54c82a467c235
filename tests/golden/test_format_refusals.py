"""What docs/snapshot-format.md says that a reader refuses: ours does, and so does the one that was written from it."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.statebackends.errors import CorruptStateError, UnsupportedVersionError
from holdfast.statebackends.storage.checksums import checksum_of
from tests.golden.contents_v1 import FLIGHTS
from tests.golden.independent_reader import UnreadableError, open_envelope, read_snapshot
from tests.golden.make_snapshots import GOLDEN
from tests.golden.restoring import Restored

Document = dict[str, Any]


def read_with_ours(folder: Path, scratch: Path) -> None:
    """Every state through the tools, and keyed state into a backend too. Raises HoldfastError."""
    snapshot = hf.Snapshot(folder)
    for problem in snapshot.verify().problems:
        raise problem.error()
    for uid, operator in snapshot.operators.items():
        for state in operator.states:
            snapshot.table(uid, state).read_all()
    restored = Restored(folder, "filesystem", {uid: operator.parallelism for uid, operator in snapshot.operators.items()}, scratch)
    assert len(list(restored.keyed(FLIGHTS))) == 2


@pytest.fixture(params=["v1-savepoint/savepoint-9f0cde-5a1e", "v1-filesystem/chk-7"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    copied = tmp_path / "job" / str(request.param).partition("/")[2]
    shutil.copytree(GOLDEN / str(request.param), copied)
    return copied


def assert_refused(folder: Path, scratch: Path, reason: str | None = None) -> CorruptStateError:
    with pytest.raises(UnreadableError):
        read_snapshot(folder)
    with pytest.raises(CorruptStateError, match=reason) as caught:
        read_with_ours(folder, scratch)
    return caught.value


def test_an_unchanged_one_is_read_by_both(folder: Path, tmp_path: Path) -> None:
    assert read_snapshot(folder)["operators"]
    read_with_ours(folder, tmp_path)
    rewrite(folder, lambda document: document.update(later={"field": [1]}))
    assert read_snapshot(folder)["operators"], "fields that a later version adds are ignored"
    read_with_ours(folder, tmp_path)


# ------------------------------------------------------------------------------------------------------------ the envelope


def seal(body: bytes, version: int = 1) -> bytes:
    header = '{"format":"holdfast-snapshot","version":%d,"length":%d,"checksum":"%s","snapshot":'
    return (header % (version, len(body), checksum_of(body))).encode() + body + b"}\n"


def rewrite(folder: Path, change: Callable[[Document], Any], version: int = 1) -> None:
    """Change the records of a snapshot, and seal them again."""
    path = folder / "_metadata"
    document = open_envelope(path.read_bytes())
    change(document)
    path.write_bytes(seal(json.dumps(document).encode(), version))


@pytest.mark.parametrize("version", [0, 4, 999_999_999])
def test_another_version(folder: Path, tmp_path: Path, version: int) -> None:
    rewrite(folder, lambda document: document.update(version=version), version)
    assert isinstance(assert_refused(folder, tmp_path), UnsupportedVersionError)


def test_version_3_without_states_of_hooks_is_damage(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, lambda document: document.update(version=3), 3)
    assert isinstance(assert_refused(folder, tmp_path), CorruptStateError)


def test_version_2_without_records_in_flight_is_damage(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, lambda document: document.update(version=2), 2)
    error = assert_refused(folder, tmp_path)
    assert isinstance(error, CorruptStateError)
    assert not isinstance(error, UnsupportedVersionError)


def test_another_key_hash(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, lambda document: document.update(key_hash_version=2))
    assert isinstance(assert_refused(folder, tmp_path), UnsupportedVersionError)


@pytest.mark.parametrize("step", range(7))
def test_truncation_and_damage_of_metadata(folder: Path, tmp_path: Path, step: int) -> None:
    path = folder / "_metadata"
    data = path.read_bytes()
    stop = len(data) * step // 7
    changed = bytearray(data)
    changed[stop] ^= 1 << step
    for damaged in (data[:stop], bytes(changed), data + b"\n", data[:-1], b" " + data, data.replace(b"xxh3_128", b"xxh3_64", 1)):
        path.write_bytes(damaged)
        assert_refused(folder, tmp_path)


# -------------------------------------------------------------------------------------------------------------- the records


def flights(document: Document) -> Document:
    return next(operator for operator in document["operators"] if operator["uid"] == FLIGHTS.uid)


def first_handle(document: Document) -> Document:
    return flights(document)["subtasks"][0]["keyed"][0]


def first_list(document: Document) -> Document:
    return document["operators"][0]["subtasks"][0]["operator"][0]


def as_segment(document: Document, offset: int, more: int) -> None:
    part = last_file(document)
    part.update(type="segment", offset=offset, file_length=part["length"] + more)


def last_file(document: Document) -> Document:
    return next(part for part in reversed(first_handle(document)["parts"]) if part["type"] == "file")


def of_all_handles(key: str, value: Any) -> Callable[[Document], Any]:
    def change(document: Document) -> None:
        for subtask in flights(document)["subtasks"]:
            subtask["keyed"][0]["states"][0][key] = value

    return change


RECORDS: dict[str, Callable[[Document], Any]] = {
    "an unknown keyed handle": lambda d: first_handle(d).update(type="runs"),
    "an unknown operator handle": lambda d: first_list(d).update(type="operator_map"),
    "an unknown part": lambda d: last_file(d).update(type="slice"),
    "a segment not within its file": lambda document: as_segment(document, 1, 0),
    "a segment of 64 MiB and a byte": lambda d: last_file(d).update(
        type="segment", offset=0, length=(64 << 20) + 1, file_length=(64 << 20) + 1
    ),
    "a segment of a file of another length": lambda document: as_segment(document, 0, 1),
    "a placeholder": lambda d: last_file(d).update(type="placeholder"),
    "an unknown format": lambda d: first_handle(d).update(format="orc"),
    "an unknown keyed kind": of_all_handles("kind", "histogram"),
    "an operator's kind of keyed state": of_all_handles("kind", "operator_list"),
    "an unknown kind of operator state": lambda d: [
        s["operator"][1]["state"].update(kind="operator_map") for s in d["operators"][0]["subtasks"]
    ],
    "an unknown kind of snapshot": lambda d: d.update(kind="backup"),
    "a subtask too few": lambda d: flights(d)["subtasks"].pop(),
    "two operators of one uid": lambda d: flights(d).update(uid=d["operators"][0]["uid"]),
    "no uid": lambda d: flights(d).update(uid=""),
    "no state's name": of_all_handles("name", ""),
    "parallelism above max parallelism": lambda d: flights(d).update(max_parallelism=1),
    "max parallelism above all bounds": lambda d: d["operators"][0].update(max_parallelism=32769),
    "key groups above max parallelism": lambda d: flights(d)["subtasks"][1]["keyed"][0]["key_groups"].update(stop=129),
    "key groups backwards": lambda d: first_handle(d)["key_groups"].update(start=64, stop=0),
    "key groups twice": lambda d: first_handle(d)["key_groups"].update(stop=65),
    "a part too few": lambda d: first_handle(d)["parts"].pop(),
    "subtasks that differ": lambda d: first_handle(d)["states"][0].update(value_type="str"),
    "entries that were not counted": lambda d: first_list(d).update(count=7),
    "a wrong length": lambda d: last_file(d).update(length=last_file(d)["length"] + 1),
    "a wrong checksum": lambda d: last_file(d).update(checksum="xxh3_128:" + "0" * 32),
    "no id": lambda d: d.update(checkpoint_id=0),
    "an id above all bounds": lambda d: d.update(checkpoint_id=10**15 + 1),
    "no base64": lambda d: first_list(d)["part"].update(data="?"),
}


@pytest.mark.parametrize("what", list(RECORDS))
def test_records(folder: Path, tmp_path: Path, what: str) -> None:
    rewrite(folder, RECORDS[what])
    assert_refused(folder, tmp_path)


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "..", ".", "", "../_metadata", "../other/file", "x/../../file", "../shared/x/y", "../shared/..", "a\0b",
     "../shared/../x", "./../shared/x"],
)  # fmt: skip
def test_paths_that_leave(folder: Path, tmp_path: Path, path: str) -> None:
    for place in ("other", "shared"):
        (tmp_path / "job" / place).mkdir()
    rewrite(folder, lambda document: last_file(document).update(path=path))
    assert "leaves" in assert_refused(folder, tmp_path).message


def test_only_checkpoints_share_files(folder: Path, tmp_path: Path) -> None:
    moved: list[str] = []

    def change(document: Document) -> None:
        part = last_file(document)
        moved.append(part["path"])
        part["path"] = f"../shared/{part['path']}"

    rewrite(folder, change)
    (tmp_path / "job/shared").mkdir()
    (folder / moved[0]).rename(tmp_path / "job/shared" / moved[0])
    if folder.name == "chk-7":
        assert read_snapshot(folder)["operators"]
        read_with_ours(folder, tmp_path)
    else:
        assert_refused(folder, tmp_path, "leaves the folder")


# ---------------------------------------------------------------------------------------------------------------- the files


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "flipped"])
def test_damaged_files(folder: Path, tmp_path: Path, damage: str) -> None:
    path = next(path for path in sorted(folder.iterdir()) if re.search(r"fl_ge_1-1.*windows", path.name))
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"shorter": data[:-1], "longer": data + b"\0", "flipped": bytes([data[0] ^ 1]) + data[1:]}[damage])
        error = assert_refused(folder, tmp_path)
    else:
        with pytest.raises(UnreadableError, match="missing"):
            read_snapshot(folder)
        with pytest.raises(CorruptStateError, match="missing") as caught:
            read_with_ours(folder, tmp_path)
        error = caught.value
    assert (error.operator, path.name in error.message) == (FLIGHTS.uid, True)


TABLES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "no key group": lambda table: table.drop_columns("key_group"),
    "no key": lambda table: table.drop_columns("key"),
    "no value": lambda table: table.drop_columns("value"),
    "a wrong key group": lambda table: table.set_column(0, "key_group", pc.subtract(table["key_group"], 1)),
    "rows of another subtask": lambda table: pq.read_table(
        next((GOLDEN / "v1-savepoint/savepoint-9f0cde-5a1e").glob("fl_ge_1-0-*-count.parquet"))
    ),
    "a key that is null": lambda table: table.set_column(1, "key", pa.nulls(len(table), pa.utf8())),
    "a value that is null": lambda table: table.set_column(3, "value", pa.nulls(len(table), pa.int64())),
}


@pytest.mark.parametrize("what", list(TABLES))
def test_tables(folder: Path, tmp_path: Path, what: str) -> None:
    """Written by another tool, with right lengths and checksums."""

    def change(document: Document) -> None:
        handle = flights(document)["subtasks"][1]["keyed"][0]
        index = [state["name"] for state in handle["states"]].index("count")
        parquet = next((GOLDEN / "v1-savepoint/savepoint-9f0cde-5a1e").glob("fl_ge_1-1-*-count.parquet"))
        table, sink = TABLES[what](pq.read_table(parquet)), io.BytesIO()
        if handle["format"] == "parquet":
            pq.write_table(table, sink)
        else:
            with pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table)
        (folder / "edited").write_bytes(sink.getvalue())
        checksum = checksum_of(sink.getvalue())
        handle["parts"][index] = {"type": "file", "path": "edited", "length": len(sink.getvalue()), "checksum": checksum}

    rewrite(folder, change)
    assert_refused(folder, tmp_path)


# ----------------------------------------------------------------------------------------------------------- deltas


def keyed_handles(document: Document) -> list[Document]:
    found: list[Document] = document["operators"][0]["subtasks"][0]["keyed"]
    return found


def run_of(document: Document) -> Document:
    return next(handle for handle in keyed_handles(document) if handle["format"] == "arrow-delta")


DELTAS_MAX = 32
"""As the page says."""


def too_many_runs(document: Document) -> None:
    handle = run_of(document)
    handle["states"] += handle["states"][:1] * DELTAS_MAX
    handle["parts"] += handle["parts"][:1] * DELTAS_MAX


RUNS: dict[str, Callable[[Document], Any]] = {
    "a run before its table": lambda d: keyed_handles(d).reverse(),
    "a run without its table": lambda d: [
        (handle["states"].pop(0), handle["parts"].pop(0)) for handle in keyed_handles(d) if handle["format"] == "arrow"
    ],
    "a run upon a table of another type": lambda d: run_of(d)["states"][0].update(value_type="int"),
    "a run of other key groups": lambda d: run_of(d)["key_groups"].update(stop=63),
    "more runs than are allowed": too_many_runs,
    "a part too few": lambda d: run_of(d)["parts"].pop(),
}


@pytest.mark.parametrize("what", list(RUNS))
def test_delta_runs(tmp_path: Path, what: str) -> None:
    shutil.copytree(GOLDEN / "v1-filesystem-deltas", tmp_path / "moved")
    folder = tmp_path / "moved/job/chk-43"
    rewrite(folder, RUNS[what])
    with pytest.raises(UnreadableError):
        read_snapshot(folder)
    with pytest.raises(CorruptStateError):
        hf.Snapshot(folder).table("totals", "count").read_all()
