"""Every flow that writes or deletes what belongs to a snapshot, killed at each of its calls to the disk (J20, S06; I11, I14, I16,
I22-I29).

A row of the table is a flow in a scene. It is killed before each call that changes the disk, writes in their middle, with and
without a loss of power, and behind the last one. Then a leader comes, and another one, and what must hold holds; whoever ran the
flow runs it again."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from holdfast.barriers.messages import CheckpointKind, FailureReason
from holdfast.chaos.sabotage import find_sabotage
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest
from holdfast.coordinator.dispatcher.submit import Starter, clear_ended, preflight, start_submission
from holdfast.coordinator.ha.recorded_job import CheckpointFact
from holdfast.coordinator.ha.records import OwnerRecord, decode_record
from holdfast.coordinator.ha.snapshots import find_problems, in_folder, load_snapshot, read_lists
from holdfast.coordinator.ha.store import put_once
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.coordinator.jobmaster.releases import Release
from holdfast.coordinator.ownership.claims import dispose_snapshot
from holdfast.coordinator.ownership.fsck import FsckReport, FsckRequest, check_directory
from holdfast.coordinator.restore.assign import assign_state, find_list_states
from holdfast.statebackends.backends.operator import read_entries
from holdfast.statebackends.errors import HoldfastError, InvalidConfigError, NotFoundError, SnapshotClaimedError
from holdfast.statebackends.handles import FileHandle, KeyGroupRange, OperatorState, OperatorSubtaskState, StateHandle
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.layout import METADATA_NAME, OWNER_NAME, JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata
from holdfast.statebackends.snapshot.parts import file_handles, read_parts
from holdfast.statebackends.state_processor.contents import StoredSnapshot
from holdfast.statebackends.state_processor.copy import copy_snapshot
from holdfast.statebackends.state_processor.diff import diff_snapshots
from holdfast.statebackends.state_processor.edit import edit_snapshot
from holdfast.statebackends.state_processor.rows import state_batches, state_schema
from holdfast.statebackends.state_processor.verify import verify_files
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.doubles import MAX_PARALLELISM
from tests.simulation import crash_scenes as scenes
from tests.simulation import outside
from tests.simulation.crash_scenes import (
    ENTRIES,
    FLOWN,
    HISTORY,
    JOB,
    OTHER,
    ROWS,
    SECOND,
    STATE,
    UNWANTED,
    USERS,
    Death,
    Killer,
    Scene,
    asking,
    claim,
    history,
    publish,
    upload,
)

Stage = Callable[[], Scene]
SAVEPOINT = CheckpointRequest(CheckpointKind.SAVEPOINT, "t", folder=f"{USERS}/savepoint-2")
MADE = f"{USERS}/made"
"""Where tools write."""
THIRD = "ef" * 16
RESCALED = 3
"""Parallelism of a job that starts from another one's snapshot."""
POWER_LOSSES = 6
"""Times that the power is lost behind one scene: a name that is not durable is lost every other time."""


@dataclass(frozen=True)
class Case:
    """A flow: what it needs, what it does, and what must hold when it died, or came to its end (`done`)."""

    stage: Stage
    run: Callable[[Scene, Scene], Any]
    """Told the scene, and the same scene as it was; what is made ready in the second is not killed."""
    holds: Callable[[Scene, bool], None]
    users: tuple[str, ...] = (HISTORY, UNWANTED)
    """Folders of users that nobody may change (I25)."""
    outside: bool = False
    """A tool of users, which touches nothing in the state directory."""


@functools.cache
def at(stage: Stage) -> Scene:
    """Stages are built once."""
    return stage()


def recovers_at(*numbers: int, done: int) -> Callable[[Scene, bool], None]:
    """Which checkpoint a recovery goes on from: one of these, and when the flow had ended, that one (I14, I22)."""

    def holds(scene: Scene, finished: bool) -> None:
        found = scene.recovery_point()
        number = 0 if found is None else found.checkpoint_id
        assert number == done if finished else number in numbers, f"a recovery goes on from {number}"

    return holds


# ------------------------------------------------------------------------------------------------------ flows of the job


def uploads(scene: Scene, before: Scene) -> Any:
    return upload(scene, 2, SECOND, base=1)


def publishes(scene: Scene, before: Scene) -> Any:
    return publish(scene, 2, uploaded_with_states()[1])


@functools.cache
def uploaded_with_states() -> tuple[Scene, scenes.States]:
    """Behind the uploads of the second checkpoint."""
    scene = at(scenes.second_claimed).copy()
    return scene, upload(scene, 2, SECOND, base=1)


def uploaded() -> Scene:
    return uploaded_with_states()[0]


def uploads_in_flight(scene: Scene, before: Scene) -> Any:
    return upload(scene, 2, SECOND, base=1), scenes.fly(scene, 2)


def completes_in_flight(scene: Scene, before: Scene) -> Any:
    states, channels = uploads_in_flight(scene, before)
    return publish(scene, 2, states, channels=channels)


def uploaded_in_flight() -> Scene:
    scene = at(scenes.in_flight_claimed).copy()
    uploads_in_flight(scene, scene)
    return scene


def with_flights(holds: Callable[[Scene, bool], None]) -> Callable[[Scene, bool], None]:
    """And every completed checkpoint has its own records in flight, whole."""

    def checked(scene: Scene, finished: bool) -> None:
        holds(scene, finished)
        for number in scene.completed():
            assert in_flight_of(scene, JobPaths(JOB).checkpoint(number)) == scenes.flying(number)

    return checked


def in_flight_of(scene: Scene, folder: str) -> list[bytes]:
    parts = [channel.part for channel in scene.run(load_snapshot(folder)).in_flight]
    return list(scene.run(in_folder(folder, functools.partial(read_parts, parts, operator="count"))))


def prepares(scene: Scene, job_id: str = JOB) -> Any:
    """The next attempt: whoever leads the job goes on from what a recovery finds."""
    number = max(scene.recorded(job_id).attempts, default=0) + 1
    return scene.run(scene.effects(job_id).flow(job_actions.PrepareAttempt(number, scene.recovery_point(job_id), 0)))


def restores_in_flight(scene: Scene, before: Scene) -> Any:
    return prepares(scene)


def has_restored(scene: Scene, finished: bool) -> None:
    """Each leader that comes deploys the same records in flight, and each of them once, whoever died before."""
    with_flights(recovers_at(2, done=2))(scene, finished)
    for _ in range(2):
        scene.lead()
        is_dealt(scene, prepares(scene), JobPaths(JOB).checkpoint(2), 2)


def starts_in_flight(scene: Scene, before: Scene) -> Any:
    """At another parallelism, from a copy that the job takes over: preflight, claim, submission and its first attempt."""
    asked = asking(restore=FLOWN, parallelism=RESCALED)
    scene.run(start_submission(OTHER, asked, Starter("rescaler", "", "directory", scene.now_ms)))
    return prepares(scene, OTHER)


def has_started_in_flight(scene: Scene, finished: bool) -> None:
    left = {path: content for path, content in scene.files(FLOWN).items() if path != OWNER_NAME}
    assert left == at(scenes.in_flight_stored).files(FLOWN)
    if not scene.recorded(OTHER).is_live:
        assert not finished
        asked = asking(restore=FLOWN, parallelism=RESCALED)
        scene.run(start_submission(OTHER, asked, Starter("again", "", "directory", scene.now_ms)))
    scene.lead(OTHER)
    found = scene.recovery_point(OTHER)
    assert found is not None
    assert found.folder == FLOWN
    is_dealt(scene, prepares(scene, OTHER), FLOWN, RESCALED)


def is_dealt(scene: Scene, prepared: Any, folder: str, parallelism: int) -> None:
    """What an attempt deploys of records in flight: those of the snapshot, to those that own their keys (I36)."""
    assert isinstance(prepared, job_events.AttemptPrepared)
    channels = scene.run(load_snapshot(folder)).in_flight
    assert [channel.subtask for channel in channels] == [0, 1]
    given: dict[StateHandle, list[tuple[int, bool]]] = {channel.part: [] for channel in channels}
    for key, restore in sorted(prepared.in_flight.items()):
        assert key.vertex == scenes.graph().vertices[1].vertex_id
        for channel in restore.channels:
            for piece in channel.pieces:
                given[restore.parts[piece.part]].append((key.subtask, piece.filtered))
    for channel in channels:
        theirs = assign_key_groups(MAX_PARALLELISM, 2, channel.subtask)
        shared = [assign_key_groups(MAX_PARALLELISM, parallelism, each).intersection(theirs) for each in range(parallelism)]
        assert sum(map(len, shared)) == len(theirs)
        assert given[channel.part] == [(heir, groups != theirs) for heir, groups in enumerate(shared) if len(groups)]


def takes_a_savepoint(scene: Scene, before: Scene) -> Any:
    outcome = claim(scene, 2, SAVEPOINT)
    assert isinstance(outcome, events.ClaimWritten)
    return publish(scene, 2, upload(scene, 2, savepoint=SAVEPOINT.folder or ""), SAVEPOINT)


def has_a_savepoint(scene: Scene, finished: bool) -> None:
    """Behind a recovery it is whole, or nothing is left of it; whichever, a recovery does not go on from it.

    A probe of the folder that was killed may leave its empty file: the id was not taken yet, so that nobody knows of it."""
    recovers_at(1, done=1)(scene, finished)
    is_probed = 2 not in scene.recorded().checkpoints
    scene.lead()
    left = scene.files(SAVEPOINT.folder or "")
    assert left or not finished
    if is_probed:
        assert left in ({}, {"_probe-leader": b""})
    elif left:
        assert is_sound(scene.savepoint(SAVEPOINT.folder or ""))
        deals_out(scene, SAVEPOINT.folder or "")


def aborts(scene: Scene, before: Scene) -> Any:
    effects = scene.effects()
    outcome = scene.run(effects.flow(actions.WriteAborted(2, FailureReason.EXPIRED, "too late")))
    scene.run(effects.flow(actions.DiscardState(2, JobPaths(JOB).checkpoint(2))))
    return outcome


def subsumes(scene: Scene, before: Scene) -> Any:
    """The first checkpoint goes, and the tables that only it names."""
    first, second = (set(shared(scene, number)) for number in (1, 2))
    assert len(first - second) == 2
    names = tuple(sorted(path.rpartition("/")[2] for path in first - second))
    return scene.run(scene.effects().flow(actions.DropCheckpoint(1, JobPaths(JOB).checkpoint(1), names)))


def shared(scene: Scene, number: int) -> Iterator[str]:
    """Shared files that a checkpoint names."""
    for operator in scene.run(load_snapshot(JobPaths(JOB).checkpoint(number))).operators:
        for state in operator.subtasks:
            yield from (handle.path for handle in file_handles(state) if handle.path.startswith("../"))


def ends(scene: Scene, before: Scene) -> Any:
    scene.run(scene.effects().flow(job_actions.WriteResult(JobState.CANCELED, "", 2, 2)))
    scene.run(clear_ended(JOB, Starter("cleaner", "", "directory", scene.now_ms)))


def ends_with_an_id_undecided(scene: Scene, before: Scene) -> Any:
    """The end was written by another leader: the id is what one that was asleep has claimed and uploaded."""
    scene.run(scene.effects().flow(job_actions.WriteResult(JobState.CANCELED, "", 2, 1)))
    scene.run(clear_ended(JOB, Starter("cleaner", "", "directory", scene.now_ms)))


def has_ended(newest: int) -> Callable[[Scene, bool], None]:
    """Or goes on from this checkpoint, while its end is not recorded."""

    def holds(scene: Scene, finished: bool) -> None:
        if scene.recorded().is_live:
            recovers_at(newest, done=0)(scene, finished)
            return
        scene.run(clear_ended(JOB, Starter("another", "", "directory", scene.now_ms)))
        left = [path for path in scene.disk.view(STATE).paths(JOB) if "/chk-" in path or "/shared/" in path]
        assert left == [], "an ended job leaves nothing that it does not keep (I24)"

    return holds


def leads(scene: Scene, before: Scene) -> Any:
    return scene.lead()


# ------------------------------------------------------------------------------------------------------------ ownership


def claims(scene: Scene, before: Scene) -> Any:
    return scene.run(start_submission(OTHER, asking(), Starter("claimer", "", "directory", scene.now_ms)))


def is_claimed(scene: Scene, finished: bool) -> None:
    """Whoever claimed it owns it: it starts again, nobody else may claim it, and it is whole until it is subsumed."""
    left = scene.files(HISTORY)
    content = left.pop(OWNER_NAME, None)
    assert left == at(scenes.started).files(HISTORY)
    assert content is not None or not finished
    assert content is None or decode_record(OwnerRecord, content, OWNER_NAME).job_id == OTHER
    if scene.recorded(OTHER).is_live:
        scene.lead(OTHER)
    else:
        scene.run(start_submission(OTHER, asking(), Starter("again", "", "directory", scene.now_ms)))
    assert scene.recovery_point(OTHER) is not None
    with pytest.raises(SnapshotClaimedError):
        scene.run(start_submission(THIRD, asking(THIRD), Starter("third", "", "directory", scene.now_ms)))
    assert contents(scene, HISTORY) == (ROWS, ENTRIES)
    deals_out(scene, HISTORY)


def releases(scene: Scene, before: Scene) -> Any:
    point = scene.recorded(OTHER).submissions[1].base
    assert point is not None
    assert point.claim
    return scene.run(scene.effects(OTHER).flow(Release(point.folder, point.claim)))


def is_released(scene: Scene, finished: bool) -> None:
    scene.lead(OTHER)
    assert scene.files(HISTORY) == {}, "the next leader deletes what is left of it (I24)"
    found = scene.recovery_point(OTHER)
    assert found is not None
    assert not found.explicit
    assert problems_of(scene, found.folder) == []


def disposes(scene: Scene, before: Scene) -> Any:
    return scene.run(dispose_snapshot(UNWANTED, "user", scene.now_ms))


def is_disposed(scene: Scene, finished: bool) -> None:
    left = set(scene.files(UNWANTED))
    assert not finished or not left
    if METADATA_NAME in left:
        assert not problems_of(scene, UNWANTED), "as long as it looks whole it is whole"
    else:
        asked = scenes.submission(scenes.graph(), job_id=OTHER, restore=UNWANTED)
        with suppress(NotFoundError):  # it says so itself
            assert not scene.run(preflight(OTHER, asked)).fits, "no job starts from what is left"
    if left:
        scene.run(dispose_snapshot(UNWANTED, "again", scene.now_ms))
    assert scene.files(UNWANTED) == {}
    with pytest.raises(NotFoundError):
        scene.run(dispose_snapshot(UNWANTED, "twice", scene.now_ms))


# ---------------------------------------------------------------------------------------------------------------- tools


def copies(scene: Scene, before: Scene) -> Any:
    folder = f"{JOB}/chk-2"
    stored = StoredSnapshot(scene.run(load_snapshot(folder)), scene.disk.storage(STATE), folder)
    return copy_snapshot(stored, scene.disk.storage(USERS), "made")


def edits(scene: Scene, before: Scene) -> Any:
    def more(batches: Any, schema: Any) -> Iterator[pa.Table]:
        for batch in batches:
            table = pa.Table.from_batches([batch])
            index = table.schema.get_field_index("value")
            yield table.set_column(index, "value", pa.array([value + 100 for value in batch.column("value").to_pylist()]))

    def others(batches: Any, schema: Any) -> Iterator[pa.Table]:
        yield pa.table({"value": [entry.upper() for batch in batches for entry in batch.column("value").to_pylist()]})

    changes = {("count", "counts"): more, ("source", "offsets"): others}
    return edit_snapshot(scene.savepoint(HISTORY), changes, scene.disk.storage(USERS), "made", now_ms=0)


def bootstraps(scene: Scene, before: Scene) -> Any:
    return history(scene, MADE)


def is_made(check: Callable[[Scene], None], run: Callable[[Scene, Scene], Any]) -> Callable[[Scene, bool], None]:
    """The target is whole, or no snapshot, and then nobody writes into what is left of it."""

    def holds(scene: Scene, finished: bool) -> None:
        left = scene.files(MADE)
        if METADATA_NAME in left:
            assert is_sound(scene.savepoint(MADE))
            check(scene)
        else:
            assert not finished
        if left:
            with pytest.raises(InvalidConfigError):
                run(scene, scene)
            assert scene.files(MADE) == left, "nothing is overwritten"
        else:
            run(scene, scene)
            check(scene)

    return holds


def copy_is_equal(scene: Scene) -> None:
    copied = scene.savepoint(MADE)
    assert copied.is_self_contained
    names = Counter(
        (operator.uid, name, part.checksum)
        for operator in copied.metadata.operators
        for state in operator.subtasks
        for keyed in state.keyed
        for name, part in zip(keyed.names, keyed.parts, strict=True)
        if isinstance(part, FileHandle)
    )
    assert sorted(name for _, name, _ in names) == ["B.sst", "B.sst", "C.sst", "C.sst"]
    deals_out(scene, MADE)


def flown_copy_is_equal(scene: Scene) -> None:
    copy_is_equal(scene)
    assert in_flight_of(scene, MADE) == scenes.flying(2)


def edit_is_equal(scene: Scene) -> None:
    assert contents(scene, MADE) == ({key: value + 100 for key, value in ROWS.items()}, [entry.upper() for entry in ENTRIES])
    deals_out(scene, MADE)


def bootstrap_is_equal(scene: Scene) -> None:
    assert diff_snapshots(scene.savepoint(HISTORY), scene.savepoint(MADE)).is_same
    deals_out(scene, MADE)


def repairs(scene: Scene, before: Scene) -> Any:
    request = FsckRequest(safety_age_ms=0, repair=True, nonce="repair")
    return scene.run(check_directory(request, STATE, scene.now_ms))


def littered() -> Scene:
    """Beside two checkpoints, files that nobody owns: of an aborted id, of one whose deletion was cut off, of nobody."""
    scene = scenes.second_completed().copy()
    for path in ("chk-2/late", "shared/7-1-count-0-n-Z.sst", "chk-9/count-0-1-n-x"):
        scene.run(put_once(f"{JOB}/{path}", b"left"))
    scene.now_ms += 1
    return scene


def is_repaired(scene: Scene, finished: bool) -> None:
    assert scene.completed() == [1, 2], "a repair deletes no checkpoint"
    report = repairs(scene, scene)
    assert (report.orphans, report.refused, report.problems) == ((), {}, ())
    assert not finished or not report.deleted


CASES = {
    "upload": Case(scenes.second_claimed, uploads, recovers_at(1, done=1)),
    "publish": Case(uploaded, publishes, recovers_at(1, 2, done=2)),
    "savepoint": Case(scenes.first_completed, takes_a_savepoint, has_a_savepoint),
    "abort": Case(uploaded, aborts, recovers_at(1, done=1)),
    "subsume": Case(scenes.second_completed, subsumes, recovers_at(2, done=2)),
    "delete at the end": Case(scenes.second_completed, ends, has_ended(2)),
    "delete at the end, an id undecided": Case(uploaded, ends_with_an_id_undecided, has_ended(1)),
    "recover": Case(uploaded, leads, recovers_at(1, done=1)),
    "recover and subsume": Case(scenes.second_completed, leads, recovers_at(2, done=2)),
    "claim": Case(scenes.started, claims, is_claimed, users=(UNWANTED,)),
    "release": Case(scenes.given, releases, is_released, users=(UNWANTED,)),
    "dispose": Case(scenes.second_completed, disposes, is_disposed, users=(HISTORY,), outside=True),
    "copy": Case(scenes.second_completed, copies, is_made(copy_is_equal, copies), outside=True),
    "edit": Case(scenes.first_completed, edits, is_made(edit_is_equal, edits), outside=True),
    "bootstrap": Case(scenes.started, bootstraps, is_made(bootstrap_is_equal, bootstraps), outside=True),
    "upload in flight": Case(scenes.in_flight_claimed, uploads_in_flight, with_flights(recovers_at(1, done=1))),
    "write and complete in flight": Case(scenes.in_flight_claimed, completes_in_flight, with_flights(recovers_at(1, 2, done=2))),
    "abort in flight": Case(uploaded_in_flight, aborts, with_flights(recovers_at(1, done=1))),
    "subsume in flight": Case(scenes.in_flight_completed, subsumes, with_flights(recovers_at(2, done=2))),
    "recover in flight": Case(uploaded_in_flight, leads, with_flights(recovers_at(1, done=1))),
    "delete at the end, in flight": Case(scenes.in_flight_completed, ends, has_ended(2)),
    "copy in flight": Case(scenes.in_flight_completed, copies, is_made(flown_copy_is_equal, copies), outside=True),
    "prepare an attempt in flight": Case(scenes.in_flight_completed, restores_in_flight, has_restored),
    "start rescaled in flight": Case(scenes.in_flight_stored, starts_in_flight, has_started_in_flight),
    "repair": Case(littered, repairs, is_repaired),
}


# --------------------------------------------------------------------------------------------------------------- checks


def problems_of(scene: Scene, folder: str) -> list[Any]:
    """Every file of a snapshot that is missing, or has not its length and checksum (I11)."""
    return scene.run(find_problems(scene.run(load_snapshot(folder)), folder, checksums=True))


def is_sound(stored: StoredSnapshot) -> bool:
    return run_flow(verify_files(stored), stored.storage).is_sound


def contents(scene: Scene, folder: str) -> tuple[dict[str, int], list[bytes]]:
    """Counts by key and the entries of the source, as tools read them."""
    stored = scene.savepoint(folder)
    found: list[list[dict[str, Any]]] = []
    with stored.reader() as reader:
        for uid, name in (("count", "counts"), ("source", "offsets")):
            state = stored.state(uid, name)
            batches = state_batches(reader, state, state_schema(reader, state))
            found.append([row for batch in batches for row in batch.to_pylist()])
    return {row["key"]: row["value"] for row in found[0]}, [row["value"] for row in found[1]]


def deals_out(scene: Scene, folder: str) -> None:
    """At any parallelism each key group has one owner with all its state (I26), and each entry goes to one subtask (I27, I28)."""
    metadata = scene.run(load_snapshot(folder))
    stored = Counter(entry for state in operator_of(metadata, "source").subtasks for entry in entries_of(scene, folder, state))
    for parallelism in (1, 2, 3):
        graph = scenes.word_count(parallelism, state_backend="rocksdb")
        lists = {
            (operator.uid, name): scene.run(read_lists(operator, name, folder))
            for operator, name in find_list_states(metadata, graph)
        }
        assigned = assign_state(metadata, graph, lists)
        source, count = graph.vertices
        dealt: Counter[bytes] = Counter()
        for subtask in range(parallelism):
            dealt.update(entries_of(scene, folder, assigned[scenes.SubtaskKey(source.vertex_id, subtask)]["source"]))
            own = assign_key_groups(MAX_PARALLELISM, parallelism, subtask)
            handles = assigned[scenes.SubtaskKey(count.vertex_id, subtask)]["count"].keyed
            covered = [group for handle in handles for group in range(*own_part(handle.key_groups, own))]
            assert sorted(covered) == list(range(own.start, own.stop))
        assert dealt == stored


def own_part(groups: KeyGroupRange, own: KeyGroupRange) -> tuple[int, int]:
    common = groups.intersection(own)
    return common.start, common.stop


def operator_of(metadata: SnapshotMetadata, uid: str) -> OperatorState:
    return next(operator for operator in metadata.operators if operator.uid == uid)


def entries_of(scene: Scene, folder: str, state: OperatorSubtaskState) -> Iterator[bytes]:
    for handle in state.operator:
        yield from scene.run(in_folder(folder, functools.partial(read_entries, handle, operator="source")))


def is_whole(scene: Scene) -> None:
    """Whatever stands as completed has all its files, before anybody tidies up (I11, I23), and what was completed is not aborted
    (I13): only the second id is ever undecided."""
    recorded = scene.recorded()
    view = scene.disk.view(STATE)
    assert outside.missing(view, JOB) == [], "as seen from outside"
    assert scene.completed() == outside.completed(view, JOB), "as seen from outside"
    for number in scene.completed():
        assert problems_of(scene, JobPaths(JOB).checkpoint(number)) == []
    undecided = recorded.with_fact(CheckpointFact.UNDECIDED) + recorded.with_fact(CheckpointFact.ABORTED)
    assert 1 not in [each.checkpoint_id for each in undecided]


def rests(scene: Scene) -> None:
    """A leader comes, and another one: they find the same, and all that there is has an owner and is whole."""
    if scene.recorded().is_live:
        scene.lead()
        first, kept = scene.recovery_point(), scene.completed()
        scene.lead()
        assert (scene.recovery_point(), scene.completed()) == (first, kept), "I29"
        assert len(kept) <= 1, "I16: retained_checkpoints is 1"
        if first is not None:
            assert first.checkpoint_id in kept, "I16: the newest one is kept"
            assert problems_of(scene, first.folder) == [], "I11, I23"
            deals_out(scene, first.folder)
    view = scene.disk.view(STATE)
    assert outside.missing(view, JOB) == [], "I11, as seen from outside"
    assert outside.unowned(view, JOB) == [], "I24, as seen from outside"
    report: FsckReport = scene.run(check_directory(FsckRequest(safety_age_ms=0, checksums=True), STATE, scene.now_ms))
    assert (report.problems, report.damaged_jobs) == ((), {}), "I11"
    assert report.orphans == (), "I24"


def stays(scene: Scene) -> None:
    """A leader goes on from what it finds, and then the power goes: what it has found, and told others of, is there ever after."""
    if not scene.recorded().is_live:
        return
    scene.lead()
    found, view = scene.recovery_point(), scene.disk.view(STATE)
    if found is None or not found.folder.startswith(f"{JOB}/"):
        return
    newest = max(outside.completed(view, JOB))
    assert found.checkpoint_id == newest, "as seen from outside"
    for seed in range(POWER_LOSSES):
        again = scene.copy()
        again.disk.power_loss(random.Random(seed))
        view = again.disk.view(STATE)
        assert newest in outside.completed(view, JOB), f"I14: checkpoint {newest} was found, and a power loss took it away"
        assert outside.missing(view, JOB) == [], "I11, behind a power loss"


def outcomes(case: Case) -> Iterator[tuple[Scene, bool, str]]:
    """The scenes that deaths leave, each once: whether the flow had ended, and where it died.

    Of files that are deleted in any order the first goes first, then the last."""
    seen: set[tuple[bool, frozenset[tuple[str, bytes]]]] = set()
    for backwards in (False, True):
        yield from _outcomes(case, backwards, seen)
    assert len(seen) > 4, "a flow that changes so little would not be tested"


def _outcomes(
    case: Case, backwards: bool, seen: set[tuple[bool, frozenset[tuple[str, bytes]]]]
) -> Iterator[tuple[Scene, bool, str]]:
    point, finished = 0, False
    while not finished:
        for power in (False, True):
            scene = at(case.stage).copy()
            scene.backwards = backwards
            scene.disk.before_call = killer = Killer(point)
            try:
                case.run(scene, scene)
            except Death:
                pass
            else:
                finished = True
                assert killer.calls == point
            scene.disk.before_call = None
            if power:
                scene.disk.power_loss(random.Random(point))
            found = (finished, scene.state())
            if found not in seen:
                seen.add(found)
                where = f"killed before change {point}{', backwards' if backwards else ''}{', power lost' if power else ''}"
                yield scene, finished, where
        point += 1


@pytest.mark.parametrize("name", CASES)
def test_a_flow_killed_anywhere_leaves_what_must_hold(name: str) -> None:
    check(name)


@pytest.mark.parametrize(
    ("sabotage", "name"),
    [
        ("unsynced_found", "publish"),
        ("half_deleted_left", "subsume"),
        ("shared_deleted_first", "subsume"),
        ("claim_deleted_last", "subsume"),
        ("unsettled_takeover", "recover"),
    ],
)
def test_a_mistake_is_found_where_a_flow_is_killed(sabotage: str, name: str) -> None:
    check(name)
    with find_sabotage(sabotage).apply(), pytest.raises(AssertionError, match=f"^{name}, killed before change"):
        check(name)


def check(name: str) -> None:
    """Raise AssertionError that says where the flow of a row died, and what does not hold then."""
    case = CASES[name]
    before = {folder: at(case.stage).files(folder) for folder in (STATE, *case.users)}
    assert all(before.values())
    for scene, finished, where in outcomes(case):
        try:
            if not case.outside:
                is_whole(scene)
                stays(scene.copy())
                case.holds(scene, finished)
                rests(scene)
            else:
                assert scene.files(STATE) == before[STATE]
                case.holds(scene, finished)
            for folder in case.users:
                assert scene.files(folder) == before[folder], "I25: a user's snapshot was changed"
        except (AssertionError, HoldfastError) as error:
            raise AssertionError(f"{name}, {where}{' (at its end)' if finished else ''}: {error}") from error
