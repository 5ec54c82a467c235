"""Positions of sources, read behind the caller's back from the snapshots that somebody asks about."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.dispatcher.reading import source_positions
from holdfast.coordinator.dispatcher.reading.source_positions import JOBS_KEPT, SourcePositions
from holdfast.coordinator.explain.positions import SnapshotPositions, SourcePlaces
from holdfast.coordinator.explain.records import CutView
from holdfast.statebackends.handles import InlineHandle, OperatorListHandle, OperatorState, OperatorSubtaskState, StateMeta
from holdfast.statebackends.keygroups import operator_id
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Operation
from tests.coordinator.doubles import wait_until

JOB = "a" * 32
SOURCES = frozenset({"orders"})


class CountingStorage(LocalStorage):
    """Counts what the caller's thread asks it, and what others do."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root))
        self.threads: list[threading.Thread] = []

    def execute(self, operation: Operation) -> Any:
        self.threads.append(threading.current_thread())
        return super().execute(operation)


def snapshot(root: Path, checkpoint_id: int, rows: list[int], **changes: Any) -> CutView:
    """With a source of so many subtasks; and an operator whose entries look like those of a source."""
    meta = StateMeta("splits", "operator_list", "bytes")
    subtasks = []
    for stripe, row in enumerate(rows):
        entries = [msgspec.msgpack.encode([1, len(rows), stripe, row])]
        handle = OperatorListHandle(meta, InlineHandle(msgspec.msgpack.encode(entries)), len(entries))
        subtasks.append(OperatorSubtaskState(operator=(handle,)))
    operators = tuple(
        OperatorState(uid, operator_id(uid), uid, len(rows), 128, tuple(subtasks)) for uid in ("orders", "other")
    )
    metadata = SnapshotMetadata(
        job_id=JOB,
        job_name="j",
        checkpoint_id=checkpoint_id,
        kind="checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=1,
        completion_timestamp_ms=2,
        operators=operators,
        **changes,
    )
    folder = root / JOB / f"chk-{checkpoint_id}"
    folder.mkdir(parents=True)
    (folder / "_metadata").write_bytes(encode_metadata(metadata))
    return CutView(checkpoint_id, CheckpointKind.CHECKPOINT, str(folder), 1)


@pytest.fixture
def positions(tmp_path: Path) -> Iterator[SourcePositions]:
    made = SourcePositions(CountingStorage(tmp_path))
    thread = threading.Thread(target=made.watch, daemon=True)
    thread.start()
    yield made
    made.close()
    thread.join(10)
    assert not thread.is_alive()


def test_caller_waits_for_no_storage_and_has_the_positions_later(positions: SourcePositions, tmp_path: Path) -> None:
    cut = snapshot(tmp_path, 7, [40, 41])
    assert positions.remembered(JOB, cut, SOURCES, has_ended=False) is None
    wait_until(lambda: positions.remembered(JOB, cut, SOURCES, has_ended=False) is not None, lambda: None)
    expected = SnapshotPositions(7, {"orders": SourcePlaces(1, ("row 40, and some read up to 41",))})
    assert positions.remembered(JOB, cut, SOURCES, has_ended=False) == expected
    storage = positions._storage._default
    assert isinstance(storage, CountingStorage)
    assert threading.current_thread() not in storage.threads
    asked = len(storage.threads)
    assert positions.changes == 1
    for _ in range(100):
        positions.remembered(JOB, cut, SOURCES, has_ended=False)
    assert len(storage.threads) == asked, "a snapshot is read once"
    assert positions.changes == 1


def test_those_of_an_earlier_snapshot_are_told_as_such_until_the_newer_one_is_read(
    positions: SourcePositions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = snapshot(tmp_path, 1, [10]), snapshot(tmp_path, 2, [20])
    monkeypatch.setattr(source_positions, "READ_INTERVAL_S", 0.2)
    positions.remembered(JOB, first, SOURCES, has_ended=False)
    wait_until(lambda: positions.remembered(JOB, first, SOURCES, has_ended=False) is not None, lambda: None)
    found = positions.remembered(JOB, second, SOURCES, has_ended=False)
    assert found is not None
    assert found.checkpoint_id == 1
    wait_until(lambda: getattr(positions.remembered(JOB, second, SOURCES, has_ended=False), "checkpoint_id", 0) == 2, lambda: None)


def test_snapshot_that_is_gone_says_nothing_and_one_that_is_damaged_has_no_positions(
    positions: SourcePositions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_positions, "READ_INTERVAL_S", 0.0)
    damaged = snapshot(tmp_path, 3, [1])
    Path(damaged.location, "_metadata").write_bytes(b"{")
    gone = replace(damaged, checkpoint_id=2, location=f"{tmp_path}/{JOB}/chk-2")
    assert positions.remembered(JOB, gone, SOURCES, has_ended=False) is None
    wait_until(lambda: not positions._wanted, lambda: None)
    assert positions.remembered(JOB, gone, SOURCES, has_ended=False) is None
    wait_until(lambda: positions.remembered(JOB, damaged, SOURCES, has_ended=False) is not None, lambda: None)
    assert positions.remembered(JOB, damaged, SOURCES, has_ended=False) == SnapshotPositions(3, {})


@pytest.mark.parametrize("limit", ["METADATA_BYTES_MAX", "STATE_BYTES_MAX"])
def test_what_is_too_large_is_not_read(
    positions: SourcePositions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(source_positions, limit, 10)
    cut = snapshot(tmp_path, 3, [1, 2, 3])
    wait_until(lambda: positions.remembered(JOB, cut, SOURCES, has_ended=False) is not None, lambda: None)
    assert positions.remembered(JOB, cut, SOURCES, has_ended=False) == SnapshotPositions(3, {})


def test_jobs_that_are_asked_for_are_bounded(tmp_path: Path) -> None:
    made = SourcePositions(LocalStorage(str(tmp_path)))
    cut = CutView(1, CheckpointKind.CHECKPOINT, f"{tmp_path}/x", 1)
    for number in range(JOBS_KEPT + 50):
        assert made.remembered(f"{number:032}", cut, SOURCES, has_ended=False) is None
    assert len(made._wanted) == JOBS_KEPT


def test_a_snapshot_of_an_ended_job_is_looked_for_anew_and_told_as_gone(
    positions: SourcePositions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_positions, "READ_INTERVAL_S", 0.0)
    cut = snapshot(tmp_path, 7, [40])

    def told() -> SnapshotPositions | None:
        return positions.remembered(JOB, cut, SOURCES, has_ended=True)

    wait_until(lambda: told() is not None, lambda: None)
    there = told()
    assert there is not None
    assert not there.is_gone
    changes, storage = positions.changes, positions._storage._default
    assert isinstance(storage, CountingStorage)
    wait_until(lambda: not positions._wanted, lambda: None)
    looked = len(storage.threads)
    told()
    wait_until(lambda: len(storage.threads) > looked, lambda: None)
    assert len(storage.threads) == looked + 1, "it is looked for, and not read again"
    Path(cut.location, "_metadata").rename(tmp_path / "aside")
    wait_until(lambda: told() == SnapshotPositions(7, {}, is_gone=True), lambda: None)
    (tmp_path / "aside").rename(Path(cut.location, "_metadata"))
    wait_until(lambda: told() == there, lambda: None)
    assert positions.changes == changes + 2, "what is found again and again is no change"
