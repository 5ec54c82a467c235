"""Sinks of targets elsewhere than a snapshot knows, and fresh starts over committed rows: told before anything starts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.sinks.log import PLACE_PROPERTY, StagedFile
from holdfast.barriers.sinks.staged import STAGED_CHECKPOINTS, CommitMark, CommitPosition, StagedCheckpoint, StagedState
from holdfast.coordinator.dispatcher.submit import Starter, start_submission
from holdfast.coordinator.ha.records import ClaimRecord, SubmissionRecord, encode_record
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.restore import target_forks
from holdfast.coordinator.restore.sink_forks import find_forgone
from holdfast.statebackends.errors import (
    CommittablesLeftError,
    OutputMayRepeatError,
    SinkMovedError,
    StorageUnavailableError,
    UnsupportedVersionError,
)
from holdfast.statebackends.handles import InlineHandle, OperatorListHandle, OperatorSubtaskState, StateMeta
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.port import Flow, run_flow
from tests.coordinator.doubles import operator, submission, vertex, word_count
from tests.coordinator.ownership.test_claims import OTHER
from tests.coordinator.restore.test_sink_forks import SAVEPOINT, Scene, told
from tests.coordinator.test_restore import snapshot, stored
from tests.coordinator.world import JOB

OLD, NEW = "table old", "table new"
STATE = StateMeta(STAGED_CHECKPOINTS, "operator_list", "bytes")
ABOVE = f"/state/{OTHER}/sinks/out"
FILES = (StagedFile("one.parquet", 40), StagedFile("two.parquet", 2))
PENDING = StagedCheckpoint(7, f"{ABOVE}/staged", FILES)


def graph_at(place: str, sink_id: str = "out") -> JobGraph:
    """A job with one target."""
    properties = {PLACE_PROPERTY: place} if place else {}
    committer = msgspec.structs.replace(
        operator("out-committer", "sink_committer", STATE), sink_id=sink_id, properties=properties
    )
    graph = word_count()
    return msgspec.structs.replace(graph, vertices=(*graph.vertices, vertex(committer, parallelism=1)))


def position(checkpoint_id: int, **changed: Any) -> CommitPosition:
    return CommitPosition(1, "out", 3, "n", OTHER, 2, checkpoint_id, line="1", tag="t", **changed)


class TargetScene(Scene):
    """Job OTHER wrote to OLD and took savepoint 7, in which the rows of checkpoint 7 wait for their commit."""

    def __init__(self, *, owner: str = OTHER, place: str = OLD, known: CommitPosition | None = None) -> None:
        self.state = StagedState(1, known or position(6), (PENDING,), place)
        super().__init__(owner=owner)
        for name in ("staging.json", *(f"staged/{file.name}" for file in FILES)):
            self.storage.files[f"{ABOVE}/{name}"] = b"rows"

    def metadata(self, **changed: Any) -> SnapshotMetadata:
        content = msgspec.msgpack.encode([msgspec.msgpack.encode(self.state)])
        external = tuple(PENDING.external)
        part = OperatorSubtaskState(operator=(OperatorListHandle(STATE, InlineHandle(content), 1),), external=external)
        return snapshot(stored("out-committer", (part,), 1), **{"job_id": self.owner, "external": external, **changed})

    def put_savepoint(self, folder: str = SAVEPOINT) -> None:
        self.storage.files[f"{folder}/_metadata"] = encode_metadata(self.metadata())

    def plan(self, sinks: str = "keep", path: str = NEW, restore: str | None = SAVEPOINT, **options: Any) -> Any:
        graph = options.pop("graph", None) or graph_at(path, options.pop("sink_id", "out"))
        return super().plan(sinks, path, restore, graph=graph, **options)


def test_a_target_elsewhere_is_refused_before_anything_starts_and_both_places_are_named() -> None:
    scene = TargetScene()
    scene.record()
    report = scene.plan().report
    named = r"writes to table new, and the snapshot's writes to table old: .* sinks='fork'"
    with pytest.raises(SinkMovedError, match=named) as caught:
        report.check()
    assert (caught.value.sink, caught.value.path, caught.value.stored) == ("out", NEW, OLD)
    (sink,) = report.sinks
    assert (sink.path, sink.is_moved, sink.stored_path) == (NEW, True, OLD)


@pytest.mark.parametrize(("stored_place", "place"), [(OLD, OLD), ("", NEW), (OLD, "")])
def test_a_target_where_it_was_or_that_names_no_place_is_none_of_it(stored_place: str, place: str) -> None:
    scene = TargetScene(place=stored_place)
    scene.record()
    plan = scene.plan(path=place)
    assert plan.report.fits
    assert told(plan) is None


def test_a_sink_id_that_was_changed_is_another_position() -> None:
    scene = TargetScene()
    scene.record()
    with pytest.raises(SinkMovedError, match="snapshot's is of sink_id 'out': name it so again"):
        scene.plan(path=OLD, sink_id="other").report.check()
    assert scene.plan("fork", path="", sink_id="other").report.fits


def test_a_fork_of_a_job_that_runs_leaves_it_its_rows_and_its_files() -> None:
    scene = TargetScene()
    scene.record()
    plan = scene.plan("fork")
    assert plan.report.fits
    assert told(plan) == {"unnamed": "", "ends": []}
    assert any("42 rows in 2 files of checkpoint 7, staged at table old, are left to job" in note for note in plan.report.notes)
    for name in FILES:
        del scene.storage.files[f"{ABOVE}/staged/{name.name}"]
    assert find_forgone(scene.metadata(), plan.submission.graph) == frozenset(PENDING.external), "an attempt needs none of them"


def test_a_fork_behind_a_stop_that_had_committed_everything_begins() -> None:
    scene = TargetScene(owner=JOB)
    scene.record(state="FINISHED")
    del scene.storage.files[f"{ABOVE}/staged/{FILES[0].name}"]
    assert scene.kinds() == ["SinkMovedError"]
    assert scene.kinds("fork") == [], "a committer that deletes them has committed them; it had not come to the second one"


@pytest.mark.parametrize(("owner", "state"), [(OTHER, "CANCELED"), (OTHER, "FAILED"), (JOB, "CANCELED")])
def test_rows_that_nobody_commits_are_refused_until_they_are_given_up_by_name(owner: str, state: str) -> None:
    scene = TargetScene(owner=owner)
    scene.record(state=state)
    named = "42 rows in 2 files of checkpoint 7, staged at table old, would be lost"
    with pytest.raises(CommittablesLeftError, match=named) as caught:
        scene.plan("fork").report.check()
    assert (caught.value.rows, caught.value.files) == (42, [file.name for file in FILES])
    plan = scene.plan("abandon")
    assert plan.report.fits
    assert any("ABANDONED" in note and FILES[0].name in note for note in plan.report.notes)


def test_a_state_directory_that_is_not_seen_does_not_pass_for_committed() -> None:
    scene = TargetScene(owner=JOB)
    scene.record(state="CANCELED")
    for path in [path for path in scene.storage.files if path.startswith(ABOVE)]:
        del scene.storage.files[path]
    assert scene.kinds("fork") == ["CommittablesLeftError"]


@pytest.mark.parametrize("folder", ["relative/staged", "/state/../secret/staged"])
def test_a_folder_that_no_committer_writes_is_read_through_by_nobody(folder: str) -> None:
    scene = TargetScene()
    scene.record()
    scene.state = msgspec.structs.replace(scene.state, checkpoints=(msgspec.structs.replace(PENDING, folder=folder),))
    scene.put_savepoint()
    assert "CorruptStateError" in scene.kinds("fork")


def test_a_state_that_can_not_be_read_is_a_refusal_that_names_the_operator() -> None:
    scene = TargetScene()
    scene.state = msgspec.structs.replace(scene.state, version=2)
    scene.put_savepoint()
    with pytest.raises(UnsupportedVersionError, match="out-committer: state of version 2"):
        scene.plan().report.check()


# ------------------------------------------------------------------------------------------------------------ fresh start


def running(known: CommitPosition | None, *checkpoints: StagedCheckpoint) -> TargetScene:
    """This job runs, and has completed checkpoint 7."""
    scene = TargetScene(owner=JOB)
    scene.state = StagedState(1, known, checkpoints, OLD)
    paths = JobPaths(JOB)
    files = scene.storage.files
    files[paths.submission(1)] = encode_record(SubmissionRecord(1, 1, submission(graph_at(OLD), job_id=JOB), None, 1, "n"))
    files[paths.claim(7)] = encode_record(ClaimRecord(7, 1, 1, 1, CheckpointKind.CHECKPOINT, paths.checkpoint(7), "n"))
    files[paths.decision(7)] = encode_metadata(scene.metadata(kind="checkpoint", checkpoint_id=7, external=()))
    return scene


@pytest.mark.parametrize(
    "scene",
    [running(position(6)), running(None, PENDING), running(position(0, reached=CommitMark(9, tag="x")))],
    ids=["committed", "released", "gone back"],
)
def test_a_fresh_start_over_committed_rows_is_refused_while_the_old_job_has_its_state(scene: TargetScene) -> None:
    asked = submission(graph_at(OLD), job_id=JOB, fresh=True)
    with pytest.raises(OutputMayRepeatError, match="sink out at table old has rows of an earlier run"):
        run_flow(start_submission(JOB, asked, Starter("m", "", "", 0)), scene.storage)
    job = run_flow(read_job(JobPaths(JOB)), scene.storage)
    assert (job.last_submission, job.newest_completed) == (1, 7)


def test_a_fresh_start_without_output_elsewhere_or_allowed_begins() -> None:
    assert running(position(0)).plan(path=OLD, restore=None, fresh=True).report.fits
    assert running(position(6)).plan(path=NEW, restore=None, fresh=True).report.fits
    assert running(position(6)).plan(path=OLD, restore=None, fresh=True, allow_output_repeat=True).report.fits
    damaged = running(position(6))
    damaged.storage.files[JobPaths(JOB).decision(7)] = b"damaged"
    assert damaged.plan(path=OLD, restore=None, fresh=True).report.fits, "fresh=True is the way out of it"


def test_a_fresh_start_waits_for_a_storage_that_can_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(folder: str) -> Flow[SnapshotMetadata]:
        yield from ()
        raise StorageUnavailableError("no answer", path=folder)

    scene = running(position(6))
    monkeypatch.setattr(target_forks, "load_snapshot", away)
    with pytest.raises(StorageUnavailableError):
        scene.plan(path=OLD, restore=None, fresh=True)
