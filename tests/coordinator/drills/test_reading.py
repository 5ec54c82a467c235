"""Drills read all of a snapshot through the decoders of a restore, and tell what is wrong without stopping (ADR 107)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.api.snapshots.snapshot import Snapshot
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.drills.reading import Findings, drill_snapshot
from holdfast.coordinator.drills.records import DrillReport, DrillState, DrillView, drilled_ms, is_due, mark_of, told_due_ms
from holdfast.coordinator.views import DrillMark
from holdfast.statebackends.errors import StorageUnavailableError
from tests.golden.goldens import folder_of

SNAPSHOTS = ("v1-filesystem-deltas", "v1-filesystem-packed", "v1-rocksdb-incremental", "v1-savepoint", "v1-rows-savepoint")


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_row_of_every_state_is_counted(name: str) -> None:
    snapshot = Snapshot(folder_of(name))
    rows = states = 0
    for uid in snapshot.operators:
        for state in snapshot.states(uid):
            states += 1
            rows += sum(batch.num_rows for batch in snapshot.table(uid, state))
    report = drill_snapshot(folder_of(name))
    assert (report.problem_count, report.problems, report.error) == (0, (), "")
    assert (report.states, report.rows, report.operators) == (states, rows, len(snapshot.operators))
    assert rows > 0
    assert report.size == snapshot.metadata.size


def copied(tmp_path: Path, name: str = "v1-savepoint") -> Path:
    """A copy, with its files named by their sizes, the largest first."""
    folder = tmp_path / "snapshot"
    shutil.copytree(folder_of(name), folder)
    return folder


def test_damage_of_one_state_keeps_no_other_from_being_read(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    sound = drill_snapshot(folder)
    victim = max((path for path in folder.iterdir() if path.name != "_metadata"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    report = drill_snapshot(folder)
    assert report.problem_count == 1
    assert victim.name in report.problems[0]
    assert 0 < report.states == sound.states - 1
    victim.unlink()
    assert "missing" in drill_snapshot(folder).problems[0] or "not exist" in drill_snapshot(folder).problems[0]


@pytest.mark.parametrize("content", [b"", b"{", b'{"format":"holdfast-snapshot"}', b"\xff" * 100])
def test_a_damaged_metadata_is_a_finding(tmp_path: Path, content: bytes) -> None:
    folder = copied(tmp_path)
    (folder / "_metadata").write_bytes(content)
    report = drill_snapshot(folder)
    assert (report.problem_count, report.states) == (1, -1)
    assert "_metadata" in report.problems[0]


def test_storage_that_fails_is_no_damage(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    (folder / "_metadata").unlink()
    (folder / "_metadata").mkdir()
    with pytest.raises(StorageUnavailableError):
        drill_snapshot(folder)


def test_rows_that_are_not_those_that_are_told_of_are_a_problem() -> None:
    found = Findings()
    found.count("a", 3, 3)
    found.count("b", 3, -1)
    found.count("c", 3, 4)
    assert (found.rows, found.states, found.problems) == (9, 3, ["c: 3 rows were read, 4 are told of"])


def test_problems_are_counted_and_some_are_told() -> None:
    found = Findings()
    for number in range(100):
        found.tell(str(number))
    assert (found.problem_count, len(found.problems)) == (100, 20)


# ---------------------------------------------------------------------------------------------------------------- records


def view(checkpoint_id: int, started_ms: int, state: DrillState = DrillState.PASSED) -> DrillView:
    return DrillView(f"{checkpoint_id}-{started_ms}", checkpoint_id, CheckpointKind.CHECKPOINT, "/x", state, "user", started_ms)


@pytest.mark.parametrize(
    ("drills", "newest", "now_ms", "due"),
    [
        ([], 7, 99, False),
        ([], 7, 100, True),
        ([], -1, 1_000, False),
        ([view(6, 50)], 7, 149, False),
        ([view(6, 50)], 7, 150, True),
        ([view(7, 50)], 7, 1_000, False),
        ([view(7, 50, DrillState.FAILED)], 7, 1_000, False),
        ([view(7, 50, DrillState.ERROR)], 7, 1_000, True),
        ([view(6, 50, DrillState.RUNNING)], 7, 1_000, False),
        ([view(6, 5_000)], 7, 1_000, True),
        ([view(6, 5_000)], 7, 99, False),
        ([view(7, 5_000)], 7, 1_000, False),
        ([view(7, 5_000, DrillState.ERROR)], 7, 1_000, True),
        ([view(5, 5_000), view(6, 950)], 7, 1_000, False),
        ([view(5, 5_000), view(6, 900)], 7, 1_000, True),
    ],
)
def test_when_the_next_drill_is_due(drills: list[DrillView], newest: int, now_ms: int, due: bool) -> None:
    assert is_due(100, newest, drills, 0, now_ms) is due
    assert not is_due(None, newest, drills, 0, now_ms)


DAY_MS = 86_400_000
MINUTE_MS = 60_000
ERROR, PASSED, FAILED = DrillState.ERROR, DrillState.PASSED, DrillState.FAILED


@pytest.mark.parametrize(
    ("states", "pause_ms"),
    [
        ([], DAY_MS),
        ([PASSED], DAY_MS),
        ([FAILED], DAY_MS),
        ([ERROR], MINUTE_MS),
        ([ERROR, PASSED], MINUTE_MS),
        ([PASSED, ERROR, ERROR], DAY_MS),
        ([ERROR, ERROR], 2 * MINUTE_MS),
        ([ERROR, ERROR, ERROR, FAILED, ERROR], 4 * MINUTE_MS),
        ([ERROR] * 11, 1_024 * MINUTE_MS),
        ([ERROR] * 12, DAY_MS),
        ([ERROR] * 20, DAY_MS),
    ],
)
def test_the_pause_behind_errors_grows_up_to_the_interval(states: list[DrillState], pause_ms: int) -> None:
    """`states`: newest first. The order of the list does not matter: two coordinators may have made them."""
    drills = [view(7, 1_000 - age, state) for age, state in enumerate(states)]
    began_ms = 1_000 if drills else 0
    for listed in (drills, drills[::-1]):
        assert not is_due(DAY_MS, 8, listed, 0, began_ms + pause_ms - 1)
        assert is_due(DAY_MS, 8, listed, 0, began_ms + pause_ms)
    assert not is_due(DAY_MS, 8, [view(8, 1_001, DrillState.RUNNING), *drills], 0, began_ms + pause_ms)


def test_a_retry_never_comes_later_than_the_interval() -> None:
    assert not is_due(5_000, 7, [view(7, 1_000, ERROR)], 0, 5_999)
    assert is_due(5_000, 7, [view(7, 1_000, ERROR)], 0, 6_000)


def test_outcomes() -> None:
    begun = view(7, 50, DrillState.RUNNING)
    passed = begun.ended(DrillReport(2, 3, 40, 500), 80)
    assert (passed.state, passed.rows, passed.duration_ms) == (DrillState.PASSED, 40, 30)
    assert begun.ended(DrillReport(2, 3, 40, 500, 1, ("x",)), 80).state is DrillState.FAILED
    assert begun.ended(DrillReport(error="x"), 80).state is DrillState.ERROR
    assert drilled_ms([view(8, 90, DrillState.ERROR), view(7, 50), view(6, 10)]) == 50
    assert drilled_ms([view(8, 90, DrillState.FAILED)]) == -1


def test_what_metrics_tell_of_drills() -> None:
    failed, error, passed = view(8, 90, DrillState.FAILED), view(9, 95, DrillState.ERROR), view(7, 50)
    assert mark_of([error, failed, passed], 5) == DrillMark(90, has_failed=True, overdue_ms=5)
    assert mark_of([view(9, 99, DrillState.RUNNING), passed], -1) == DrillMark(50)
    assert mark_of([error], 0) == DrillMark(overdue_ms=0)
    assert told_due_ms(100, 9, [error, failed, passed], 10) == 190, "an error has told nothing"
    assert told_due_ms(100, 8, [error, failed], 10) is None, "all is known of the newest one"
    assert told_due_ms(100, 9, [error], 10) == 110
    assert told_due_ms(100, -1, [], 10) is None


@pytest.mark.parametrize(("memory_bytes_max", "is_read"), [(2 << 30, True), (24 << 20, False)])
def test_the_process_of_a_drill_is_bounded(memory_bytes_max: int, is_read: bool) -> None:
    request = json.dumps({"location": str(folder_of("v1-savepoint")), "seconds_max": 60, "memory_bytes_max": memory_bytes_max})
    command = [sys.executable, "-m", "holdfast.coordinator.drills.scratch"]
    done = subprocess.run(command, input=request.encode(), capture_output=True, timeout=120, check=False)
    found = json.loads(done.stdout) if done.stdout else {"rows": -1, "error": f"exit code {done.returncode}"}
    assert (int(str(found["rows"])) > 0) is is_read, found
    assert bool(found["error"]) is not is_read
