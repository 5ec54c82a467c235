"""What a target's committer keeps, byte for byte as version 1 wrote it: its state, its position at the target, the marker of its
folder. `sink_state_v1.json` was made once; a release that reads less is no upgrade."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.barriers.sinks.log import StagedFile
from holdfast.barriers.sinks.staged import CommitMark, CommitPosition, StagedCheckpoint, StagedState, decode_staged_state
from holdfast.operators.sinks.targets.staging import Marker
from holdfast.statebackends.errors import CorruptStateError, UnsupportedVersionError

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "sink_state_v1.json").read_text())

POSITION = CommitPosition(1, "orders", 7, "4f1c0a9be2d3", "9f0cde", 3, 41, 250, line="a1b2c3d4e5f6", tag="0123456789abcdef")
BACK = msgspec.structs.replace(POSITION, row=-1, repeated=44, reached=CommitMark(48, tag="fedcba9876543210"))
FIRST = CommitPosition(1, "orders", 1, "4f1c0a9be2d3", "9f0cde", 1, line="a1b2c3d4e5f6")
STAGED = (
    StagedCheckpoint(41, "s3://bucket/9f0cde/sinks/orders/staged", (StagedFile("a.parquet", 300), StagedFile("b.parquet", 2))),
    StagedCheckpoint(44, "/elsewhere/9f0cde/sinks/orders/staged", (StagedFile("c.parquet", 1),)),
)
STATES = {
    "none": StagedState(1, None, ()),
    "staged": StagedState(1, POSITION, STAGED, "postgresql orders"),
    "back": StagedState(1, BACK, STAGED[1:]),
}
POSITIONS = {"first": FIRST, "within": POSITION, "back": BACK}


@pytest.mark.parametrize("name", STATES)
def test_a_state_is_read_and_written_as_ever(name: str) -> None:
    stored = bytes.fromhex(GOLDEN["states"][name])
    assert decode_staged_state(stored, "orders") == STATES[name]
    assert msgspec.msgpack.encode(STATES[name]) == stored


@pytest.mark.parametrize("name", POSITIONS)
def test_a_position_is_read_and_written_as_ever(name: str) -> None:
    stored = GOLDEN["positions"][name]
    assert CommitPosition.decode(stored) == POSITIONS[name]
    assert POSITIONS[name].encode().decode() == stored


def test_marker_and_tags_are_as_ever() -> None:
    assert msgspec.json.decode(GOLDEN["marker"], type=Marker) == Marker(1, "orders", "a1b2c3d4e5f6")
    assert [each.tag for each in STAGED] == GOLDEN["tags"]


def test_a_newer_or_a_damaged_state_is_refused_by_the_operator_s_name() -> None:
    stored = bytes.fromhex(GOLDEN["states"]["staged"])
    with pytest.raises(UnsupportedVersionError, match="orders"):
        decode_staged_state(msgspec.msgpack.encode(msgspec.structs.replace(STATES["staged"], version=2)), "orders")
    with pytest.raises(CorruptStateError, match="orders"):
        decode_staged_state(stored[:-3], "orders")
