"""Files that nobody's checksum vouches for, damaged in any way: one typed error that names the file, never another exception."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.coordinator.ha.leadership import open_directory
from holdfast.coordinator.ha.recorded_job import Unreadable, decode_decision
from holdfast.coordinator.ha.records import (
    AbortRecord,
    ClaimRecord,
    ConfigRecord,
    LeaderRecord,
    OwnerRecord,
    ResultRecord,
    SavepointRecord,
    VoidRecord,
    decode_record,
    encode_record,
    is_void,
)
from holdfast.coordinator.ha.store import read_job
from holdfast.statebackends.errors import CorruptStateError
from holdfast.statebackends.layout import DIRECTORY_FILE, JobPaths, parse_checkpoint_name
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata, encode_metadata
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import PutIfAbsent, run_flow
from tests.coordinator.world import DictStorage

OWNER = OwnerRecord("j" * 32, "directory", "nonce", 3)
RECORDS: tuple[msgspec.Struct, ...] = (
    LeaderRecord(epoch=3, nonce="n", created_ms=1),
    ClaimRecord(
        checkpoint_id=4, epoch=1, submission=1, attempt=1, kind=CheckpointKind.CHECKPOINT, folder="job/chk-4", nonce="n"
    ),
    AbortRecord(checkpoint_id=4, reason=FailureReason.EXPIRED, epoch=1, nonce="n", message="late"),
    SavepointRecord(
        checkpoint_id=4, folder="/elsewhere/sp", kind=CheckpointKind.SAVEPOINT, timestamp_ms=1, epoch=1, nonce="n"
    ),
    OWNER,
    VoidRecord(number=2, epoch=1, nonce="n", given=4, owner=OWNER),
    ConfigRecord(number=1, epoch=1, submission=1, settings={"min_pause_ms": 1}, nonce="n"),
    ResultRecord(submission=1, state="FINISHED", epoch=1, nonce="n", last_checkpoint_id=9, newest_completed=8),
)
DEEP = b"[" * 20_000 + b"]" * 20_000
"""More than the stack of the interpreter holds."""


def damages(content: bytes) -> list[bytes]:
    """Each byte that no UTF-8 text has, at each place; and what is nested without end, in place of a number and as a new field."""
    changed = [content[:at] + b"\xff" + content[at + 1 :] for at in range(len(content))]
    return [*changed, DEEP, content.replace(b" 1", DEEP, 1), content.replace(b"{", b'{"later":' + DEEP + b",", 1)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_any_damage_of_a_record_is_one_typed_error(record: msgspec.Struct) -> None:
    refused = []
    for content in damages(encode_record(record)):
        is_void(content)
        decode_decision(content, "chk-4/_metadata")
        try:
            decode_record(type(record), content, "job/file")  # a field that may be left out may also have lost its name
        except CorruptStateError as error:
            refused.append(error.path)
    assert set(refused) == {"job/file"}
    assert len(refused) > len(encode_record(record)) // 2


@pytest.mark.parametrize("record", RECORDS[2:4], ids=lambda record: type(record).__name__)
def test_a_damaged_decision_is_unreadable(record: msgspec.Struct) -> None:
    for content in (DEEP, encode_record(record).replace(b'"epoch": 1', b'"epoch": ' + DEEP), b'{"decision":"aborted","x":"\xff"}'):
        assert isinstance(decode_decision(content, "chk-4/_metadata"), Unreadable)


def seal(body: bytes) -> bytes:
    """A `_metadata` whose checksum is right, whatever is in it."""
    header = '{"format":"holdfast-snapshot","version":1,"length":%d,"checksum":"%s","snapshot":'
    return (header % (len(body), checksum_of(body))).encode() + body + b"}\n"


def test_a_metadata_that_its_checksum_vouches_for_and_that_is_no_snapshot() -> None:
    metadata = SnapshotMetadata(
        job_id="j", job_name="name", checkpoint_id=1, kind="savepoint", attempt=1, epoch=1, trigger_timestamp_ms=1,
        completion_timestamp_ms=1, graph={"vertices": []},
    )  # fmt: skip
    body = msgspec.json.encode(metadata)
    assert decode_metadata(encode_metadata(metadata), "p") == decode_metadata(seal(body), "p")
    bad_text, deep_graph = body.replace(b'"name"', b'"\xed\xa0\x80"'), body.replace(b'{"vertices":[]}', b'{"a":' + DEEP + b"}")
    for content in (bad_text, deep_graph, body[:-1] + b',"later":' + DEEP + b"}"):
        with pytest.raises(CorruptStateError, match="sp/_metadata"):
            decode_metadata(seal(content), "sp/_metadata")
        assert isinstance(decode_decision(seal(content)), Unreadable)


def test_a_job_with_a_record_that_is_no_text_is_refused_by_the_file() -> None:
    """One byte of a file decays: whoever recovers the job is told which file, and the other jobs are led."""
    storage, paths = DictStorage(), JobPaths("ab" * 16)
    content = encode_record(RECORDS[-1]).replace(b'"n"', b'"\xee"')
    storage.execute(PutIfAbsent(paths.result(1), content))
    with pytest.raises(CorruptStateError, match=paths.result(1)):
        run_flow(read_job(paths), storage)


@pytest.mark.parametrize("name", ["chk-007", "chk-\u0663", "chk-0", "chk-" + "9" * 30, "chk--1", "chk-", "42", "chk-4 ", "chk-4//"])
def test_no_other_name_is_taken_for_the_folder_of_an_id(name: str) -> None:
    assert parse_checkpoint_name(name) is None
    assert (parse_checkpoint_name("chk-42"), parse_checkpoint_name("chk-42/")) == (42, 42)


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", "Zürich".encode()])
def test_a_state_directory_whose_name_is_damaged_is_not_led(content: bytes) -> None:
    storage = DictStorage()
    storage.execute(PutIfAbsent(DIRECTORY_FILE, content))
    with pytest.raises(CorruptStateError, match="_holdfast holds no name of a state directory"):
        run_flow(open_directory("mine"), storage)
