"""Scenario group R where it needs storage: damage at every offset (R12, R13), unnamed operators (R07), S3 and back (R14), and the
writing side of S01-S05. A restore is refused with a typed error before anything is written, or it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.jobgraph import JobConfig, JobGraph, Submission
from holdfast.coordinator.dispatcher.submit import Starter, preflight, start_submission
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.restore.compatibility import check_compatibility
from holdfast.coordinator.restore.plan import SubmissionPlan, plan_submission
from holdfast.coordinator.restore.preflight import Presence
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.functions.process import ProcessFunction
from holdfast.operators.sources.generator import GeneratorSource
from holdfast.statebackends.errors import (
    CorruptStateError,
    InvalidConfigError,
    NotFoundError,
    UnclaimedStateError,
    UnsupportedVersionError,
)
from holdfast.statebackends.handles import OperatorSubtaskState
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import decode_metadata, encode_metadata
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.storage.locations import open_storage
from holdfast.statebackends.storage.port import Flow, ReadFile, run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.ownership.test_claims import SAVEPOINT, contents, put_snapshot
from tests.coordinator.test_restore import COUNTS, keyed, snapshot, stored
from tests.coordinator.test_roundtrips import assert_same
from tests.coordinator.world import JOB, DictStorage, Steps
from tests.s3_server import bucket as bucket
from tests.s3_server import connection as connection
from tests.s3_server import server as server
from tests.statebackends.roundtrip import restored_at
from tests.statebackends.snapshot_harness import SOME, write

METADATA = f"{SAVEPOINT}/_metadata"
STARTER = Starter("s", "", "directory", 0)


@pytest.fixture
def storage() -> DictStorage:
    found = DictStorage()
    put_snapshot(found, SAVEPOINT)
    return found


def refusal(storage: DictStorage) -> CorruptStateError:
    """The typed error of a submission that names the savepoint; nothing is written by it."""
    before = dict(storage.files)
    report = run_flow(preflight(JOB, submission(word_count(), job_id=JOB, restore=SAVEPOINT)), storage)
    with pytest.raises(CorruptStateError) as caught:
        report.check()
    assert storage.files == before
    return caught.value


def not_found(storage: DictStorage, place: str) -> str:
    """What a submission and a preflight alike say of a place that holds no snapshot."""
    for flow in (preflight, plan_of):
        with pytest.raises(NotFoundError) as caught:
            run_flow(flow(JOB, submission(word_count(), job_id=JOB, restore=place)), storage)
    return caught.value.message


def plan_of(job_id: str, asked: Submission) -> Flow[SubmissionPlan]:
    job = yield from read_job(JobPaths(job_id))
    return (yield from plan_submission(job, asked))


# ------------------------------------------------------------------------------------------------------------- R12 and R13


def test_r12_metadata_truncated_at_each_offset_is_corrupt_at_that_offset(storage: DictStorage) -> None:
    whole = storage.files[METADATA]
    for length in range(len(whole)):
        storage.files[METADATA] = whole[:length]
        error = refusal(storage)
        of_header = (error.reason or "").startswith(("the file is empty", "no snapshot header"))
        assert f"corrupt at {length}:" in str(error) or of_header, length
        assert error.path == METADATA


def test_r12_a_bit_flipped_at_each_offset_of_the_metadata_is_seen(storage: DictStorage) -> None:
    whole = storage.files[METADATA]
    kinds = set()
    for offset in range(len(whole)):
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << offset % 8
        storage.files[METADATA] = bytes(flipped)
        kinds.add(type(refusal(storage)))
    assert kinds == {CorruptStateError, UnsupportedVersionError}, "a flipped version is a newer one, as far as anybody can tell"


def damages(content: bytes) -> Iterator[bytes]:
    for offset in range(len(content)):
        yield content[:offset]
        flipped = bytearray(content)
        flipped[offset] ^= 1 << offset % 8
        yield bytes(flipped)
    yield content + b"\0"


def test_r13_each_state_file_damaged_at_each_offset_is_refused_by_name(storage: DictStorage) -> None:
    for index in range(2):
        path = f"{SAVEPOINT}/source-{index}"
        whole = storage.files[path]
        for damaged in damages(whole):
            storage.files[path] = damaged
            error = refusal(storage)
            assert (error.operator, error.path) == ("source", path)
            assert error.reason in ("length", "checksum")
        del storage.files[path]
        assert refusal(storage).reason == "missing"
        storage.files[path] = whole
    assert run_flow(preflight(JOB, submission(word_count(), restore=SAVEPOINT)), storage).fits, "and whole again it fits"


def test_r13_all_that_is_damaged_is_named_at_once(storage: DictStorage) -> None:
    for index in range(2):
        storage.files[f"{SAVEPOINT}/source-{index}"] += b"x"
    error = refusal(storage)
    found = [text.partition(": ")[0] for text in error.problems or ()]
    assert found == ["operator 'source' subtask 0", "operator 'source' subtask 1"]


@pytest.mark.parametrize("content", [b"", b"{}", b"PAR1", b"\xff" * 300, b'{"format":"holdfast-snapshot","version":1,"length":2'])
def test_what_is_no_snapshot_of_ours_is_refused(storage: DictStorage, content: bytes) -> None:
    storage.files[METADATA] = content
    assert refusal(storage).path == METADATA


def test_a_half_written_savepoint_without_metadata_is_refused(storage: DictStorage) -> None:
    del storage.files[METADATA]
    assert "there is no _metadata file; it holds" in not_found(storage, SAVEPOINT)


def test_a_snapshot_that_is_not_there_is_missing_and_not_damaged(storage: DictStorage) -> None:
    above = SAVEPOINT.rpartition("/")[0]
    assert not_found(storage, f"{above}/gone") == (
        f"there is no snapshot at {above}/gone: there is no _metadata file: there is no such folder, or it is empty"
    )
    said = not_found(storage, above)
    assert said == f"there is no snapshot at {above}: it is a folder of snapshots: restore='{SAVEPOINT}'"


def test_a_snapshot_is_read_once_by_a_submission_that_a_preflight_went_before(storage: DictStorage) -> None:
    def reads(*, verified: bool) -> list[str]:
        flow = start_submission(JOB, submission(word_count(), job_id=JOB, restore=SAVEPOINT), STARTER, verified=verified)
        read = []
        steps = Steps(flow, storage)
        while not steps.done:
            if isinstance(steps._operation, ReadFile) and "/source-" in steps._operation.path:
                read.append(steps._operation.path)
            steps.step()
        return read

    assert reads(verified=True) == []
    assert sorted(reads(verified=False)) == [f"{SAVEPOINT}/source-0", f"{SAVEPOINT}/source-1"]


# --------------------------------------------------------------------------------------------------------------------- R07

SCHEMA = pa.schema([("i", pa.int64()), ("key", pa.int64())])


class Remember(ProcessFunction):
    states = (ValueStateDescriptor("seen", int),)

    def process_element(self, value: Any, ctx: Any, out: Any) -> None:
        out(value)


def make_batch(indices: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(indices), pa.array(indices % 3)], schema=SCHEMA)


def graph_of(*, uid: str | None, filtered: bool) -> JobGraph:
    env = Environment("unnamed")
    stream = env.from_source(GeneratorSource(make_batch, 10, SCHEMA, 1))
    if filtered:
        stream = stream.filter(lambda row: row["i"] > 3)
    out = stream.key_by("key").process(Remember(), returns=SCHEMA)
    (out.uid(uid) if uid else out).sink_to(hf.Blackhole())
    return env.build().graph


def stateful_uid(graph: JobGraph) -> str:
    (uid,) = [operator.uid for vertex in graph.vertices for operator in vertex.operators if operator.key_type is not None]
    return uid


def test_r07_without_uids_a_changed_graph_is_refused_and_every_start_before_has_warned() -> None:
    before, after = graph_of(uid=None, filtered=False), graph_of(uid=None, filtered=True)
    assert stateful_uid(before) != stateful_uid(after)
    seen = next(state for vertex in before.vertices for operator in vertex.operators for state in operator.states if state.key_type)
    old = snapshot(stored(stateful_uid(before), keyed(1, seen)))
    same = check_compatibility(old, before)
    assert same.refusals == ()
    assert any("has no uid of its own" in note for note in same.notes)
    changed = check_compatibility(old, after)
    assert isinstance(changed.refusals[0].error(), UnclaimedStateError)
    removed = [finding for finding in changed.operators if finding.presence is Presence.REMOVED]
    assert [finding.renamed_to for finding in removed] == [stateful_uid(after)], "the likely new name is proposed"
    named = snapshot(stored("mine", keyed(1, seen)))
    assert check_compatibility(named, graph_of(uid="mine", filtered=True)).refusals == ()


# --------------------------------------------------------------------------------------------------------------------- R14


def test_r14_a_savepoint_goes_to_s3_restores_there_and_restores_when_it_is_back(tmp_path: Path, bucket: str) -> None:
    first = write(tmp_path, "savepoint-7", SOME, kind="filesystem", parallelism=2, canonical=True)
    there = hf.Snapshot(first.location).copy(f"{bucket}/archive/savepoint-7")
    reached = type(first)(first.metadata, open_storage(str(tmp_path / "state")), first.folder)
    assert_same(first, restored_at(tmp_path, reached, "memory", 3, location=there.location))
    back = there.copy(tmp_path / "back" / "savepoint-7")
    assert_same(first, restored_at(tmp_path, reached, "rocksdb", 1, location=back.location))


# ----------------------------------------------------------------------------------------------------------------- S01, S05


def test_s01_no_operators_only_lists_only_keyed_finished_and_all_of_it_are_read_as_written() -> None:
    finished = stored("finished", (OperatorSubtaskState(), *keyed(1)))
    some = [
        snapshot(),
        contents(),
        snapshot(stored("count", keyed(2, COUNTS))),
        snapshot(finished, properties={"finished_tasks": "v:0"}),
        snapshot(*contents().operators, stored("count", keyed(2)), external=("a", "b|c"), graph={"name": "x"}),
    ]
    for metadata in some:
        assert decode_metadata(encode_metadata(metadata), "m") == metadata
    assert len({encode_metadata(metadata) for metadata in some}) == len(some)


def test_s03_what_an_older_metadata_lacks_has_the_meaning_of_its_default() -> None:
    metadata = snapshot(stored("count", keyed(1)))
    body = msgspec.to_builtins(metadata)
    for field in ("properties", "graph", "external"):
        del body[field]
    older = msgspec.convert(body, type(metadata))
    assert (older.properties, older.graph, older.external) == ({}, None, ())
    assert check_compatibility(older, word_count()).refusals == ()


@pytest.mark.parametrize(("threshold", "fits"), [(0, True), (1, True), (1 << 20, True), ((1 << 20) + 1, False), (-1, False)])
def test_s05_the_inline_threshold_is_at_most_a_mebibyte(threshold: int, fits: bool) -> None:
    config = JobConfig(inline_threshold=threshold)
    if fits:
        config.check()
        return
    with pytest.raises(InvalidConfigError, match="inline_threshold must be 0"):
        config.check()
