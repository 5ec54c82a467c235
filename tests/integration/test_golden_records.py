"""Every record that is stored or crosses a process boundary, as bytes that must not change unnoticed.

Regenerate with HOLDFAST_GOLDEN=1 after a deliberate change, which needs an ADR and a changelog line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from holdfast.barriers import codec
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    CancelTasks,
    CheckpointKind,
    CheckpointMetrics,
    DeclineCheckpoint,
    FailureReason,
    FinishTasks,
    Heartbeat,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    NumberedCommand,
    OperatorMetrics,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskMetrics,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
)
from holdfast.barriers.sinks.log import CommitEntry, LogPosition, MergeEntry, MergePlan, OwnerEntry, PendingCheckpoint, StagedFile
from holdfast.coordinator.ha.records import (
    AbortRecord,
    AttemptRecord,
    ClaimRecord,
    ConfigRecord,
    ForgettingRecord,
    LabelRecord,
    LeaderRecord,
    OwnerRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    VoidRecord,
)
from holdfast.coordinator.totals import OperatorTotals
from holdfast.operators.sinks.files.log import Committable
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorSubtaskState,
    PlaceholderHandle,
    StateMeta,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "records_v1.json"

STATE = OperatorSubtaskState(
    keyed=(
        KeyedStateHandle(
            KeyGroupRange(0, 64),
            "arrow",
            (StateMeta("total", "value", "int", "utf8"), StateMeta("seen", "list", "str", "utf8")),
            (FileHandle("u-0-1-n-total.arrow", 12, "xxh3_128:" + "0" * 32), InlineHandle(b"\x00\x01")),
        ),
    ),
    external=("jobs/sources/u/1/manifest.json",),
)
COUNTED = (OperatorMetrics("u", 5, 4, 1, 250, {"refunds": 2}, 3, "no number"),)
TOTALS = {"u": OperatorTotals(5, 4, 1, 250, {"refunds": 2}, 3, "no number")}
ACK = AcknowledgeCheckpoint(3, 7, "a" * 32, 1, {"u": STATE}, CheckpointMetrics(1.5, 2.5, 0.5, 9.0, 10, 20, 30, COUNTED))
INCREMENT = OperatorSubtaskState(
    keyed=(
        KeyedStateHandle(
            KeyGroupRange(0, 64),
            "rocksdb",
            (StateMeta("total", "value", "int", "utf8"),),
            (
                FileHandle("../shared/7-3-u-1-n-000012.sst", 12, "xxh3_128:" + "0" * 32),
                PlaceholderHandle("../shared/6-3-u-1-n-000009.sst", 34),
                InlineHandle(b"MANIFEST-000010\n"),
            ),
            ("000012.sst", "000009.sst", "CURRENT"),
        ),
    )
)
INCREMENT_ACK = AcknowledgeCheckpoint(3, 7, "a" * 32, 1, {"u": INCREMENT}, CheckpointMetrics(1.5, 2.5, 0.5, 9.0, 10, 28, 62))
PHASES = CheckpointMetrics(
    1.5, 2.5, 0.5, 9.0, 10, 28, 62, store_duration_ms=3.5, new_files=4, notified_checkpoint=6, notified_after_ms=40.0,
    stalled_duration_ms=5.0,
)  # fmt: skip
DECLINE = DeclineCheckpoint(3, 8, "a" * 32, 0, FailureReason.ASYNC_EXCEPTION, "disk full")
STATUS = SubtaskStatus(3, "a" * 32, 1, TaskState.FAILED, False, "E: x", "trace", 99)
STAGED = StagedFile("part-1.parquet", 5)

RECORDS: dict[str, msgspec.Struct] = {
    "register": RegisterWorker(
        "j", 0, 1, 2, "n", 10, "h", "tcp://127.0.0.1:1", "d", 3, (STATUS,), (ACK, DECLINE), spawn=4, launch_token="p"
    ),
    "registered": Registered(1, "s", 3, None, 6, (7,), 2000, 50000, (AckStatus.SUCCESS,), 0),
    "acks": AckBatch(1, 0, "s", (ACK, DECLINE)),
    "increment": AckBatch(1, 0, "s", (INCREMENT_ACK,)),
    "phases": PHASES,
    "answers": AckAnswers(1, (AckStatus.DUPLICATE, AckStatus.UNKNOWN, AckStatus.DISCARDED)),
    "states": StatusBatch(1, 0, "s", (STATUS,)),
    "backlog": StatusBatch(1, 0, "s", (SubtaskStatus(3, "a" * 32, 1, TaskState.RUNNING, changed_ms=99, backlog=1),)),
    "heartbeat": Heartbeat(0, "s", 3, (SubtaskMetrics("a" * 32, 1, 5, 4, operators=COUNTED),)),
    "trigger": NumberedCommand(1, "s", 1, TriggerCheckpoint(3, 7, 5, CheckpointKind.STOP_SAVEPOINT, "j/chk-7", True, 6)),
    "complete": NumberedCommand(1, "s", 2, NotifyCheckpointComplete(3, 7, 5)),
    "abort": NumberedCommand(1, "s", 3, NotifyCheckpointAborted(3, 8, 7)),
    "finish": NumberedCommand(1, "s", 4, FinishTasks(3, 7)),
    "cancel": NumberedCommand(1, "s", 5, CancelTasks(3)),
    "shutdown": NumberedCommand(1, "s", 6, ShutdownWorker("finished")),
    "keep-alive": NumberedCommand(1, "s", 6, None),
    "leader": LeaderRecord(1, "n", "http://x", 5),
    "void": VoidRecord(2, 3, "n", True, 5),
    "given": VoidRecord(2, 3, "n", True, 5, 9, OwnerRecord("j", "d", "n", 5)),
    "owner": OwnerRecord("j", "d", "n", 5),
    "restore-point": RestorePoint(7, "file:///s", 5, CheckpointKind.SAVEPOINT, True, "n"),
    "attempt": AttemptRecord(3, 1, 1, "g", 2, None, 1, "n", 5, totals=TOTALS),
    "claim": ClaimRecord(7, 1, 1, 3, CheckpointKind.SAVEPOINT, "file:///s", "n", False, "t", 5),
    "config": ConfigRecord(2, 1, 3, {"checkpoint_interval_ms": None, "min_pause_ms": 500}, "n", 5),
    "label": LabelRecord(2, ("audit", "before-upgrade"), "n", "j/chk-7", created_ms=5, given_ms=(5, 4)),
    "label-deleting": LabelRecord(3, (), "n", "file:///s", deleting=True, created_ms=5),
    "forgetting": ForgettingRecord(9, "n", "file:///out/forgotten", ("file:///s",), 5),
    "takeover": VoidRecord(2, 3, "n", True, 5, config=4),
    "aborted": AbortRecord(8, FailureReason.EXPIRED, 1, "n", "m", 5),
    "savepoint": SavepointRecord(7, "file:///s", CheckpointKind.SAVEPOINT, 4, 1, "n", 5, totals=TOTALS),
    "result": ResultRecord(1, "FINISHED", 1, "n", 9, 8, "", 1, 5, totals=TOTALS),
    "sink-owner": OwnerEntry(1, 0, 1, "n", "j", 1, 0, "", 5),
    "sink-commit": CommitEntry(1, 1, 1, "n", "j", 3, 7, 5, (STAGED,), "w", 9),
    "sink-merge": MergeEntry(2, 2, 1, "n", "j", 3, 7, StagedFile("part-n", 5), 99, "xxh3_128:0", (STAGED,), 20, "w", 9),
    "sink-merge-plan": MergePlan(2, "part-n", 2),
    "sink-committable": Committable(1, 7, 0, (STAGED,)),
    "sink-position": LogPosition(1, 2, 1, "n", "j"),
    "sink-pending": PendingCheckpoint(7, (STAGED,)),
    "sink-position-place": LogPosition(1, 2, 1, "n", "j", "/out/_holdfast/s"),
    "sink-pending-place": PendingCheckpoint(7, (STAGED,), "/out/_holdfast/s"),
}


def encoded() -> str:
    document = {name: msgspec.Raw(codec.encode(record)) for name, record in RECORDS.items()}
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def test_records_are_written_as_they_always_were() -> None:
    text = encoded()
    if os.environ.get("HOLDFAST_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_records_of_version_1_are_read(name: str) -> None:
    stored = msgspec.json.decode(GOLDEN.read_text(), type=dict[str, msgspec.Raw])
    assert codec.decode(bytes(stored[name]), type(RECORDS[name])) == RECORDS[name]


PACKED = {name: RECORDS[name] for name in ("acks", "increment")}
GOLDEN_PACKED = GOLDEN.with_name("acks_msgpack_v1.json")
"""Bodies as msgpack, in hexadecimal digits."""


def test_acknowledgements_are_packed_as_they_always_were() -> None:
    packed = {name: codec.encode_msgpack(record) for name, record in PACKED.items()}
    text = json.dumps({name: body.hex() for name, body in packed.items() if body is not None}, indent=1) + "\n"
    if os.environ.get("HOLDFAST_GOLDEN"):
        GOLDEN_PACKED.write_text(text)
    assert text == GOLDEN_PACKED.read_text()
    stored = json.loads(text)
    assert {name: codec.decode_packed(bytes.fromhex(stored[name]), AckBatch) for name in PACKED} == PACKED


def test_a_coordinator_of_an_older_version_takes_json_alone() -> None:
    stored = msgspec.json.decode(GOLDEN.read_text(), type=dict[str, dict[str, object]])["registered"]
    stored.pop("msgpack")
    assert not codec.decode(msgspec.json.encode(stored), Registered).msgpack


def test_records_from_before_settings_could_be_changed_are_read() -> None:
    """What says nothing of a backlog processes none; a leader that says nothing of changed settings has not looked for any."""
    stored = msgspec.json.decode(GOLDEN.read_text())
    del stored["states"]["subtasks"][0]["backlog"], stored["void"]["config"]
    assert codec.decode(msgspec.json.encode(stored["states"]), StatusBatch) == RECORDS["states"]
    assert codec.decode(msgspec.json.encode(stored["void"]), VoidRecord) == RECORDS["void"]


def test_labels_from_before_each_had_its_time_are_read() -> None:
    stored = msgspec.json.decode(GOLDEN.read_text(), type=dict[str, dict[str, object]])["label"]
    stored.pop("given_ms")
    assert codec.decode(msgspec.json.encode(stored), LabelRecord).times() == {"audit": 5, "before-upgrade": 5}


@pytest.mark.parametrize("name", ["attempt", "savepoint", "result"])
def test_records_from_before_counters_were_kept_are_read(name: str) -> None:
    stored = msgspec.json.decode(GOLDEN.read_text(), type=dict[str, dict[str, object]])[name]
    stored.pop("totals")
    without = codec.decode(msgspec.json.encode(stored), type(RECORDS[name]))
    assert without == msgspec.structs.replace(RECORDS[name], totals={})


def test_counters_from_before_skipped_rows_were_among_them_are_read() -> None:
    stored = msgspec.json.decode(GOLDEN.read_text())
    beat, result = stored["heartbeat"], stored["result"]
    counted, totals = beat["metrics"][0]["operators"][0], result["totals"]["u"]
    for each in (counted, totals):
        del each["rows_skipped"], each["first_skipped"]
    beat["metrics"][0] |= {"late_dropped": 4, "rows_skipped": 5}  # those of the subtask, which nobody read but the workers' page
    read = codec.decode(msgspec.json.encode(beat), Heartbeat)
    assert read.metrics[0].operators == (OperatorMetrics("u", 5, 4, 1, 250, {"refunds": 2}),)
    assert codec.decode(msgspec.json.encode(result), ResultRecord).totals == {"u": OperatorTotals(5, 4, 1, 250, {"refunds": 2})}
