"""The report of a snapshot against a job: everything it finds, and that a refusal is never anything but the report's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.barriers.jobgraph import JobConfig, JobGraph
from holdfast.coordinator.dispatcher import submit as submit_module
from holdfast.coordinator.dispatcher.submit import PREFLIGHT_TRIES_MAX, preflight
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.records import ResultRecord, SubmissionRecord
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.restore.compatibility import check_compatibility
from holdfast.coordinator.restore.plan import plan_submission
from holdfast.coordinator.restore.preflight import PreflightReport, Presence, Refusal, SchemaVerdict
from holdfast.statebackends.errors import (
    BackendMismatchError,
    CorruptStateError,
    HoldfastError,
    IncompatibleStateError,
    MaxParallelismError,
    OutputMayRepeatError,
    RestoreError,
    UnclaimedStateError,
)
from holdfast.statebackends.handles import (
    FileHandle,
    InlineHandle,
    KeyedStateHandle,
    KeyGroupRange,
    OperatorSubtaskState,
    StateMeta,
)
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import Flow, run_flow
from tests.coordinator.doubles import COUNTS, operator, submission, vertex, word_count
from tests.coordinator.test_restore import JOB, TWO, graph_of, keyed, lists, snapshot, stored

WIDER = StateMeta("counts", "value", "float", "utf8")
EXTRA = StateMeta("extra", "value", "pickled", "utf8")


def native(parallelism: int = 2) -> tuple[OperatorSubtaskState, ...]:
    found = []
    for index in range(parallelism):
        groups = assign_key_groups(128, parallelism, index)
        parts = (InlineHandle(b"sst"), InlineHandle(b"manifest"))
        names = ("000001.sst", "MANIFEST")
        found.append(
            OperatorSubtaskState(
                keyed=(KeyedStateHandle(KeyGroupRange(groups.start, groups.stop), "rocksdb", (COUNTS,), parts, names),)
            )
        )
    return tuple(found)


# ---------------------------------------------------------------------------------------------------------------- findings


def test_every_operator_and_state_is_told_with_its_verdict() -> None:
    old = snapshot(*TWO.operators, stored("gone", keyed(2, EXTRA)), stored("shell", (OperatorSubtaskState(),)))
    count = vertex(operator("count", "process", WIDER, StateMeta("new", "list", "str", "utf8"), key_type="utf8"), parallelism=3)
    graph = graph_of(word_count().vertices[0], count, vertex(operator("added", "process", EXTRA, key_type="utf8")))
    found = {finding.uid: finding for finding in check_compatibility(old, graph).operators}
    presences = {uid: finding.presence for uid, finding in found.items()}
    assert presences == {
        "source": Presence.MATCHED,
        "count": Presence.MATCHED,
        "added": Presence.ADDED,
        "gone": Presence.REMOVED,
        "shell": Presence.REMOVED,
    }
    states = {state.name: state for state in found["count"].states}
    assert (states["counts"].verdict, states["new"].verdict) == (SchemaVerdict.MIGRATION, SchemaVerdict.ADDED)
    assert (states["counts"].stored, states["counts"].declared) == ("value of int by utf8", "value of float by utf8")
    assert (found["count"].stored_parallelism, found["count"].parallelism, found["count"].stored_max_parallelism) == (2, 3, 128)
    assert (found["gone"].size, found["gone"].renamed_to, found["shell"].renamed_to) == (18, "added", None)
    assert [state.pickled for state in found["gone"].states] == [True]


def test_sizes_and_changes_of_every_state_are_told() -> None:
    last = StateMeta("last", "value", "struct<total: int, note: str>", "utf8")
    newer = StateMeta("last", "value", "struct<total: float, city: str = default>", "utf8")
    bad = StateMeta("counts", "value", "str", "utf8")
    old = snapshot(
        stored("source", lists([b"a"], [b"bc"])), stored("count", keyed(2, COUNTS, EXTRA, last)), stored("gone", keyed(3))
    )
    count = vertex(operator("count", "process", bad, newer, key_type="utf8"))
    compatibility = check_compatibility(old, graph_of(word_count().vertices[0], count), allow_non_restored_state=True)
    found = {(finding.uid, state.name): state for finding in compatibility.operators for state in finding.states}
    sizes = {name: state.size for name, state in found.items()}
    source = next(state for uid, state in found if uid == "source")
    assert sizes == {
        ("source", source): old.operators[0].size,
        ("count", "counts"): 18,
        ("count", "extra"): 18,
        ("count", "last"): 18,
        ("gone", "counts"): 27,
    }
    assert old.operators[0].size > 0
    changes = {name: [(change.path, change.kind) for change in state.changes] for name, state in found.items()}
    assert changes == {
        ("source", source): [],
        ("count", "counts"): [("", "retyped")],
        ("count", "extra"): [],
        ("count", "last"): [("total", "widened"), ("note", "removed"), ("city", "added")],
        ("gone", "counts"): [],
    }
    rewritten = next(note for note in compatibility.notes if "is rewritten" in note)
    assert "note (str) is removed, and what was stored in it is lost" in rewritten
    assert "city (str) is added, with its default" in rewritten
    report = PreflightReport(job_id=JOB, job_name="word count", operators=compatibility.operators)
    assert msgspec.json.decode(msgspec.json.encode(report), type=PreflightReport) == report
    old_form = msgspec.json.encode(report).replace(b'"changes"', b'"later"').replace(b'"size"', b'"other"')
    assert msgspec.json.decode(old_form, type=PreflightReport).operators[0].states[0].changes == ()
    refusals = check_compatibility(old, graph_of(word_count().vertices[0], count)).refusals
    assert any("operator 'count': extra (18 bytes)." in refusal.message for refusal in refusals)


def test_states_in_native_files_have_no_size_of_their_own() -> None:
    old = snapshot(TWO.operators[0], stored("count", native()))
    found = check_compatibility(old, word_count(state_backend="rocksdb")).operators
    assert [(state.name, state.size) for state in found[1].states] == [("counts", None)]
    assert found[1].size > 0


def test_a_note_tells_a_few_changes_and_that_there_are_more() -> None:
    removed = ", ".join(f"r{number}: int" for number in range(20))
    old = StateMeta("counts", "value", f"struct<a: int, {removed}>", "utf8")
    new = StateMeta("counts", "value", "struct<a: int>", "utf8")
    count = vertex(operator("count", "process", new, key_type="utf8"))
    metadata = snapshot(TWO.operators[0], stored("count", keyed(2, old)))
    compatibility = check_compatibility(metadata, graph_of(word_count().vertices[0], count))
    (note,) = compatibility.notes
    assert note.endswith("; and 12 more (a preflight lists them)")
    assert len(compatibility.operators[1].states[0].changes) == 20


def test_all_that_is_wrong_is_refused_at_once_and_the_first_is_raised() -> None:
    old = snapshot(stored("source", lists([b"a"], [b"b"])), stored("count", native()), stored("gone", keyed(1)))
    wrong = vertex(
        operator("count", "process", StateMeta("counts", "value", "str", "utf8"), key_type="utf8"),
        parallelism=200,
        max_parallelism=256,
    )
    compatibility = check_compatibility(old, graph_of(word_count().vertices[0], wrong))
    kinds = [refusal.kind for refusal in compatibility.refusals]
    assert kinds == ["UnclaimedStateError", "IncompatibleStateError", "BackendMismatchError", "MaxParallelismError"]
    report = PreflightReport(job_id=JOB, job_name="word count", refusals=compatibility.refusals)
    with pytest.raises(UnclaimedStateError, match="3 more reasons") as caught:
        report.check()
    assert caught.value.others == [refusal.message for refusal in compatibility.refusals[1:]]
    assert caught.value.operators == {"gone": 9}


def test_native_files_are_refused_on_another_backend_and_fit_on_their_own() -> None:
    old = snapshot(TWO.operators[0], stored("count", native()))
    for backend in ("memory", "filesystem"):
        (refusal,) = check_compatibility(old, word_count(state_backend=backend)).refusals
        error = refusal.error()
        assert isinstance(error, BackendMismatchError)
        assert (error.operator, error.stored, error.requested) == ("count", "rocksdb", backend)
    assert check_compatibility(old, word_count(state_backend="rocksdb")).refusals == ()


def test_what_is_accepted_is_noted() -> None:
    old = snapshot(*TWO.operators[:1], stored("count", keyed(2, COUNTS, EXTRA)), stored("gone", keyed(1)))
    unnamed = msgspec.structs.replace(operator("count", "process", WIDER, key_type="utf8"), uid_generated=True)
    compatibility = check_compatibility(old, graph_of(word_count().vertices[0], vertex(unnamed)), allow_non_restored_state=True)
    assert compatibility.refusals == ()
    assert [note.partition(":")[0] for note in compatibility.notes[:2]] == ["operator 'gone' is not in the job", "operator 'count'"]
    assert "extra (18 bytes) are dropped" in compatibility.notes[1]
    assert "'counts' is rewritten from value of int by utf8 to value of float by utf8" in compatibility.notes[2]
    assert "extra is pickled" in compatibility.notes[3]
    assert "no uid of its own" in compatibility.notes[4]


def test_what_at_least_once_repeats_is_noted_for_the_snapshot_and_for_the_job() -> None:
    graph, mode = word_count(), {"checkpointing_mode": "at_least_once"}
    name = graph.vertices[1].name
    repeating = msgspec.structs.replace(graph, config=msgspec.structs.replace(graph.config, **mode))
    taken = msgspec.structs.replace(TWO, graph=msgspec.to_builtins(repeating))
    (note,) = check_compatibility(taken, graph).notes
    assert note == f"the snapshot was taken at least once: behind this restore some records may repeat in {name} and behind"
    (note,) = check_compatibility(TWO, repeating).notes
    assert note == f"the job runs at least once: a restore loses no record, and may repeat some in {name} and behind"
    assert len(check_compatibility(taken, repeating).notes) == 2
    assert check_compatibility(msgspec.structs.replace(TWO, graph={"vertices": 1}), graph).notes == ()


# ------------------------------------------------------------------------------------------------- refusal equals report

STATES = st.sampled_from(
    [COUNTS, WIDER, EXTRA, StateMeta("counts", "list", "int", "utf8"), StateMeta("seen", "value", "int", "utf8")]
)
NAMED = st.lists(STATES, max_size=2, unique_by=lambda state: state.name)
JOBS = st.dictionaries(st.sampled_from(["count", "tally", "other"]), NAMED, max_size=3)


@given(
    old=JOBS,
    new=JOBS,
    native_uid=st.sampled_from(["", "count", "tally"]),
    backend=st.sampled_from(["memory", "rocksdb"]),
    parallelism=st.sampled_from([1, 2, 200]),
    allowed=st.booleans(),
)
def test_a_restore_is_refused_exactly_when_the_report_says_so(
    old: dict[str, list[StateMeta]], new: dict[str, list[StateMeta]], native_uid: str, backend: str, parallelism: int, allowed: bool
) -> None:
    def subtasks(uid: str, states: list[StateMeta]) -> tuple[OperatorSubtaskState, ...]:
        return native() if uid == native_uid else keyed(2, *states) if states else (OperatorSubtaskState(),)

    metadata = snapshot(TWO.operators[0], *(stored(uid, subtasks(uid, states)) for uid, states in sorted(old.items())))
    vertices = (
        vertex(operator(uid, "process", *states, key_type="utf8"), parallelism=parallelism, max_parallelism=256)
        for uid, states in sorted(new.items())
    )
    graph = JobGraph("word count", (word_count().vertices[0], *vertices), (), JobConfig(state_backend=backend))
    compatibility = check_compatibility(metadata, graph, allow_non_restored_state=allowed)
    verdicts = [{state.verdict for state in finding.states} for finding in compatibility.operators]
    incompatible = any(SchemaVerdict.INCOMPATIBLE in found for found in verdicts)
    lost = any(SchemaVerdict.REMOVED in found for found in verdicts)
    has_state = {uid for uid in old if uid == native_uid or old[uid]}
    crowded = parallelism == 200 and bool(has_state & set(new))
    mixed = native_uid in old and native_uid in new and backend == "memory"
    assert bool(compatibility.refusals) == (incompatible or crowded or mixed or (lost and not allowed))
    decoded = msgspec.json.decode(msgspec.json.encode(compatibility.refusals), type=tuple[Refusal, ...])
    for sent, refusal in zip(decoded, compatibility.refusals, strict=True):
        assert type(sent.error()) is type(refusal.error())
        assert isinstance(sent.error(), RestoreError)


# -------------------------------------------------------------------------------------------------------------- in storage


class Place:
    """A state directory and a savepoint whose source state lies in files."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "state"
        self.folder = tmp_path / "savepoints" / "savepoint-1"
        self.storage = RoutedStorage(LocalStorage(self.root))

    def write(self, **changes: Any) -> SnapshotMetadata:
        self.folder.mkdir(parents=True, exist_ok=True)
        subtasks = []
        for index, subtask in enumerate(keyed(2)):
            content = b"PAR1%dPAR1" % index
            (self.folder / f"count-{index}").write_bytes(content)
            part = FileHandle(f"count-{index}", len(content), checksum_of(content))
            handle = msgspec.structs.replace(subtask.keyed[0], parts=(part,))
            subtasks.append(OperatorSubtaskState(keyed=(handle,)))
        metadata = snapshot(TWO.operators[0], stored("count", tuple(subtasks)), **changes)
        return self.put(metadata)

    def put(self, metadata: SnapshotMetadata) -> SnapshotMetadata:
        (self.folder / "_metadata").write_bytes(encode_metadata(metadata))
        return metadata

    def report(self, restore: str | None = None, **options: Any) -> PreflightReport:
        asked = submission(word_count(), restore=restore or str(self.folder), **options)
        return run_flow(preflight(JOB, asked), self.storage)


def test_a_damaged_snapshot_of_a_job_that_goes_on_is_judged_a_bounded_number_of_times(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write()
    (place.folder / "count-0").write_bytes(b"other")
    read = itertools.count()

    def job_that_goes_on(paths: JobPaths) -> Flow[RecordedJob]:
        yield from ()
        return RecordedJob(JOB, (), {}, {}, {}, {}, last_submission=next(read))

    monkeypatch.setattr(submit_module, "read_job", job_that_goes_on)
    assert not place.report().fits
    assert next(read) == PREFLIGHT_TRIES_MAX + 1


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_snapshot_that_fits_is_described(place: Place) -> None:
    metadata = place.write()
    report = place.report()
    assert report.fits
    assert report.snapshot is not None
    assert (report.snapshot.location, report.snapshot.checkpoint_id, report.snapshot.size) == (str(place.folder), 7, metadata.size)
    report.check()


@pytest.mark.parametrize(
    ("called", "is_one"), [("arrow", "a Parquet file"), ("arrow-delta", "a Parquet file"), ("parquet", "neither an Arrow nor")]
)
def test_a_table_that_is_called_by_another_format_is_damaged(place: Place, called: str, is_one: str) -> None:
    """Its checksum is right; a restore would find out in the task that opens it."""
    metadata = place.write()
    first = metadata.operators[1].subtasks[0].keyed[0]
    if called == "parquet":
        content = b"ARROW1 PAR1"
        (place.folder / "count-0").write_bytes(content)
        other = msgspec.structs.replace(first, parts=(FileHandle("count-0", len(content), checksum_of(content)),))
    elif called == "arrow":
        other = msgspec.structs.replace(first, format=called)
    else:
        (place.folder / "run-0").write_bytes(b"PAR1")
        run = msgspec.structs.replace(first, format=called, parts=(FileHandle("run-0", 4, checksum_of(b"PAR1")),))
        place.put(with_handles(metadata, first, run))
        other = None
    if other is not None:
        place.put(with_handles(metadata, other))
    report = place.report()
    (file,) = report.files
    assert (file.operator, file.subtask, file.problem) == ("count", 0, "format")
    assert file.path == f"{place.folder}/{'run-0' if called == 'arrow-delta' else 'count-0'}"
    assert is_one in file.detail
    assert f"format {called!r}" in file.detail
    with pytest.raises(CorruptStateError, match=r"operator 'count' subtask 0: .*-0: .*format '"):
        report.check()


def test_a_table_within_the_metadata_that_is_called_by_another_format_is_damaged(place: Place) -> None:
    metadata = place.write()
    inline = msgspec.structs.replace(metadata.operators[1].subtasks[0].keyed[0], format="arrow", parts=(InlineHandle(b"PAR1"),))
    place.put(with_handles(metadata, inline))
    with pytest.raises(CorruptStateError, match=r"_metadata: operator 'count': subtask 0: a Parquet file, .* format 'arrow'"):
        place.report().check()


def with_handles(metadata: SnapshotMetadata, *handles: KeyedStateHandle) -> SnapshotMetadata:
    """The same with these in the first subtask of the second operator."""
    source, count = metadata.operators
    changed = msgspec.structs.replace(count, subtasks=(OperatorSubtaskState(keyed=handles), *count.subtasks[1:]))
    return msgspec.structs.replace(metadata, operators=(source, changed))


def test_every_damaged_file_is_named_and_not_the_first_alone(place: Place) -> None:
    place.write(external=("job/sources/s/manifest.json",))
    (place.folder / "count-0").unlink()
    (place.folder / "count-1").write_bytes(b"PAR1zPAR1")
    report = place.report()
    assert [(file.operator, file.subtask, file.problem) for file in report.files] == [
        ("count", 0, "missing"),
        ("count", 1, "checksum"),
        (None, None, "missing"),
    ]
    with pytest.raises(CorruptStateError, match=r"count-0: the file is missing; .*count-1: the checksum") as caught:
        report.check()
    assert (caught.value.operator, len(caught.value.problems or ())) == ("count", 3)


@pytest.mark.parametrize("path", ["../savepoint-2/count-0", "a/../../x", "/etc/passwd", "../../state/_holdfast", ".."])
def test_a_path_that_leaves_the_savepoint_is_refused_and_nothing_is_read_through_it(place: Place, path: str) -> None:
    metadata = place.write()
    handle = msgspec.structs.replace(
        metadata.operators[1].subtasks[0].keyed[0], parts=(FileHandle(path, 9, "xxh3_128:" + "0" * 32),)
    )
    bad = msgspec.structs.replace(
        metadata.operators[1], subtasks=(OperatorSubtaskState(keyed=(handle,)), metadata.operators[1].subtasks[1])
    )
    place.put(msgspec.structs.replace(metadata, operators=(metadata.operators[0], bad)))
    (place.folder.parent / "savepoint-2").mkdir()
    (place.folder.parent / "savepoint-2" / "count-0").write_bytes(b"PAR10PAR1")
    (file,) = place.report().files
    assert (file.problem, file.path, file.operator, file.subtask) == ("path", path, "count", 0)
    with pytest.raises(CorruptStateError, match="leaves"):
        place.report().check()


def test_records_that_do_not_fit_together_are_refused_though_their_checksum_is_right(place: Place) -> None:
    metadata = place.write()
    handle = msgspec.structs.replace(metadata.operators[1].subtasks[0].keyed[0], key_groups=KeyGroupRange(0, 500))
    bad = msgspec.structs.replace(metadata.operators[1], subtasks=(OperatorSubtaskState(keyed=(handle,)), OperatorSubtaskState()))
    place.put(msgspec.structs.replace(metadata, operators=(bad,)))
    report = place.report()
    assert [(refusal.kind, refusal.fields["operator"]) for refusal in report.refusals] == [("CorruptStateError", "count")]
    assert "key groups [0, 500) of 128" in report.refusals[0].message


def test_what_can_not_be_judged_at_all_is_a_refusal_too(place: Place) -> None:
    place.write()
    (place.folder / "_metadata").write_bytes(b"something else")
    assert [refusal.kind for refusal in place.report().refusals] == ["CorruptStateError"]
    assert [refusal.kind for refusal in place.report("latest").refusals] == ["RestoreError"]


def test_sinks_whose_output_may_repeat_are_named(place: Place) -> None:
    place.write()
    sink = msgspec.structs.replace(operator("out", "sink_committer"), sink_id="files")
    graph = word_count()
    graph = msgspec.structs.replace(graph, vertices=(*graph.vertices, vertex(sink, parallelism=1)))
    record = SubmissionRecord(1, 1, submission(graph), None, 1, "n")
    result = ResultRecord(1, "CANCELED", 1, "n", last_checkpoint_id=12, newest_completed=9)
    recorded = RecordedJob(JOB, (1,), {1: record}, {}, {1: result}, {})

    def planned(**options: Any) -> Any:
        return run_flow(plan_submission(recorded, submission(graph, restore=str(place.folder), **options)), place.storage)

    with pytest.raises(OutputMayRepeatError, match="what of 'files' came after it would be written again") as caught:
        planned()
    assert (caught.value.restored, caught.value.committed, caught.value.sinks) == (7, 9, ["files"])
    report = planned(allow_output_repeat=True).report
    assert [(found.sink_id, found.operator, found.may_repeat) for found in report.sinks] == [("files", "out", True)]
    assert any("would be written again" in note for note in report.notes)


def test_a_report_survives_the_wire(place: Place) -> None:
    place.write()
    (place.folder / "count-0").unlink()
    report = place.report()
    again = msgspec.json.decode(msgspec.json.encode(report), type=PreflightReport)
    assert again == report
    with pytest.raises(CorruptStateError):
        again.check()


def test_a_refusal_of_a_kind_that_is_not_known_is_still_a_refusal() -> None:
    error = Refusal("KindOfANewerVersion", "no", {"a": 1}).error()
    assert type(error) is RestoreError
    assert isinstance(error, HoldfastError)
    told = IncompatibleStateError("x", operator="u", state="s", stored="int", declared="str")
    assert Refusal.of(told).error().fields == told.fields
    assert isinstance(Refusal.of(MaxParallelismError("x", operator="u", stored=8, requested=4)).error(), MaxParallelismError)


def test_a_preflight_writes_nothing(place: Place) -> None:
    place.write()
    before = sorted(path for path in place.folder.parent.parent.rglob("*"))
    place.report()
    assert sorted(path for path in place.folder.parent.parent.rglob("*")) == before
    assert not (place.root / JobPaths(JOB).leaders).exists()
