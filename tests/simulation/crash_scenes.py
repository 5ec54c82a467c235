"""One simulated disk with a job's directory and its users' savepoints, built by the product's own flows, in several stages.

Stages follow each other in the life of the job; a test takes one, lets a flow die in it, and sees what a leader makes of it."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from holdfast.barriers.jobgraph import ClaimMode, JobGraph, Submission
from holdfast.barriers.launches import draw_secret
from holdfast.barriers.messages import SubtaskKey
from holdfast.chaos.sim.disk import SimDisk
from holdfast.coordinator.checkpoints import actions
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.dispatcher.submit import Starter, resume_submission, start_submission
from holdfast.coordinator.ha.recorded_job import CheckpointFact, RecordedJob, derive_recovery_point
from holdfast.coordinator.ha.records import RestorePoint
from holdfast.coordinator.ha.routing import RoutedStorage
from holdfast.coordinator.ha.snapshots import load_snapshot
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.job import JobSetup, JobState
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.statebackends.backend import SnapshotTarget
from holdfast.statebackends.handles import (
    ChannelPiece,
    ChannelState,
    FileHandle,
    KeyedStateHandle,
    OperatorListHandle,
    OperatorSubtaskState,
    StateHandle,
)
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.serialization.keys import KeyType
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.snapshot.parts import PartsWriter, WrittenPart, write_part
from holdfast.statebackends.state import ValueStateDescriptor
from holdfast.statebackends.state_processor.bootstrap import NewEntries, NewState, Shape, layout_of_descriptor, write_savepoint
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.storage.port import Flow, one_by_one, run_flow
from tests.coordinator.doubles import COUNTS, MAX_PARALLELISM, OFFSETS, submission, word_count

JOB, OTHER = "ab" * 16, "cd" * 16
STATE = "/state"
USERS = "/savepoints"
HISTORY, UNWANTED, FLOWN = f"{USERS}/history", f"{USERS}/unwanted", f"{USERS}/flown"
COUNT = ValueStateDescriptor("counts", int)
ROWS = {f"key-{number}": number for number in range(6)}
ENTRIES = [b"a", b"b", b"c"]
FIRST, SECOND = ("A", "B"), ("B", "C")
"""Tables that each subtask has: the second checkpoint of the job shares one with the first."""
NO_STORAGE = (
    job_actions.Answer
    | job_actions.Refuse
    | job_actions.Deliver
    | job_actions.CloseStream
    | job_actions.LookForProcess
    | job_actions.JobEnded
    | actions.TriggerHook
    | job_actions.RestoreHook
)
"""Actions that touch no storage."""


States: TypeAlias = dict[SubtaskKey, dict[str, OperatorSubtaskState]]


class Death(BaseException):
    """The process is gone: whatever it calls afterwards fails alike."""


_CHANGES = ("create", "write", "fsync", "fsync_folder", "link", "unlink", "mkdir", "rmdir")
"""Dying before any other call leaves what dying before the next one of these leaves."""


class Killer:
    """Kills before the n-th call that changes something, a write in its middle."""

    def __init__(self, before: int | None = None) -> None:
        self.calls = 0
        self._before = before
        self._dead = False

    def __call__(self, name: str, path: str, size: int) -> int:
        if self._dead:
            raise Death
        if name in _CHANGES:
            if self.calls == self._before:
                self._dead = True
                if name == "write" and size > 1:
                    return size // 2
                raise Death
            self.calls += 1
        return size


@dataclass
class Scene:
    """A disk, and who looks at it."""

    disk: SimDisk
    now_ms: int = 1_000_000
    backwards: bool = False
    """Of files that may go in any order the last one goes first."""
    _frozen: bytes = b""

    def copy(self) -> Scene:
        """The same scene on a disk of its own; a scene that is copied must not change any more."""
        if not self._frozen:
            self._frozen = pickle.dumps((self.disk._root, self.disk._numbers, self.disk._nonces))
        disk = SimDisk()
        disk._root, disk._numbers, disk._nonces = pickle.loads(self._frozen)
        disk._nodes.clear()
        disk._index("", disk._root)
        return Scene(disk, self.now_ms)

    @property
    def storage(self) -> RoutedStorage:
        """The coordinator's: a new one for each process."""
        return RoutedStorage(self.disk.storage(STATE))

    def run(self, flow: Flow[Any]) -> Any:
        return run_flow(one_by_one(flow, lambda count: count - 1 if self.backwards else 0), self.storage)

    def files(self, folder: str) -> dict[str, bytes]:
        view = self.disk.view(folder)
        return {path: view.peek(path) or b"" for path in view.paths()}

    def state(self) -> frozenset[tuple[str, bytes]]:
        """All that there is; of temporary files, which nobody reads, their names."""
        view = self.disk.view("/")
        return frozenset((path, b"" if "/.tmp/" in path else view.peek(path) or b"") for path in view.paths())

    def savepoint(self, folder: str) -> StoredSnapshot:
        """Of a user, by its location."""
        parent, _, name = folder.rpartition("/")
        storage = self.disk.storage(parent)
        content = self.disk.view(parent).peek(f"{name}/_metadata")
        assert content is not None
        return StoredSnapshot(decode_metadata(content, folder), storage, name)

    # ------------------------------------------------------------------------------------------------------- leaders

    def recorded(self, job_id: str = JOB) -> RecordedJob:
        return self.run(read_job(JobPaths(job_id)))

    def recovery_point(self, job_id: str = JOB) -> RestorePoint | None:
        found = self.recorded(job_id)
        assert found.newest_submission is not None
        return derive_recovery_point(found, found.newest_submission)

    def completed(self, job_id: str = JOB) -> list[int]:
        return [each.checkpoint_id for each in self.recorded(job_id).with_fact(CheckpointFact.COMPLETED) if each.is_recovery_point]

    def effects(self, job_id: str = JOB) -> StorageEffects:
        recorded = self.recorded(job_id)
        record = recorded.newest_submission
        assert record is not None
        identity = Identity(job_id, max(recorded.epochs), "leader", record.number, record.graph)
        return StorageEffects(identity, lambda: self.now_ms)

    def lead(self, job_id: str = JOB) -> JobSetup:
        """A new leader comes, and does all that it does without workers: settle, drop what is beyond retention, release."""
        self.now_ms += 1
        setup: JobSetup = self.run(resume_submission(job_id, Starter(f"leader {self.now_ms}", "", "directory", self.now_ms)))
        identity = Identity(job_id, setup.epoch, f"leader {self.now_ms}", setup.submission, setup.graph)
        master = JobMaster(setup, rng=random.Random(1), draw_secret=draw_secret)
        effects = StorageEffects(identity, lambda: self.now_ms)
        events: list[job_events.Event] = [job_events.JobStarted()]
        while events:
            for action in master.handle(events.pop(0), now_ms=self.now_ms, wall_ms=self.now_ms):
                if not isinstance(action, NO_STORAGE):
                    outcome = self.run(effects.flow(action))
                    events += [outcome] if outcome is not None else []
        return setup


# -------------------------------------------------------------------------------------------------------------- stages


def graph(parallelism: int = 2, **settings: Any) -> JobGraph:
    """Barriers may overtake what is queued between its two steps."""
    found = word_count(parallelism, state_backend="rocksdb", **settings)
    (edge,) = found.edges
    return msgspec.structs.replace(found, edges=(msgspec.structs.replace(edge, overtakable=True, columns=("word: string",)),))


def upload(
    scene: Scene, number: int, tables: Sequence[str] = FIRST, *, base: int = 0, job_id: str = JOB, savepoint: str = ""
) -> States:
    """What the workers store for a checkpoint, or in a savepoint's folder; the tables that its base has are not stored again."""
    source, count = graph().vertices
    states: States = {}
    paths = JobPaths(job_id)
    known: dict[str, FileHandle] = {}
    if base:
        metadata = decode_metadata(scene.disk.view(STATE).peek(paths.decision(base)) or b"", "base")
        for operator in metadata.operators:
            for subtask, state in enumerate(operator.subtasks):
                for handle in state.keyed:
                    parts_of = zip(handle.names, handle.parts, strict=True)
                    known |= {f"{subtask} {name}": part for name, part in parts_of if isinstance(part, FileHandle)}
    for subtask in range(2):
        folder = savepoint or paths.checkpoint(number)
        target = SnapshotTarget(number, folder, f"source-{subtask}-1-n", False, 0)
        part = scene.run(write_part(b"\x91\xc4\x01" + b"%d" % subtask, "offsets", target))
        states[SubtaskKey(source.vertex_id, subtask)] = {
            "source": OperatorSubtaskState(operator=(OperatorListHandle(OFFSETS, part, 1),))
        }
        target = SnapshotTarget(number, folder, f"count-{subtask}-1-n", False, 0, f"{number}-1-count-{subtask}-n")
        writer = PartsWriter(target)
        parts: list[StateHandle | WrittenPart] = []
        for name in tables:
            stored = known.get(f"{subtask} {name}.sst")
            parts.append(stored or writer.add(f"table {name} of {subtask}".encode(), f"{name}.sst", is_shared=not savepoint))
        scene.run(writer.store())
        handles = tuple(part.handle if isinstance(part, WrittenPart) else part for part in parts)
        groups = assign_key_groups(MAX_PARALLELISM, 2, subtask)
        keyed = KeyedStateHandle(groups, "rocksdb", (COUNTS,), handles, tuple(f"{name}.sst" for name in tables))
        states[SubtaskKey(count.vertex_id, subtask)] = {"count": OperatorSubtaskState(keyed=(keyed,))}
    return states


def flying(number: int) -> list[bytes]:
    """What each subtask has in flight when a checkpoint is taken."""
    return [b"in flight to %d at %d" % (subtask, number) for subtask in range(2)]


def fly(scene: Scene, number: int) -> tuple[ChannelState, ...]:
    """What the workers store of it."""
    found = []
    for subtask, content in enumerate(flying(number)):
        target = SnapshotTarget(number, JobPaths(JOB).checkpoint(number), f"count-{subtask}-1-n", False, 0)
        part = scene.run(write_part(content, "inflight-0", target))
        pieces = (ChannelPiece(0, 0, len(content), 3),)
        found.append(ChannelState("source", None, "count", 0, 0, "hash", "input", subtask, 3, part, pieces))
    return tuple(found)


def claim(scene: Scene, number: int, request: CheckpointRequest | None = None, job_id: str = JOB) -> Any:
    request = request or CheckpointRequest()
    folder = request.folder or JobPaths(job_id).checkpoint(number)
    return scene.run(scene.effects(job_id).flow(actions.WriteClaim(number, request, folder, 1)))


def publish(
    scene: Scene,
    number: int,
    states: States,
    request: CheckpointRequest | None = None,
    job_id: str = JOB,
    channels: tuple[ChannelState, ...] = (),
) -> Any:
    request = request or CheckpointRequest()
    folder = request.folder or JobPaths(job_id).checkpoint(number)
    action = actions.WriteMetadata(number, request.kind, 1, folder, scene.now_ms, states, channels=channels)
    return scene.run(scene.effects(job_id).flow(action))


def history(scene: Scene, folder: str) -> StoredSnapshot:
    """A user's own savepoint, of rows that they had."""
    shape = Shape("history", MAX_PARALLELISM, 2, 5)
    layout = layout_of_descriptor("count", COUNT, KeyType.parse("utf8"), shape)
    rows = pa.table({"key": list(ROWS), "namespace": [b""] * len(ROWS), "value": list(ROWS.values())})
    entries = pa.table({"value": pa.array(ENTRIES, pa.binary())})
    parent, _, name = folder.rpartition("/")
    states: list[NewState | NewEntries] = [NewState(layout, [rows]), NewEntries("source", OFFSETS, [entries])]
    return write_savepoint(states, shape, scene.disk.storage(parent), name)


def started() -> Scene:
    """A job whose first attempt runs; beside it two savepoints of its users."""
    scene = Scene(SimDisk())
    history(scene, HISTORY)
    history(scene, UNWANTED)
    asked = submission(graph(retained_checkpoints=1), job_id=JOB)
    scene.run(start_submission(JOB, asked, Starter("leader", "", "directory", 0)))
    scene.run(scene.effects().flow(job_actions.PrepareAttempt(1, None, 0)))
    return scene


def first_completed() -> Scene:
    scene = started()
    claim(scene, 1)
    publish(scene, 1, upload(scene, 1))
    return scene


def second_claimed() -> Scene:
    scene = first_completed()
    claim(scene, 2)
    return scene


def second_completed() -> Scene:
    """The first one is to be dropped."""
    scene = second_claimed()
    publish(scene, 2, upload(scene, 2, SECOND, base=1))
    return scene


def in_flight_claimed() -> Scene:
    """As `second_claimed`, of a job whose barriers overtake."""
    scene = started()
    claim(scene, 1)
    publish(scene, 1, upload(scene, 1), channels=fly(scene, 1))
    claim(scene, 2)
    return scene


def in_flight_completed() -> Scene:
    scene = in_flight_claimed()
    publish(scene, 2, upload(scene, 2, SECOND, base=1), channels=fly(scene, 2))
    return scene


def in_flight_stored() -> Scene:
    """A user has a copy of the job's checkpoint, with its records in flight."""
    scene = in_flight_completed()
    stored = StoredSnapshot(scene.run(load_snapshot(f"{JOB}/chk-2")), scene.disk.storage(STATE), f"{JOB}/chk-2")
    copy_snapshot(stored, scene.disk.storage(USERS), "flown")
    return scene


def ended() -> Scene:
    """The job was canceled, and retains nothing."""
    scene = second_completed()
    scene.run(scene.effects().flow(job_actions.WriteResult(JobState.CANCELED, "", 2, 2)))
    return scene


def given() -> Scene:
    """Another job was started from the history, owns it, and has subsumed it just now."""
    scene = started()
    scene.run(start_submission(OTHER, asking(), Starter("other", "", "directory", 0)))
    scene.run(scene.effects(OTHER).flow(job_actions.PrepareAttempt(1, scene.recovery_point(OTHER), 0)))
    first = scene.recorded(OTHER).submissions[1].first_checkpoint_id
    claim(scene, first, job_id=OTHER)
    publish(scene, first, upload(scene, first, job_id=OTHER), job_id=OTHER)
    return scene


def asking(job_id: str = OTHER, restore: str = HISTORY, parallelism: int = 2) -> Submission:
    """The history, or another snapshot, is to be another job's."""
    wanted = graph(parallelism, retained_checkpoints=1)
    return submission(wanted, job_id=job_id, restore=restore, claim_mode=ClaimMode.CLAIM)
