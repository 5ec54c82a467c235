"""A small world for crash tests: leaders whose storage flows advance one operation at a time, over storage in a dict.

A leader may be killed between any two operations, or left running beside its successor. Workers obey the highest epoch they
have seen. The world keeps a ledger of what was committed and checks the invariants as things happen."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.barriers.jobgraph import JobGraph, RestartStrategy
from holdfast.barriers.launches import draw_secret
from holdfast.barriers.messages import (
    AckBatch,
    AcknowledgeCheckpoint,
    CancelTasks,
    CheckpointKind,
    Deploy,
    Deployment,
    FinishTasks,
    NotifyCheckpointComplete,
    Registered,
    RegisterWorker,
    ShutdownWorker,
    StatusBatch,
    SubtaskKey,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.dispatcher.storage_effects import Identity, StorageEffects
from holdfast.coordinator.dispatcher.submit import Starter, resume_submission, start_submission
from holdfast.coordinator.ha.recorded_job import Completed, decode_decision
from holdfast.coordinator.ha.records import RestorePoint, SavepointRecord
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.job import JobSetup
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.statebackends.errors import AmbiguousWriteError, HoldfastError, ObjectMissingError, StorageUnavailableError
from holdfast.statebackends.handles import FileHandle, OperatorListHandle, OperatorSubtaskState
from holdfast.statebackends.snapshot.metadata import decode_metadata
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.directory import storage_from_url
from holdfast.statebackends.storage.port import (
    DeleteFile,
    DeleteFolder,
    DescribeFiles,
    FileFacts,
    ListFiles,
    ListFolder,
    Operation,
    PutIfAbsent,
    ReadFile,
    StatFile,
    Storage,
    SyncFile,
    WriteFile,
    one_by_one,
)
from tests.coordinator.doubles import OFFSETS, stored_states, submission, word_count

JOB = "ab" * 16

decoded = functools.lru_cache(10_000)(decode_decision)
"""What stays as it is, and is asked for after every step."""


class DictStorage:
    """Files in a dict; may fail or turn ambiguous by a seeded coin."""

    root = "memory"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.now_ms = 0
        self.modified_ms: dict[str, int] = {}
        """Of files that were written when it was later than 0."""
        self.trouble: random.Random | None = None
        self.trouble_share = 0.0

    def at(self, location: str) -> Storage:
        return storage_from_url(location)

    def execute(self, operation: Operation) -> Any:
        fails = self.trouble is not None and self.trouble.random() < self.trouble_share
        if isinstance(operation, PutIfAbsent):
            if fails and self.trouble is not None:
                if self.trouble.random() < 0.5:
                    self._put(operation)
                raise AmbiguousWriteError("who knows", path=operation.path)
            return self._put(operation)
        if fails:
            raise StorageUnavailableError("storage is away", path=str(operation))
        match operation:
            case WriteFile():
                self.files[operation.path] = b"".join(bytes(chunk) for chunk in operation.chunks)
                self.modified_ms[operation.path] = self.now_ms
                return len(self.files[operation.path])
            case ReadFile():
                if operation.path not in self.files:
                    raise ObjectMissingError(operation.path, path=operation.path)
                stop = None if operation.length is None else operation.offset + operation.length
                return self.files[operation.path][operation.offset : stop]
            case SyncFile():
                return operation.path in self.files
            case StatFile():
                return len(self.files[operation.path]) if operation.path in self.files else None
            case ListFiles():
                return sorted(path for path in self.files if path.startswith(f"{operation.prefix}/"))
            case DescribeFiles():
                prefix = f"{operation.prefix}/" if operation.prefix else ""
                paths = sorted(path for path in self.files if path.startswith(prefix))
                return [FileFacts(path, len(self.files[path]), self.modified_ms.get(path, 0)) for path in paths]
            case ListFolder():
                prefix = f"{operation.prefix}/" if operation.prefix else ""
                rests = (path.removeprefix(prefix) for path in self.files if path.startswith(prefix))
                return sorted({rest.partition("/")[0] + "/" * ("/" in rest) for rest in rests})
            case DeleteFile():
                return self.files.pop(operation.path, None) is not None
            case DeleteFolder():
                gone = [path for path in self.files if path.startswith(f"{operation.prefix}/")]
                for path in gone:
                    del self.files[path]
                return len(gone)
            case _:
                raise AssertionError(operation)

    def _put(self, operation: PutIfAbsent) -> bool:
        if operation.path in self.files:
            return False
        self.files[operation.path] = operation.data
        self.modified_ms[operation.path] = self.now_ms
        return True

    def completed(self, job_id: str) -> dict[int, str]:
        """Completed recovery points as storage has them: id -> folder of the snapshot."""
        found: dict[int, str] = {}
        for path, content in self.files.items():
            if not path.endswith("/_metadata"):
                continue
            parts = path.split("/")
            if len(parts) == 3 and parts[0] == job_id and f"{job_id}/{parts[1]}/_claim" in self.files:
                decision = decoded(content)
                if isinstance(decision, Completed):
                    found[decision.checkpoint_id] = f"{job_id}/{parts[1]}"
                elif isinstance(decision, SavepointRecord) and decision.kind is not CheckpointKind.SAVEPOINT:
                    found[decision.checkpoint_id] = decision.folder
        return found


class Steps:
    """A flow that is driven one operation at a time."""

    def __init__(self, flow: Any, storage: Any) -> None:
        self._flow = one_by_one(flow)
        self._storage = storage
        self.done = False
        self.value: Any = None
        self._operation = self._advance(lambda: next(self._flow))

    def step(self) -> None:
        """Perform the operation that is due."""
        operation = self._operation
        try:
            result = self._storage.execute(operation)
        except HoldfastError as caught:
            error = caught
            self._operation = self._advance(lambda: self._flow.throw(error))
        else:
            self._operation = self._advance(lambda: self._flow.send(result))

    def run(self) -> Any:
        while not self.done:
            self.step()
        return self.value

    def _advance(self, resume: Any) -> Any:
        try:
            return resume()
        except StopIteration as stop:
            self.done, self.value = True, stop.value
            return None


@dataclass
class Leader:
    """One coordinator process, as far as this job goes."""

    epoch: int
    master: JobMaster
    effects: StorageEffects
    flows: list[Steps] = field(default_factory=list)


@dataclass
class Worker:
    slot: int
    task_attempt: int = 0
    epoch: int = 0
    session: str = ""
    attempt: int = 0
    deployment: Deployment | None = None
    statuses: dict[SubtaskKey, SubtaskStatus] = field(default_factory=dict)
    gone: bool = False

    @property
    def nonce(self) -> str:
        return f"{self.slot}-{self.task_attempt}"


class World:
    """One job of two slots. Call the steps in any order; `check` holds after each."""

    def __init__(
        self,
        seed: int,
        *,
        trouble_share: float = 0.0,
        storage: DictStorage | None = None,
        asked: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`storage`: one that holds something already; `asked`: further fields of the submission."""
        self.random = random.Random(seed)
        self.storage = storage or DictStorage()
        restart = RestartStrategy("fixed_delay")  # the pauses of repeated failures would outlast the time that a test has
        self.graph: JobGraph = word_count(checkpoint_interval_ms=10, checkpoint_timeout_ms=200, restart=restart, **settings)
        self.now = 0
        self.leaders: list[Leader] = []
        self.workers = [Worker(0), Worker(1)]
        self.committed: list[tuple[int, int]] = []
        """(attempt, checkpoint id) of each notice that a worker acted on."""
        self.deployed: dict[int, int] = {}
        """attempt -> restored id"""
        self.claimed: set[int] = set()
        self.tickets = 0
        self.answers: dict[int, Any] = {}
        self.base: RestorePoint | None = None
        """What the submission started from, which is another's."""
        flow = start_submission(JOB, submission(self.graph, job_id=JOB, **(asked or {})), self._starter())
        self._lead(Steps(flow, self.storage).run())
        self.storage.trouble, self.storage.trouble_share = random.Random(seed + 1), trouble_share

    # -- leaders

    def _starter(self) -> Starter:
        return Starter(f"{self.random.getrandbits(64):x}", "", "directory", self.now)

    def _lead(self, setup: JobSetup) -> None:
        self.base = setup.base
        nonce = f"{self.random.getrandbits(64):x}"
        identity = Identity(JOB, setup.epoch, nonce, setup.submission, setup.graph)
        master = JobMaster(setup, rng=random.Random(self.random.getrandbits(32)), draw_secret=draw_secret)
        leader = Leader(setup.epoch, master, StorageEffects(identity, lambda: self.now))
        self.leaders.append(leader)
        self.feed(leader, job_events.JobStarted())

    def feed(self, leader: Leader, event: job_events.Event) -> None:
        for action in leader.master.handle(event, now_ms=self.now, wall_ms=self.now):
            match action:
                case job_actions.Answer():
                    self.answers[action.ticket] = action.value
                case job_actions.Refuse():
                    self.answers[action.ticket] = action.error
                case job_actions.Deliver():
                    worker = self.workers[action.slot]
                    for numbered in action.commands:
                        if worker.session == action.session and numbered.epoch >= worker.epoch:
                            self._follow(leader, worker, numbered.command)
                case job_actions.CloseStream() | job_actions.LookForProcess() | job_actions.JobEnded():
                    pass
                case actions.TriggerHook() | job_actions.RestoreHook():
                    raise AssertionError("no job of this world names a master hook")
                case _:
                    leader.flows.append(Steps(leader.effects.flow(action), self.storage))
        self.check()

    def call(self, leader: Leader, make: Any) -> Any:
        self.tickets += 1
        ticket = self.tickets
        self.feed(leader, make(ticket))
        return self.answers.pop(ticket, None)

    # -- steps

    def step_flow(self, leader: Leader) -> None:
        """One operation of one flow; its outcome goes back when it ends."""
        if not leader.flows:
            return
        flow = self.random.choice(leader.flows)
        if not flow.done:
            flow.step()
        if flow.done:
            leader.flows.remove(flow)
            if flow.value is not None:
                self.feed(leader, flow.value)
        self.check()

    def pass_time(self, leader: Leader, by_ms: int) -> None:
        self.now += by_ms
        self.feed(leader, events.DeadlineReached())

    def register(self, leader: Leader, worker: Worker) -> None:
        """A worker turns to a leader; it never goes back to a lower epoch."""
        if leader.epoch < worker.epoch:
            return
        message = RegisterWorker(
            JOB, worker.slot, 1, worker.task_attempt, worker.nonce, 1, "host", f"tcp://{worker.slot}:1", "directory",
            worker.attempt, tuple(worker.statuses.values()),
        )  # fmt: skip
        registered = self.call(leader, lambda ticket: job_events.RegistrationReceived(ticket, message))
        if not isinstance(registered, Registered):
            return
        worker.epoch, worker.session = registered.epoch, registered.session
        if registered.attempt > worker.attempt:
            self._follow(leader, worker, CancelTasks(registered.attempt - 1))
        if registered.deployment is not None:
            self._follow(leader, worker, Deploy(registered.deployment))
        elif registered.attempt == worker.attempt and registered.newest_completed:
            self._commit(worker, registered.newest_completed)
        session = worker.session
        commands = self.call(leader, lambda ticket: job_events.StreamOpened(ticket, worker.slot, session, 0))
        for numbered in commands if isinstance(commands, tuple) else ():
            self._follow(leader, worker, numbered.command)

    def kill_worker(self, leader: Leader, slot: int) -> None:
        older = self.workers[slot]
        self.workers[slot] = Worker(slot, older.task_attempt + 1, epoch=older.epoch)
        self.register(leader, self.workers[slot])

    def take_over(self, *, steps: int | None = None) -> bool:
        """A new leader reads the directory; killed after `steps` operations, if given. True if it leads."""
        flow = Steps(resume_submission(JOB, self._starter()), self.storage)
        while not flow.done:
            if steps is not None and steps <= 0:
                return False
            steps = None if steps is None else steps - 1
            try:
                flow.step()
            except HoldfastError:
                return False
        self._lead(flow.value)
        return True

    # -- what workers do

    def _follow(self, leader: Leader, worker: Worker, command: WorkerCommand | None) -> None:
        match command:
            case Deploy(deployment=deployment):
                if deployment.attempt > worker.attempt:
                    self._deploy(leader, worker, deployment)
            case CancelTasks(attempt=attempt):
                if 0 < worker.attempt <= attempt:
                    self._report(leader, worker, TaskState.CANCELED)
            case TriggerCheckpoint():
                if command.attempt == worker.attempt:
                    self._snapshot(leader, worker, command)
            case NotifyCheckpointComplete():
                if command.attempt == worker.attempt:
                    self._commit(worker, command.checkpoint_id)
            case FinishTasks():
                if command.attempt == worker.attempt:
                    self._report(leader, worker, TaskState.FINISHED)
            case ShutdownWorker():
                worker.gone = True

    def _deploy(self, leader: Leader, worker: Worker, deployment: Deployment) -> None:
        restored = deployment.restored_checkpoint_id
        assert self.deployed.setdefault(deployment.attempt, restored) == restored
        for attempt, number in self.committed:
            assert attempt >= deployment.attempt or number <= restored, f"attempt {deployment.attempt} rewinds below {number} (I22)"
        if restored:
            metadata = decode_metadata(self.storage.files[f"{deployment.restored_folder}/_metadata"], "")
            for operator in metadata.operators:
                for subtask in operator.subtasks:
                    for handle in subtask.operator:
                        assert isinstance(handle.part, FileHandle)
                        path = f"{deployment.restored_folder}/{handle.part.path}"
                        assert path in self.storage.files, "a hole in a snapshot (I11)"
        worker.attempt, worker.deployment = deployment.attempt, deployment
        worker.statuses = {SubtaskKey(task.vertex, task.subtask): None for task in deployment.subtasks}  # type: ignore[misc]
        self._report(leader, worker, TaskState.RUNNING)

    def _report(self, leader: Leader, worker: Worker, state: TaskState) -> None:
        worker.statuses = {key: SubtaskStatus(worker.attempt, key.vertex, key.subtask, state) for key in worker.statuses}
        batch = StatusBatch(worker.epoch, worker.slot, worker.session, tuple(worker.statuses.values()))
        self.call(leader, lambda ticket: job_events.StatesReceived(ticket, batch))

    def _snapshot(self, leader: Leader, worker: Worker, command: TriggerCheckpoint) -> None:
        if self.random.random() < 0.1:
            return  # the acknowledgement never comes
        items = []
        for key in sorted(worker.statuses):
            states = self._states(worker, key, command)
            if states is None:
                return
            items.append(AcknowledgeCheckpoint(worker.attempt, command.checkpoint_id, key.vertex, key.subtask, states))
        batch = AckBatch(worker.epoch, worker.slot, worker.session, tuple(items))
        self.call(leader, lambda ticket: job_events.AckBatchReceived(ticket, batch))

    def _states(self, worker: Worker, key: SubtaskKey, command: TriggerCheckpoint) -> dict[str, OperatorSubtaskState] | None:
        """What one subtask stores; None if its worker says nothing more of this checkpoint."""
        if key.vertex != self.graph.vertices[0].vertex_id:
            return stored_states(self.graph, key, savepoint=command.kind.is_savepoint)
        name = f"source-{key.subtask}-{worker.attempt}-{worker.nonce}-offsets"
        self.storage.files[f"{command.folder}/{name}"] = b"12345"
        part = FileHandle(name, 5, checksum_of(b"12345"))
        return {"source": OperatorSubtaskState(operator=(OperatorListHandle(OFFSETS, part, 1),))}

    def _commit(self, worker: Worker, number: int) -> None:
        """Side effects up to `number` become visible: the moment that everything else exists for."""
        known = {**self.storage.completed(JOB), **({self.base.checkpoint_id: self.base.folder} if self.base is not None else {})}
        assert number in known or any(other > number for other in known), f"{number} is announced and not stored (I14)"
        for attempt, restored in self.deployed.items():
            assert attempt <= worker.attempt or number <= restored, f"{number} commits what attempt {attempt} replays (I18)"
        self.committed.append((worker.attempt, number))

    # -- invariants

    def check(self) -> None:
        for path in self.storage.files:
            if path.endswith("/_claim"):
                self.claimed.add(int(path.split("/")[1].removeprefix("chk-")))

    def garbage(self) -> Iterator[str]:
        """Files of ids that are not completed, except for claims and decisions."""
        kept = {f"{JOB}/chk-{number}" for number in self.storage.completed(JOB)}
        for path in sorted(self.storage.files):
            folder, _, name = path.rpartition("/")
            if "/chk-" in folder and folder not in kept and name not in ("_claim", "_metadata"):
                yield path
