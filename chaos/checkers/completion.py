"""The meaning of COMPLETED: every acknowledgement, every file, and the record before the notice.

I11 from the completion of an id for as long as it is claimed; I23 for shared files; I14 for each notice; I25 for files of
savepoints (docs/invariants.md). An acknowledgement counts as the worker's loop gave it, so that sessions and network excuse
nothing."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    CheckpointKind,
    FinishTasks,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    Registered,
    SubtaskKey,
    SubtaskStatus,
    TaskState,
    WorkerCommand,
)
from holdfast.chaos.checkers.base import Checker
from holdfast.chaos.checkers.ledger import ClaimDropped, Claimed, Decided, JobLedger, PowerLost, Snapshot, join
from holdfast.chaos.checkers.observations import (
    Answered,
    Commanded,
    Delivered,
    Lifecycle,
    Observation,
    Report,
    Reported,
    Stored,
    WorldView,
)
from holdfast.chaos.checkers.oracle import is_replaced
from holdfast.chaos.workloads.hooked import hook_states
from holdfast.chaos.workloads.scenario import Scenario
from holdfast.statebackends.handles import FileHandle, OperatorSubtaskState, PlaceholderHandle, SegmentHandle, external_places
from holdfast.statebackends.layout import METADATA_NAME, SHARED_FOLDER
from holdfast.statebackends.snapshot.parts import snapshot_files
from holdfast.statebackends.storage import is_absolute_folder
from holdfast.statebackends.storage.checksums import checksum_of

_ENDING = (CheckpointKind.FINAL, CheckpointKind.STOP_SAVEPOINT)


class CompletionChecker(Checker):
    """Collects acknowledgements, and watches the files of every completed snapshot."""

    invariants: ClassVar[tuple[str, ...]] = ("I11", "I14", "I20", "I23", "I25")
    hears: ClassVar[tuple[type, ...]] = (Stored, Reported, Commanded, Delivered, Answered, Lifecycle)

    def __init__(self, world: WorldView, scenario: Scenario, report: Report, ledger: JobLedger) -> None:
        super().__init__(world, scenario, report, ledger)
        self._acks: dict[tuple[int, int], dict[SubtaskKey, AcknowledgeCheckpoint]] = {}
        """(attempt, id) -> acknowledgement of each subtask."""
        self._finished: set[tuple[int, SubtaskKey]] = set()
        self._kept: dict[str, set[int]] = {}
        """Location of a file -> completed ids that refer to it."""
        self._external: dict[str, dict[int, str]] = {}
        """External file -> ids that refer to it, each with all locations of the file."""
        self._told: set[int] = set()
        """Ids with a notice of completion."""

    def observe(self, observation: Observation) -> None:
        match observation:
            case Stored():
                if observation.added or observation.removed:
                    self._stored(observation)
            case Reported(item=AcknowledgeCheckpoint() as ack):
                self._acks.setdefault((ack.attempt, ack.checkpoint_id), {})[SubtaskKey(ack.vertex, ack.subtask)] = ack
            case Reported(item=SubtaskStatus(state=TaskState.FINISHED) as status):
                self._finished.add((status.attempt, SubtaskKey(status.vertex, status.subtask)))
            case Commanded() | Delivered():
                self._command(observation.command, by_leader=isinstance(observation, Commanded))
            case Answered(answer=Registered() as registered):
                self._registered(registered)
            case Lifecycle():
                for change in self.ledger.changes(observation):
                    if isinstance(change, PowerLost):
                        self._power_lost(change)
            case _:
                pass

    def _stored(self, fact: Stored) -> None:
        for change in self.ledger.changes(fact):
            match change:
                case Decided():
                    self._decided(change)
                case Claimed(checkpoint_id=number) if self.ledger.stands(number):  # again, beside its decision
                    self._check_files(self.ledger.completed[number])
                    self._keep(self.ledger.completed[number])
                case ClaimDropped(snapshot=Snapshot() as snapshot):
                    if not snapshot.kind.is_savepoint or self.ledger.is_subsumed(snapshot.checkpoint_id):
                        self._forget(snapshot.checkpoint_id)
                case _:
                    pass
        for path in fact.removed:
            self._removed(join(fact.root, path), fact)

    # ------------------------------------------------------------------------------------------------------- completion

    def _decided(self, change: Decided) -> None:
        if change.problem:
            self.report("I11", f"checkpoint {change.checkpoint_id} is completed and can't be read: {change.problem}")
        if change.snapshot is None:
            return
        self._check_acks(change.snapshot)
        self._check_files(change.snapshot)
        self._keep(change.snapshot)
        self._acks.pop((change.snapshot.claim.attempt, change.checkpoint_id), None)

    def _check_acks(self, snapshot: Snapshot) -> None:
        """Every subtask of the graph has acknowledged exactly the state that the snapshot has of it."""
        number, claim = snapshot.checkpoint_id, snapshot.claim
        submission = self.ledger.submissions.get(claim.submission)
        if submission is None:
            self.report("I11", f"checkpoint {number} completed for submission {claim.submission}, which is not on record")
            return
        if snapshot.metadata.hooks != hook_states(submission.graph.config.master_hooks, number):
            self.report("I11", f"checkpoint {number} has not the states that its master hooks gave")
        acks = self._acks.get((claim.attempt, number), {})
        finished = _finished_tasks(snapshot.metadata.properties.get("finished_tasks", ""))
        operators = {operator.uid: operator for operator in snapshot.metadata.operators}
        nothing = OperatorSubtaskState()
        for vertex in submission.graph.vertices:
            for index in range(vertex.parallelism):
                key = SubtaskKey(vertex.vertex_id, index)
                ack = acks.get(key)
                if ack is None and not (key in finished and (claim.attempt, key) in self._finished):
                    self.report("I11", f"checkpoint {number} completed without {vertex.name} ({index}) of attempt {claim.attempt}")
                    return
                for description in vertex.operators:
                    stored = operators.get(description.uid)
                    told = nothing if ack is None else ack.states.get(description.uid, nothing)
                    if stored is None or index >= len(stored.subtasks) or not _is_what_was_told(stored.subtasks[index], told):
                        self.report("I11", f"checkpoint {number} has not the state that {description.uid} ({index}) acknowledged")
                        return

    def _check_files(self, snapshot: Snapshot) -> None:
        for handle in _files(snapshot):
            problem = _file_problem(snapshot, handle)
            if problem:
                self.report("I11", f"checkpoint {snapshot.checkpoint_id}: {handle.path} {problem}")
        for entry in snapshot.metadata.external:
            if not self._is_there(entry):
                self.report("I11", f"checkpoint {snapshot.checkpoint_id}: the external file {entry} is missing")

    # ------------------------------------------------------------------------------------------------------------ files

    def _is_there(self, entry: str) -> bool:
        """Whether an external file is at one of its places, or needs to be at none: a committed one that was merged."""
        places = external_places(entry)
        return any(self.ledger.exists(place) for place in places) or is_replaced(self.world.store, places)

    def _keep(self, snapshot: Snapshot) -> None:
        number = snapshot.checkpoint_id
        for handle in _files(snapshot):
            self._kept.setdefault(snapshot.location(handle.path), set()).add(number)
        if snapshot.kind.is_savepoint:
            self._kept.setdefault(snapshot.location(METADATA_NAME), set()).add(number)
        for entry in snapshot.metadata.external:
            for place in external_places(entry):
                location = place if is_absolute_folder(place) else join(self.world.state.root, place)
                self._external.setdefault(location, {})[number] = entry

    def _forget(self, number: int) -> None:
        """The id is dropped: its files may go."""
        for location in [location for location, holders in self._kept.items() if number in holders]:
            self._kept[location].discard(number)
            if not self._kept[location]:
                del self._kept[location]
        for holders in self._external.values():
            holders.pop(number, None)

    def _removed(self, location: str, fact: Stored) -> None:
        for number in sorted(self._kept.get(location, ())):
            if self.ledger.is_subsumed(number):
                self._forget(number)
                continue
            is_shared = f"/{SHARED_FOLDER}/" in location.removeprefix(self.world.state.root)
            invariant = "I25" if self.ledger.completed[number].kind.is_savepoint else "I23" if is_shared else "I11"
            self.report(invariant, f"{fact.actor} deleted {location}, which checkpoint {number} needs")
        for holder, entry in self._external.get(location, {}).items():
            if not self._is_there(entry):
                invariant = "I25" if self.ledger.completed[holder].kind.is_savepoint else "I20"
                self.report(invariant, f"{fact.actor} deleted {location}, which checkpoint {holder} needs from outside")

    def _power_lost(self, change: PowerLost) -> None:
        for snapshot in change.lost:
            self._forget(snapshot.checkpoint_id)
            if snapshot.checkpoint_id in self._told:
                self.report("I14", f"checkpoint {snapshot.checkpoint_id} was announced as complete, and a power loss took it away")
        self.at_end()

    def at_end(self) -> None:
        """What is still claimed is unchanged since its completion."""
        for number in sorted(self.ledger.completed):
            if self.ledger.stands(number) and not self.ledger.is_subsumed(number):
                self._check_files(self.ledger.completed[number])

    # ---------------------------------------------------------------------------------------------------------- notices

    def _command(self, command: WorkerCommand, *, by_leader: bool) -> None:
        match command:
            case NotifyCheckpointComplete(checkpoint_id=number):
                self._complete(number, "is notified as complete")
            case NotifyCheckpointAborted(checkpoint_id=number, newest_completed=newest) if by_leader:
                # A worker that missed notices is made to drop all ids that are not live: not judged at its end.
                if number not in self.ledger.aborted:
                    self.report("I14", f"checkpoint {number} is notified as aborted and is not")
                if newest:
                    self._complete(newest, f"is named as the newest one in the abort of {number}")
            case FinishTasks(checkpoint_id=number):
                self._complete(number, "ends the job")
                snapshot = self.ledger.completed.get(number)
                if snapshot is not None and snapshot.kind not in _ENDING:
                    self.report("I14", f"checkpoint {number} ends the job and is a {snapshot.kind}")
            case _:
                pass

    def _registered(self, registered: Registered) -> None:
        if registered.newest_completed:
            self._complete(registered.newest_completed, "is named as the newest one to a worker")

    def _complete(self, number: int, how: str) -> None:
        if number not in self.ledger.completed:
            self.report("I14", f"checkpoint {number} {how} and is not durably completed")
        self._told.add(number)


def _is_what_was_told(stored: OperatorSubtaskState, told: OperatorSubtaskState) -> bool:
    """A placeholder stands for the base's file of that path, whose bytes are checked as those of every file."""
    if len(stored.keyed) != len(told.keyed):
        return False
    keyed = []
    for ours, theirs in zip(stored.keyed, told.keyed, strict=True):
        pairs = list(zip(ours.parts, theirs.parts, strict=False))
        parts = tuple(
            mine if isinstance(yours, PlaceholderHandle) and isinstance(mine, FileHandle) and _same(mine, yours) else yours
            for mine, yours in pairs
        )
        keyed.append(msgspec.structs.replace(theirs, parts=parts) if len(theirs.parts) == len(ours.parts) else theirs)
    return stored == msgspec.structs.replace(told, keyed=tuple(keyed))


def _same(file: FileHandle, placeholder: PlaceholderHandle) -> bool:
    offset = file.offset if isinstance(file, SegmentHandle) else None
    return (file.path, file.length, offset) == (placeholder.path, placeholder.length, placeholder.offset)


def _files(snapshot: Snapshot) -> list[FileHandle]:
    return [handle for handle, _, _ in snapshot_files(snapshot.metadata)]


def _file_problem(snapshot: Snapshot, handle: FileHandle) -> str:
    """The problem of a snapshot's file; empty if there is none."""
    content = snapshot.view.peek(snapshot.path(handle.path))
    if content is None:
        return "is missing"
    if len(content) != handle.file_length:
        return f"has {len(content)} bytes instead of {handle.file_length}"
    piece = content[handle.offset : handle.offset + handle.length]
    return "" if checksum_of(piece) == handle.checksum and len(piece) == handle.length else "has another checksum"


def _finished_tasks(text: str) -> set[SubtaskKey]:
    """`vertex:subtask,...`, in the form of the metadata's properties."""
    parts = (part.rpartition(":") for part in text.split(",") if part)
    return {SubtaskKey(vertex, int(subtask)) for vertex, _, subtask in parts}
