"""Files of in-flight data are files of the snapshot: named, verified, claimed and copied. Tools refuse it that would part it
from its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from holdfast.api.snapshots.inspection import summarise
from holdfast.coordinator.ownership.files import claimed_paths
from holdfast.statebackends.errors import CorruptStateError, InFlightStateError, InvalidConfigError
from holdfast.statebackends.handles import ChannelPiece, ChannelState, FileHandle, InlineHandle, PlaceholderHandle, SegmentHandle
from holdfast.statebackends.snapshot.metadata import IN_FLIGHT_VERSION, SnapshotMetadata, decode_metadata, encode_metadata
from holdfast.statebackends.snapshot.parts import snapshot_files, verify_snapshot
from holdfast.statebackends.state_processor.arrange import write_arranged
from holdfast.statebackends.state_processor.arrangement import Arrangement
from holdfast.statebackends.state_processor.bootstrap import Shape
from holdfast.statebackends.state_processor.contents import StoredSnapshot, check_contents
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.edit import edit_snapshot
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import PutIfAbsent, Storage, run_flow
from tests.operators.ports import DictStorage

DATA = b"in flight"


def snapshot(storage: Storage) -> StoredSnapshot:
    part = FileHandle("count-1-1-n0-inflight-0", len(DATA), checksum_of(DATA))
    storage.execute(PutIfAbsent(f"job/chk-3/{part.path}", DATA))
    pieces = (ChannelPiece(0, 0, len(DATA), 4),)
    channel = ChannelState("source", None, "count", 0, 0, "hash", "input", 1, 4, part, pieces)
    metadata = SnapshotMetadata(
        job_id="job", job_name="job", checkpoint_id=3, kind="checkpoint", attempt=1, epoch=1, trigger_timestamp_ms=0,
        completion_timestamp_ms=0, channels=(channel,), version=IN_FLIGHT_VERSION,
    )  # fmt: skip
    return StoredSnapshot(decode_metadata(encode_metadata(metadata), "_metadata"), storage, "job/chk-3")


def test_its_files_are_named_claimed_and_verified() -> None:
    storage = DictStorage()
    stored = snapshot(storage)
    ((handle, uid, subtask),) = snapshot_files(stored.metadata)
    assert (handle.path, uid, subtask) == ("count-1-1-n0-inflight-0", "count", 1)
    path = f"job/chk-3/{handle.path}"
    assert list(claimed_paths(stored.metadata, stored.folder)) == [path]
    assert run_flow(verify_snapshot(stored.metadata, stored.folder), storage) == []
    storage.files[path] = DATA[:-1]
    (problem,) = run_flow(verify_snapshot(stored.metadata, stored.folder), storage)
    assert (problem.operator, problem.subtask) == ("count", 1)


RECORDS: dict[str, Callable[[ChannelState], ChannelState]] = {
    "a broadcast edge": lambda c: msgspec.structs.replace(c, partitioning="broadcast"),
    "no subtask": lambda c: msgspec.structs.replace(c, subtask=-1),
    "a subtask that no job has": lambda c: msgspec.structs.replace(c, subtask=1 << 15),
    "an input that no job has": lambda c: msgspec.structs.replace(c, input=2**31),
    "an edge that no job has": lambda c: msgspec.structs.replace(c, ordinal=2**31),
    "no peer": lambda c: with_piece(c, peer=-1),
    "a peer that no job has": lambda c: with_piece(c, peer=2**31),
    "no pieces": lambda c: msgspec.structs.replace(c, pieces=(), rows=0),
    "a piece too long": lambda c: with_piece(c, length=10),
    "a piece too short": lambda c: with_piece(c, length=8),
    "a piece of nothing": lambda c: with_piece(c, length=0),
    "a piece before the part": lambda c: with_piece(c, offset=-1, length=10),
    "rows that no piece has": lambda c: msgspec.structs.replace(c, rows=5),
    "rows that nobody holds": lambda c: msgspec.structs.replace(with_piece(c, rows=2**41), rows=2**41),
    "a negative number of rows": lambda c: msgspec.structs.replace(with_piece(c, rows=-1), rows=-1),
    "a placeholder": lambda c: msgspec.structs.replace(c, part=PlaceholderHandle("x", len(DATA))),
    "a segment outside of its file": lambda c: msgspec.structs.replace(c, part=SegmentHandle("x", len(DATA), "", 1, len(DATA))),
}


def with_piece(channel: ChannelState, **fields: Any) -> ChannelState:
    return msgspec.structs.replace(channel, pieces=(msgspec.structs.replace(channel.pieces[0], **fields),))


@pytest.mark.parametrize("what", list(RECORDS))
def test_records_that_can_be_of_no_snapshot_are_damage(what: str) -> None:
    stored = snapshot(DictStorage())
    check_contents(stored)
    (channel,) = stored.metadata.in_flight
    forged = msgspec.structs.replace(stored.metadata, channels=(RECORDS[what](channel),))
    with pytest.raises(CorruptStateError, match="'source'"):
        check_contents(StoredSnapshot(decode_metadata(sealed(forged), "_metadata"), stored.storage, stored.folder))


def test_one_end_of_an_edge_is_told_of_once() -> None:
    """Told of twice, its rows would be restored twice. Another side, subtask or edge is another end."""
    stored = snapshot(DictStorage())
    (channel,) = stored.metadata.in_flight
    others: list[dict[str, Any]] = [{"side": "output"}, {"subtask": 0}, {"ordinal": 1}, {"tag": "late"}, {"input": 1}]
    ends = (channel, *(msgspec.structs.replace(channel, **fields) for fields in others))
    known = msgspec.structs.replace(stored.metadata, channels=ends)
    assert decode_metadata(encode_metadata(known), "_metadata") == known
    again = msgspec.structs.replace(channel, part=InlineHandle(b"inline"), pieces=(ChannelPiece(0, 0, 6, 4),))
    forged = msgspec.structs.replace(known, channels=(*ends, again))
    said = "in-flight records of 'source' -> 'count', input side of subtask 1, are in the snapshot twice"
    with pytest.raises(CorruptStateError, match=said):
        decode_metadata(sealed(forged), "_metadata")
    with pytest.raises(InvalidConfigError, match=said):
        encode_metadata(forged)


def sealed(metadata: SnapshotMetadata) -> bytes:
    """Bytes of `_metadata` that nobody has checked, with a right checksum."""
    body = msgspec.json.encode(metadata)
    head = b'{"format":"holdfast-snapshot","version":2,"length":%d,"checksum":"%s","snapshot":'
    return head % (len(body), checksum_of(body).encode()) + body + b"}\n"


def test_a_copy_keeps_it_in_files_of_its_own(tmp_path: Path) -> None:
    """Parts that share a file with other data come as files of their own; inline parts stay inline."""
    storage = LocalStorage(tmp_path)
    stored = snapshot(storage)
    (channel,) = stored.metadata.in_flight
    storage.execute(PutIfAbsent("job/chk-3/packed", b"other" + DATA + b"behind"))
    others = [
        msgspec.structs.replace(channel, side="output", part=SegmentHandle("packed", len(DATA), checksum_of(DATA), 5, 20)),
        msgspec.structs.replace(channel, ordinal=1, part=InlineHandle(DATA)),
    ]
    metadata = msgspec.structs.replace(stored.metadata, channels=(channel, *others))
    copied = copy_snapshot(StoredSnapshot(metadata, storage, stored.folder), storage, "copy")
    assert copied.metadata == decode_metadata((tmp_path / "copy/_metadata").read_bytes(), "_metadata")
    assert (copied.metadata.version, copied.metadata.kind) == (IN_FLIGHT_VERSION, "savepoint")
    packed = FileHandle("packed-5", len(DATA), checksum_of(DATA))
    assert [each.part for each in copied.metadata.in_flight] == [channel.part, packed, InlineHandle(DATA)]
    pairs = zip(copied.metadata.in_flight, (channel, *others), strict=True)
    assert all(msgspec.structs.replace(each, part=old.part) == old for each, old in pairs)
    assert run_flow(verify_snapshot(copied.metadata, copied.folder), storage) == []


def test_a_copy_refuses_a_damaged_file(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    stored = snapshot(storage)
    (tmp_path / "job/chk-3/count-1-1-n0-inflight-0").write_bytes(DATA[::-1])
    with pytest.raises(CorruptStateError, match="inflight-0") as caught:
        copy_snapshot(stored, storage, "copy")
    assert caught.value.operator == "count"
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "tool",
    [
        lambda stored, out: edit_snapshot(stored, {}, out, "edit", now_ms=0),
        lambda stored, out: write_arranged(Arrangement.of(stored), (), Shape("job", 8, 1, 0), out, "edit", graph=None),
    ],
)
def test_edits_refuse_it_with_rows_bytes_and_the_way_out(tool: Callable[[Any, Any], object]) -> None:
    out = DictStorage()
    said = r"holds 4 rows \(9 bytes\) in flight on 'source' -> 'count' \(4 rows, 9 bytes\).* take a savepoint, which holds none"
    with pytest.raises(InFlightStateError, match=said) as caught:
        tool(snapshot(DictStorage()), out)
    assert (caught.value.rows, caught.value.size, caught.value.checkpoint_id) == (4, 9, 3)
    assert [(each["source"], each["target"], each["rows"]) for each in caught.value.edges] == [("source", "count", 4)]
    assert out.files == {}


def test_inspection_shows_rows_and_bytes_of_an_edge() -> None:
    opened = SimpleNamespace(metadata=snapshot(DictStorage()).metadata, location="job/chk-3", operators={})
    assert summarise(cast(Any, opened))["in_flight"] == [{"edge": "'source' -> 'count'", "rows": 4, "size": 9}]
