"""What streaming inputs, groups of queries and queries that write keep, byte for byte as version 1 wrote it. `stream_state_v1.json`
was made once; a release that reads less is no upgrade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.barriers.sinks.log import LogPosition, StagedFile
from holdfast.barriers.sinks.staged import CommitPosition
from holdfast.operators.sinks.queries.batches import BatchCommitted, BatchSeal
from holdfast.operators.sources.materialised import ChunkFile
from holdfast.operators.sources.stream import StreamPosition, decode_stream_positions
from holdfast.operators.sources.stream_input import (
    NO_BATCH,
    BatchManifest,
    DroppedRecord,
    EndRecord,
    OwnerRecord,
    StartRecord,
    StreamBase,
    StreamRecord,
)
from holdfast.operators.sources.stream_savepoint import GroupRecord
from holdfast.statebackends.errors import CorruptStateError, UnsupportedVersionError

FILE = Path(__file__).parent / "stream_state_v1.json"
GOLDEN: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}

INPUT = "9f0cde/sources/clicks/000003"
BASE = StreamBase("4a5b6c/sources/clicks/000001", 41, 1_000_300, "7a3c1d52-0b61-4d7e-8f7c-5a1e0c9d2b34")
SCHEMA = "/////3gAAAAQAAAA"
CHUNKS = (
    ChunkFile("f3a1/00000-0.arrow", 1_000_300, 65_536, 524_800, "xxh3_128:00112233445566778899aabbccddeeff"),
    ChunkFile("f3a1/00001-0.arrow", 1_065_836, 2, 1_100, "xxh3_128:ffeeddccbbaa99887766554433221100"),
)
FILES = (StagedFile("0001-n-0-43-0.parquet", 300), StagedFile("0001-n-1-43-0.parquet", 2))
POSITION = CommitPosition(1, "orders", 7, "4f1c0a9be2d3", BASE.query_id, 3, 43, line="a1b2c3d4e5f6", tag="0123456789abcdef")

POSITIONS = {
    "none": StreamPosition(1, 128, 0, 0, INPUT, NO_BATCH),
    "within": StreamPosition(1, 128, 127, 1_000_447, INPUT, 42),
}
RECORDS: dict[str, msgspec.Struct] = {
    "stream.json": StreamRecord(1, SCHEMA),
    "stream.json behind another": StreamRecord(1, SCHEMA, BASE),
    "manifest.json": BatchManifest(1, SCHEMA, 65_538, CHUNKS, "f3a1", 42, 1_000_300, BASE.query_id),
    "manifest.json without rows": BatchManifest(1, SCHEMA, 0, (), "f3a2", 43, 1_065_838, BASE.query_id),
    "owner": OwnerRecord(1, "9f0cde", 3, "4f1c0a9be2d3"),
    "start": StartRecord(1, INPUT, 1_000_300, 2),
    "end": EndRecord(1, 44, 1_065_838),
    "group.json": GroupRecord(1, {"orders": BASE, "totals": StreamBase(INPUT, NO_BATCH, 0, "")}),
    "seal": BatchSeal(1, 42, "00112233445566778899aabbccddeeff", FILES),
    "committed": BatchCommitted(1, 42, POSITION),
    "committed to a log": BatchCommitted(1, 42, POSITION, LogPosition(1, 1_044, 3, "4f1c0a9be2d3", BASE.query_id)),
    "dropped": DroppedRecord(1, 40),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_position_is_read_and_written_as_ever(name: str) -> None:
    stored = bytes.fromhex(GOLDEN["positions"][name])
    assert decode_stream_positions([stored], "clicks") == [POSITIONS[name]]
    assert msgspec.msgpack.encode(POSITIONS[name]) == stored


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_is_read_and_written_as_ever(name: str) -> None:
    stored = GOLDEN["records"][name]
    assert msgspec.json.decode(stored, type=type(RECORDS[name])) == RECORDS[name]
    assert msgspec.json.encode(RECORDS[name]).decode() == stored


def test_a_newer_or_a_damaged_position_is_refused_by_the_source_s_name() -> None:
    stored = bytes.fromhex(GOLDEN["positions"]["within"])
    newer = msgspec.msgpack.encode(msgspec.structs.replace(POSITIONS["within"], version=2))
    for entry in (newer, stored[:-3]):
        with pytest.raises((CorruptStateError, UnsupportedVersionError), match="clicks"):
            decode_stream_positions([entry], "clicks")
