"""The worker protocol: every message between a worker and the coordinator, as frozen records.

`codec.py` turns them into bytes; the same records travel over HTTP, through the simulator and in tests. Every message
is idempotent and fenced: it carries the coordinator's epoch and the job's attempt where it matters.

What comes by ten thousands a second has `gc=False`: frozen records of frozen records can't be part of a cycle, and the collector's
look at each of them cost four times what decoding does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from holdfast.barriers.erasure import Erasure
from holdfast.barriers.jobgraph import JobGraph
from holdfast.barriers.latency import Latencies
from holdfast.statebackends.handles import ChannelState, OperatorSubtaskState, StateHandle

TEXT_BYTES_MAX = 1024
"""Of a text that a worker sends, once it is taken: what is longer is clipped, or refused where it is a name."""
SKIPPED_REASON_BYTES_MAX = 512
"""Of the text that tells why an operator left out its first row: it is in every heartbeat from then on, and in snapshots."""
SOCKET_PATH_BYTES_MAX = 107
"""Of a unix socket's path, by the kernel (`sun_path` and its end)."""
TRACEBACK_BYTES_MAX = 8 * 1024
"""Of the end of a traceback, for the job's exceptions."""

INT_MAX = 2**63 - 1
_Int: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**63), le=INT_MAX)]
"""What a record of ours, and every reader of it, can hold."""
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)]
_Millis: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=INT_MAX)]

COUNTERS_MAX = 64
"""Counters of its own that an operator's function may have."""
COUNTER_NAME_CHARS_MAX = 64
COUNTER_NAME_PATTERN = rf"^[A-Za-z_][A-Za-z0-9_.:-]{{0,{COUNTER_NAME_CHARS_MAX - 1}}}\Z"
"""Of a user's counter: it is a label in metrics, a column on a console and a key in JSON."""
_CounterName: TypeAlias = Annotated[str, msgspec.Meta(pattern=COUNTER_NAME_PATTERN)]
Counters: TypeAlias = Annotated[dict[_CounterName, _Count], msgspec.Meta(max_length=COUNTERS_MAX)]
"""A user's counters by name."""


QUESTION_ID_CHARACTERS = 64
FRAME_CHARACTERS_MAX = 200
"""Of the name of a function, of the path of its file (its end), and of a thread's name, in a sampled stack."""
STACK_FRAMES_MAX = 128
STACKS_MAX = 512
"""Different stacks in one answer."""
CODE_LINES_MAX = 2_048
"""Different lines of code in one answer."""
SAMPLES_MAX = 100
SAMPLING_MS_MAX = 5_000
"""Time over which stacks are sampled for one question."""
LOG_CHARACTERS_MAX = 256 * 1024
"""Of a worker's log in one answer."""


class QuestionKind(StrEnum):
    """What a worker can be asked."""

    STACKS = "stacks"
    """Where its threads are, sampled."""
    LOG = "log"
    """The newest lines of its log."""
    STDOUT = "stdout"
    """The end of what its process printed."""


QuestionName: TypeAlias = Annotated[str, msgspec.Meta(max_length=32)]
QuestionKinds: TypeAlias = Annotated[tuple[QuestionName, ...], msgspec.Meta(max_length=16)]
LOOKS_MAX = 64
"""Processes that a worker that stands by is asked to look for at once."""
_Fingerprint: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]


def clip(text: str, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """A foreign text, cut to so many bytes of UTF-8 with `...` at its end. The result can always be encoded: the name of an
    undecodable file has lone surrogates, and a message with one of them could never be sent."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= bytes_max:
        return encoded.decode()
    return encoded[: bytes_max - 3].decode("utf-8", "ignore") + "..."


def clip_front(text: str, bytes_max: int = TRACEBACK_BYTES_MAX) -> str:
    """As `clip`, but the end stays: of a traceback the last lines tell most."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= bytes_max:
        return encoded.decode()
    return "..." + encoded[3 - bytes_max :].decode("utf-8", "ignore")


def printable(text: str, *, keep: str = "") -> str:
    """A foreign text that a terminal shows and does not obey: characters that are not printable are escaped as Python does it,
    except those of `keep`. Idempotent."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep else each.encode("unicode_escape").decode("ascii") for each in text)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def has_control_characters(text: str) -> bool:
    """Those of Unicode's category Cc, which no path of ours has."""
    return _CONTROL.search(text) is not None


class CheckpointKind(StrEnum):
    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    STOP_SAVEPOINT = "stop_savepoint"
    FINAL = "final"
    """The checkpoint that the coordinator triggers when every subtask of a bounded job has drained."""

    @property
    def is_savepoint(self) -> bool:
        """Its user's: in a folder of its own, and not among those that retention counts."""
        return self in (CheckpointKind.SAVEPOINT, CheckpointKind.STOP_SAVEPOINT)


class TaskState(StrEnum):
    CREATED = "CREATED"
    SCHEDULED = "SCHEDULED"
    DEPLOYING = "DEPLOYING"
    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELING = "CANCELING"
    CANCELED = "CANCELED"
    FAILED = "FAILED"


_TASK_ENDS = frozenset({TaskState.CANCELING, TaskState.CANCELED, TaskState.FAILED})

TRANSITIONS: Mapping[TaskState, frozenset[TaskState]] = {
    TaskState.CREATED: frozenset({TaskState.SCHEDULED, TaskState.CANCELED}),
    TaskState.SCHEDULED: frozenset({TaskState.DEPLOYING}),
    TaskState.DEPLOYING: _TASK_ENDS | {TaskState.INITIALIZING},
    TaskState.INITIALIZING: _TASK_ENDS | {TaskState.RUNNING},
    TaskState.RUNNING: _TASK_ENDS | {TaskState.FINISHED},
    TaskState.FINISHED: frozenset(),
    TaskState.CANCELING: frozenset({TaskState.CANCELED}),
    TaskState.CANCELED: frozenset(),
    TaskState.FAILED: frozenset(),
}
"""State of a task -> what may follow, as the task goes. CANCELED without CANCELING: its process is gone, or never began it.

A report may be overtaken by a later one, and a new leader meets tasks that run: an observer sees some of the steps, in order."""


class FailureReason(StrEnum):
    """Why a checkpoint was refused or aborted; machine-readable, shown to users as it stands."""

    # pre-flight: nothing was started
    SCHEDULER_SHUT_DOWN = "scheduler_shut_down"
    COORDINATOR_SHUTDOWN = "coordinator_shutdown"
    """The job was cancelled or has failed. Flink's word for what coordinates the checkpoints of one job."""
    TOO_MANY_REQUESTS = "too_many_requests"
    TOO_MANY_CONCURRENT = "too_many_concurrent"
    MINIMUM_TIME_BETWEEN = "minimum_time_between_checkpoints"
    NOT_ALL_TASKS_RUNNING = "not_all_required_tasks_running"
    NO_TARGET_DIRECTORY = "no_savepoint_directory"
    JOB_FINISHING = "job_finishing"
    TRIGGER_FAILURE = "trigger_failure"
    # in flight
    DECLINED = "declined"
    TASK_NOT_READY = "task_not_ready"
    ASYNC_EXCEPTION = "asynchronous_part_failed"
    IO_EXCEPTION = "io_exception"
    EXPIRED = "expired"
    SUBSUMED = "subsumed"
    SUSPENDED = "suspended"
    JOB_FAILOVER = "job_failure"
    FINALIZE_FAILURE = "finalize_failure"
    LEADER_CHANGED = "leader_changed"
    END_OF_INPUT = "end_of_input"
    IN_FLIGHT_LIMIT = "in_flight_limit"


class AckStatus(StrEnum):
    """The answer to one acknowledgement or decline."""

    SUCCESS = "SUCCESS"
    DUPLICATE = "DUPLICATE"
    UNKNOWN = "UNKNOWN"
    DISCARDED = "DISCARDED"
    """The checkpoint is gone; the leader deletes the state that came with it."""


SkippedReason: TypeAlias = Annotated[str, msgspec.Meta(max_length=SKIPPED_REASON_BYTES_MAX)]


class SubtaskKey(msgspec.Struct, frozen=True, gc=False, order=True):
    """One parallel instance of one job vertex."""

    vertex: str
    subtask: _Int


class OperatorMetrics(msgspec.Struct, frozen=True, gc=False):
    """Counters of one operator of one subtask since the attempt began. They only rise."""

    operator: str
    """Its uid."""
    records_in: _Count = 0
    """Records that it took; 0 of a source."""
    records_out: _Count = 0
    """Records that it emitted, however many read them. Of a sink's writer: committables."""
    late_dropped: _Count = 0
    """Of `records_in`: came behind the watermark, too late for all that they belong to (Flink's numLateRecordsDropped)."""
    late_ms_max: _Count = 0
    """How far the event time of the latest of these lay behind the watermark."""
    counters: Counters = {}
    """The function's own (`ctx.counter(name)`)."""
    rows_skipped: _Count = 0
    """Of `records_in`: left out by on_error="skip"; of a flat_map also rows that it made and that fit no column."""
    first_skipped: SkippedReason = ""
    """Why the first of these was."""


OPERATORS_MAX = 4_096
"""Operators of one chain whose counters are reported, in data order."""
OperatorCounts: TypeAlias = Annotated[tuple[OperatorMetrics, ...], msgspec.Meta(max_length=OPERATORS_MAX)]


AlignedWatermarks: TypeAlias = Annotated[dict[str, _Int | None], msgspec.Meta(max_length=OPERATORS_MAX)]


class CheckpointMetrics(msgspec.Struct, frozen=True, gc=False):
    """Numbers of one subtask for one checkpoint; times in ms, sizes in bytes."""

    alignment_duration_ms: _Millis = 0
    start_delay_ms: _Millis = 0
    sync_duration_ms: _Millis = 0
    async_duration_ms: _Millis = 0
    bytes_processed_during_alignment: _Count = 0
    checkpointed_size: _Count = 0
    """Bytes that it has written for the checkpoint, in-flight data included."""
    state_size: _Count = 0
    """The same, with what it shares with the checkpoint's base."""
    operators: OperatorCounts = ()
    """The counters of the subtask's operators at the cut."""
    bytes_persisted_during_alignment: _Count | msgspec.UnsetType = msgspec.UNSET
    """In-flight data among them; absent without any."""
    unaligned: bool | msgspec.UnsetType = msgspec.UNSET
    """True: the barrier has overtaken at its input, or what it overtook is stored; else absent."""
    store_duration_ms: _Millis | msgspec.UnsetType = msgspec.UNSET
    """Of the asynchronous part: in operations of storage; the rest encodes, or waits for a thread. Absent from older workers."""
    new_files: _Count | msgspec.UnsetType = msgspec.UNSET
    """Files that hold the new bytes; those inline are none. Absent from older workers."""
    notified_checkpoint: _Count | msgspec.UnsetType = msgspec.UNSET
    """Newest checkpoint whose completion the subtask was told of with the next number; absent before one."""
    notified_after_ms: _Millis | msgspec.UnsetType = msgspec.UNSET
    """From that checkpoint's trigger, by the coordinator's clock, to when it was told, by the worker's."""
    stalled_duration_ms: _Millis | msgspec.UnsetType = msgspec.UNSET
    """Of the asynchronous part: RocksDB had no room for what was to be written; absent where nothing waited for it."""


# ---------------------------------------------------------------------------------------------- worker -> coordinator


class AcknowledgeCheckpoint(msgspec.Struct, frozen=True, gc=False, tag="ack"):
    """One subtask's state for one checkpoint is durable. `states` maps operator uid -> what it stored."""

    attempt: _Int
    checkpoint_id: _Int
    vertex: str
    subtask: _Int
    states: dict[str, OperatorSubtaskState] = {}
    metrics: CheckpointMetrics = CheckpointMetrics()
    finished: bool = False
    """The subtask had come to the end of its input in front of this state: it emits nothing behind it, in any attempt."""
    channels: tuple[ChannelState, ...] | msgspec.UnsetType = msgspec.UNSET
    """In-flight records at this subtask's ends of its channels; unset where nothing was in flight."""

    @property
    def in_flight(self) -> tuple[ChannelState, ...]:
        """In-flight records, by edge and end."""
        return () if self.channels is msgspec.UNSET else self.channels


class DeclineCheckpoint(msgspec.Struct, frozen=True, gc=False, tag="decline"):
    """One subtask can't take part in a checkpoint."""

    attempt: _Int
    checkpoint_id: _Int
    vertex: str
    subtask: _Int
    reason: FailureReason
    message: str = ""


Answerable: TypeAlias = AcknowledgeCheckpoint | DeclineCheckpoint


SPLITS_REPORTED_MAX = 16
"""Splits of one reader that are reported: those that hold event time back most, and then those with most records to come."""
SPLIT_CHARACTERS_MAX = 200
"""Of a split's id in reports; of a longer one the end is left out."""


class SplitMetrics(msgspec.Struct, frozen=True, gc=False):
    """How far one split of a source is read."""

    split: Annotated[str, msgspec.Meta(max_length=SPLIT_CHARACTERS_MAX)]
    watermark_ms: _Int | None = None
    """Event time of the split; None before the first, and where event time is not kept by split."""
    watermark_lag_ms: _Int | msgspec.UnsetType = msgspec.UNSET
    """Wall clock less that."""
    idle: bool = False
    """Event time does not wait for it: it is silent, or waits for its turn."""
    pending_records: _Count | msgspec.UnsetType = msgspec.UNSET
    """Records that are known to wait in it, behind those that were passed on."""


SlowestSplits: TypeAlias = Annotated[tuple[SplitMetrics, ...], msgspec.Meta(max_length=SPLITS_REPORTED_MAX)]


class SubtaskMetrics(msgspec.Struct, frozen=True, gc=False):
    """Counters since the attempt began."""

    vertex: str
    subtask: _Int
    records_in: _Count = 0
    records_out: _Count = 0
    bytes_in: _Count = 0
    bytes_out: _Count = 0
    busy_ms: _Count = 0
    idle_ms: _Count = 0
    backpressured_ms: _Count = 0
    watermark_ms: _Int | None = None
    restored_local_bytes: _Count = 0
    """Files of the restored snapshot that were read from this host's own copies."""
    restored_remote_bytes: _Count = 0
    """Files of it that were read from storage."""
    operators: OperatorCounts = ()
    """Of each operator of the chain."""
    aligned: AlignedWatermarks | msgspec.UnsetType = msgspec.UNSET
    """Operator in a watermark group -> its watermark; None: it has none, is idle or has ended, and holds nobody."""
    output_watermark_ms: _Int | msgspec.UnsetType = msgspec.UNSET
    """The least of what the last operators of the chain have passed on; absent before the first and behind the last."""
    watermark_lag_ms: _Int | msgspec.UnsetType = msgspec.UNSET
    """Wall clock less event time: the watermark of the input, of a source its own (Flink's watermarkLag)."""
    emit_lag_ms: _Int | msgspec.UnsetType = msgspec.UNSET
    """Of a source: wall clock less event time of its last record, when that was emitted (Flink's currentEmitEventTimeLag)."""
    source_idle_ms: _Count | msgspec.UnsetType = msgspec.UNSET
    """Of a source: time since its last record (Flink's sourceIdleTime)."""
    idle: bool | msgspec.UnsetType = msgspec.UNSET
    """Of a source: it has told those behind it that it is idle, and holds nobody's event time."""
    splits: _Count | msgspec.UnsetType = msgspec.UNSET
    """Of a source with splits: those that this reader has."""
    pending_records: _Count | msgspec.UnsetType = msgspec.UNSET
    """Of a source with splits: records that are known to wait in those of this reader (Flink's pendingRecords)."""
    slowest_splits: SlowestSplits | msgspec.UnsetType = msgspec.UNSET
    """Some of them."""
    uncommitted_checkpoints: _Count | msgspec.UnsetType = msgspec.UNSET
    """Of sinks' committers: complete checkpoints whose output is not known to be committed."""
    uncommitted_rows: _Count | msgspec.UnsetType = msgspec.UNSET
    """Staged rows of these, of committers that know."""
    pending_committables: _Count | msgspec.UnsetType = msgspec.UNSET
    """Things to commit of these, staged files of most sinks (Flink's pendingCommittables, which also counts younger ones)."""
    commit_lag_ms: _Count | msgspec.UnsetType = msgspec.UNSET
    """Since the oldest of these was complete, as far as the attempt knows; 0: nothing waits."""
    busy_ms_per_second: _Count | msgspec.UnsetType = msgspec.UNSET
    """Of the last second, while it runs: ms in which it worked, or waited for its turn with something to do. This and the next two
    sum to 1,000."""
    idle_ms_per_second: _Count | msgspec.UnsetType = msgspec.UNSET
    backpressured_ms_per_second: _Count | msgspec.UnsetType = msgspec.UNSET
    """ms in which it could not work, since an output was full."""
    queued_in_bytes: _Count | msgspec.UnsetType = msgspec.UNSET
    """Received and not taken yet."""
    queued_out_bytes: _Count | msgspec.UnsetType = msgspec.UNSET
    """Emitted and not sent yet."""
    allocated_in_bytes: _Count | msgspec.UnsetType = msgspec.UNSET
    """What those in front of it may have under way to it, over all channels; the next one tells what is more than that."""
    overshoot_in_bytes: _Count | msgspec.UnsetType = msgspec.UNSET
    time_to_consume_ms: _Count | msgspec.UnsetType = msgspec.UNSET
    """Estimate for what is held of its slowest channel; absent while no rate is known, and without debloating."""
    latencies: Latencies | msgspec.UnsetType = msgspec.UNSET
    """By the markers that came, of each source vertex; absent in a job that does not track latency."""
    step_ms: _Count | msgspec.UnsetType = msgspec.UNSET
    """How long a step of it has lasted from which the worker's loop has not come back, for all of its subtasks; absent for steps of
    normal length."""


class SubtaskStatus(msgspec.Struct, frozen=True):
    """State of one subtask of one attempt, with the failure if it failed."""

    attempt: _Int
    vertex: str
    subtask: _Int
    state: TaskState
    drained: bool = False
    """All input was consumed and finish() ran; the subtask stays RUNNING until FinishTasks."""
    error: str = ""
    """`ErrorClass: message` when FAILED."""
    traceback: str = ""
    changed_ms: _Int = 0
    metrics: SubtaskMetrics | None = None
    """The counters as they are with this state, once the subtask is drained or has ended: no later heartbeat tells them."""
    backlog: _Count = 0
    """How often its source has begun or ended to process a backlog since the attempt began; odd: it processes one. It only rises,
    so that a report that a later one overtook changes nothing."""


class RegisterWorker(msgspec.Struct, frozen=True, tag="register"):
    """A full snapshot of a worker: its identity, and all that the coordinator needs to resume with it."""

    job_id: str
    slot: _Int
    submission: _Int
    task_attempt: _Int
    """Spark's task attempt id (or the launcher's own sequence): rises with each successor in the slot."""
    nonce: str
    """Drawn once per process."""
    pid: _Int
    host: str
    data_address: str
    """`tcp://host:port` of the worker's data socket."""
    directory_nonce: str
    """Content of `_holdfast` nonce file in the state directory as the worker reads it; empty if it can't."""
    attempt: _Int = 0
    """Attempt that the process is running, 0 for none."""
    subtasks: tuple[SubtaskStatus, ...] = ()
    unanswered: tuple[Answerable, ...] = ()
    data_key: str = ""
    """Public CURVE key of the data socket, Z85: the identity of the process towards its peers."""
    spawn: _Int = 0
    """Number of the worker among those that its launcher started for the slot, 1, 2, 3 ...; 0: not known."""
    launch_token: str = ""
    """Proof of that: see launches.py."""
    fingerprint: str = ""
    """Which process `pid` is, to a launcher on the same host: see operators/worker/working_folders.py. Empty: not known."""
    data_socket: str = ""
    """Path of a unix socket for peers of the same host; empty: there is none."""
    questions: QuestionKinds = ()
    """Kinds of questions that the process answers; workers of older versions know none."""
    seat: _Int = -1
    """Where its launcher started it, of one that stood by and was given another's slot; -1: in its own slot. `slot`, `spawn`,
    `task_attempt` and `launch_token` are then those of its StandbyOrder."""
    seat_spawn: _Int = 0
    """Number of the worker among those that were started there."""
    sight: _Fingerprint = ""
    """Which processes it sees: see processes.py. Those with the same sight can tell of its end. Empty: none can."""


class StandBy(msgspec.Struct, frozen=True, tag="stand_by"):
    """A worker without a slot waits for one. It has imported, and read its plan; nobody counts on it.

    Seats are where the launcher starts workers: 0 .. slots-1 for the slots of the job, and more for those that stand by from the
    beginning. A worker that was started anew in a seat asks first, since another may hold its slot by now."""

    job_id: str
    seat: _Int
    submission: _Int
    task_attempt: _Int
    nonce: str
    pid: _Int
    host: str
    spawn: _Int
    launch_token: str = ""
    """Proof that it is worker `spawn` of the seat."""
    fingerprint: str = ""
    """As in RegisterWorker."""
    sight: _Fingerprint = ""
    """As in RegisterWorker."""
    ended: Annotated[tuple[_Fingerprint, ...], msgspec.Meta(max_length=LOOKS_MAX)] = ()
    """Of the processes that the answer before asked for, those that have ended, by their fingerprints."""


class ProcessLook(msgspec.Struct, frozen=True):
    """A process that a worker with the same sight is to look for."""

    pid: _Int
    fingerprint: str


class StandbyOrder(msgspec.Struct, frozen=True, tag="standby_order"):
    """Answer to StandBy, as soon as there is a slot for the worker; and without one, after a while: it asks again."""

    epoch: _Int
    slot: _Int = -1
    """The slot that it is to register for; -1: none yet."""
    spawn: _Int = 0
    task_attempt: _Int = 0
    """Numbers to register with: above those of the process that held the slot, below those of any that is started there later."""
    launch_token: str = ""
    shutdown: ShutdownWorker | None = None
    """The job is over, or another submission's: it leaves."""
    looks: Annotated[tuple[ProcessLook, ...], msgspec.Meta(max_length=LOOKS_MAX)] = ()
    """Processes that have lost their connection, and that the coordinator does not see itself: have they ended? The worker looks
    for a moment, and asks again with what it found."""


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent by the worker's control thread; carries counters for the progress display."""

    slot: _Int
    session: str
    attempt: _Int
    metrics: tuple[SubtaskMetrics, ...] = ()
    frames_refused: _Count = 0
    """Frames that the data port dropped since the process began: no worker of the job had a reason to send them."""


class AckBatch(msgspec.Struct, frozen=True):
    """Body of POST .../acks; answered item by item, in order."""

    epoch: _Int
    slot: _Int
    session: str
    items: tuple[Answerable, ...]


class AckAnswers(msgspec.Struct, frozen=True):
    epoch: _Int
    answers: tuple[AckStatus, ...]


class StatusBatch(msgspec.Struct, frozen=True):
    """Body of POST .../states."""

    epoch: _Int
    slot: _Int
    session: str
    subtasks: tuple[SubtaskStatus, ...]


class CodeLine(msgspec.Struct, frozen=True):
    """Where a frame of a stack is. It holds no variable and no argument."""

    function: Annotated[str, msgspec.Meta(max_length=FRAME_CHARACTERS_MAX)]
    """Qualified name."""
    file: Annotated[str, msgspec.Meta(max_length=FRAME_CHARACTERS_MAX)]
    line: _Count
    own: bool = False
    """Of Holdfast, and not of the job or a library."""


class SampledStack(msgspec.Struct, frozen=True):
    """One stack of one thread, and how often it was seen."""

    thread: Annotated[str, msgspec.Meta(max_length=FRAME_CHARACTERS_MAX)]
    frames: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=STACK_FRAMES_MAX)]
    """Indices in `WorkerAnswer.code`, outermost first. Of a deeper stack the outermost are left out."""
    samples: _Count
    on_cpu: _Count = 0
    """Of `samples`: the thread had a processor most of the time since the sample before."""
    off_cpu: _Count = 0
    """Of `samples`: it waited most of it. The rest is not known, as the first sample is."""
    vertex: str = ""
    """Of the subtask that the thread was working for; empty: for none that is known."""
    subtask: _Int = -1
    idle: bool = False
    """It waits for work."""


class LogTail(msgspec.Struct, frozen=True):
    """The end of a worker's log, as its loggers let it through, or of its standard output, without secrets."""

    text: Annotated[str, msgspec.Meta(max_length=LOG_CHARACTERS_MAX)] = ""
    changed_ms: _Int = -1
    """When its end was written, wall clock; -1: nothing was."""
    left_out: _Count = 0
    """Lines since the process began that are not kept any more."""


class WorkerAnswer(msgspec.Struct, frozen=True):
    """Body of POST .../answers: what a worker's control thread says to a question."""

    epoch: _Int
    slot: _Int
    session: str
    attempt: _Int
    """Attempt that the process was running when it answered, 0 for none."""
    question: Annotated[str, msgspec.Meta(max_length=QUESTION_ID_CHARACTERS)]
    kind: QuestionName
    known: bool = True
    """False: the worker does not know this kind."""
    samples: _Count = 0
    """Of stacks: how often each thread was looked at."""
    sampled_ms: _Count = 0
    """From the first of these to the last."""
    code: Annotated[tuple[CodeLine, ...], msgspec.Meta(max_length=CODE_LINES_MAX)] = ()
    stacks: Annotated[tuple[SampledStack, ...], msgspec.Meta(max_length=STACKS_MAX)] = ()
    """Most frequent first."""
    left_out: _Count = 0
    """Samples of stacks that had no room."""
    log: LogTail | None = None
    """The log or the standard output, by the kind of the question."""


# ---------------------------------------------------------------------------------------------- coordinator -> worker


class RestoredPiece(msgspec.Struct, frozen=True):
    """Consecutive elements of one old channel, as one Arrow IPC stream."""

    part: int
    """Index in `InFlightRestore.parts`."""
    offset: int
    """Bytes, in the part."""
    length: int
    """Bytes."""
    rows: int
    filtered: bool = False
    """Some of its rows may belong to another subtask: only those of the key groups of this one are restored."""


class RestoredChannel(msgspec.Struct, frozen=True):
    """What stands in front of one channel when an attempt begins: records that were in flight when the snapshot was taken."""

    edge_id: int
    producer: int
    pieces: tuple[RestoredPiece, ...]
    """In order."""
    keeps_events: bool
    """Watermarks and statuses stay in their places; False: they are dropped, since they come of several old channels, or of one
    whose end has moved."""


class InFlightRestore(msgspec.Struct, frozen=True):
    """In-flight records that one subtask restores, before anything new."""

    parts: tuple[StateHandle, ...] = ()
    channels: tuple[RestoredChannel, ...] = ()
    """By edge in the graph's order, then by producer; those with nothing in front of them are left out."""


class SubtaskDeployment(msgspec.Struct, frozen=True):
    """One subtask to run in this worker. `restore` maps operator uid -> handles for it (already redistributed)."""

    vertex: str
    subtask: int
    restore: dict[str, OperatorSubtaskState] = {}
    """Keyed handles may cover more key groups than the subtask owns: it reads the intersection."""
    finished: bool = False
    """Its input had ended in front of the restored snapshot, and brings nothing more: no timer by the clock fires again."""
    in_flight: InFlightRestore = InFlightRestore()


class Deployment(msgspec.Struct, frozen=True):
    """Everything a worker needs to run its slice of one attempt."""

    attempt: int
    graph: JobGraph
    subtasks: tuple[SubtaskDeployment, ...]
    addresses: dict[int, str]
    """slot -> data address. Subtask i of every vertex runs in slot i."""
    restored_checkpoint_id: int = 0
    """0: started empty."""
    restored_folder: str = ""
    """Storage-relative folder, or absolute location, of the restored snapshot."""
    restored_from: int = 0
    """trigger timestamp of the restored snapshot, ms."""
    data_keys: dict[int, str] = {}
    """slot -> public CURVE key of its data socket. A message of any other key is dropped."""
    data_sockets: dict[int, str] = {}
    """slot -> path of its unix socket, of those that have one."""
    data_secret: str = ""
    """Secret of this attempt, sent to its workers alone: it lets them in at the unix sockets."""
    restores_in_flight: bool = False
    """The restored snapshot holds records in flight, for any of the job's subtasks: these may have stored different event times."""


class Deploy(msgspec.Struct, frozen=True, tag="deploy"):
    deployment: Deployment


class CancelTasks(msgspec.Struct, frozen=True, tag="cancel_tasks"):
    """Cancel every subtask of this attempt and of lower ones."""

    attempt: int


class TriggerCheckpoint(msgspec.Struct, frozen=True, tag="trigger"):
    """Start checkpoint `checkpoint_id` at the sources of this worker."""

    attempt: int
    checkpoint_id: int
    timestamp_ms: int
    kind: CheckpointKind
    folder: str
    drain: bool = False
    base: int | None = None
    native: bool = False
    """A savepoint in the state backend's own files."""
    unaligned: bool = False
    """Its barriers may overtake, on the edges where that is allowed."""
    aligned_timeout_ms: int | None = None
    """Age of the checkpoint from which on they do; 0: at once, None: never. For unaligned ones."""
    erasure: Erasure | msgspec.UnsetType = msgspec.UNSET
    """A key that leaves keyed state at its cut; absent from all others. Such a checkpoint builds on none, and never overtakes."""


class NotifyCheckpointComplete(msgspec.Struct, frozen=True, tag="complete"):
    """COMPLETED(id) is durable: side effects up to and including it may be released."""

    attempt: int
    checkpoint_id: int
    timestamp_ms: int


class NotifyCheckpointAborted(msgspec.Struct, frozen=True, tag="abort"):
    """ABORTED(id) is durable."""

    attempt: int
    checkpoint_id: int
    newest_completed: int = 0


class FinishTasks(msgspec.Struct, frozen=True, tag="finish"):
    """The final (or stop) checkpoint is complete: commit what is committable, send end of partition, then FINISHED."""

    attempt: int
    checkpoint_id: int


class AlignWatermarks(msgspec.Struct, frozen=True, tag="align_watermarks"):
    """Sources of a watermark group wait while their watermark is above the group's maximum."""

    attempt: int
    maximum_ms: dict[str, int]
    """By group."""


class ShutdownWorker(msgspec.Struct, frozen=True, tag="shutdown"):
    """The job is in a terminal state, or this process is superseded: leave the process."""

    reason: str
    respawn: bool = False
    """The driver starts another process in the slot."""
    job_over: bool = False
    """The job is in a terminal state: what the worker keeps on its own disk for a restore is of no use any more."""
    superseded: bool = False
    """A newer submission runs the job: it belongs to another driver. Never said of a slot that another process took."""


WorkerCommand: TypeAlias = (
    Deploy
    | CancelTasks
    | TriggerCheckpoint
    | NotifyCheckpointComplete
    | NotifyCheckpointAborted
    | FinishTasks
    | AlignWatermarks
    | ShutdownWorker
)


class WorkerQuestion(msgspec.Struct, frozen=True):
    """Something that people want to know of a worker. It changes nothing there, and is not repeated if it is lost."""

    id: str
    """Drawn by the coordinator for this question."""
    kind: str
    """A QuestionKind; of a newer coordinator perhaps another one."""
    attempt: int
    samples: int = 1
    """Of stacks: how often to look, at most."""
    interval_ms: int = 0
    """Of stacks: from one look to the next."""


class NumberedCommand(msgspec.Struct, frozen=True):
    """One line of the command stream. `number` is 1, 2, 3 ... per (epoch, session)."""

    epoch: int
    session: str
    number: int
    command: WorkerCommand | None
    """None: keep-alive, carries the number of the last command sent."""
    question: WorkerQuestion | msgspec.UnsetType = msgspec.UNSET
    """Of a keep-alive: asked beside the commands. A stream that is resumed does not bring it again, and a worker that does not know
    the field takes the line for what it is."""


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    """The full desired state of a worker."""

    epoch: int
    session: str
    attempt: int
    """The job's current attempt; subtasks of any lower one are to be cancelled."""
    deployment: Deployment | None
    """Given when the worker is to run the attempt and does not run it yet."""
    newest_completed: int
    live_checkpoints: tuple[int, ...]
    """Pending ids; anything else unanswered below the newest claimed id is dead."""
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    answers: tuple[AckStatus, ...] = ()
    """To `RegisterWorker.unanswered`, in order."""
    finish: int = 0
    """Checkpoint id of a FinishTasks that is in force, or 0."""
    members: tuple[str, ...] = ()
    """URLs of the coordinators of which one leads, this one first; empty: there are no others."""
    msgpack: bool = False
    """Whether acknowledgements may be msgpack where this was answered; coordinators of older versions take JSON alone."""
