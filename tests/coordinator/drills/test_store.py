"""Drills on record: the newest of a job are found, however many there were, and what can't be read is named."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.drills.records import DrillReport, DrillState, DrillView
from holdfast.coordinator.drills.store import DRILLS_KEPT, RECORD_BYTES_MAX, keep_drill, read_drills
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import ListFolder, PutIfAbsent, ReadFile, run_flow
from tests.coordinator.world import JOB, DictStorage

PATHS = JobPaths(JOB)
GOLDEN = Path(__file__).parents[2] / "golden" / "drill_v1.json"
NOW = 1_700_000_000_000


def drill(number: int, state: DrillState = DrillState.PASSED) -> DrillView:
    folder = f"/state/{JOB}/chk-{number}"
    kind = CheckpointKind.CHECKPOINT
    return DrillView(f"{number:032x}", number, kind, folder, state, "schedule", NOW + number, 30, 2, 3, 40, 500)


def test_the_newest_are_kept_and_found() -> None:
    storage = DictStorage()
    drills = [drill(number) for number in range(1, DRILLS_KEPT + 6)]
    for each in drills[::2] + drills[1::2]:  # clocks and coordinators need not agree
        run_flow(keep_drill(PATHS, each), storage)
    assert run_flow(read_drills(PATHS), storage) == (tuple(reversed(drills[-DRILLS_KEPT:])), ())
    assert len(storage.execute(ListFolder(PATHS.drills))) == DRILLS_KEPT


def test_a_file_is_as_ever_and_tells_some_problems() -> None:
    storage = DictStorage()
    view = replace(drill(7), drill_id="d" * 32).ended(DrillReport(2, 3, 40, 500, 9, tuple("abcdefghi")), NOW + 37)
    run_flow(keep_drill(PATHS, view), storage)
    assert storage.execute(ReadFile(PATHS.drill(view.started_ms, view.drill_id), 0, RECORD_BYTES_MAX)) == GOLDEN.read_bytes()
    ((found,), _) = run_flow(read_drills(PATHS), storage)
    assert (found.state, found.problem_count, found.problems) == (DrillState.FAILED, 9, tuple("abcde"))


def test_what_can_not_be_read_is_named_and_hides_nothing() -> None:
    storage = DictStorage()
    run_flow(keep_drill(PATHS, drill(1)), storage)
    later = GOLDEN.read_bytes().replace(b'"failed"', b'"of a later version"')
    names = {2: b"{", 3: later, 4: GOLDEN.read_bytes(), 5: b" " * (RECORD_BYTES_MAX + 1)}
    for number, content in names.items():
        storage.execute(PutIfAbsent(PATHS.drill(NOW + number, f"{number:032x}"), content))
    storage.execute(PutIfAbsent(f"{PATHS.drills}/notes.txt", b"not ours"))
    found, damage = run_flow(read_drills(PATHS), storage)
    assert found == (drill(1),)
    assert damage == tuple(PATHS.drill(NOW + number, f"{number:032x}") for number in sorted(names, reverse=True))


def test_a_job_without_drills() -> None:
    assert run_flow(read_drills(PATHS), DictStorage()) == ((), ())
