"""Facts of the simulated world for its checkers: stores, messages, processes and states, as frozen records.

They are observed outside the product: at the store itself, on the wire, at the ports of a worker. What the job says of itself is no
proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec

from holdfast.barriers.jobgraph import JobGraph, Submission
from holdfast.barriers.messages import AcknowledgeCheckpoint, Answerable, NotifyCheckpointAborted, SubtaskStatus, WorkerCommand
from holdfast.statebackends.storage.port import Operation


class Stored(msgspec.Struct, frozen=True):
    """An operation took effect on a store, or was found to have none; observed at the store, not at its caller.

    Successful reads are left out (a third of all operations); listings of folders are not."""

    at_ms: int
    actor: str
    """Process that asked, such as `coordinator-2`; it may be dead."""
    root: str
    operation: Operation
    result: Any
    """Result of the operation; an exception if it failed without effect."""
    removed: tuple[str, ...] = ()
    """Paths removed by it."""
    added: tuple[str, ...] = ()
    """Paths created by it."""
    fate: str = ""
    """Effect of a fault: `lie` and `late` (its caller saw a failure), `postponed` (its caller sees a failure now, and it comes
    `late`), `unsynced`, `partial`, `full`, `fail`; empty without one."""
    on_wire: bool = False
    """It went through the S3 shell: the fault hit its requests, not the operation as a whole."""


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
    """Body of the request: a repeated request is answered twice, and the second answer may follow a later request."""


class Commanded(msgspec.Struct, frozen=True):
    """The coordinator put a command on a worker's stream."""

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
    """A subtask acknowledged, declined or changed its state; taken at the worker's loop, before any session or network."""

    at_ms: int
    actor: str
    slot: int
    item: SubtaskStatus | Answerable


class Remembered(msgspec.Struct, frozen=True):
    """A user's function holds data outside of its declared state at its end that it did not hold when it was opened."""

    at_ms: int
    actor: str
    uid: str
    places: tuple[str, ...]


class Forged(msgspec.Struct, frozen=True):
    """A worker sends a forged acknowledgement; `real` is the one of its task."""

    at_ms: int
    actor: str
    slot: int
    item: AcknowledgeCheckpoint
    real: AcknowledgeCheckpoint


class Impersonated(msgspec.Struct, frozen=True):
    """A process that no launcher started, or not as that worker, registers for a worker's slot."""

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
    """Ids whose notices of an abort wait in its mailbox, unread."""
    firing: bool = False
    """It is between two slices of work, such as the firing of a watermark."""


class ChannelEnded(msgspec.Struct, frozen=True):
    """A channel of a subtask ends. `aligning`: while the subtask waits for barriers, this channel's among others."""

    at_ms: int
    actor: str
    aligning: bool


class AllocationMoved(msgspec.Struct, frozen=True):
    """A channel of a subtask grants another number of bytes than before."""

    at_ms: int
    actor: str
    before: int
    after: int


class Overtook(msgspec.Struct, frozen=True):
    """A barrier of a subtask has overtaken what waits at one side of it."""

    at_ms: int
    actor: str
    attempt: int
    vertex: str
    subtask: int
    checkpoint_id: int
    side: str
    """`input`: what its gate holds; `output`: what one of its outputs does, and something was there."""
    switched: bool
    """It was aligned until then."""
    in_hand: bool
    """Rows of a batch that had begun were left."""
    again: bool
    """What an older snapshot held in flight waits still."""


class CollectingAborted(msgspec.Struct, frozen=True):
    """A subtask gives up a checkpoint that has overtaken, while barriers of other channels are to come."""

    at_ms: int
    actor: str
    attempt: int
    vertex: str
    subtask: int
    checkpoint_id: int


class InFlightRestored(msgspec.Struct, frozen=True):
    """A subtask puts what was in flight in front of one of its channels."""

    at_ms: int
    actor: str
    attempt: int
    vertex: str
    subtask: int
    channel: int
    """Index in its gate."""
    rows: tuple[tuple[Any, ...], ...]
    """In order; the timestamp last, if they have one."""
    events: int = 0
    """Watermarks and statuses among them."""


class TakenOutOfTurn(msgspec.Struct, frozen=True):
    """A gate hands out a batch while others, which were restored, have to come before it."""

    at_ms: int
    actor: str
    attempt: int
    vertex: str
    subtask: int
    channel: int
    waiting: int
    """Batches that should have come before."""


class DataEnded(msgspec.Struct, frozen=True):
    """A subtask flushes: all of its input has come."""

    at_ms: int
    actor: str
    attempt: int
    vertex: str
    subtask: int


class EmittedBehind(msgspec.Struct, frozen=True):
    """A row left an operator behind a watermark that was forwarded, and neither a late record nor a timer brought it."""

    at_ms: int
    actor: str
    uid: str
    subtask: int
    timestamp_ms: int
    watermark_ms: int


class HookFailing(msgspec.Struct, frozen=True):
    """A master hook of a coordinator process fails a call, or does not answer it in time."""

    at_ms: int
    actor: str
    checkpoint_id: int


class Listened(msgspec.Struct, frozen=True):
    """A coordinator process accepts requests from now on."""

    at_ms: int
    actor: str


class Claimed(msgspec.Struct, frozen=True):
    """A member asks for the epoch behind the active member's, and what it had to go by: its looks at storage, its probes, and the
    lock of its host, as its ports have them."""

    at_ms: int
    actor: str
    epoch: int
    has_left: bool
    """The active member's last sign says so."""
    unchanged_ms: int
    """Time between the first and the last of its looks that saw the active member's sign as it is."""
    probed_ms: int
    """Time from the first of these looks until it sent the last probe; negative: none since."""
    probe_failed: bool
    """That probe was answered, and not by the active member, or timed out."""
    has_lock: bool
    """It holds the lock of its host, which the active member held in its epoch, by that sign."""
    takeover_after_ms: int


class SignFailed(msgspec.Struct, frozen=True):
    """The active member could not store its sign of life, and goes on to be the active one."""

    at_ms: int
    actor: str
    in_a_row: int
    """Signs that failed since the last one that is stored, or since it leads."""
    signs_until_given_up: int
    """So many fit into the time after which it gives up."""


class Labelled(msgspec.Struct, frozen=True):
    """A user's tool gave a checkpoint a label, or begins to take it back."""

    at_ms: int
    checkpoint_id: int
    keeps: bool


class Forgotten(msgspec.Struct, frozen=True):
    """A user's key was erased at the barrier of a completed checkpoint, and nothing was found of older ones: a certificate."""

    at_ms: int
    checkpoint_id: int


class Led(msgspec.Struct, frozen=True):
    """A coordinator process leads a job from now on: its recovery or start is complete."""

    at_ms: int
    actor: str
    job_id: str
    epoch: int
    submission: int
    graph: JobGraph
    wall_ms: int = 0
    """The process's wall clock then."""


class Submitted(msgspec.Struct, frozen=True):
    """A driver asks a coordinator to start the job."""

    at_ms: int
    actor: str
    submission: Submission


class Lifecycle(msgspec.Struct, frozen=True):
    """A process was `started`, `killed`, `paused`, `cancelled` while paused, or `resumed`, or it `left` by itself."""

    at_ms: int
    actor: str
    role: str
    """coordinator | worker | driver."""
    change: str
    crash_point: str = ""
    """Of `killed`: the last point that it passed."""


class FaultBegan(msgspec.Struct, frozen=True):
    """A fault hit: its index in the plan. A fault without a target never begins."""

    at_ms: int
    index: int
    kind: str = ""


class PhaseBegan(msgspec.Struct, frozen=True):
    """`safety` (faults on), `liveness` (faults off), `quiet` (the job has ended and every process is at rest)."""

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
    | AllocationMoved
    | Overtook
    | CollectingAborted
    | InFlightRestored
    | TakenOutOfTurn
    | DataEnded
    | EmittedBehind
    | HookFailing
    | Listened
    | Claimed
    | SignFailed
    | Labelled
    | Forgotten
    | Led
    | Submitted
    | Lifecycle
    | FaultBegan
    | PhaseBegan
)


class StoreView(Protocol):
    """A store as it is now, read from outside: without latency, faults or traces."""

    root: str

    def peek(self, path: str) -> bytes | None:
        """Content of a file; None if it does not exist."""

    def size(self, path: str) -> int | None: ...

    def paths(self, prefix: str = "") -> list[str]:
        """Every file below a folder, sorted; paths relative to the root. Temporary files of the store itself are excluded."""


class WorldView(Protocol):
    """The part of the world that checkers read."""

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
        """The store at a location (an absolute path or URL), such as a sink's or that of a savepoint's parent folder."""

    def fork_stores(self) -> Any:
        """All that is stored now (a holdfast.chaos.sim.stores.Medium), for another world."""

    @property
    def local_directory(self) -> str:
        """Local folder of the workers' host; empty if a run has none."""

    def workers(self) -> list[Any]:
        """Live worker processes (holdfast.chaos.cluster.worker_host.WorkerHost), by name."""

    def coordinators(self) -> list[Any]:
        """Live coordinator processes (holdfast.chaos.cluster.coordinator_host.CoordinatorHost), by name."""


Report: TypeAlias = Callable[[str, str], None]
"""(invariant, message) -> recorded as a ViolationRecord; the run ends at the first one."""


def aborts_unread(subtask: Any) -> tuple[int, ...]:
    """Ids whose notices of an abort wait, unread, in the mailbox of an operators.task.subtask.Subtask."""
    return tuple(mail.checkpoint_id for mail in subtask.mailbox._mails if isinstance(mail, NotifyCheckpointAborted))
