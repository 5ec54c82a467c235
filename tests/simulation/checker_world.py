"""A world for tests of the checkers: stores in dicts, and a story of one job, told step by step as observations.

Each step does to the store what it says and lets every checker hear of it; a test tells a good story up to a point, and then one
thing that must not be."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.barriers.jobgraph import JobConfig, JobGraph, JobVertex, OperatorDescription, Submission
from holdfast.barriers.messages import (
    AcknowledgeCheckpoint,
    CheckpointKind,
    Deploy,
    Deployment,
    FailureReason,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    SubtaskDeployment,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
    WorkerCommand,
)
from holdfast.chaos.checkers import make_checkers
from holdfast.chaos.checkers.observations import (
    Commanded,
    Delivered,
    Led,
    Lifecycle,
    Observation,
    PhaseBegan,
    Reported,
    Stored,
    StoreView,
)
from holdfast.chaos.workloads.scenario import Scenario, SinkExpectation
from holdfast.coordinator.ha.records import (
    AbortRecord,
    AttemptRecord,
    BackoffRecord,
    ClaimRecord,
    LeaderRecord,
    RestorePoint,
    ResultRecord,
    SavepointRecord,
    SubmissionRecord,
    encode_record,
)
from holdfast.statebackends.errors import StorageUnavailableError
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
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.checksums import checksum_of
from holdfast.statebackends.storage.port import DeleteFile, Operation, PutIfAbsent, WriteFile

JOB = "5" * 32
STATE, OUT, SAVEPOINTS = "/state", "/out", "/savepoints"
MAX_PARALLELISM = 4
POSITIONS = StateMeta("positions", "operator_list", "bytes")
COUNTS = StateMeta("counts", "value", "int", "int64")


class DictView:
    """Implements `StoreView`."""

    def __init__(self, files: dict[str, bytes], root: str) -> None:
        self.root = root
        self._files = files

    def peek(self, path: str) -> bytes | None:
        return self._files.get(f"{self.root}/{path}")

    def size(self, path: str) -> int | None:
        content = self.peek(path)
        return None if content is None else len(content)

    def paths(self, prefix: str = "") -> list[str]:
        start = f"{self.root}/{prefix.rstrip('/')}/" if prefix else f"{self.root}/"
        return sorted(path[len(self.root) + 1 :] for path in self._files if path.startswith(start))


def graph(parallelism: int = 1, **config: Any) -> JobGraph:
    """A source and a keyed count, as two vertices of so many subtasks each."""
    vertices = tuple(
        JobVertex(uid * 6, uid, parallelism, MAX_PARALLELISM, (OperatorDescription(uid, uid, uid, kind),))
        for uid, kind in (("source", "source"), ("count", "process"))
    )
    return JobGraph("job", vertices, (), JobConfig(**config))


@dataclass
class Story:
    """The job so far. `tell` lets the checkers hear; what they report is in `violations`."""

    sinks: tuple[SinkExpectation, ...] = (SinkExpectation(OUT, "ledger", None, ordered_by=(0, 1), steps_by_one=True),)
    cuts: tuple[Any, ...] = ()
    parallelism: int = 1
    now_ms: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    violations: list[tuple[str, str]] = field(default_factory=list)
    epoch: int = 0
    attempt: int = 0
    restarts: dict[int, int] = field(default_factory=dict)
    """Submission -> restarts on record with its newest attempt."""
    job_id: str = JOB
    jobs_live: bool = True
    live_workers: list[Any] = field(default_factory=list)
    local_directory: str = ""
    live_coordinators: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph = graph(self.parallelism)
        self.scenario = Scenario(plan=lambda _: None, records=0, sinks=self.sinks, operators=("count",), cuts=self.cuts)  # type: ignore[arg-type, return-value]
        self.checkers = make_checkers(self, self.scenario, lambda invariant, message: self.violations.append((invariant, message)))
        self.claims: dict[int, ClaimRecord] = {}
        self.metadata: dict[int, SnapshotMetadata] = {}
        self.entries = 0

    # ---------------------------------------------------------------------------------------------------- as WorldView

    @property
    def state(self) -> StoreView:
        return DictView(self.files, STATE)

    def fork_stores(self) -> dict[str, bytes]:
        return dict(self.files)

    def store(self, location: str) -> StoreView:
        return DictView(self.files, location.rstrip("/"))

    def workers(self) -> list[Any]:
        return self.live_workers

    def coordinators(self) -> list[Any]:
        return self.live_coordinators

    # ------------------------------------------------------------------------------------------------------ telling

    @property
    def broken(self) -> list[str]:
        """Invariants that were reported, in order."""
        return [invariant for invariant, _ in self.violations]

    def tell(self, observation: Observation) -> None:
        self.now_ms += 1
        for checker in self.checkers:
            if isinstance(observation, checker.hears):
                checker.observe(observation)

    def look(self) -> None:
        for checker in self.checkers:
            checker.look()

    def end(self) -> None:
        self.tell(PhaseBegan(self.now_ms, "quiet"))
        for checker in self.checkers:
            checker.at_end()

    def _stored(
        self,
        root: str,
        operation: Operation,
        result: Any,
        removed: tuple[str, ...] = (),
        added: tuple[str, ...] = (),
        actor: str = "",
    ) -> None:
        actor = actor or (f"coordinator-{self.epoch}" if root == STATE else "worker-0.1")
        self.tell(Stored(self.now_ms, actor, root, operation, result, removed, added))

    def put(self, path: str, content: bytes, root: str = STATE) -> bool:
        """Put-if-absent."""
        created = f"{root}/{path}" not in self.files
        if created:
            self.files[f"{root}/{path}"] = content
        self._stored(root, PutIfAbsent(path, content), created, added=(path,) if created else ())
        return created

    def write(self, path: str, content: bytes, root: str = STATE) -> FileHandle:
        self.files[f"{root}/{path}"] = content
        self._stored(root, WriteFile(path, [content]), len(content), added=(path,))
        return FileHandle(path.rpartition("/")[2], len(content), checksum_of(content))

    def delete(self, path: str, root: str = STATE, *, actor: str = "") -> None:
        """`actor`: other than whoever leads."""
        existed = self.files.pop(f"{root}/{path}", None) is not None
        self._stored(root, DeleteFile(path), existed, removed=(path,) if existed else (), actor=actor)

    def lose_power(self, *lost: str) -> None:
        """Everything dies, and these files of the state directory are gone."""
        for path in lost:
            del self.files[f"{STATE}/{path}"]
        self.tell(Lifecycle(self.now_ms, "store", "store", "power_loss"))

    # -------------------------------------------------------------------------------------------------------- the job

    def lead(self, epoch: int | None = None) -> None:
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self.put(f"{JOB}/leader/{self.epoch}", encode_record(LeaderRecord(self.epoch, f"n{self.epoch}")))

    def submit(
        self,
        number: int = 1,
        base: RestorePoint | None = None,
        first: int = 1,
        *,
        repeat: bool = False,
        restore: str | None = None,
        driver: str = "",
    ) -> None:
        told = Submission(self.graph, allow_output_repeat=repeat, restore=restore, driver_nonce=driver)
        record = SubmissionRecord(number, self.epoch, told, base, first, f"n{self.epoch}")
        self.submission = number
        self.put(f"{JOB}/submissions/{number}.json", encode_record(record))
        self.tell_led()

    def tell_led(self) -> None:
        """The leader leads the submission; its wall clock shows virtual time."""
        self.tell(Led(self.now_ms, f"coordinator-{self.epoch}", JOB, self.epoch, self.submission, self.graph, self.now_ms))

    def begin(self) -> None:
        """A leader, a submission, and its first attempt."""
        self.lead()
        self.submit()
        self.record_attempt(0)
        self.deploy()

    def record_attempt(
        self,
        restored: int,
        attempt: int | None = None,
        folder: str | None = None,
        *,
        restarts: int | None = None,
        backoff: BackoffRecord | None = None,
    ) -> None:
        """`restarts`: None: one more than before, in the same submission."""
        self.attempt = self.attempt + 1 if attempt is None else attempt
        if restarts is None:
            restarts = self.restarts.get(self.submission, -1) + 1
        self.restarts[self.submission] = restarts
        point = RestorePoint(restored, folder or self.folder(restored), 0) if restored else None
        record = AttemptRecord(self.attempt, self.epoch, self.submission, "", self.parallelism, point, restarts, f"n{self.epoch}")
        record = msgspec.structs.replace(record, backoff=backoff)
        self.put(f"{JOB}/attempts/{self.attempt}.json", encode_record(record))

    def deployment(self, slot: int, restored: int = 0) -> Deployment:
        """What a slot is given: the whole state of its index, as it was."""
        metadata = self.metadata.get(restored)
        operators = {operator.uid: operator for operator in metadata.operators} if metadata is not None else {}
        return Deployment(
            self.attempt,
            self.graph,
            tuple(
                SubtaskDeployment(
                    vertex.vertex_id,
                    slot,
                    {each.uid: operators[each.uid].subtasks[slot] for each in vertex.operators if each.uid in operators},
                )
                for vertex in self.graph.vertices
            ),
            {},
            restored_checkpoint_id=restored,
        )

    def deploy(self, restored: int = 0) -> None:
        for slot in range(self.parallelism):
            command = Deploy(self.deployment(slot, restored))
            self.command(command, slot)
            self.deliver(command, slot)

    def command(self, command: WorkerCommand, slot: int = 0) -> None:
        self.tell(Commanded(self.now_ms, f"coordinator-{self.epoch}", self.epoch, slot, command))

    def deliver(self, command: WorkerCommand, slot: int = 0, actor: str | None = None) -> None:
        self.tell(Delivered(self.now_ms, actor or f"worker-{slot}.1", slot, command))

    def folder(self, number: int) -> str:
        return self.claims[number].folder if number in self.claims else f"{JOB}/chk-{number}"

    def claim(self, number: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT, **fields: Any) -> ClaimRecord:
        savepoint = kind in (CheckpointKind.SAVEPOINT, CheckpointKind.STOP_SAVEPOINT)
        folder = f"{SAVEPOINTS}/savepoint-{number}" if savepoint else f"{JOB}/chk-{number}"
        record = ClaimRecord(number, self.epoch, self.submission, self.attempt, kind, folder, f"n{self.epoch}", **fields)
        self.claims[number] = record
        self.put(f"{JOB}/chk-{number}/_claim", encode_record(record))
        return record

    def trigger(self, number: int) -> None:
        claim = self.claims[number]
        self.command(TriggerCheckpoint(claim.attempt, number, 0, claim.kind, claim.folder))

    def states(self, number: int, index: int) -> dict[str, dict[str, OperatorSubtaskState]]:
        """vertex -> uid -> what subtask `index` stores: a position inline, and its keyed state in a file."""
        claim = self.claims[number]
        root = SAVEPOINTS if claim.folder.startswith(SAVEPOINTS) else STATE
        relative = claim.folder.removeprefix(f"{SAVEPOINTS}/")
        handle = self.write(f"{relative}/count-{index}-{claim.attempt}", f"state of {number} {index}".encode(), root)
        width = MAX_PARALLELISM // self.parallelism
        groups = KeyGroupRange(index * width, (index + 1) * width)
        position = OperatorListHandle(POSITIONS, InlineHandle(msgspec.msgpack.encode([b"%d %d" % (number, index)])), 1)
        return {
            "source" * 6: {"source": OperatorSubtaskState(operator=(position,))},
            "count" * 6: {"count": OperatorSubtaskState(keyed=(KeyedStateHandle(groups, "arrow", (COUNTS,), (handle,)),))},
        }

    def acknowledge(self, number: int) -> dict[str, list[OperatorSubtaskState]]:
        """Every subtask acknowledges; uid -> state of each."""
        found: dict[str, list[OperatorSubtaskState]] = {}
        for index in range(self.parallelism):
            for vertex, states in self.states(number, index).items():
                ack = AcknowledgeCheckpoint(self.claims[number].attempt, number, vertex, index, states)
                self.tell(Reported(self.now_ms, f"worker-{index}.1", index, ack))
                for uid, state in states.items():
                    found.setdefault(uid, []).append(state)
        return found

    def snapshot(self, number: int, states: dict[str, list[OperatorSubtaskState]], **fields: Any) -> SnapshotMetadata:
        claim = self.claims[number]
        kinds: dict[CheckpointKind, Any] = {
            CheckpointKind.SAVEPOINT: "savepoint",
            CheckpointKind.STOP_SAVEPOINT: "stop_savepoint",
        }
        named: dict[str, Any] = {"attempt": claim.attempt, "epoch": claim.epoch, "checkpoint_id": number, **fields}
        return SnapshotMetadata(
            job_id=JOB,
            job_name="job",
            kind=kinds.get(claim.kind, "checkpoint"),
            trigger_timestamp_ms=0,
            completion_timestamp_ms=0,
            operators=tuple(
                OperatorState(uid, "1", uid, self.parallelism, MAX_PARALLELISM, tuple(states[uid])) for uid in ("source", "count")
            ),
            **named,
        )

    def decide(self, number: int, metadata: SnapshotMetadata) -> None:
        """COMPLETED is stored."""
        claim = self.claims[number]
        self.metadata[number] = metadata
        content = encode_metadata(metadata)
        if claim.folder.startswith(SAVEPOINTS):
            self.put(f"{claim.folder.removeprefix(f'{SAVEPOINTS}/')}/_metadata", content, SAVEPOINTS)
            record = SavepointRecord(number, claim.folder, claim.kind, 0, claim.epoch, "n")
            content = encode_record(record)
        self.put(f"{JOB}/chk-{number}/_metadata", content)

    def complete(self, number: int, kind: CheckpointKind = CheckpointKind.CHECKPOINT, **fields: Any) -> None:
        """From the claim to the notice."""
        self.claim(number, kind)
        self.trigger(number)
        self.decide(number, self.snapshot(number, self.acknowledge(number), **fields))
        if kind is not CheckpointKind.SAVEPOINT:
            self.notify(number)

    def notify(self, number: int) -> None:
        command = NotifyCheckpointComplete(self.claims[number].attempt, number, 0)
        for slot in range(self.parallelism):
            self.command(command, slot)
            self.deliver(command, slot)

    def abort(self, number: int, epoch: int | None = None, reason: FailureReason = FailureReason.EXPIRED) -> None:
        """ABORTED is stored."""
        record = AbortRecord(number, reason, epoch or self.epoch, "n")
        self.put(f"{JOB}/chk-{number}/_metadata", encode_record(record))

    def fail_call(self, actor: str, error: Exception | None = None, fate: str = "") -> None:
        """A call of a store fails whoever made it."""
        operation = WriteFile(f"{JOB}/chk-2/count-0-1", (b"",))
        error = error or StorageUnavailableError("no", path=operation.path)
        self.tell(Stored(self.now_ms, actor, STATE, operation, error, fate=fate))

    def notify_aborted(self, number: int) -> None:
        self.command(NotifyCheckpointAborted(self.attempt, number))

    def drop(self, number: int) -> None:
        self.delete(f"{JOB}/chk-{number}/_claim")
        for path in self.state.paths(f"{JOB}/chk-{number}"):
            self.delete(path)

    def fail_over(self, restored: int) -> None:
        self.record_attempt(restored)
        self.deploy(restored)

    def finish(self, newest: int) -> None:
        """The result is stored, and every checkpoint is dropped."""
        last = max(self.claims, default=0)
        self.put(
            f"{JOB}/results/{self.submission}.json",
            encode_record(ResultRecord(self.submission, "FINISHED", self.epoch, "n", last, newest)),
        )
        self.jobs_live = False
        for number in sorted(self.metadata):
            if not self.claims[number].folder.startswith(SAVEPOINTS):
                self.drop(number)

    # ----------------------------------------------------------------------------------------------------------- sinks

    def stage(self, name: str, *rows: tuple[int, int]) -> None:
        target = io.BytesIO()
        table = pa.table({"key": pa.array([key for key, _ in rows]), "seq": pa.array([seq for _, seq in rows])})
        pq.write_table(table, target)
        self.write(f"_holdfast/ledger/staged/{name}", target.getvalue(), OUT)

    def staged_name(self, first: int, sequence: int = 0, attempt: int | None = None) -> str:
        return f"part-ledger-00000000-a{attempt or self.attempt}-s0-c{first}-abc-{sequence:05d}.parquet"

    def commit(self, checkpoint: int, *names: str, publish: bool = True) -> None:
        """Link, entry, publish, and delete what was staged."""
        staged, data = "_holdfast/ledger/staged", "_holdfast/ledger/data"
        for name in names:
            if f"{OUT}/{staged}/{name}" in self.files:
                self.write(f"{data}/{name}", self.files[f"{OUT}/{staged}/{name}"], OUT)
        self.log("commit", checkpoint_id=checkpoint, attempt=self.attempt, files=[self._staged_file(name) for name in names])
        for name in names if publish else ():
            self.write(name, self.files[f"{OUT}/{data}/{name}"], OUT)
            self.delete(f"{staged}/{name}", OUT)

    def _staged_file(self, name: str) -> dict[str, Any]:
        content = self.files.get(f"{OUT}/_holdfast/ledger/data/{name}")
        return {"name": name, "rows": 0 if content is None else pq.read_table(pa.BufferReader(content)).num_rows}

    def log(self, kind: str, **fields: Any) -> None:
        self.put(f"_holdfast/ledger/log/{self.entries:012d}.json", json.dumps({"type": kind, **fields}).encode(), OUT)
        self.entries += 1

    def report(self, state: TaskState, attempt: int | None = None, actor: str = "worker-0.1") -> None:
        """A subtask says how it is."""
        self.tell(Reported(self.now_ms, actor, 0, SubtaskStatus(attempt or self.attempt, "count" * 6, 0, state)))


def ledger(*rows: tuple[int, int]) -> tuple[SinkExpectation, ...]:
    """One sink that must hold these rows."""
    return (SinkExpectation(OUT, "ledger", lambda: Counter(rows), ordered_by=(0, 1), steps_by_one=True),)


def process(name: str, **parts: Any) -> SimpleNamespace:
    """A host of `WorldView.workers` or `coordinators`."""
    return SimpleNamespace(process=SimpleNamespace(name=name, paused=False), **parts)
