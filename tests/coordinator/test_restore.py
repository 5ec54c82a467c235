"""Snapshot against job (scenarios R, O11): what fits, what is refused and how it is named, and who gets which state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex
from holdfast.barriers.messages import SubtaskKey
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.snapshots import check_files, load_snapshot
from holdfast.coordinator.restore.assign import assign_state, find_list_states
from holdfast.coordinator.restore.compatibility import propose_rename
from holdfast.coordinator.restore.plan import plan_submission
from holdfast.statebackends.errors import (
    CorruptStateError,
    IncompatibleStateError,
    InvalidConfigError,
    MaxParallelismError,
    NotFoundError,
    OutputMayRepeatError,
    RestoreError,
    UnclaimedStateError,
    UnsupportedVersionError,
)
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorListHandle,
    OperatorState,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.keygroups import assign_key_groups, operator_id
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import COUNTS, OFFSETS, operator, submission, vertex, word_count
from tests.harness.restoring import plan_restore

JOB = "cd" * 16
EMPTY = RecordedJob(JOB, (), {}, {}, {}, {})


def keyed(parallelism: int, *states: StateMeta, max_parallelism: int = 128) -> tuple[OperatorSubtaskState, ...]:
    ranges = [assign_key_groups(max_parallelism, parallelism, index) for index in range(parallelism)]
    return tuple(
        OperatorSubtaskState(
            keyed=(
                KeyedStateHandle(
                    KeyGroupRange(groups.start, groups.stop),
                    "parquet",
                    states or (COUNTS,),
                    tuple(InlineHandle(b"PAR1%dPAR1" % index) for _ in states or (COUNTS,)),
                ),
            )
        )
        for index, groups in enumerate(ranges)
    )


def lists(*entries: list[bytes]) -> tuple[OperatorSubtaskState, ...]:
    return tuple(
        OperatorSubtaskState(operator=(OperatorListHandle(OFFSETS, InlineHandle(msgspec.msgpack.encode(part)), len(part)),))
        for part in entries
    )


def stored(uid: str, subtasks: tuple[OperatorSubtaskState, ...], max_parallelism: int = 128) -> OperatorState:
    return OperatorState(uid, operator_id(uid), uid, len(subtasks), max_parallelism, subtasks)


def snapshot(*operators: OperatorState, **fields: Any) -> SnapshotMetadata:
    defaults: dict[str, Any] = {
        "job_id": JOB,
        "job_name": "word count",
        "checkpoint_id": 7,
        "kind": "savepoint",
        "attempt": 1,
        "epoch": 1,
        "trigger_timestamp_ms": 1,
        "completion_timestamp_ms": 2,
    }
    return SnapshotMetadata(operators=operators, **{**defaults, **fields})


TWO = snapshot(stored("source", lists([b"a", b"b"], [b"c"])), stored("count", keyed(2)))


def graph_of(*vertices: JobVertex, explicit: bool = False) -> JobGraph:
    return JobGraph("word count", vertices, (), JobConfig(), explicit)


# ------------------------------------------------------------------------------------------------------------- verdict


def test_r01_same_graph_gives_every_subtask_its_own_handles() -> None:
    graph = word_count()
    plan = plan_restore(TWO, graph)
    assert (plan.graph, plan.dropped) == (graph, {})
    assert find_list_states(TWO, graph) == []
    assigned = assign_state(TWO, graph, {})
    for index in range(2):
        assert assigned[SubtaskKey(graph.vertices[0].vertex_id, index)]["source"] == TWO.operators[0].subtasks[index]
        assert assigned[SubtaskKey(graph.vertices[1].vertex_id, index)]["count"] == TWO.operators[1].subtasks[index]


def test_r02_removed_operator_with_state_is_refused_with_uid_and_size() -> None:
    graph = graph_of(vertex(operator("source", "source", OFFSETS)))
    with pytest.raises(UnclaimedStateError, match="'count' \\(18 bytes\\)") as caught:
        plan_restore(TWO, graph)
    assert caught.value.operators == {"count": 18}
    assert plan_restore(TWO, graph, allow_non_restored_state=True).dropped == {"count": 18}


def test_r03_removed_operator_without_state_is_fine() -> None:
    old = snapshot(*TWO.operators, stored("map", (OperatorSubtaskState(), OperatorSubtaskState())))
    assert plan_restore(old, word_count()).dropped == {}


def test_r04_added_operator_starts_empty() -> None:
    graph = graph_of(*word_count().vertices, vertex(operator("new", "process", COUNTS, key_type="utf8")))
    plan = plan_restore(TWO, graph)
    assigned = assign_state(TWO, plan.graph, {})
    assert assigned[SubtaskKey(graph.vertices[2].vertex_id, 0)] == {}


def test_r05_changed_uid_is_refused_and_the_rename_is_proposed() -> None:
    graph = graph_of(word_count().vertices[0], vertex(operator("word-tally", "process", COUNTS, key_type="utf8")))
    with pytest.raises(UnclaimedStateError, match="was 'count' renamed to 'word-tally'"):
        plan_restore(TWO, graph)
    assert propose_rename(TWO.operators[1], {}) is None
    unlike = {"zzz": operator("zzz", "process", StateMeta("other", "value", "int", "utf8"))}
    assert propose_rename(TWO.operators[1], unlike) is None


def test_r06_operators_chained_differently_restore_by_uid() -> None:
    chain = vertex(operator("source", "source", OFFSETS), operator("count", "process", COUNTS, key_type="utf8"))
    graph = graph_of(chain)
    assigned = assign_state(TWO, plan_restore(TWO, graph).graph, {})
    assert set(assigned[SubtaskKey(chain.vertex_id, 1)]) == {"source", "count"}


def test_r08_parallelism_above_the_stored_maximum_is_refused_with_the_number() -> None:
    with pytest.raises(MaxParallelismError, match="max parallelism 128, the job asks for 200") as caught:
        plan_restore(TWO, word_count(parallelism=200, max_parallelism=512))
    assert (caught.value.stored, caught.value.requested) == (128, 200)


def test_o11_open_max_parallelism_adopts_the_stored_one_and_an_explicit_one_must_agree() -> None:
    graph = word_count(max_parallelism=256)
    plan = plan_restore(TWO, graph)
    assert [entry.max_parallelism for entry in plan.graph.vertices] == [128, 128]
    with pytest.raises(MaxParallelismError):
        plan_restore(TWO, msgspec.structs.replace(graph, explicit_max_parallelism=True))


@pytest.mark.parametrize(
    ("declared", "field"),
    [
        (StateMeta("counts", "list", "int", "utf8"), "kind"),
        (StateMeta("counts", "value", "str", "utf8"), "value type"),
        (StateMeta("counts", "value", "int", "int64"), "key type"),
    ],
)
def test_r11_state_declared_otherwise_is_refused_with_both_types(declared: StateMeta, field: str) -> None:
    graph = graph_of(word_count().vertices[0], vertex(operator("count", "process", declared, key_type=declared.key_type)))
    with pytest.raises(IncompatibleStateError) as caught:
        plan_restore(TWO, graph)
    assert (caught.value.operator, caught.value.state) == ("count", "counts"), field
    assert caught.value.stored != caught.value.declared


def test_r11_widened_value_type_is_accepted() -> None:
    wider = StateMeta("counts", "value", "float", "utf8")
    graph = graph_of(word_count().vertices[0], vertex(operator("count", "process", wider, key_type="utf8")))
    assert plan_restore(TWO, graph).dropped_states == {}


def test_state_that_is_no_longer_declared_is_refused_and_can_be_dropped() -> None:
    extra = StateMeta("extra", "value", "int", "utf8")
    old = snapshot(TWO.operators[0], stored("count", keyed(2, COUNTS, extra)))
    with pytest.raises(UnclaimedStateError, match="operator 'count': extra"):
        plan_restore(old, word_count())
    graph = word_count()
    assert plan_restore(old, graph, allow_non_restored_state=True).dropped_states == {"count": ("extra",)}
    handle = assign_state(old, graph, {})[SubtaskKey(graph.vertices[1].vertex_id, 0)]["count"].keyed[0]
    assert (handle.states, len(handle.parts)) == ((COUNTS,), 1)


# ---------------------------------------------------------------------------------------------------------- assignment


def test_o08_rescale_gives_each_subtask_the_handles_that_overlap_its_key_groups() -> None:
    graph = word_count(parallelism=3)
    assigned = assign_state(TWO, graph, {("source", "offsets"): [[b"a", b"b"], [b"c"]]})
    counts = [assigned[SubtaskKey(graph.vertices[1].vertex_id, index)]["count"].keyed for index in range(3)]
    old = [subtask.keyed[0] for subtask in TWO.operators[1].subtasks]
    assert counts == [(old[0],), (old[0], old[1]), (old[1],)]


def test_p_list_entries_are_dealt_out_anew_and_none_is_lost() -> None:
    graph = word_count(parallelism=3)
    assert [(state.uid, name) for state, name in find_list_states(TWO, graph)] == [("source", "offsets")]
    assigned = assign_state(TWO, graph, {("source", "offsets"): [[b"a", b"b"], [b"c"]]})
    parts = [assigned[SubtaskKey(graph.vertices[0].vertex_id, index)]["source"].operator[0].part for index in range(3)]
    assert [msgspec.msgpack.decode(part.data) for part in parts if isinstance(part, InlineHandle)] == [[b"a"], [b"b"], [b"c"]]


def test_external_files_reach_every_subtask_when_the_parallelism_changed() -> None:
    subtasks = tuple(msgspec.structs.replace(part, external=("input",)) for part in lists([b"a"], []))
    old = snapshot(stored("source", subtasks), TWO.operators[1])
    graph = word_count(parallelism=1)
    assigned = assign_state(old, graph, {("source", "offsets"): [[b"a"], []]})
    assert assigned[SubtaskKey(graph.vertices[0].vertex_id, 0)]["source"].external == ("input",)


# ----------------------------------------------------------------------------------------------------------- preflight


def written(folder: Path, metadata: SnapshotMetadata, content: bytes = b"0123456789") -> SnapshotMetadata:
    """A snapshot on disk whose source state is in a file."""
    folder.mkdir(parents=True)
    part = FileHandle("source-0", len(content), checksum_of(content))
    subtasks = (OperatorSubtaskState(operator=(OperatorListHandle(OFFSETS, part, 1),)), OperatorSubtaskState())
    metadata = msgspec.structs.replace(metadata, operators=(stored("source", subtasks), *metadata.operators[1:]))
    (folder / "source-0").write_bytes(content)
    (folder / "_metadata").write_bytes(encode_metadata(metadata))
    return metadata


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    folder = tmp_path / "savepoints" / "savepoint-cdcdcd-1"
    written(folder, TWO)
    return folder


def plan(tmp_path: Path, restore: str, **options: Any) -> Any:
    from holdfast.coordinator.ha.routing import RoutedStorage

    storage = RoutedStorage(LocalStorage(tmp_path / "state"))
    recorded = options.pop("recorded", EMPTY)
    return run_flow(plan_submission(recorded, submission(word_count(), restore=restore, **options)), storage)


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/_metadata", "file://{}"])
def test_savepoint_is_found_by_every_form_of_its_place(tmp_path: Path, savepoint: Path, form: str) -> None:
    planned = plan(tmp_path, form.format(savepoint))
    assert (planned.base.checkpoint_id, planned.base.explicit, planned.first_checkpoint_id) == (7, True, 8)


def test_r14_moved_savepoint_restores(tmp_path: Path, savepoint: Path) -> None:
    moved = tmp_path / "elsewhere"
    savepoint.rename(moved)
    assert plan(tmp_path, str(moved)).base.folder == str(moved)


def test_r12_truncated_metadata_is_refused_at_every_length(tmp_path: Path, savepoint: Path) -> None:
    content = (savepoint / "_metadata").read_bytes()
    for length in range(0, len(content), 97):
        (savepoint / "_metadata").write_bytes(content[:length])
        with pytest.raises(CorruptStateError, match=r"corrupt at \d+"):
            plan(tmp_path, str(savepoint))


@pytest.mark.parametrize(
    ("damage", "reason"), [("missing", "missing"), ("shorter", "9 bytes instead of 10"), ("changed", "checksum")]
)
def test_r13_damaged_state_file_is_refused_naming_file_and_operator(
    tmp_path: Path, savepoint: Path, damage: str, reason: str
) -> None:
    file = savepoint / "source-0"
    match damage:
        case "missing":
            file.unlink()
        case "shorter":
            file.write_bytes(b"012345678")
        case _:
            file.write_bytes(b"012345678X")
    with pytest.raises(CorruptStateError, match=f"operator 'source' subtask 0: .*source-0: .*{reason}"):
        plan(tmp_path, str(savepoint))


def test_missing_external_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "savepoints" / "savepoint-x"
    written(folder, msgspec.structs.replace(TWO, external=("job/sources/s/manifest",)))
    with pytest.raises(CorruptStateError, match="job/sources/s/manifest: the external file is missing"):
        plan(tmp_path, str(folder))
    (tmp_path / "state" / "job" / "sources" / "s").mkdir(parents=True)
    (tmp_path / "state" / "job" / "sources" / "s" / "manifest").write_text("x")
    assert plan(tmp_path, str(folder)).base.checkpoint_id == 7


def test_s02_newer_version_is_refused_by_number(tmp_path: Path, savepoint: Path) -> None:
    content = (savepoint / "_metadata").read_bytes().replace(b'"version":1', b'"version":9', 1)
    (savepoint / "_metadata").write_bytes(content)
    with pytest.raises(UnsupportedVersionError):
        plan(tmp_path, str(savepoint))


@pytest.mark.parametrize(
    ("restore", "error"),
    [
        ("relative/savepoint", InvalidConfigError),
        ("s3://bucket/savepoint", InvalidConfigError),
        ("/nowhere/savepoint-1", NotFoundError),
        ("12", NotFoundError),
        ("latest", RestoreError),
    ],
)
def test_restore_from_what_is_not_there_says_so(tmp_path: Path, restore: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        plan(tmp_path, restore)


def test_savepoint_older_than_committed_output_needs_the_flag(tmp_path: Path, savepoint: Path) -> None:
    from holdfast.coordinator.ha.records import ResultRecord, SubmissionRecord

    record = SubmissionRecord(1, 1, submission(word_count()), None, 1, "n")
    result = ResultRecord(1, "CANCELED", 1, "n", last_checkpoint_id=12, newest_completed=9)
    recorded = RecordedJob(JOB, (1,), {1: record}, {}, {1: result}, {})
    with pytest.raises(OutputMayRepeatError) as caught:
        plan(tmp_path, str(savepoint), recorded=recorded)
    assert (caught.value.restored, caught.value.committed) == (7, 9)
    allowed = plan(tmp_path, str(savepoint), recorded=recorded, allow_output_repeat=True)
    assert allowed.first_checkpoint_id == 13


def test_lengths_alone_are_checked_for_our_own_checkpoints(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    written(tmp_path / JOB / "chk-7", TWO)
    (tmp_path / JOB / "chk-7" / "source-0").write_bytes(b"012345678X")
    metadata = run_flow(load_snapshot(f"{JOB}/chk-7"), storage)
    run_flow(check_files(metadata, f"{JOB}/chk-7", checksums=False), storage)
    with pytest.raises(CorruptStateError):
        run_flow(check_files(metadata, f"{JOB}/chk-7", checksums=True), storage)
