"""Branches: jobs beside their parents, from a savepoint, with output elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.barriers.jobgraph import ClaimMode, SinkMode, Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.dispatcher.submit import Starter, start_submission
from holdfast.coordinator.ha.records import (
    ClaimRecord,
    LeaderRecord,
    SavepointRecord,
    SubmissionRecord,
    derive_job_id,
    encode_record,
)
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.ownership.labels import Mark, add_label
from holdfast.coordinator.restore.compatibility import has_state
from holdfast.coordinator.restore.plan import check_submission
from holdfast.operators.datastream.launcher import LaunchOptions
from holdfast.statebackends.errors import HoldfastError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import encode_metadata
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import word_count
from tests.coordinator.test_restore import TWO, snapshot
from tests.coordinator.world import DictStorage

NAME = "word count@trial"
JOB = derive_job_id(NAME)
SAVED = "/saved/savepoint-1"


def storage_with(**fields: Any) -> DictStorage:
    storage = DictStorage()
    storage.files[f"{SAVED}/_metadata"] = encode_metadata(snapshot(*TWO.operators, **fields))
    return storage


def submission(**fields: Any) -> Submission:
    return Submission(word_count(name=fields.pop("name", NAME)), **{"restore": SAVED, "branch": "trial", **fields})


def start(storage: DictStorage, asked: Submission, nonce: str = "n") -> Any:
    return run_flow(start_submission(JOB, asked, Starter(nonce, "", "directory", 1)), storage)


def test_it_is_a_job_of_its_own_from_a_savepoint_that_it_leaves_as_it_is() -> None:
    storage = storage_with()
    before = dict(storage.files)
    setup = start(storage, submission())
    assert (setup.job_id, setup.graph.name) == (JOB, NAME)
    assert derive_job_id("word count") != JOB
    assert setup.base.folder == SAVED
    assert setup.base.claim == ""
    assert setup.first_checkpoint_id == 8, "ids go on behind the savepoint's"
    assert {path: content for path, content in storage.files.items() if not path.startswith(JOB)} == before


def test_the_same_branch_twice_is_refused_and_goes_on_without_restore() -> None:
    storage = storage_with()
    start(storage, submission())
    with pytest.raises(hf.JobExistsError, match=r"branch 'trial' exists already, as job .* take another name"):
        start(storage, submission(), "other")
    again = start(storage, submission(restore=None), "other")
    assert (again.submission, again.base.folder) == (2, SAVED)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"restore": None}, hf.InvalidConfigError, "does not exist: begin it with restore="),
        ({"branch": "a/b", "name": "word count@a/b"}, hf.InvalidConfigError, "the name of a branch"),
        ({"branch": "other"}, hf.InvalidConfigError, "is named <parent>@other"),
        ({"name": "@trial"}, hf.InvalidConfigError, "is named <parent>@trial"),
        ({"fresh": True}, hf.InvalidConfigError, "exclude"),
        ({"job_id": JOB}, hf.InvalidConfigError, "branch= excludes job_id="),
        ({"claim_mode": ClaimMode.CLAIM}, hf.InvalidConfigError, "branch= excludes"),
        ({"restore": "/saved/nothing"}, hf.NotFoundError, "there is no snapshot at /saved/nothing"),
        ({"restore": "latest"}, hf.NotFoundError, "there is no job 'word count' whose 'latest'"),
        ({"restore": "label:x"}, hf.NotFoundError, "there is no job 'word count' whose 'label:x'"),
        ({"restore": "latest-readable"}, hf.InvalidConfigError, "looks for a checkpoint"),
    ],
)
def test_what_no_branch_can_be(asked: dict[str, Any], error: type[Exception], message: str) -> None:
    storage = storage_with()
    with pytest.raises(error, match=message):
        run_flow(check_submission(run_flow(read_job(JobPaths(JOB)), storage), submission(**asked)), storage)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "checkpoint"}, "is a checkpoint, and that is its job's to delete, also if a label keeps it .* with a savepoint"),
        ({"job_name": "another"}, "is a snapshot of job 'another', and the branch is one of 'word count'"),
    ],
)
def test_a_snapshot_that_no_branch_begins_with(fields: dict[str, Any], message: str) -> None:
    storage = storage_with(**fields)
    plan = run_flow(check_submission(run_flow(read_job(JobPaths(JOB)), storage), submission()), storage)
    assert any(re.search(message, refusal.message) for refusal in plan.report.refusals)
    with pytest.raises(HoldfastError, match=message):
        start(storage, submission())


# ----------------------------------------------------------------------------------- by the parent's own words for it

PARENT = JobPaths(derive_job_id("word count"))
CHECKPOINT, STOP = CheckpointKind.CHECKPOINT, CheckpointKind.STOP_SAVEPOINT


def parent_with(*kinds: CheckpointKind) -> DictStorage:
    """A parent with a snapshot 7, 8, ... of each of these kinds."""
    storage = DictStorage()
    put = lambda path, record: storage.files.update({path: encode_record(record)})  # noqa: E731
    put(PARENT.leader(1), LeaderRecord(1, "n"))
    put(PARENT.submission(1), SubmissionRecord(1, 1, Submission(word_count(), job_id=PARENT.job_id), None, 1, "n"))
    for number, kind in enumerate(kinds, 7):
        folder = f"/saved/savepoint-{number}" if kind.is_savepoint else PARENT.checkpoint(number)
        put(PARENT.claim(number), ClaimRecord(number, 1, 1, 1, kind, folder, "n"))
        found = snapshot(*TWO.operators, checkpoint_id=number, kind=kind.value, job_id=PARENT.job_id)
        storage.files[f"{folder}/_metadata"] = encode_metadata(found)
        if kind.is_savepoint:
            put(PARENT.decision(number), SavepointRecord(number, folder, kind, 1, 1, "n"))
    return storage


@pytest.mark.parametrize("restore", ["latest", "8", "label:x"])
def test_a_savepoint_by_its_parent_s_word_for_it_is_as_one_by_its_path(restore: str) -> None:
    storage = parent_with(CHECKPOINT, STOP)
    run_flow(add_label(PARENT, 8, "x", Mark("n", 1)), storage)
    before = dict(storage.files)
    setup = start(storage, submission(restore=restore))
    assert (setup.job_id, setup.branch_of) == (JOB, "word count")
    assert (setup.base.folder, setup.base.explicit, setup.base.claim) == ("/saved/savepoint-8", True, "")
    stored = run_flow(read_job(JobPaths(JOB)), storage).newest_submission
    assert stored is not None
    assert stored.submission.restore == "/saved/savepoint-8", "the word may mean another one later"
    assert {path: content for path, content in storage.files.items() if not path.startswith(JOB)} == before


@pytest.mark.parametrize(
    ("restore", "error", "message"),
    [
        ("latest", hf.RestoreError, "restore='latest' is checkpoint 9 of job 'word count', and that is its .* with a savepoint"),
        ("7", hf.RestoreError, "restore='7' is checkpoint 7 of job 'word count'"),
        ("label:x", hf.RestoreError, "restore='label:x' is checkpoint 7 .* also if a label keeps it now"),
        ("label:y", hf.NotFoundError, "y"),
        ("12", hf.NotFoundError, "has no completed checkpoint 12"),
    ],
)
def test_a_word_that_names_no_savepoint_is_refused_and_nothing_is_written(
    restore: str, error: type[Exception], message: str
) -> None:
    storage = parent_with(CHECKPOINT, CheckpointKind.SAVEPOINT, CHECKPOINT)
    run_flow(add_label(PARENT, 7, "x", Mark("n", 1)), storage)
    asked = submission(restore=restore)
    with pytest.raises(error, match=message):
        run_flow(check_submission(run_flow(read_job(JobPaths(JOB)), storage), asked), storage)
    with pytest.raises(error, match=message):
        start(storage, asked)
    assert run_flow(read_job(JobPaths(JOB)), storage).submissions == {}


def test_a_parent_without_any_snapshot_is_named_and_not_the_branch() -> None:
    with pytest.raises(hf.RestoreError, match="job 'word count' has no completed checkpoint"):
        start(parent_with(), submission(restore="latest"))


# --------------------------------------------------------------------------------------------------- output elsewhere


class Recording:
    """Implements Launcher."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, LaunchOptions]] = []

    def launch(self, plan: Any, options: LaunchOptions) -> Any:
        self.launched.append((plan, options))
        return self


def program(path: Path, sink: Any) -> tuple[Any, Recording]:
    launcher = Recording()
    env = hf.Environment("billing", state_dir=path / "state", launcher=launcher)
    env.from_collection([{"a": 1}]).sink_to(sink, uid="out")
    return env, launcher


def paths_of(plan: Any) -> set[str]:
    operators = [operator for vertex in plan.graph.vertices for operator in vertex.operators]
    return {operator.properties["sink_path"] for operator in operators if "sink_path" in operator.properties}


def test_its_files_go_elsewhere_and_the_program_stays_as_it_was(tmp_path: Path) -> None:
    sink = hf.ParquetSink(tmp_path / "real")
    env, launcher = program(tmp_path, sink)
    env.execute(branch="trial", branch_output=tmp_path / "trials", restore=tmp_path / "savepoint")
    ((plan, options),) = launcher.launched
    assert (plan.graph.name, options.branch, options.sinks) == ("billing@trial", "trial", SinkMode.FORK)
    assert paths_of(plan) == {str(tmp_path / "trials" / "out")}
    settings = [operator.settings for operator in plan.operators.values() if hasattr(operator, "settings")]
    assert all(str(tmp_path / "real") != each.path for each in settings)
    assert (sink.path, env.sinks) == (str(tmp_path / "real"), (sink,))
    assert paths_of(env.build()) == {str(tmp_path / "real")}


def test_what_can_not_be_redirected_is_refused_before_anything_starts(tmp_path: Path) -> None:
    env, launcher = program(tmp_path, hf.ParquetSink(tmp_path / "real"))
    with pytest.raises(hf.InvalidConfigError, match=r"sink 'out' writes files: say where .* branch_output="):
        env.execute(branch="trial", restore=tmp_path / "savepoint")
    with pytest.raises(hf.InvalidConfigError, match="branch_output= is for branch="):
        env.execute(branch_output=tmp_path)
    kafka = hf.KafkaSink("localhost:1", "topic")
    other, none = program(tmp_path, kafka)
    with pytest.raises(hf.InvalidConfigError, match=r"sink 'out' \(KafkaSink\) can't be redirected: mute it \(mute='out'\)"):
        other.execute(branch="trial", branch_output=tmp_path, restore=tmp_path / "savepoint")
    assert (launcher.launched, none.launched) == ([], [])
    silent, started = program(tmp_path, hf.Blackhole())
    silent.execute(branch="trial", restore=tmp_path / "savepoint")
    assert len(started.launched) == 1


# ------------------------------------------------------------------------------------------------------ muted sinks


@pytest.mark.parametrize("mute", [True, "out", ("out",), ["out"], {"out"}])
def test_a_muted_sink_is_not_asked_for_anything_and_the_program_stays_as_it_was(tmp_path: Path, mute: Any) -> None:
    sink = hf.KafkaSink("localhost:1", "topic")
    env, launcher = program(tmp_path, sink)
    env.execute(branch="trial", mute=mute, restore=tmp_path / "savepoint")
    ((plan, options),) = launcher.launched
    assert (options.branch, options.sinks, env.sinks) == ("trial", SinkMode.FORK, (sink,))
    operators = {operator.uid: operator for vertex in plan.graph.vertices for operator in vertex.operators}
    assert "out-committer" not in operators
    assert (operators["out"].sink_id, operators["out"].properties) == ("out", {"discards": True, "muted": True})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"branch": "trial", "mute": "sink"}, "mute= names 'sink', which is no sink's uid; its sinks are 'out'"),
        ({"branch": "trial", "mute": ("out", "collection")}, "mute= names 'collection', which is no sink's uid"),
        ({"branch": "trial", "mute": 7}, "mute= names 7"),
        ({"branch": "trial", "mute": ("out",), "branch_output": "/trials"}, "'out' can't be muted and redirected"),
        ({"branch": "trial", "mute": True, "branch_output": "/trials"}, "'out' can't be muted and redirected"),
        ({"mute": ("out",)}, "mute= is for branch="),
        ({"mute": True}, "mute= is for branch="),
    ],
)
def test_what_can_not_be_muted_is_refused_before_anything_starts(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    env, launcher = program(tmp_path, hf.ParquetSink(tmp_path / "real"))
    with pytest.raises(hf.InvalidConfigError, match=message):
        env.execute(**asked, restore=tmp_path / "savepoint")
    assert launcher.launched == []


def with_property(asked: Submission, **changes: Any) -> Submission:
    """The submission, its last operator changed."""
    vertex = asked.graph.vertices[-1]
    operator = msgspec.structs.replace(vertex.operators[-1], **changes)
    vertex = msgspec.structs.replace(vertex, operators=(*vertex.operators[:-1], operator))
    graph = msgspec.structs.replace(asked.graph, vertices=(*asked.graph.vertices[:-1], vertex))
    return msgspec.structs.replace(asked, graph=graph)


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        (submission(branch=msgspec.UNSET), {"kind": "sink_writer", "sink_id": "x", "properties": {"muted": True}}),
        (submission(), {"kind": "process", "sink_id": "x", "properties": {"muted": True}}),
        (submission(), {"kind": "sink_writer", "sink_id": None, "properties": {"muted": True}}),
        (submission(), {"kind": "sink_writer", "sink_id": "x", "properties": {"muted": ["other"]}}),
    ],
)
def test_only_writers_of_sinks_leave_state_aside_and_only_in_a_branch(asked: Submission, changes: dict[str, Any]) -> None:
    storage = storage_with()
    sent = with_property(asked, **changes)
    with pytest.raises(hf.InvalidConfigError, match="is said to be muted: only the writer of a sink can be, in a branch"):
        run_flow(check_submission(run_flow(read_job(JobPaths(JOB)), storage), sent), storage)


def test_only_state_of_the_muted_sink_is_left_aside_and_the_notes_say_so() -> None:
    asked = submission()
    uid = asked.graph.vertices[-1].operators[-1].uid
    stored = next(each for each in TWO.operators if has_state(each))
    rest = [each for each in TWO.operators if each.uid != uid]
    ofs = lambda name: msgspec.structs.replace(stored, uid=name)  # noqa: E731
    storage = DictStorage()
    storage.files[f"{SAVED}/_metadata"] = encode_metadata(snapshot(*rest, ofs(f"{uid}-committer"), ofs("other-committer")))
    muted = with_property(asked, kind="sink_writer", sink_id="x", properties={"muted": True, "discards": True}, states=())
    report = run_flow(check_submission(run_flow(read_job(JobPaths(JOB)), storage), muted), storage).report
    assert [sink.is_muted for sink in report.sinks] == [True]
    (note,) = [note for note in report.notes if "is muted" in note]
    assert note.startswith(f"sink 'x' is muted: its state ({stored.size} bytes, ")
    assert "which alone commits what is staged" in note
    (dropped,) = [refusal for refusal in report.refusals if refusal.kind == "UnclaimedStateError"]
    assert dropped.fields["operators"] == {"other-committer": stored.size}
