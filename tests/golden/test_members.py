"""Records of members, as bytes that must not change unnoticed: members of two versions meet in one state directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.coordinator.ha.records import decode_record, encode_record
from holdfast.coordinator.standby.records import ActiveRecord, SignOfLife

GOLDEN = Path(__file__).with_name("members_v1.json")
MEMBER = "0123456789abcdef" * 2
RECORDS = (
    ActiveRecord(3, MEMBER, "https://node-a:7070", 1_700_000_000_000),
    SignOfLife(
        MEMBER, 41, "https://node-a:7070", 3, "f" * 32, True, False, "node-a", 4711, "no locks", 1_700_000_000_001
    ),
    SignOfLife(MEMBER, 42, "https://node-a:7070", gave_up=3),
)


def test_records_of_members_are_written_and_read_as_ever() -> None:
    golden = [msgspec.json.format(each, indent=1) for each in msgspec.json.decode(GOLDEN.read_bytes(), type=list[msgspec.Raw])]
    assert [encode_record(each) for each in RECORDS] == golden
    assert [decode_record(type(each), content, "p") for each, content in zip(RECORDS, golden, strict=True)] == list(RECORDS)


def test_signs_of_members_that_know_of_no_giving_up_are_read() -> None:
    content = encode_record(RECORDS[1]).replace(b',\n "gave_up": 0', b"")
    assert b"gave_up" not in content
    assert decode_record(SignOfLife, content, "p") == RECORDS[1]
