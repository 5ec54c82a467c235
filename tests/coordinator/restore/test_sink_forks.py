"""Sinks elsewhere than a snapshot knows: told before anything starts; a fork loses no row that somebody still has to commit, and
writes to no log but its job's own."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.barriers.jobgraph import JobGraph, SinkMode
from holdfast.barriers.messages import CheckpointKind
from holdfast.barriers.sinks.log import (
    COMMITTABLES,
    DISCARDS_PROPERTY,
    FORK_PROPERTY,
    PLACE_PROPERTY,
    CommitEntry,
    LogPosition,
    OwnerEntry,
    PendingCheckpoint,
    SinkPaths,
    StagedFile,
    place_of,
    place_of_staged,
    split_place,
)
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.ha.records import (
    ClaimRecord,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    decode_record,
    encode_record,
)
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster.actions import PrepareAttempt
from holdfast.coordinator.jobmaster.events import AttemptImpossible, AttemptPrepared
from holdfast.coordinator.restore.plan import SubmissionPlan, check_submission
from holdfast.coordinator.restore.preflight import Refusal, gravest_first
from holdfast.statebackends.errors import (
    CommittablesLeftError,
    CorruptStateError,
    OutputMayRepeatError,
    SinkMovedError,
    UnclaimedStateError,
)
from holdfast.statebackends.handles import InlineHandle, OperatorListHandle, OperatorSubtaskState, StateMeta
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import encode_metadata
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import operator, submission, vertex, word_count
from tests.coordinator.ownership.test_claims import OTHER
from tests.coordinator.test_restore import snapshot, stored
from tests.coordinator.world import JOB, DictStorage

SAVEPOINT = "/savepoints/savepoint-7"
OLD, NEW = "/old", "/new"
FILE = StagedFile("part-out-1.parquet", 40)
PENDING = PendingCheckpoint(7, (FILE,))
STATE = StateMeta(COMMITTABLES, "operator_list", "bytes")
PATHS = SinkPaths("out")


def graph_at(path: str, sink_id: str = "out") -> JobGraph:
    """A job with one Parquet sink."""
    committer = msgspec.structs.replace(
        operator("out-committer", "sink_committer", STATE), sink_id=sink_id, properties={PLACE_PROPERTY: path}
    )
    graph = word_count()
    return msgspec.structs.replace(graph, vertices=(*graph.vertices, vertex(committer, parallelism=1)))


def position(sequence: int = 1, nonce: str = "owner", job_id: str = OTHER, place: str = place_of(OLD, "out")) -> LogPosition:
    return LogPosition(1, sequence, 1, nonce, job_id, place)


class Scene:
    """Job OTHER wrote to OLD and took savepoint 7, in which the files of checkpoint 7 wait for their commit."""

    def __init__(self, *, owner: str = OTHER, named: bool = True) -> None:
        self.storage = DictStorage()
        self.storage.files["_holdfast"] = b"directory"
        self.owner = owner
        self.named = named
        place = place_of(OLD, "out") if named else ""
        self.entries = [position(job_id=owner, place=place), msgspec.structs.replace(PENDING, place=place)]
        self.log(OLD, OwnerEntry(1, 0, 1, "owner", owner, 1, 0, "", 0))
        self.storage.files[f"{OLD}/{PATHS.staged(FILE.name)}"] = b"rows"
        self.put_savepoint()

    def log(self, path: str, entry: Any) -> None:
        self.storage.files[f"{path}/{PATHS.log(entry.sequence)}"] = msgspec.json.encode(entry)

    def commit(self, *files: StagedFile, checkpoint: int = 7, sequence: int = 1) -> None:
        self.log(OLD, CommitEntry(1, sequence, 1, "owner", self.owner, 1, checkpoint, 40, files, "w", 0))

    def put_savepoint(self, folder: str = SAVEPOINT) -> None:
        content = msgspec.msgpack.encode([msgspec.msgpack.encode(entry) for entry in self.entries])
        external = (f"{OLD}/{PATHS.staged(FILE.name)}|{OLD}/{PATHS.data(FILE.name)}",)
        part = OperatorSubtaskState(
            operator=(OperatorListHandle(STATE, InlineHandle(content), len(self.entries)),), external=external
        )
        graph = msgspec.to_builtins(graph_at(OLD)) if self.named else None
        metadata = snapshot(stored("out-committer", (part,), 1), job_id=self.owner, external=external, graph=graph)
        self.storage.files[f"{folder}/_metadata"] = encode_metadata(metadata)

    def record(self, *, state: str | None = None, newest: int = 6, took: bool = True) -> None:
        """What this state directory knows of the job that took the savepoint; `state`: how it ended, None: it runs."""
        paths = JobPaths(self.owner)
        first = SubmissionRecord(1, 1, submission(graph_at(OLD), job_id=self.owner), None, 1, "n")
        self.storage.files[paths.submission(1)] = encode_record(first)
        if took:
            claim = ClaimRecord(7, 1, 1, 1, CheckpointKind.SAVEPOINT, SAVEPOINT, "n")
            self.storage.files[paths.claim(7)] = encode_record(claim)
            decision = SavepointRecord(7, SAVEPOINT, CheckpointKind.SAVEPOINT, 1, 1, "n")
            self.storage.files[paths.decision(7)] = encode_record(decision)
        if state is not None:
            self.storage.files[paths.result(1)] = encode_record(ResultRecord(1, state, 1, "n", 7, newest))

    def plan(
        self, sinks: str = "keep", path: str = NEW, restore: str | None = SAVEPOINT, *, known: bool = True, **options: Any
    ) -> SubmissionPlan:
        graph = options.pop("graph", None) or graph_at(path)

        def flow() -> Any:
            recorded = yield from read_job(JobPaths(JOB))
            asked = submission(graph, job_id=JOB, restore=restore, sinks=SinkMode(sinks), **options)
            return (yield from check_submission(recorded, asked, external=known))

        plan: SubmissionPlan = run_flow(flow(), self.storage)
        return plan

    def kinds(self, sinks: str = "keep", **options: Any) -> list[str]:
        return [refusal.kind for refusal in self.plan(sinks, **options).report.refusals]


def told(plan: SubmissionPlan) -> Any:
    """What the committer is told."""
    (found,) = [each for vertex in plan.submission.graph.vertices for each in vertex.operators if each.uid == "out-committer"]
    return msgspec.json.decode(msgspec.json.encode(found.properties.get(FORK_PROPERTY)))


# -------------------------------------------------------------------------------------------------------------------- keep


def test_a_sink_elsewhere_is_refused_before_anything_starts_and_both_places_are_named() -> None:
    scene = Scene()
    scene.record()
    report = scene.plan().report
    with pytest.raises(SinkMovedError, match=r"writes to /new, and the snapshot's writes to /old: .* sinks='fork'") as caught:
        report.check()
    assert (caught.value.sink, caught.value.path, caught.value.stored) == ("out", NEW, OLD)
    (sink,) = report.sinks
    assert (sink.path, sink.is_moved, sink.stored_path) == (NEW, True, OLD)


def test_a_sink_elsewhere_is_refused_though_a_stop_had_committed_everything() -> None:
    scene = Scene()
    scene.record(state="FINISHED")
    scene.commit(FILE)
    assert scene.kinds() == ["SinkMovedError"]
    assert scene.kinds("fork") == []


def test_a_snapshot_of_an_older_holdfast_says_by_its_staged_files_where_its_sink_was() -> None:
    scene = Scene(named=False)
    scene.record()
    with pytest.raises(SinkMovedError, match="/old"):
        scene.plan().report.check()
    plan = scene.plan("fork")
    assert plan.report.fits
    assert told(plan) == {"unnamed": place_of(OLD, "out"), "ends": []}
    assert scene.plan(path=OLD).report.fits


def test_a_sink_where_it_was_is_none_of_it() -> None:
    scene = Scene()
    scene.record()
    plan = scene.plan(path=OLD)
    assert plan.report.fits
    assert told(plan) is None
    assert [sink.is_moved for sink in plan.report.sinks] == [False]


def test_a_folder_that_was_moved_with_its_log_is_the_same_sink() -> None:
    scene = Scene()
    scene.log(NEW, OwnerEntry(1, 0, 1, "owner", OTHER, 1, 0, "", 0))
    plan = scene.plan()
    assert plan.report.fits
    assert told(plan) is None


def test_a_sink_id_that_was_changed_is_another_log() -> None:
    scene = Scene()
    scene.record()
    plan = scene.plan(graph=graph_at(OLD, "other"))
    with pytest.raises(SinkMovedError, match=r"'other' .* a log of its own at /old, .* of sink_id 'out': name it so") as caught:
        plan.report.check()
    assert "put it back" not in caught.value.message
    assert (caught.value.stored, caught.value.stored_id) == (OLD, "out")
    assert [(sink.stored_path, sink.stored_id) for sink in plan.report.sinks] == [(OLD, "out")]


# -------------------------------------------------------------------------------------------------------------------- fork


def test_a_job_that_runs_keeps_what_it_staged_and_its_fork_is_not_told_that_output_repeats() -> None:
    scene = Scene()
    scene.record()
    scene.storage.files |= checkpoint_of(OTHER, 8)
    plan = scene.plan("fork")
    assert plan.report.fits
    assert told(plan) == {"unnamed": place_of(OLD, "out"), "ends": []}, "this job never writes to the log of another"
    left = "40 rows in 1 file of checkpoint 7, staged at /old, are left to job 'word count'"
    (note,) = [note for note in plan.report.notes if left in note]
    assert "has no end on record" in note
    assert "whether it runs now is not known here" in note, "a job that was killed looks the same"
    assert not any("written again" in note and "accept" in note for note in plan.report.notes)
    assert [sink.may_repeat for sink in plan.report.sinks] == [False]
    assert scene.kinds(path=OLD) == ["OutputMayRepeatError"], "in the same place it would"


def test_a_job_that_finished_without_them_had_written_them_again() -> None:
    scene = Scene()
    scene.record(state="FINISHED")
    plan = scene.plan("fork")
    assert plan.report.fits
    assert any("are left: job 'word count'" in note and "written them again" in note for note in plan.report.notes)


@pytest.mark.parametrize("owner", [OTHER, JOB])
@pytest.mark.parametrize("state", [None, "CANCELED"])
def test_rows_of_a_log_that_a_third_job_took_over_are_that_job_s_and_it_is_named(owner: str, state: str | None) -> None:
    heir = "ef" * 16
    scene = Scene(owner=owner)
    scene.record(state=state)
    scene.log(OLD, OwnerEntry(1, 1, 2, "heir", heir, 1, 7, "", 0))
    with pytest.raises(CommittablesLeftError, match=f"job {heir}, which took that log over") as caught:
        scene.plan("fork").report.check()
    assert caught.value.files == [FILE.name]
    assert told(scene.plan("abandon"))["ends"] == []
    scene.log(OLD, CommitEntry(1, 2, 2, "heir", heir, 1, 7, 40, (FILE,), "w", 0))
    assert scene.plan("fork").report.fits, "it has committed them"


def checkpoint_of(job_id: str, number: int) -> dict[str, bytes]:
    paths = JobPaths(job_id)
    claim = ClaimRecord(number, 1, 1, 1, CheckpointKind.CHECKPOINT, paths.checkpoint(number), "n")
    metadata = snapshot(kind="checkpoint", job_id=job_id, checkpoint_id=number)
    return {paths.claim(number): encode_record(claim), paths.decision(number): encode_metadata(metadata)}


@pytest.mark.parametrize("state", ["CANCELED", "FAILED"])
def test_rows_that_nobody_commits_are_refused_until_they_are_given_up_by_name(state: str) -> None:
    scene = Scene()
    scene.record(state=state)
    with pytest.raises(CommittablesLeftError, match="40 rows in 1 file of checkpoint 7, staged at /old, would be lost") as caught:
        scene.plan("fork").report.check()
    assert (caught.value.rows, caught.value.files, caught.value.checkpoints) == (40, [FILE.name], [7])
    plan = scene.plan("abandon")
    assert plan.report.fits
    assert any(f"ABANDONED, no job commits them: {FILE.name}" in note for note in plan.report.notes)


def test_a_job_of_the_same_id_in_another_directory_is_somebody_else() -> None:
    scene = Scene(owner=JOB)
    assert scene.kinds("fork") == ["CommittablesLeftError"]
    assert told(scene.plan("abandon")) == {"unnamed": place_of(OLD, "out"), "ends": []}


def test_a_state_directory_that_is_not_known_refuses_nothing_and_says_so() -> None:
    plan = Scene().plan("fork", known=False)
    assert plan.report.fits
    assert any("whether job 'word count'" in note for note in plan.report.notes)


def test_a_job_that_moves_its_own_sink_commits_there_first() -> None:
    scene = Scene(owner=JOB)
    scene.record(state="CANCELED")
    plan = scene.plan("fork")
    assert plan.report.fits
    assert told(plan) == {"unnamed": place_of(OLD, "out"), "ends": [place_of(OLD, "out")]}
    assert any("are committed there first" in note for note in plan.report.notes)


def test_a_copy_of_the_savepoint_is_the_job_s_own_too() -> None:
    scene = Scene(owner=JOB)
    scene.record(state="CANCELED")
    scene.put_savepoint("/elsewhere/copy")
    assert told(scene.plan("fork", restore="/elsewhere/copy"))["ends"] == [place_of(OLD, "out")]


@pytest.mark.parametrize("cause", ["gone on", "another owner", "file gone", "log gone", "older"])
def test_a_log_that_went_on_without_them_gets_them_no_more(cause: str) -> None:
    scene = Scene(owner=JOB)
    scene.record(state="CANCELED", newest=9 if cause == "older" else 6)
    match cause:
        case "gone on":
            scene.commit(StagedFile("part-out-2.parquet", 3), checkpoint=8)
        case "another owner":
            scene.log(OLD, OwnerEntry(1, 1, 2, "heir", OTHER, 1, 7, "", 0))
            scene.log(OLD, CommitEntry(1, 2, 2, "heir", OTHER, 1, 9, 3, (StagedFile("x", 3),), "w", 0))
        case "file gone":
            del scene.storage.files[f"{OLD}/{PATHS.staged(FILE.name)}"]
        case "log gone":
            del scene.storage.files[f"{OLD}/{PATHS.log(0)}"]
    refused = scene.plan("fork", allow_output_repeat=True)
    assert [refusal.kind for refusal in refused.report.refusals] == ["CommittablesLeftError"]
    given_up = scene.plan("abandon", allow_output_repeat=True)
    assert given_up.report.fits, "what is missing there is not needed either"
    assert told(given_up)["ends"] == []


def test_where_another_job_has_a_log_none_begins() -> None:
    scene = Scene()
    scene.record()
    scene.log(NEW, OwnerEntry(1, 0, 1, "n", "ef" * 16, 1, 0, "", 0))
    with pytest.raises(SinkMovedError, match=f"job {'ef' * 16} has one there"):
        scene.plan("fork").report.check()


def test_where_this_job_has_committed_rows_before_it_has_to_be_allowed() -> None:
    scene = Scene()
    scene.record()
    scene.log(NEW, OwnerEntry(1, 0, 1, "n", JOB, 1, 0, "", 0))
    assert scene.kinds("fork") == [], "an attempt that died before its first commit left only this"
    scene.log(NEW, CommitEntry(1, 1, 1, "n", JOB, 1, 9, 3, (StagedFile("x", 3),), "w", 0))
    assert scene.kinds("fork") == ["OutputMayRepeatError"]
    assert scene.kinds("fork", allow_output_repeat=True) == []


def test_what_an_older_fork_still_has_to_commit_is_no_new_question() -> None:
    """A checkpoint of a job that moved its sink, taken before the old log had everything."""
    scene = Scene(owner=JOB)
    scene.record(state="CANCELED")
    scene.entries = [position(place=place_of(NEW, "out"), job_id=JOB), *scene.entries]
    scene.put_savepoint()
    plan = scene.plan()
    assert plan.report.fits
    assert told(plan)["ends"] == [place_of(OLD, "out")]


def test_what_a_graph_says_of_a_fork_itself_is_not_believed() -> None:
    scene = Scene()
    scene.record()
    graph = graph_at(OLD)
    committer = graph.vertices[-1].operators[0]
    forged = msgspec.structs.replace(committer, properties={**committer.properties, FORK_PROPERTY: {"ends": ["/x"]}})
    last = msgspec.structs.replace(graph.vertices[-1], operators=(forged,))
    graph = msgspec.structs.replace(graph, vertices=(*graph.vertices[:-1], last))
    assert told(scene.plan(graph=graph)) is None
    assert told(scene.plan(graph=graph, restore=None)) is None


def test_committables_that_can_not_be_read_are_a_refusal_that_names_the_operator() -> None:
    scene = Scene()
    scene.record()
    content = msgspec.msgpack.encode([b"\xc1"])
    part = OperatorSubtaskState(operator=(OperatorListHandle(STATE, InlineHandle(content), 1),))
    metadata = snapshot(stored("out-committer", (part,), 1), job_id=OTHER)
    scene.storage.files[f"{SAVEPOINT}/_metadata"] = encode_metadata(metadata)
    (refusal,) = scene.plan("fork").report.refusals
    assert isinstance(refusal.error(), CorruptStateError)
    assert refusal.fields["operator"] == "out-committer"


@pytest.mark.parametrize("place", ["relative/_holdfast/out", "/etc", "/a/../_holdfast/out", "/a/_holdfast/\0"])
def test_a_place_that_no_committer_writes_is_read_through_by_nobody(place: str) -> None:
    scene = Scene()
    scene.record()
    scene.entries = [position(place=place)]
    scene.put_savepoint()
    (refusal,) = scene.plan("abandon").report.refusals
    assert (refusal.kind, refusal.fields["operator"]) == ("CorruptStateError", "out-committer")


# ---------------------------------------------------------------------------------------------------------- what is told


def test_a_sink_that_shows_nothing_repeats_nothing() -> None:
    scene = Scene(owner=JOB)
    scene.record(state="CANCELED", newest=9)
    hole = msgspec.structs.replace(operator("hole", "sink_writer"), sink_id="hole", properties={DISCARDS_PROPERTY: True})
    graph = msgspec.structs.replace(word_count(), vertices=(*word_count().vertices, vertex(hole, parallelism=1)))
    assert scene.kinds(graph=graph, allow_non_restored_state=True) == []
    both = msgspec.structs.replace(graph, vertices=(*graph.vertices, graph_at(OLD).vertices[-1]))
    (refusal,) = scene.plan(graph=both).report.refusals
    assert (refusal.kind, refusal.fields["sinks"]) == ("OutputMayRepeatError", ["out"])


def test_all_reasons_are_told_and_the_gravest_is_raised() -> None:
    scene = Scene(owner=JOB)
    scene.record(state="CANCELED", newest=9)
    del scene.storage.files[f"{OLD}/{PATHS.staged(FILE.name)}"]
    report = scene.plan(path=OLD, graph=word_count()).report
    assert [refusal.kind for refusal in report.refusals] == ["CorruptStateError", "UnclaimedStateError", "OutputMayRepeatError"]
    with pytest.raises(CorruptStateError, match=r"2 more reasons: \(2\) .*uid.* \[UnclaimedStateError\]; \(3\) ") as caught:
        report.check()
    assert len(caught.value.others or ()) == 2
    repeats, unclaimed = OutputMayRepeatError("r", restored=1, committed=2), UnclaimedStateError("u", operators={"a": 1})
    mixed = [Refusal.of(error) for error in (repeats, unclaimed, CorruptStateError("c"))]
    unknown = Refusal("KindOfANewerVersion", "no", {})
    assert [refusal.message for refusal in gravest_first([*mixed, unknown])] == ["c", "no", "u", "r"]


@pytest.mark.parametrize(("path", "sink_id"), [("/a/b", "out"), ("s3://bucket/p/", "a/b c"), ("/", "x")])
def test_a_place_says_its_path_and_its_sink(path: str, sink_id: str) -> None:
    place = place_of(path, sink_id)
    assert split_place(place) == (path.rstrip("/") or "/", sink_id)
    staged = f"{path.rstrip('/')}/{SinkPaths(sink_id).staged('part-1.parquet')}"
    assert place_of_staged(staged) == place
    assert place_of_staged("/jobs/sources/u/manifest.json") == ""


# ---------------------------------------------------------------------------------------------------------------- attempts


def prepared(scene: Scene, accepted: SubmissionPlan) -> Any:
    """Outcome of an attempt of a leader that has just come: it knows what was recorded of the submission, and nothing else."""
    record = SubmissionRecord(1, 2, accepted.submission, accepted.base, accepted.first_checkpoint_id, "n")
    graph = decode_record(SubmissionRecord, encode_record(record), "submission").submission.graph
    effects = StorageEffects(Identity(JOB, 1, "n", 1, graph), lambda: 0)
    return run_flow(effects.flow(PrepareAttempt(1, accepted.base, 0, {})), scene.storage)


def test_an_attempt_of_any_leader_does_without_the_files_that_were_given_up() -> None:
    scene = Scene()
    scene.record(state="CANCELED")
    accepted = scene.plan("abandon")
    del scene.storage.files[f"{OLD}/{PATHS.staged(FILE.name)}"]
    assert isinstance(prepared(scene, accepted), AttemptPrepared)


def test_files_that_are_left_to_a_job_that_runs_may_go_on_their_way() -> None:
    scene = Scene()
    scene.record()
    accepted = scene.plan("fork")
    del scene.storage.files[f"{OLD}/{PATHS.staged(FILE.name)}"]
    assert isinstance(prepared(scene, accepted), AttemptPrepared)


@pytest.mark.parametrize("sinks", ["fork", "abandon"])
def test_files_that_this_job_commits_first_must_still_be_there(sinks: str) -> None:
    scene = Scene(owner=JOB)
    scene.record(state="CANCELED")
    accepted = scene.plan(sinks)
    assert told(accepted)["ends"] == [place_of(OLD, "out")]
    del scene.storage.files[f"{OLD}/{PATHS.staged(FILE.name)}"]
    outcome = prepared(scene, accepted)
    assert isinstance(outcome, AttemptImpossible)
    assert "the external file is missing" in str(outcome.error)


def test_files_of_a_sink_that_stayed_where_it_was_must_still_be_there() -> None:
    scene = Scene()
    scene.record(state="CANCELED")
    accepted = scene.plan("abandon", path=OLD)
    assert accepted.report.fits
    del scene.storage.files[f"{OLD}/{PATHS.staged(FILE.name)}"]
    assert isinstance(prepared(scene, accepted), AttemptImpossible)
