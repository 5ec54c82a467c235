"""Dangerous states that a good set of runs visits: a checker that never met them proves little.

Each is recognised from observations alone, as the invariants are."""

from __future__ import annotations

from collections import Counter
from typing import Any

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import (
    AckAnswers,
    AcknowledgeCheckpoint,
    AckStatus,
    CheckpointKind,
    DeclineCheckpoint,
    Deploy,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    Registered,
    RegisterWorker,
    SubtaskDeployment,
    SubtaskStatus,
    TaskState,
)
from holdfast.chaos.checkers.observations import (
    AllocationMoved,
    Answered,
    ChannelEnded,
    CollectingAborted,
    Commanded,
    Delivered,
    Forged,
    Impersonated,
    Led,
    Lifecycle,
    Observation,
    Overtook,
    Reported,
    Requested,
    SnapshotBegan,
    Stored,
    Submitted,
)
from holdfast.coordinator.ha.records import AttemptRecord, ClaimRecord, decode_record
from holdfast.statebackends.errors import AmbiguousWriteError, AuthenticationError, FencedError, HoldfastError
from holdfast.statebackends.layout import SHARED_FOLDER, parse_checkpoint_name
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, Operation, PutIfAbsent

SOMETIMES: dict[str, str] = {
    "ack_after_decision": "an acknowledgement comes when its checkpoint is decided already",
    "ack_repeated": "an acknowledgement comes twice",
    "ack_of_stale_attempt": "a subtask of an older attempt acknowledges",
    "ack_forged": "a worker acknowledges what no task can have stored",
    "checkpoint_declined": "a subtask declines a checkpoint",
    "checkpoint_aborted": "workers get notice that a checkpoint is aborted",
    "crash_before_store": "a coordinator dies just before an id is decided",
    "crash_after_store": "a coordinator dies between the durable decision and the notice",
    "crash_while_recovering": "a coordinator dies before it leads every job again",
    "asked_while_recovering": "a worker registers before its job is led, and waits for it",
    "crash_while_restoring": "a worker dies while it restores state",
    "crash_in_commit": "a worker dies around the commit of a sink",
    "crash_in_deletion": "a coordinator dies while it deletes",
    "crash_between_deletions": "a coordinator dies when it has deleted some of the files that checkpoints shared, and not all",
    "restart_in_restart": "a second attempt is deployed before every subtask of the one before ran",
    "leader_changed_in_flight": "another coordinator takes over while the job's workers run",
    "restarts_counted_on": "a leader continues the count of restarts of another one",
    "pause_continued": "a leader continues the pause before a restart that another one has begun",
    "two_leaders": "a coordinator is asked while another one with a higher epoch leads",
    "stale_leader_writes": "a leader of an older epoch writes after a newer one leads",
    "register_lost": "two processes want one id and one of them loses it",
    "write_ambiguous": "the store can't tell whether a write happened",
    "wire_answer_lost": "S3's answer to a create is lost or wrong, and its sender finds the object to be its own",
    "wire_request_late": "a request to S3 arrives after its sender has sent another one, and has its answer",
    "hung_worker_cancelled": "a worker that hangs past its lease is cancelled by its driver",
    "hung_worker_wakes": "a hung worker wakes after its cancellation",
    "zombie_refused": "a process that was replaced comes back and is refused",
    "impostor_refused": "a process that no launcher started registers for a worker's slot, and is refused",
    "standby_took_slot": "a worker that stood by takes the slot of one that is gone",
    "standby_refused": "a worker that stood by comes too late for a slot, and is refused",
    "worker_reconnects": "a worker registers again without having died",
    "frame_refused": "a data port drops frames that no peer has a reason to send",
    "stale_command": "a command of an attempt that is over reaches a worker",
    "savepoint_taken": "a savepoint is complete",
    "savepoint_overtaken": "a checkpoint completes while an older savepoint is undecided",
    "stopped_with_savepoint": "a job is stopped with a savepoint",
    "stop_tried_again": "an interrupted stop with a savepoint claims another id",
    "savepoint_copied": "a user copies a savepoint",
    "copy_failed": "storage fails a user's copy of a savepoint",
    "savepoint_disposed": "a user disposes of a savepoint",
    "restored_from_copy": "a submission restores from a copy of a savepoint",
    "gone_back": "a submission goes back to an older snapshot, and its user says that output may repeat",
    "restored_from_savepoint": "a submission restores from a savepoint's folder",
    "rescaled": "a submission runs with another parallelism than the one before",
    "restored": "an attempt begins from a completed checkpoint",
    "restored_from_disk": "a subtask restores from copies of its state on its worker's own disk",
    "restore_refused": "a subtask fails because the disk of its host is full",
    "restored_odd_keys": "an attempt begins with state by decimals, texts, bytes or keys of several fields",
    "restored_nothing": "an attempt begins again from nothing",
    "final_checkpoint": "a job ends with a final checkpoint",
    "commit_after_restore": "a sink commits an id that was complete before its attempt began",
    "sink_taken_over": "a sink changes its owner",
    "retention_dropped": "a checkpoint is dropped because a newer one is complete",
    "ended_in_alignment": "a channel ends while its reader waits for barriers",
    "allocation_grown": "a channel grants more in flight than before",
    "allocation_shrunk": "a channel grants less in flight than its sender may have used already",
    "overtook_input": "a barrier overtakes what waits in front of a subtask",
    "overtook_output": "a barrier overtakes what waits behind a subtask",
    "stored_remainder": "a barrier overtakes when a batch is half processed",
    "switched_at_consumer": "a checkpoint that was aligned overtakes, at a subtask that waits for it",
    "switched_at_producer": "a barrier that waits in an output grows old enough to overtake",
    "aborted_while_collecting": "a checkpoint that has overtaken is given up while barriers are to come",
    "forced_beside_overtaken": "a checkpoint with data in flight is complete in a job where some edges can't be overtaken",
    "restored_in_flight": "an attempt begins with records in flight",
    "rescaled_in_flight": "an attempt begins with records in flight at another parallelism",
    "in_flight_again": "a barrier overtakes records that an older snapshot held in flight",
    "settled_in_flight": "a copy of a checkpoint with records in flight further up than its state settles, and is compared",
    "barrier_in_firing": "a subtask takes its part of a checkpoint between two slices of a firing",
    "resumed_from_drain": "a submission follows a drained one, whose windows and timers fired early",
    "user_code_failed": "the user's code raises",
    "backlog_ended": "a source has worked off a backlog, for which the job has an interval of its own",
    "settings_changed": "a user's change of settings holds while the job runs",
    "power_lost": "storage loses what was not durable",
    "power_lost_behind_found": "a loss of power follows the use of a name that was not known to be durable",
}


class Sometimes:
    """Counts the visits of one run."""

    def __init__(self) -> None:
        self.visits: Counter[str] = Counter()
        self._running: set[tuple[int, str, int]] = set()
        self._deployed: dict[int, set[tuple[str, int]]] = {}
        self._attempt = 0
        self._epoch = 0
        self._leader = ""
        self._has_backlog = False
        self._has_forced_edge = False
        """Of the job, some edges can't be overtaken."""
        self._parallelism: tuple[int, ...] = ()
        self._completed: dict[int, int] = {}
        self._owners = 0
        self._asked_ms: dict[str, int] = {}
        """Process -> when it last sent a request, ms."""
        self._led_ms: dict[int, int] = {}
        """Epoch -> since when it leads, ms."""
        self._cancelled: set[str] = set()
        self._strangers: set[str] = set()
        self._stops: set[str] = set()
        self._submission = 0
        self._recorded: AttemptRecord | None = None
        """Record of the newest attempt."""
        self._undecided: set[int] = set()
        """Ids of plain savepoints that are claimed and undecided."""
        self._deletes_shared: set[str] = set()
        """Processes whose last change of the store deleted a shared file."""
        self._drains: set[int] = set()
        """Ids claimed to drain the job."""
        self._drained = False
        """The job was drained, and no submission has continued it yet."""
        self._unsynced: dict[str, bool] = {}
        """Location of a new name whose writer received a failure -> whether another call has found it since."""

    def observe(self, observation: Observation) -> None:
        """Take one fact."""
        match observation:
            case Stored():
                self._stored(observation)
            case Answered():
                self._answered(observation)
            case Reported():
                self._reported(observation)
            case Forged():
                self._visit("ack_forged")
            case Impersonated():
                self._strangers.add(observation.actor)
            case Delivered():
                self._delivered(observation)
            case Commanded():
                if isinstance(observation.command, NotifyCheckpointComplete):
                    self._completed.setdefault(observation.command.checkpoint_id, self._attempt)
            case Lifecycle():
                self._lifecycle(observation)
            case ChannelEnded():
                if observation.aligning:
                    self._visit("ended_in_alignment")
            case AllocationMoved():
                self._visit("allocation_grown" if observation.after > observation.before else "allocation_shrunk")
            case Overtook():
                self._overtook(observation)
            case CollectingAborted():
                self._visit("aborted_while_collecting")
            case SnapshotBegan():
                if observation.firing:
                    self._visit("barrier_in_firing")
            case Led():
                self._led(observation)
            case Submitted():
                if observation.submission.allow_output_repeat:
                    self._visit("gone_back")
                if observation.submission.restore is not None and "/" in observation.submission.restore:
                    self._visit("restored_from_savepoint")
                    if "-copy-" in observation.submission.restore:
                        self._visit("restored_from_copy")
            case Requested():
                self._asked_ms[observation.actor] = observation.at_ms
                if observation.request == "register" and observation.body.attempt > 0:
                    self._visit("worker_reconnects")
                if observation.request == "heartbeat" and observation.body.frames_refused > 0:
                    self._visit("frame_refused")
            case _:
                pass

    def _visit(self, name: str) -> None:
        self.visits[name] += 1

    def _overtook(self, fact: Overtook) -> None:
        ends = {"input": "consumer", "output": "producer"}
        self._visit(f"overtook_{fact.side}")
        for name, is_so in ((f"switched_at_{ends[fact.side]}", fact.switched), ("stored_remainder", fact.in_hand)):
            if is_so:
                self._visit(name)
        if fact.again:
            self._visit("in_flight_again")

    def _stored(self, fact: Stored) -> None:
        operation = fact.operation
        if fact.actor == "user":
            self._used(fact, operation)
        if fact.removed and isinstance(operation, DeleteFile) and f"/{SHARED_FOLDER}/" in operation.path:
            self._deletes_shared.add(fact.actor)
        elif fact.removed or fact.added:
            self._deletes_shared.discard(fact.actor)
        told_wrongly = fact.fate in ("lie", "late") and not fact.on_wire  # on the wire the shell itself finds out
        if isinstance(fact.result, AmbiguousWriteError) or (told_wrongly and isinstance(operation, PutIfAbsent)):
            self._visit("write_ambiguous")
        if fact.on_wire and fact.fate == "late":
            self._visit("wire_request_late")
        elif fact.on_wire and fact.fate == "lie" and fact.added and not isinstance(fact.result, Exception):
            self._visit("wire_answer_lost")
        if isinstance(operation, PutIfAbsent):
            self._put(fact, operation)
        elif isinstance(operation, DeleteFile) and operation.path.endswith("/_claim") and fact.removed:
            self._visit("retention_dropped")

    def _used(self, fact: Stored, operation: Operation) -> None:
        """Count the use of a snapshot tool."""
        if isinstance(fact.result, Exception):
            self._visit("copy_failed")
        elif isinstance(operation, PutIfAbsent) and operation.path.endswith("/_metadata") and fact.added:
            self._visit("savepoint_copied")
        elif isinstance(operation, DeleteFolder) and any(path.endswith("/_owner") for path in fact.removed):
            self._visit("savepoint_disposed")

    def _put(self, fact: Stored, operation: PutIfAbsent) -> None:
        location = f"{fact.root}/{operation.path}"
        if fact.fate == "unsynced" and fact.added:
            self._unsynced[location] = False
        elif fact.result is False and location in self._unsynced:
            self._unsynced[location] = True
        if fact.result is False and operation.path.endswith(("_metadata", "_claim")):
            self._visit("register_lost")
        if fact.actor.startswith("coordinator") and self._leader and fact.actor != self._leader and fact.added:
            self._visit("stale_leader_writes")
        if operation.path.endswith("/_claim") and fact.added and b'"stop_savepoint"' in operation.data:
            trigger_id = decode_record(ClaimRecord, bytes(operation.data), operation.path).trigger_id
            if trigger_id in self._stops:
                self._visit("stop_tried_again")
            self._stops.add(trigger_id)
        if fact.added and operation.path.endswith(("/_claim", "/_metadata")):
            self._registered(operation)
        if fact.added and "/attempts/" in operation.path:
            self._attempted(decode_record(AttemptRecord, operation.data, operation.path))
        if "/log/" in operation.path and fact.added and b'"owner"' in operation.data[:40]:
            self._owners += 1
            if self._owners > 1:
                self._visit("sink_taken_over")
        elif "/log/" in operation.path and fact.added:
            number = _number(operation.data, b'"checkpoint_id":')
            if self._completed.get(number, self._attempt) < self._attempt:
                self._visit("commit_after_restore")

    def _attempted(self, record: AttemptRecord) -> None:
        before, self._recorded = self._recorded, record
        if before is not None and before.submission == record.submission and before.restarts and before.epoch < record.epoch:
            self._visit("restarts_counted_on")
            pauses = [each.backoff.pause_ms if each.backoff is not None else 0 for each in (before, record)]
            if before.restarts == record.restarts and pauses[0] == pauses[1] > 0:
                self._visit("pause_continued")

    def _registered(self, operation: PutIfAbsent) -> None:
        number = parse_checkpoint_name(operation.path.split("/")[-2])
        if number is None:
            return
        if operation.path.endswith("/_metadata"):
            self._undecided.discard(number)
        elif b'"kind": "savepoint"' in operation.data:
            self._undecided.add(number)
        elif b'"drain": true' in operation.data:
            self._drains.add(number)

    def _answered(self, fact: Answered) -> None:
        if isinstance(fact.answer, JobConfig):
            self._visit("settings_changed")
        elif self._has_backlog and fact.request == "states" and _tells_end_of_backlog(fact):
            self._visit("backlog_ended")
        if fact.receiver in self._strangers:
            if isinstance(fact.answer, AuthenticationError):
                self._visit("impostor_refused")
        elif isinstance(fact.body, RegisterWorker) and fact.body.seat >= 0:
            self._visit("standby_took_slot" if isinstance(fact.answer, Registered) else "standby_refused")
        elif isinstance(fact.answer, AckAnswers):
            for answer in fact.answer.answers:
                if answer in (AckStatus.DISCARDED, AckStatus.UNKNOWN):
                    self._visit("ack_after_decision")
                elif answer is AckStatus.DUPLICATE:
                    self._visit("ack_repeated")
        elif isinstance(fact.answer, FencedError):
            if fact.request == "register":
                self._visit("zombie_refused")
            elif fact.request == "acks":
                self._visit("ack_of_stale_attempt")
        elif isinstance(fact.answer, Registered):
            if fact.answer.epoch < self._epoch:
                self._visit("two_leaders")
            if self._asked_ms.get(fact.receiver, 0) < self._led_ms.get(fact.answer.epoch, 0):
                self._visit("asked_while_recovering")

    def _reported(self, fact: Reported) -> None:
        item = fact.item
        if isinstance(item, DeclineCheckpoint):
            self._visit("checkpoint_declined")
        elif isinstance(item, AcknowledgeCheckpoint):
            if item.attempt < self._attempt:
                self._visit("ack_of_stale_attempt")
        elif isinstance(item, SubtaskStatus):
            if item.metrics is not None and item.metrics.restored_local_bytes:
                self._visit("restored_from_disk")
            if item.state is TaskState.RUNNING:
                self._running.add((item.attempt, item.vertex, item.subtask))
            elif item.state is TaskState.FAILED and item.error.startswith("OutOfSpaceError"):
                self._visit("restore_refused")
            elif item.state is TaskState.FAILED and "injected" in item.error:
                self._visit("user_code_failed")

    def _delivered(self, fact: Delivered) -> None:
        command: Any = fact.command
        if isinstance(command, Deploy):
            deployment = command.deployment
            if deployment.attempt > self._attempt:
                before = self._deployed.get(self._attempt, set())
                if any((self._attempt, *key) not in self._running for key in before):
                    self._visit("restart_in_restart")
                if deployment.attempt > 1:
                    self._visit("restored" if deployment.restored_checkpoint_id else "restored_nothing")
                    channels = [each for subtask in deployment.subtasks for each in subtask.in_flight.channels]
                    if channels:
                        self._visit("restored_in_flight")
                    if not all(channel.keeps_events for channel in channels):
                        self._visit("rescaled_in_flight")
                    if any(map(_has_odd_keys, deployment.subtasks)):
                        self._visit("restored_odd_keys")
                self._attempt = deployment.attempt
            keys = self._deployed.setdefault(deployment.attempt, set())
            keys.update((each.vertex, each.subtask) for each in deployment.subtasks)
        elif isinstance(command, NotifyCheckpointAborted):
            self._visit("checkpoint_aborted")
        elif 0 < getattr(command, "attempt", 0) < self._attempt:
            self._visit("stale_command")

    def _lifecycle(self, fact: Lifecycle) -> None:
        if fact.change == "power_loss":
            self._visit("power_lost")
            if any(self._unsynced.values()):
                self._visit("power_lost_behind_found")
            self._unsynced.clear()
        elif fact.change == "cancelled":
            self._visit("hung_worker_cancelled")
            self._cancelled.add(fact.actor)
        elif fact.change == "resumed" and fact.actor in self._cancelled:
            self._visit("hung_worker_wakes")
        if fact.change != "killed":
            return
        point = fact.crash_point
        if point == "coordinator.DeleteFile.shared" and fact.actor in self._deletes_shared:
            self._visit("crash_between_deletions")
        for name, parts in _CRASHES.items():
            if point.startswith(parts):
                self._visit(name)

    def _led(self, fact: Led) -> None:
        if self._epoch and fact.epoch > self._epoch and self._running:
            self._visit("leader_changed_in_flight")
        if self._drained and fact.submission > self._submission:
            self._visit("resumed_from_drain")
            self._drained = False
        self._submission = fact.submission
        self._has_backlog = fact.graph.config.checkpoint_interval_during_backlog_ms is not None
        self._has_forced_edge = not all(edge.overtakable for edge in fact.graph.edges)
        self._epoch, self._leader = fact.epoch, fact.actor
        self._led_ms[fact.epoch] = fact.at_ms
        parallelism = tuple(vertex.parallelism for vertex in fact.graph.vertices)
        if self._parallelism and parallelism != self._parallelism:
            self._visit("rescaled")
        self._parallelism = parallelism

    def settled(self) -> None:
        """A copy of a checkpoint settles."""
        self._visit("settled_in_flight")

    def completed(self, kind: CheckpointKind, number: int, *, in_flight: bool = False) -> None:
        """A checkpoint of a kind is complete, as the store shows it. `in_flight`: it holds records in flight."""
        if in_flight and self._has_forced_edge:
            self._visit("forced_beside_overtaken")
        if kind is not CheckpointKind.SAVEPOINT and any(each < number for each in self._undecided):
            self._visit("savepoint_overtaken")
        if kind is CheckpointKind.SAVEPOINT:
            self._visit("savepoint_taken")
        elif kind is CheckpointKind.STOP_SAVEPOINT:
            self._visit("stopped_with_savepoint")
            self._drained = number in self._drains
        elif kind is CheckpointKind.FINAL:
            self._visit("final_checkpoint")


_CRASHES: dict[str, tuple[str, ...]] = {
    "crash_before_store": ("coordinator.PutIfAbsent.metadata",),
    "crash_after_store": ("coordinator.PutIfAbsent.metadata.done", "coordinator.send.complete"),
    "crash_while_recovering": ("coordinator.recovering",),
    "crash_while_restoring": ("worker.restore",),
    "crash_in_commit": ("worker.PutIfAbsent.log", "worker.LinkFile"),
    "crash_in_deletion": ("coordinator.DeleteFile", "coordinator.DeleteFolder"),
}


def _tells_end_of_backlog(fact: Answered) -> bool:
    ended = any(status.backlog and status.backlog % 2 == 0 and not status.drained for status in fact.body.subtasks)
    return ended and not isinstance(fact.answer, HoldfastError)


def _number(data: bytes, key: bytes) -> int:
    """The integer of a key in a JSON record; -1 without one."""
    _, found, rest = data.partition(key)
    digits = rest.lstrip()[:20].split(b",")[0].split(b"}")[0]
    return int(digits) if found and digits.strip().isdigit() else -1


def _has_odd_keys(subtask: SubtaskDeployment) -> bool:
    types = (meta.key_type for state in subtask.restore.values() for keyed in state.keyed for meta in keyed.states)
    return any(key_type is not None and key_type.startswith(("tuple", "decimal", "utf8", "binary")) for key_type in types)
