"""Files of in-flight data are files of the snapshot: named, verified, claimed. Tools that don't know them refuse it by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.api.snapshots.inspection import summarise
from holdfast.coordinator.ownership.files import claimed_paths
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import ChannelPiece, ChannelState, FileHandle
from holdfast.statebackends.snapshot.metadata import IN_FLIGHT_VERSION, SnapshotMetadata, decode_metadata, encode_metadata
from holdfast.statebackends.snapshot.parts import snapshot_files, verify_snapshot
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.edit import edit_snapshot
from holdfast.statebackends.state_processor.export import export_snapshot
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import run_flow
from tests.operators.ports import DictStorage

DATA = b"in flight"


def snapshot(storage: DictStorage) -> StoredSnapshot:
    part = FileHandle("count-1-1-n0-inflight-0", len(DATA), checksum_of(DATA))
    storage.files[f"job/chk-3/{part.path}"] = DATA
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


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (lambda stored, out: copy_snapshot(stored, out, "copy"), "a copy"),
        (lambda stored, out: edit_snapshot(stored, {}, out, "edit", now_ms=0), "an edit"),
        (lambda stored, out: diff_snapshots(stored, stored), "a comparison"),
        (lambda stored, out: export_snapshot(stored, (), out, "export"), "an export"),
    ],
)
def test_tools_that_would_miss_it_refuse_with_rows_and_bytes(tool: Callable[[Any, Any], object], said: str) -> None:
    out = DictStorage()
    with pytest.raises(InvalidConfigError, match=rf"holds 4 rows \(9 bytes\) in flight, which {said} does not know"):
        tool(snapshot(DictStorage()), out)
    assert out.files == {}


def test_inspection_shows_rows_and_bytes_of_an_edge() -> None:
    opened = SimpleNamespace(metadata=snapshot(DictStorage()).metadata, location="job/chk-3", operators={})
    assert summarise(cast(Any, opened))["in_flight"] == [{"edge": "'source' -> 'count'", "rows": 4, "size": 9}]
