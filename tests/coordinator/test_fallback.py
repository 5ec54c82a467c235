"""Going back: to the newest snapshot that can be read, or to an older one (J08, R18, R24, I22). Never silently."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.dispatcher.submit import Starter, preflight, start_submission
from holdfast.coordinator.ha.recorded_job import derive_descent
from holdfast.coordinator.ha.records import (
    ClaimRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    encode_record,
)
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.restore.plan import SubmissionPlan, plan_submission
from holdfast.coordinator.restore.preflight import PreflightReport
from holdfast.statebackends.errors import CorruptStateError, NotFoundError, OutputMayRepeatError, RestoreError, SnapshotClaimedError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import operator, submission, vertex, word_count
from tests.coordinator.ownership.test_claims import OTHER, put_checkpoint, put_snapshot
from tests.coordinator.world import JOB, DictStorage

PATHS = JobPaths(JOB)
SAVEPOINT = "/savepoints/savepoint-7"


def with_sink() -> JobGraph:
    sink = msgspec.structs.replace(operator("out", "sink_committer"), sink_id="files")
    graph = word_count(retention_on_cancel="retain", retained_checkpoints=4)
    return msgspec.structs.replace(graph, vertices=(*graph.vertices, vertex(sink, parallelism=1)))


GRAPH = with_sink()


def put_submission(storage: DictStorage, number: int, base: RestorePoint | None, first: int, job_id: str = JOB) -> None:
    record = SubmissionRecord(number, 1, submission(GRAPH, job_id=job_id), base, first, "n")
    storage.files[JobPaths(job_id).submission(number)] = encode_record(record)


def put_result(storage: DictStorage, number: int, newest: int, job_id: str = JOB, state: str = "CANCELED") -> None:
    result = ResultRecord(number, state, 1, "n", last_checkpoint_id=newest, newest_completed=newest)
    storage.files[JobPaths(job_id).result(number)] = encode_record(result)


@pytest.fixture
def storage() -> DictStorage:
    """A job that was canceled with checkpoints 3, 4 and 5."""
    found = DictStorage()
    found.files["_holdfast"] = b"directory"
    put_submission(found, 1, None, 1)
    for number in (3, 4, 5):
        put_checkpoint(found, JOB, number)
    put_result(found, 1, 5)
    return found


def planned(storage: DictStorage, restore: str | None, job_id: str = JOB, **options: Any) -> SubmissionPlan:
    def flow() -> Any:
        recorded = yield from read_job(JobPaths(job_id))
        return (yield from plan_submission(recorded, submission(GRAPH, job_id=job_id, restore=restore, **options)))

    plan: SubmissionPlan = run_flow(flow(), storage)
    return plan


def report(storage: DictStorage, restore: str, **options: Any) -> PreflightReport:
    asked = submission(GRAPH, job_id=JOB, restore=restore, **options)
    found: PreflightReport = run_flow(preflight(JOB, asked), storage)
    return found


def damage(storage: DictStorage, number: int, how: str) -> None:
    folder = PATHS.checkpoint(number)
    match how:
        case "metadata":
            storage.files[f"{folder}/_metadata"] = storage.files[f"{folder}/_metadata"][:-9]
        case "foreign":
            storage.files[f"{folder}/_metadata"] = b"<html>not found</html>"
        case "missing":
            del storage.files[f"{folder}/source-1"]
        case "length":
            storage.files[f"{folder}/source-0"] += b"x"


DAMAGES = ("metadata", "foreign", "missing", "length")


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("restore", ["latest", "5"])
def test_r18_an_unreadable_newest_checkpoint_is_refused_whatever_is_allowed(storage: DictStorage, how: str, restore: str) -> None:
    damage(storage, 5, how)
    with pytest.raises(CorruptStateError) as caught:
        planned(storage, restore, allow_output_repeat=True, allow_non_restored_state=True)
    if restore == "latest" or how in ("missing", "length"):
        assert "restore='latest-readable' with allow_output_repeat=True" in str(caught.value)


@pytest.mark.parametrize("how", DAMAGES)
def test_r18_the_fallback_needs_a_flag_and_says_what_is_skipped_and_what_may_repeat(storage: DictStorage, how: str) -> None:
    damage(storage, 5, how)
    with pytest.raises(OutputMayRepeatError, match=r"not readable: 5\), whose output is committed: what of 'files'") as caught:
        planned(storage, "latest-readable")
    error = caught.value
    assert (error.restored, error.committed, error.sinks, error.skipped) == (4, 5, ["files"], [5])
    plan = planned(storage, "latest-readable", allow_output_repeat=True)
    assert plan.base is not None
    assert (plan.base.checkpoint_id, plan.first_checkpoint_id) == (4, 6), "no id is used twice"
    assert [skipped.checkpoint_id for skipped in plan.report.skipped] == [5]
    assert [sink.may_repeat for sink in plan.report.sinks] == [True]
    assert any("would be written again" in note for note in plan.report.notes)


def test_r18_all_that_is_skipped_is_listed_newest_first(storage: DictStorage) -> None:
    damage(storage, 5, "metadata")
    damage(storage, 4, "missing")
    found = report(storage, "latest-readable", allow_output_repeat=True)
    assert found.snapshot is not None
    assert found.snapshot.checkpoint_id == 3
    assert [skipped.checkpoint_id for skipped in found.skipped] == [5, 4]
    assert "source-1: the file is missing" in found.skipped[1].reason


def test_without_damage_the_newest_readable_is_the_newest_and_needs_no_flag(storage: DictStorage) -> None:
    plan, latest = planned(storage, "latest-readable"), planned(storage, "latest")
    assert plan.base == latest.base
    assert (plan.report.skipped, plan.report.notes) == ((), latest.report.notes)


def test_where_nothing_can_be_read_all_is_named(storage: DictStorage) -> None:
    for number in (3, 4, 5):
        damage(storage, number, "metadata")
    with pytest.raises(CorruptStateError, match=r"has no checkpoint that can be read: 5: .*; 4: .*; 3: ") as caught:
        planned(storage, "latest-readable", allow_output_repeat=True)
    assert caught.value.skipped == [5, 4, 3]
    with pytest.raises(RestoreError, match="no completed checkpoint"):
        planned(DictStorage(), "latest-readable")


def test_a_checkpoint_that_another_job_claimed_is_not_skipped_silently(storage: DictStorage) -> None:
    from holdfast.coordinator.ha.records import OwnerRecord, VoidRecord

    void = VoidRecord(2, 1, "n", given=5, owner=OwnerRecord(OTHER, "directory", "n"))
    storage.files[PATHS.submission(2)] = encode_record(void)
    with pytest.raises(SnapshotClaimedError, match=f"checkpoint 5 was claimed by job {OTHER}"):
        planned(storage, "latest-readable", allow_output_repeat=True)


def test_the_fallback_follows_the_line_of_descent_and_never_another_life_of_the_job(storage: DictStorage) -> None:
    """1: 3 to 5. 2 begins at 4: 7. 3 is fresh: 9. 4 begins at 9: 11, 12."""
    chk = {number: RestorePoint(number, PATHS.checkpoint(number), 0) for number in (4, 9)}
    for number, base, first in ((2, chk[4], 6), (3, None, 8), (4, chk[9], 10)):
        put_submission(storage, number, base, first)
    for number in (7, 9, 11, 12):
        put_checkpoint(storage, JOB, number)
    recorded = run_flow(read_job(PATHS), storage)
    assert [each.checkpoint_id for each in derive_descent(recorded)] == [12, 11, 9]
    for number in (9, 11, 12):
        damage(storage, number, "metadata")
    with pytest.raises(CorruptStateError, match="has no checkpoint that can be read"):
        planned(storage, "latest-readable", allow_output_repeat=True)
    for number in (3, 4):
        del storage.files[PATHS.submission(number)]
    recorded = run_flow(read_job(PATHS), storage)
    assert [each.checkpoint_id for each in derive_descent(recorded)] == [12, 11, 9, 7, 4, 3], (
        "of submission 2, which nobody followed"
    )


def test_a_snapshot_given_by_its_path_is_the_end_of_the_line(storage: DictStorage) -> None:
    put_snapshot(storage, SAVEPOINT, job_id=OTHER)
    base = RestorePoint(7, SAVEPOINT, 0, explicit=True)
    put_submission(storage, 2, base, 8)
    put_checkpoint(storage, JOB, 9)
    damage(storage, 9, "metadata")
    with pytest.raises(OutputMayRepeatError) as caught:
        planned(storage, "latest-readable")
    assert (caught.value.restored, caught.value.committed, caught.value.skipped) == (7, 9, [9])
    plan = planned(storage, "latest-readable", allow_output_repeat=True)
    assert plan.base == base


def test_r18_a_job_started_by_the_fallback_goes_on_and_keeps_what_it_could_not_read(storage: DictStorage) -> None:
    damage(storage, 5, "metadata")
    asked = submission(GRAPH, job_id=JOB, restore="latest-readable", allow_output_repeat=True)
    setup = run_flow(start_submission(JOB, asked, Starter("s", "", "directory", 0)), storage)
    assert setup.base is not None
    assert setup.base.checkpoint_id == 4
    assert any("not readable: 5" in note for note in setup.notes)
    assert PATHS.decision(5) in storage.files, "whoever mends it may want it"


# ------------------------------------------------------------------------------------------------------ I22: older snapshots


def test_i22_an_older_checkpoint_by_id_or_path_needs_the_flag(storage: DictStorage) -> None:
    put_snapshot(storage, SAVEPOINT, job_id=JOB, checkpoint_id=2)
    for restore in ("4", SAVEPOINT):
        with pytest.raises(OutputMayRepeatError, match="what of 'files' came after it"):
            planned(storage, restore)
        assert planned(storage, restore, allow_output_repeat=True).base is not None


def test_i22_to_start_again_from_another_jobs_savepoint_needs_the_flag_once_the_job_has_gone_on(storage: DictStorage) -> None:
    put_snapshot(storage, SAVEPOINT, job_id=OTHER)
    assert planned(storage, SAVEPOINT).report.fits
    put_submission(storage, 2, RestorePoint(7, SAVEPOINT, 0, explicit=True), 8)
    assert planned(storage, SAVEPOINT).report.fits, "it has completed nothing since"
    put_checkpoint(storage, JOB, 9)
    with pytest.raises(OutputMayRepeatError) as caught:
        planned(storage, SAVEPOINT)
    assert (caught.value.restored, caught.value.committed) == (7, 9)


def test_r24_a_job_of_another_id_that_shares_a_sink_is_held_to_what_the_first_one_committed(storage: DictStorage) -> None:
    graph = msgspec.to_builtins(GRAPH)
    put_snapshot(storage, SAVEPOINT, job_id=JOB, checkpoint_id=4, graph=graph)
    with pytest.raises(OutputMayRepeatError, match=f"older than 5 of job {JOB}"):
        planned(storage, SAVEPOINT, OTHER)
    assert planned(storage, SAVEPOINT, OTHER, allow_output_repeat=True).report.sinks[0].may_repeat
    put_snapshot(storage, SAVEPOINT, job_id=JOB, checkpoint_id=5, graph=graph)
    assert planned(storage, SAVEPOINT, OTHER).report.fits, "nothing came after it"
    put_snapshot(storage, SAVEPOINT, job_id=JOB, checkpoint_id=4)
    assert planned(storage, SAVEPOINT, OTHER).report.fits, "a snapshot without a graph says nothing of its sinks"
    unknown = {"name": "of a newer version", "vertices": 7}
    put_snapshot(storage, SAVEPOINT, job_id=JOB, checkpoint_id=4, graph=unknown)
    assert planned(storage, SAVEPOINT, OTHER).report.fits


def put_stop(storage: DictStorage, number: int) -> str:
    """A stop with a savepoint, whose folder its user deleted afterwards; that folder."""
    folder = f"/savepoints/savepoint-{number}"
    claim = ClaimRecord(number, 1, 1, 1, CheckpointKind.STOP_SAVEPOINT, folder, "n")
    storage.files[PATHS.claim(number)] = encode_record(claim)
    decision = SavepointRecord(number, folder, CheckpointKind.STOP_SAVEPOINT, 1, 1, "n")
    storage.files[PATHS.decision(number)] = encode_record(decision)
    put_result(storage, 1, number)
    return folder


@pytest.mark.parametrize("restore", ["latest", "6"])
def test_a_savepoint_of_the_job_that_its_user_deleted_is_missing_and_not_corrupt(storage: DictStorage, restore: str) -> None:
    folder = put_stop(storage, 6)
    for ask in (planned, report):
        with pytest.raises(NotFoundError, match=f"from checkpoint 6, a stop savepoint at {folder}, which was deleted") as caught:
            ask(storage, restore)
        error = caught.value
        assert (error.path, error.job, error.checkpoint, error.kept) == (folder, JOB, 6, [3, 4, 5])
        assert "has kept 3, 4, 5: restore='5' goes on from there" in error.message
        assert "restore='latest-readable' with allow_output_repeat=True" in error.message
        assert "corrupt" not in error.message
    assert planned(storage, "5", allow_output_repeat=True).base is not None, "as the message says"


@pytest.mark.parametrize("restore", ["latest", None])
def test_a_deleted_savepoint_that_a_job_began_from_is_missing_too(restore: str | None) -> None:
    storage = DictStorage()
    storage.files["_holdfast"] = b"directory"
    put_submission(storage, 1, RestorePoint(7, SAVEPOINT, 1, explicit=True, kind=CheckpointKind.SAVEPOINT), 8)
    with pytest.raises(NotFoundError, match=f"{SAVEPOINT}, which was deleted or moved") as caught:
        planned(storage, restore)
    assert caught.value.kept == []
    assert "latest-readable" not in caught.value.message, "there is none"


def test_a_savepoint_that_goes_while_the_job_goes_on_is_looked_for_again(storage: DictStorage) -> None:
    """What the report says is of one moment: what was latest when the records were read may be subsumed and deleted since."""
    files = dict(storage.files)
    put_stop(storage, 6)

    class Goes(DictStorage):
        def execute(self, operation: Any) -> Any:
            if getattr(operation, "path", "") == "/savepoints/savepoint-6/_metadata":
                self.files = dict(files)
            return super().execute(operation)

    going = Goes()
    going.files = dict(storage.files)
    found = report(going, "latest")
    assert found.snapshot is not None
    assert found.snapshot.checkpoint_id == 5
