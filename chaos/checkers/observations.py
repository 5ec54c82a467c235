"""What the simulated world tells its checkers: facts about stores, messages, processes and states, as frozen records.

They are observed outside the product: at the store itself, on the wire, at the ports of a worker. A checker that believed
what the job says of itself would prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec

from holdfast.barriers.jobgraph import JobGraph, Submission
from holdfast.barriers.messages import AcknowledgeCheckpoint, Answerable, NotifyCheckpointAborted, SubtaskStatus, WorkerCommand
from holdfast.statebackends.storage.port import Operation


class Stored(msgspec.Struct, frozen=True):
    """An operation took effect on a store (or was found to have none): seen at the store, not at its caller.

    What only reads, and could, and whose caller heard so, is not told: a third of all operations, and news to nobody. Lists of a
    folder are."""

    at_ms: int
    actor: str
    """Name of the process that asked, such as `coordinator-2`; it may be dead by now."""
    root: str
    operation: Operation
    result: Any
    """What the operation returns; an exception when it failed without effect."""
    removed: tuple[str, ...] = ()
    """Paths that are gone now."""
    added: tuple[str, ...] = ()
    """Paths that exist now and did not before."""
    fate: str = ""
    """What a fault made of it: `lie` and `late` (the caller was told of a failure), `postponed` (the caller is told of a failure
    now, and it comes `late`), `unsynced`, `partial`, `full`, `fail`; else nothing."""
    on_wire: bool = False
    """It went through the S3 shell, whose requests may have met with the fault, and the operation with none."""


class Requested(msgspec.Struct, frozen=True):
    """A worker's request left for the coordinator. `body` is a record of holdfast.barriers.messages."""

    at_ms: int
    actor: str
    request: str
    body: Any


class Answered(msgspec.Struct, frozen=True):
    """The coordinator answered a worker's request; `answer` may be an error."""

    at_ms: int
    actor: str
    receiver: str
    request: str
    answer: Any
    body: Any = None
    """What was asked: a request that came twice is answered twice, and its second answer behind a later request."""


class Commanded(msgspec.Struct, frozen=True):
    """The coordinator process put a command on a worker's stream."""

    at_ms: int
    actor: str
    epoch: int
    slot: int
    command: WorkerCommand


class Delivered(msgspec.Struct, frozen=True):
    """A worker process took a command, after its session's fencing and deduplication."""

    at_ms: int
    actor: str
    slot: int
    command: WorkerCommand


class Reported(msgspec.Struct, frozen=True):
    """A subtask acknowledged, declined or changed its state: what the worker's loop says, before any session or network."""

    at_ms: int
    actor: str
    slot: int
    item: SubtaskStatus | Answerable


class Remembered(msgspec.Struct, frozen=True):
    """A user's function ends, and remembers outside of its declared state what it did not when it was opened."""

    at_ms: int
    actor: str
    uid: str
    places: tuple[str, ...]


class Forged(msgspec.Struct, frozen=True):
    """A worker sends an acknowledgement that no task of ours sends; `real` is what its task said."""

    at_ms: int
    actor: str
    slot: int
    item: AcknowledgeCheckpoint
    real: AcknowledgeCheckpoint


class Impersonated(msgspec.Struct, frozen=True):
    """A process that no launcher started, or not as that worker, asks for a worker's slot."""

    at_ms: int
    actor: str
    slot: int


class SnapshotBegan(msgspec.Struct, frozen=True):
    """A subtask begins to take its part of a checkpoint: the cut is here."""

    at_ms: int
    actor: str
    attempt: int
    vertex: str
    subtask: int
    checkpoint_id: int
    aborts_unread: tuple[int, ...] = ()
    """Ids whose notices of an abort wait in its mailbox: it can't know of them yet."""
    firing: bool = False
    """It is between two slices of work such as the firing of a watermark."""


class ChannelEnded(msgspec.Struct, frozen=True):
    """A channel of a subtask ends; `aligning`: while the subtask waits for barriers, of this channel among others."""

    at_ms: int
    actor: str
    aligning: bool


class DataEnded(msgspec.Struct, frozen=True):
    """A subtask flushes what it has: all of its input has come, and nothing will."""

    at_ms: int
    actor: str
    attempt: int
    vertex: str
    subtask: int


class Listened(msgspec.Struct, frozen=True):
    """A coordinator process takes requests from now on."""

    at_ms: int
    actor: str


class Led(msgspec.Struct, frozen=True):
    """A coordinator process leads a job from now on: its recovery or its start is done."""

    at_ms: int
    actor: str
    job_id: str
    epoch: int
    submission: int
    graph: JobGraph


class Submitted(msgspec.Struct, frozen=True):
    """A driver asks a coordinator to start the job."""

    at_ms: int
    actor: str
    submission: Submission


class Lifecycle(msgspec.Struct, frozen=True):
    """A process was `started`, `killed`, `paused`, `cancelled` while it was paused, `resumed`, or has `left` by itself."""

    at_ms: int
    actor: str
    role: str
    """coordinator | worker | driver."""
    change: str
    crash_point: str = ""
    """For `killed`: the last point that it passed."""


class FaultBegan(msgspec.Struct, frozen=True):
    """A fault hit: index in the plan. One that never finds its target never begins."""

    at_ms: int
    index: int
    kind: str = ""


class PhaseBegan(msgspec.Struct, frozen=True):
    """`safety` (faults on), `liveness` (faults off), `quiet` (the job has ended and every process has done its work)."""

    at_ms: int
    phase: str


Observation: TypeAlias = (
    Stored
    | Requested
    | Answered
    | Commanded
    | Delivered
    | Remembered
    | Reported
    | Forged
    | Impersonated
    | SnapshotBegan
    | ChannelEnded
    | DataEnded
    | Listened
    | Led
    | Submitted
    | Lifecycle
    | FaultBegan
    | PhaseBegan
)


class StoreView(Protocol):
    """A store as it is now, read from outside: no latency, no faults, no traces."""

    root: str

    def peek(self, path: str) -> bytes | None:
        """Content of a file; None if it does not exist."""

    def size(self, path: str) -> int | None: ...

    def paths(self, prefix: str = "") -> list[str]:
        """Every file below a folder, sorted; paths relative to the root. Temporary files of the store itself are left out."""


class WorldView(Protocol):
    """What checkers may look at."""

    @property
    def job_id(self) -> str: ...

    @property
    def now_ms(self) -> int: ...

    @property
    def state(self) -> StoreView:
        """The state directory."""

    @property
    def jobs_live(self) -> bool:
        """A submission has no terminal result yet."""

    def store(self, location: str) -> StoreView:
        """The store at a location (an absolute path or URL), such as a sink's or a savepoint's parent."""

    @property
    def local_directory(self) -> str:
        """Of the workers' host; empty where a run uses none."""

    def workers(self) -> list[Any]:
        """Live worker processes (holdfast.chaos.cluster.worker_host.WorkerHost), by name."""

    def coordinators(self) -> list[Any]:
        """Live coordinator processes (holdfast.chaos.cluster.coordinator_host.CoordinatorHost), by name."""


Report: TypeAlias = Callable[[str, str], None]
"""(invariant, message) -> recorded as a ViolationRecord; the run ends at the first one."""


def aborts_unread(subtask: Any) -> tuple[int, ...]:
    """Ids whose notices of an abort wait in the mailbox of an operators.task.subtask.Subtask: it can't know of them yet."""
    return tuple(mail.checkpoint_id for mail in subtask.mailbox._mails if isinstance(mail, NotifyCheckpointAborted))
