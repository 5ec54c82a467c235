"""Snapshots with records in flight: what preflight says, that only their own id gives them up, what an attempt deploys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.messages import CheckpointKind
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.ha.records import RestorePoint, SubmissionRecord, decode_record, encode_record
from holdfast.coordinator.jobmaster.actions import PrepareAttempt
from holdfast.coordinator.jobmaster.events import AttemptImpossible, AttemptPrepared
from holdfast.coordinator.restore.plan import SubmissionPlan, check_submission, derive_setup, plan_submission
from holdfast.statebackends.errors import (
    CorruptStateError,
    InFlightStateError,
    InvalidConfigError,
    UnsupportedVersionError,
)
from holdfast.statebackends.handles import ChannelPiece, ChannelState, InlineHandle
from holdfast.statebackends.layout import METADATA_NAME
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, decode_metadata, encode_metadata
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.test_restore import EMPTY, JOB, TWO, snapshot
from tests.operators.ports import DictStorage

FOLDER = "/backup/savepoint-7"
COLUMNS = ("word: string",)


def graph(parallelism: int = 2, **edge: Any) -> JobGraph:
    found = word_count(parallelism)
    (only,) = found.edges
    return msgspec.structs.replace(found, edges=(msgspec.structs.replace(only, **{"columns": COLUMNS, **edge}),))


def stored(**fields: Any) -> SnapshotMetadata:
    channels = (
        ChannelState("source", None, "count", 0, 0, "hash", "input", 0, 3, InlineHandle(b"first"), (ChannelPiece(1, 0, 5, 3),)),
        ChannelState("source", None, "count", 0, 0, "hash", "output", 1, 2, InlineHandle(b"then"), (ChannelPiece(0, 0, 4, 2),)),
    )
    settings = {"version": 2, "channels": channels, "graph": msgspec.to_builtins(graph()), "checkpoint_id": 7}
    return snapshot(*TWO.operators, **{**settings, **fields})


class Scene:
    """A snapshot with five records in flight, in a folder of its own."""

    def __init__(self, metadata: SnapshotMetadata | None = None) -> None:
        self.storage = DictStorage()
        self.storage.files["_holdfast"] = b"directory"
        self.storage.files[f"{FOLDER}/{METADATA_NAME}"] = encode_metadata(metadata or stored())

    def checked(self, now: JobGraph, **options: Any) -> SubmissionPlan:
        wanted = submission(now, restore=FOLDER, **options)
        return run_flow(check_submission(EMPTY, wanted, external=False), self.storage)

    def prepared(self, accepted: SubmissionPlan) -> Any:
        """Outcome of an attempt of a leader that has just come: it knows what was recorded, and nothing else."""
        record = SubmissionRecord(1, 2, accepted.submission, accepted.base, accepted.first_checkpoint_id, "n")
        record = decode_record(SubmissionRecord, encode_record(record), "submission")
        setup = derive_setup(EMPTY, record, epoch=1, directory_nonce="directory")
        identity = Identity(JOB, 1, "n", 1, setup.graph, without_channel_state=setup.without_channel_state)
        return run_flow(StorageEffects(identity, lambda: 0).flow(PrepareAttempt(1, accepted.base, 0, {})), self.storage)


def test_an_attempt_deploys_them_to_the_consumers_at_any_parallelism() -> None:
    dealt = ((2, {0: [(1, True, 2)]}), (1, {0: [(0, False, 2)]}), (3, {0: [(1, False, 2)], 1: [(1, False, 2)]}))
    for parallelism, expected in dealt:
        scene, now = Scene(), graph(parallelism)
        accepted = scene.checked(now)
        assert accepted.report.fits
        found = scene.prepared(accepted)
        assert isinstance(found, AttemptPrepared)
        assert {
            key.subtask: [(each.producer, each.keeps_events, len(each.pieces)) for each in restore.channels]
            for key, restore in found.in_flight.items()
        } == expected
        assert {key.vertex for key in found.in_flight} == {now.vertices[1].vertex_id}
        assert found.in_flight[min(found.in_flight)].parts == (InlineHandle(b"first"), InlineHandle(b"then"))


def test_without_an_equal_edge_they_are_refused_whatever_is_allowed() -> None:
    scene, now = Scene(), graph(key=("other",))
    report = scene.checked(now, allow_non_restored_state=True, allow_output_repeat=True).report
    (refusal,) = report.refusals
    assert refusal.kind == "InFlightStateError"
    assert "'source' -> 'count' (5 rows, 9 bytes): its key was word (utf8), and is other (utf8)" in refusal.message
    assert "without_channel_state=7" in refusal.message
    with pytest.raises(InFlightStateError):
        run_flow(plan_submission(EMPTY, submission(now, restore=FOLDER)), scene.storage)


def test_they_are_given_up_for_their_own_id_by_every_leader_and_said() -> None:
    scene = Scene()
    for now in (graph(key=("other",)), graph()):
        accepted = scene.checked(now, without_channel_state=7)
        assert accepted.report.fits
        lost = "in flight on 'source' -> 'count', and lost by without_channel_state=7: 5 rows (9 bytes)"
        assert accepted.report.notes[0] == lost
        found = scene.prepared(accepted)
        assert isinstance(found, AttemptPrepared)
        assert found.in_flight == {}
        assert any(found.states.values())


def test_the_id_of_another_snapshot_gives_nothing_up() -> None:
    with pytest.raises(InvalidConfigError, match="state=6, and the snapshot that is restored has the id 7") as caught:
        Scene().checked(graph(), without_channel_state=6)
    assert caught.value.setting == "without_channel_state"
    wanted = submission(graph(), without_channel_state=7)
    with pytest.raises(InvalidConfigError, match="the job starts from none"):
        run_flow(check_submission(EMPTY, wanted, external=False), DictStorage())


def test_a_newer_checkpoint_of_the_job_keeps_its_own() -> None:
    """The option is of the snapshot that was named, not of those that follow."""
    scene = Scene()
    accepted = scene.checked(graph(), without_channel_state=7)
    folder = f"/jobs/{JOB}/chk-8"
    scene.storage.files[f"{folder}/{METADATA_NAME}"] = encode_metadata(stored(checkpoint_id=8))
    base = RestorePoint(8, folder, 0, CheckpointKind.CHECKPOINT)
    found = scene.prepared(replace(accepted, base=base))
    assert isinstance(found, AttemptPrepared)
    assert sum(len(restore.channels) for restore in found.in_flight.values()) == 1


def test_a_channel_that_can_not_have_been_is_damage_in_preflight_and_attempt() -> None:
    channel = ChannelState("source", None, "count", 0, 0, "hash", "input", 5, 3, InlineHandle(b"x"), (ChannelPiece(1, 0, 1, 3),))
    scene = Scene(stored(channels=(channel,)))
    accepted = scene.checked(graph())
    assert [refusal.kind for refusal in accepted.report.refusals] == ["CorruptStateError"]
    found = scene.prepared(accepted)
    assert isinstance(found, AttemptImpossible)
    assert isinstance(found.error, CorruptStateError)


def test_version_2_is_of_snapshots_with_records_in_flight_alone() -> None:
    content = encode_metadata(stored())
    assert b'"version":2,' in content[:60]
    assert decode_metadata(content, "p").in_flight == stored().in_flight
    plain = stored().without_in_flight()
    assert b"channels" not in encode_metadata(plain)
    assert b'"version":1,' in encode_metadata(plain)[:60]
    for wrong in (stored(version=1), msgspec.structs.replace(plain, version=2), stored(channels=())):
        with pytest.raises(InvalidConfigError, match="in-flight records"):
            encode_metadata(wrong)
    with pytest.raises(UnsupportedVersionError, match="version 9 is not supported"):
        decode_metadata(content.replace(b'"version":2,', b'"version":9,', 1), "p")
