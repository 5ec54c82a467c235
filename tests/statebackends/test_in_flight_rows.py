"""In-flight records as rows: exported edge by edge, compared as a bag, and damage of a piece named by its edge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import holdfast as hf
from holdfast.barriers.alignment.inflight import encode
from holdfast.barriers.elements import Batch, Element, Watermark
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.handles import ChannelPiece, ChannelState, InlineHandle
from holdfast.statebackends.snapshot.in_flight import EdgeName
from holdfast.statebackends.snapshot.metadata import IN_FLIGHT_VERSION, SnapshotMetadata, decode_metadata, encode_metadata

EDGE = EdgeName("source", None, "count", 0, 0)
LATE = EdgeName("source", "late", "count", 1, 0)


def rows(*numbers: int, timed: bool = True) -> Batch:
    columns = pa.RecordBatch.from_pydict({"n": pa.array(numbers, pa.int64()), "side": [f"s{number}" for number in numbers]})
    return Batch(columns=columns, timestamps=np.array(numbers, np.int64) * 10 if timed else None)


def channels(edge: EdgeName, side: Any, subtask: int, pieces: list[tuple[int, list[Element]]]) -> ChannelState:
    data, found = b"", []
    for peer, elements in pieces:
        encoded = encode(elements)
        found.append(ChannelPiece(peer, len(data), len(encoded), sum(e.num_rows for e in elements if isinstance(e, Batch))))
        data += encoded
    total = sum(piece.rows for piece in found)
    return ChannelState(*edge, "hash", side, subtask, total, InlineHandle(data), tuple(found))


STORED = (
    channels(EDGE, "output", 1, [(0, [rows(5)])]),
    channels(EDGE, "input", 0, [(0, [rows(1, 2), Watermark(15), rows(3)]), (1, [rows(4)]), (1, [rows(6, timed=False)])]),
    channels(LATE, "input", 1, [(1, [Watermark(7)])]),
)


def snapshot(folder: Path, *stored: ChannelState) -> hf.Snapshot:
    metadata = SnapshotMetadata(
        job_id="job", job_name="job", checkpoint_id=3, kind="savepoint", attempt=1, epoch=1, trigger_timestamp_ms=0,
        completion_timestamp_ms=0,
    )  # fmt: skip
    if stored:
        metadata = msgspec.structs.replace(metadata, channels=stored, version=IN_FLIGHT_VERSION)
    folder.mkdir()
    (folder / "_metadata").write_bytes(encode_metadata(metadata))
    return hf.Snapshot(folder)


def test_an_export_has_a_dataset_of_each_edge(tmp_path: Path) -> None:
    report = snapshot(tmp_path / "savepoint", *STORED).export(tmp_path / "out")
    assert [(each.folder, each.rows) for each in report.in_flight] == [
        ("_in_flight/source-count", 6),
        ("_in_flight/source-late-count-2", 0),
    ]
    found = pq.read_table(tmp_path / "out/_in_flight/source-count/part-00000.parquet")
    assert found.schema.names == ["side", "producer", "consumer", "position", "n", "row.side", "_timestamp_ms"]
    assert list(map(tuple, zip(*found.to_pydict().values(), strict=True))) == [
        ("input", 0, 0, 0, 1, "s1", 10),
        ("input", 0, 0, 1, 2, "s2", 20),
        ("input", 0, 0, 2, 3, "s3", 30),
        ("input", 1, 0, 0, 4, "s4", 40),
        ("input", 1, 0, 1, 6, "s6", None),
        ("output", 1, 0, 2, 5, "s5", 50),
    ]
    manifest = json.loads((tmp_path / "out/_export.json").read_text())
    listed = [(each["source"], each["tag"], each["rows"]) for each in manifest["in_flight"]]
    assert listed == [("source", None, 6), ("source", "late", 0)]


def test_a_difference_is_named_by_edge_wherever_records_were_stored(tmp_path: Path) -> None:
    stored = snapshot(tmp_path / "a", *STORED)
    pieces: list[tuple[int, list[Element]]] = [(0, [rows(3, 4, 5)]), (0, [rows(6, timed=False)]), (1, [rows(2, 1)])]
    moved = (channels(EDGE, "input", 1, pieces), STORED[2])
    assert stored.diff(snapshot(tmp_path / "b", *moved)).is_same
    other = stored.diff(snapshot(tmp_path / "c", channels(EDGE, "input", 0, [(0, [rows(1, 2, 2, 7)])])))
    assert not other.is_same
    assert [(each.edge, each.added, each.removed, each.same) for each in other.in_flight] == [(EDGE, 2, 4, 2), (LATE, 0, 0, 0)]
    gone = stored.diff(snapshot(tmp_path / "d"))
    assert [(each.edge, each.removed) for each in gone.in_flight] == [(EDGE, 6), (LATE, 0)]
    assert not gone.is_same


def test_a_damaged_piece_is_named_and_nothing_is_exported(tmp_path: Path) -> None:
    (piece,) = STORED[0].pieces
    assert isinstance(STORED[0].part, InlineHandle)
    cut = STORED[0].part.data[:-8]
    damaged = msgspec.structs.replace(
        STORED[0], part=InlineHandle(cut), pieces=(msgspec.structs.replace(piece, length=len(cut)),)
    )
    stored = snapshot(tmp_path / "savepoint", damaged)
    with pytest.raises(CorruptStateError, match=r"in-flight records of 'source' -> 'count', output side of subtask 1: .* cut off"):
        stored.export(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CorruptStateError, match="'source' -> 'count'"):
        stored.diff(stored)


def test_a_copy_is_the_same(tmp_path: Path) -> None:
    stored = snapshot(tmp_path / "savepoint", *STORED)
    copied = stored.copy(tmp_path / "copy")
    assert stored.diff(copied).is_same
    assert decode_metadata((tmp_path / "copy/_metadata").read_bytes(), "p").in_flight == STORED
