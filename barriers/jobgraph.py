"""The JobGraph that tasks and coordinator share, and a job's configuration: plain records with a JSON form.

It describes; it holds no user code. The functions travel in Spark's closure, keyed by operator uid."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import cache, cached_property
from typing import Annotated, Any

import msgspec

from holdfast.statebackends.decoding import UNDECODABLE
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.keygroups import check_parallelism, operator_id
from holdfast.statebackends.settings import ROW_TABLE_BYTES
from holdfast.statebackends.settings import RocksDBConfig as RocksDBConfig

JOB_NAME_CHARS_MAX = 255
CANCELLATION_TIMEOUT_MS_MAX = 24 * 3_600_000
"""Workers keep the connections of their peers waiting for longer than this."""
CREDIT_BYTES_START = 65_536
"""Default of `channel_credit_bytes_start`."""


MASTER_HOOKS_MAX = 16
MASTER_HOOK_TIMEOUT_MS_MAX = 600_000
HOOK_NAME_CHARS_MAX = 100


def check_hook_name(name: object) -> None:
    """Raise InvalidConfigError unless a master hook can have this name: 1..100 printable characters, not blanks alone."""
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > HOOK_NAME_CHARS_MAX:
        shown = repr(name)[:60]
        message = f"the name of a master hook has 1..{HOOK_NAME_CHARS_MAX} printable characters, and is not blank: {shown}"
        raise InvalidConfigError(message, setting="master_hooks")


def check_job_name(name: str) -> None:
    """Raise InvalidConfigError unless a job can have this name: 1..255 printable characters, not blanks alone."""
    if not name.strip():
        raise InvalidConfigError("a job needs a name", setting="name")
    if len(name) > JOB_NAME_CHARS_MAX:
        message = f"the name of a job has at most {JOB_NAME_CHARS_MAX} characters; {name[:40]!r}... has {len(name)}"
        raise InvalidConfigError(message, setting="name")
    if not name.isprintable():
        raise InvalidConfigError(f"the name of a job must be printable characters, not {name!r}", setting="name")


class Partitioning(StrEnum):
    """Which subtasks of the target get a record of an edge."""

    FORWARD = "forward"
    HASH = "hash"
    REBALANCE = "rebalance"
    BROADCAST = "broadcast"
    RESCALE = "rescale"
    """In turn, within a group of neighbouring subtasks."""
    SHUFFLE = "shuffle"
    """Pseudo-random, by seed, producer and number of the record."""
    GLOBAL = "global"
    """Subtask 0."""
    CUSTOM = "custom"
    """The subtask that a function of the user returns."""


RESTART_KINDS = ("none", "fixed_delay", "exponential_delay", "failure_rate")
NO_LIMIT = 2**31 - 1
FAILURES_PER_INTERVAL_MAX = 1_000
"""The time of each is on record with each attempt."""
RESTART_MS_MAX = 100 * 365 * 24 * 3_600_000
"""A hundred years, which stands for ever: of each time of a restart strategy. JSON has integers that no clock can wait for."""


class OperatorDescription(msgspec.Struct, frozen=True):
    """One operator of a chain."""

    uid: str
    operator_id: str
    """32 hex digits."""
    name: str
    kind: str
    """source | map | filter | flat_map | map_batches | timestamps | process | window | sink_writer | sink_committer | ..."""
    states: tuple[StateMeta, ...] = ()
    key_type: str | None = None
    """Canonical key type text for an operator on a keyed stream."""
    uid_generated: bool = False
    """True when the user gave no uid: the id changes with the graph's shape."""
    sink_id: str | None = None
    properties: dict[str, Any] = {}


class JobEdge(msgspec.Struct, frozen=True):
    """A data exchange between two vertices. Channels of an edge: (producer subtask, consumer subtask)."""

    edge_id: int
    source: str
    """Vertex id."""
    source_operator: str
    """Uid of the operator in the source chain whose output feeds the edge."""
    target: str
    input_index: int
    """Which logical input of the target's head (union merges several edges into one index)."""
    partitioning: Partitioning
    key: tuple[str, ...] | None = None
    """Key columns for HASH and CUSTOM by column; None for a key function, which travels with the plan."""
    key_type: str | None = None
    side_output: str | msgspec.UnsetType = msgspec.UNSET
    """Tag of the side output that feeds the edge; unset: the operator's main output."""
    seed: int | msgspec.UnsetType = msgspec.UNSET
    """Of a SHUFFLE edge, int64."""
    overtakable: bool = False
    """Whether the barrier of a checkpoint may overtake its records. False in graphs of before it was known."""
    columns: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Those that are sent, in order, as `name: type`. Unset where they are not declared, or where no rule says to whom a stored
    record of the edge belongs."""

    @property
    def tag(self) -> str | None:
        """Of the side output; None for the main output."""
        return self.side_output or None


class JobVertex(msgspec.Struct, frozen=True):
    """A chain of operators that runs as one subtask per parallel instance."""

    vertex_id: str
    """operator_id of the chain's head: 32 hex digits."""
    name: str
    parallelism: int
    max_parallelism: int
    operators: tuple[OperatorDescription, ...]
    """Head to tail, in data order."""
    chain_edges: tuple[tuple[str, str], ...] = ()
    """(uid, uid) pairs inside the chain: a chain is a tree when an operator feeds several chained ones."""
    chain_side_outputs: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Uid of a chained operator -> tag of the side output that feeds it. Unset, or not among them: a main output."""

    @property
    def is_source(self) -> bool:
        return self.operators[0].kind == "source"


class RestartStrategy(msgspec.Struct, frozen=True):
    """Whether and when a failed job restarts: `none`, `fixed_delay`, `exponential_delay`, `failure_rate`; with Flink's options.

    Times are 100 years at most."""

    kind: str = "exponential_delay"
    """"none": the first failure ends the job. "fixed_delay": the same pause before each restart. "exponential_delay": a pause that
    grows with each failure. "failure_rate": the same pause, and too many failures within an interval end the job."""
    attempts_max: int = 2**31 - 1
    """Restarts of one submission; the failure after them ends the job."""
    delay_ms: int = 1_000
    """Pause before a restart; of `exponential_delay` before the first, multiplied by each failure that follows until it is reset.
    A completed checkpoint resets it, unless `reset_backoff_threshold_ms` is set."""
    immediate_first: bool = True
    """The first failure after a completed checkpoint (after a reset, with `reset_backoff_threshold_ms`) restarts at once, unless
    the user's code raised it: that would raise again. Flink always waits."""
    delay_max_ms: int = 60_000
    """Of `exponential_delay`: the longest pause, at least `delay_ms`."""
    backoff_multiplier: float = 2.0
    """Of `exponential_delay`: factor from one pause to the next, at least 1."""
    reset_backoff_threshold_ms: int | None = None
    """Of `exponential_delay`: time without a failure, from the end of a pause, after which the next pause is the first one again;
    at least 1. None: a completed checkpoint resets it."""
    jitter_factor: float = 0.0
    """Of `exponential_delay`: a pause is longer or shorter by a random part of itself, at most this one, 0..1, and never longer
    than `delay_max_ms`. Drawn once for each failure: a new leader of the job continues the pause."""
    attempts_before_reset_max: int = 2**31 - 1
    """Of `exponential_delay`: restarts without a reset; the failure after them ends the job."""
    failures_per_interval_max: int = 1
    """Of `failure_rate`: failures within the interval that restart the job, 1..1,000; one more ends it. Failures under former
    leaders of the job count."""
    failure_rate_interval_ms: int = 60_000
    """Of `failure_rate`: the interval, at least 1. A failure counts for so long."""

    @staticmethod
    def of(setting: RestartStrategy | str) -> RestartStrategy:
        """A strategy by its name, with its defaults: one of RESTART_KINDS, or in Flink's spelling ("fixed-delay").

        Raises InvalidConfigError for anything else."""
        if isinstance(setting, RestartStrategy):
            return setting
        kind = setting.replace("-", "_") if isinstance(setting, str) else setting
        if kind not in RESTART_KINDS:
            choices = ", ".join(map(repr, RESTART_KINDS))
            raise InvalidConfigError(f"restart is {setting!r}, must be one of {choices}, or a RestartStrategy", setting="restart")
        return RestartStrategy(kind)

    def check(self) -> None:
        """Raise InvalidConfigError naming the first field out of bounds."""
        if self.kind not in RESTART_KINDS:
            raise InvalidConfigError(f"restart is {self.kind!r}, must be one of {', '.join(RESTART_KINDS)}", setting="restart")
        self._check_types()
        bounds = dict.fromkeys(("attempts_max", "attempts_before_reset_max"), NO_LIMIT)
        times = ("delay_ms", "delay_max_ms", "reset_backoff_threshold_ms", "failure_rate_interval_ms")
        bounds.update(dict.fromkeys(times, RESTART_MS_MAX))
        for name, highest in bounds.items():
            value = getattr(self, name) or 0
            if value < 0:
                raise _restart_error(name, f"must not be negative, got {value}")
            if value > highest:
                raise _restart_error(name, f"must be at most {highest}")
        self._check_backoff()

    def _check_types(self) -> None:
        """Of a strategy that is decoded they are right; Python takes any."""
        for field in _restart_fields():
            try:
                msgspec.convert(getattr(self, field.name), field.type, strict=True)
            except msgspec.ValidationError as error:
                raise _restart_error(field.name, f"has the wrong type: {error}") from error

    def _check_backoff(self) -> None:
        if self.kind == "exponential_delay" and self.delay_max_ms < self.delay_ms:
            raise _restart_error("delay_max_ms", f"is {self.delay_max_ms}, below delay_ms, which is {self.delay_ms}")
        if not 1 <= self.backoff_multiplier < math.inf:
            raise _restart_error("backoff_multiplier", f"must be at least 1, got {self.backoff_multiplier}")
        if not 0 <= self.jitter_factor <= 1:
            raise _restart_error("jitter_factor", f"must be 0..1, got {self.jitter_factor}")
        threshold_ms = self.reset_backoff_threshold_ms
        if threshold_ms is not None and threshold_ms < 1:
            raise _restart_error("reset_backoff_threshold_ms", f"must be at least 1, got {threshold_ms}")
        if not 1 <= self.failures_per_interval_max <= FAILURES_PER_INTERVAL_MAX:
            bounds = f"must be 1..{FAILURES_PER_INTERVAL_MAX}"
            raise _restart_error("failures_per_interval_max", f"{bounds}, got {self.failures_per_interval_max}")
        if self.failure_rate_interval_ms < 1:
            raise _restart_error("failure_rate_interval_ms", f"must be at least 1, got {self.failure_rate_interval_ms}")

    @property
    def is_lasting(self) -> bool:
        """A new leader continues where its predecessor was: pauses and counted failures are on record with each attempt."""
        if self.kind == "failure_rate":
            return True
        of_time = self.reset_backoff_threshold_ms is not None or self.attempts_before_reset_max < NO_LIMIT
        return self.kind == "exponential_delay" and (of_time or self.jitter_factor > 0)

    def delay_after(self, failures: int) -> int:
        """The pause in ms before a restart that is not at once, without jitter, behind so many pauses since the last reset."""
        if self.kind != "exponential_delay":
            return self.delay_ms
        try:
            return int(min(self.delay_max_ms, self.delay_ms * self.backoff_multiplier**failures))
        except OverflowError:
            return self.delay_max_ms if self.delay_ms else 0

    def describe(self) -> str:
        """One line for users, such as `failure_rate: pause 1 s; a failure after 3 within 60 s ends the job`."""
        pause = f"{self.kind}: pause {_seconds(self.delay_ms)}"
        match self.kind:
            case "none":
                return "none: the first failure ends the job"
            case "failure_rate":
                limit = f"{self.failures_per_interval_max} within {_seconds(self.failure_rate_interval_ms)}"
                text = f"{pause}; a failure after {limit} ends the job"
            case "exponential_delay":
                jitter = f", jitter {self.jitter_factor:g}" if self.jitter_factor else ""
                threshold_ms = self.reset_backoff_threshold_ms
                reset = "a completed checkpoint" if threshold_ms is None else f"{_seconds(threshold_ms)} without a failure"
                growth = f"times {self.backoff_multiplier:g} up to {_seconds(self.delay_max_ms)}{jitter}"
                text = f"{pause}, {growth}; first one again after {reset}"
                if self.attempts_before_reset_max < NO_LIMIT:
                    text += f"; at most {self.attempts_before_reset_max} restarts before that"
            case _:
                text = pause
        return text if self.attempts_max == NO_LIMIT else f"{text}; at most {self.attempts_max} restarts in all"

    def jitter_of(self, delay_ms: int) -> int:
        """The most by which jitter makes a pause of so many ms longer or shorter."""
        return int(delay_ms * self.jitter_factor) if self.kind == "exponential_delay" else 0


def _seconds(time_ms: int) -> str:
    return f"{time_ms / 1000:g} s"


@cache
def _restart_fields() -> tuple[msgspec.structs.FieldInfo, ...]:
    """Fields of a RestartStrategy: msgspec reads their annotations anew each time, which takes longer than all other checks."""
    return msgspec.structs.fields(RestartStrategy)


def _restart_error(name: str, problem: str) -> InvalidConfigError:
    return InvalidConfigError(f"restart: {name} {problem}", setting=f"restart.{name}")


RETAINED_MAX = 1_000
"""Checkpoints kept beside the newest `retained_checkpoints`."""
WITHIN_MS_MAX = 100 * 365 * 86_400_000
DRILL_INTERVAL_MS_MIN = 60_000


class JobConfig(msgspec.Struct, frozen=True):
    """Settings of one job; the only home of their defaults. All times in ms, all sizes in bytes."""

    checkpoint_interval_ms: int | None = 10_000
    """Time from the start of one periodic checkpoint to the start of the next; at least 10. None: no periodic checkpoints (manual
    ones still work), and a failure restarts the job from its beginning."""
    checkpoint_timeout_ms: int = 600_000
    """A checkpoint that is not complete after this time is aborted, and counts as failed. At least 1."""
    min_pause_ms: int = 0
    """Least time from the end of a periodic checkpoint to the start of the next. More than 0 needs max_concurrent_checkpoints=1."""
    max_concurrent_checkpoints: int = 1
    """Checkpoints under way at the same time, at most; at least 1. With more than one, the next can begin before a slow one is
    complete."""
    tolerable_failed_checkpoints: int = 0
    """Checkpoints that may fail in a row; one more fails the job over to the last completed one."""
    retained_checkpoints: int = 1
    """Completed checkpoints that are kept, at least 1; older ones are deleted as newer ones complete. A restore can only skip a
    damaged newest one if an older one is kept."""
    retention_on_cancel: str = "delete"
    """delete (keeps on failure) | retain (keeps on cancel and failure)."""
    retain_on_finish: bool = False
    """True: a job that FINISHED keeps its retained checkpoints, the final one being the newest, for another job or a later run to
    start from; deleted like any other as newer ones complete, or by `holdfast snapshot dispose`."""
    checkpointing_mode: str = "exactly_once"
    """exactly_once: a subtask that has read a barrier on one channel reads nothing behind it before its snapshot. at_least_once: it
    reads on, so that no channel waits for another; a failure loses nothing, but records that came behind a barrier may be processed
    again, where a subtask has several input channels. Sinks commit each of their files once in both."""
    state_backend: str = "memory"
    """memory | filesystem | rocksdb."""
    incremental_checkpoints: bool = True
    """A checkpoint stores only the changes since the one before it (rocksdb, filesystem)."""
    inline_threshold: int = 20_480
    """State files smaller than this are stored in the checkpoint's metadata instead of in a file of their own; 0..1 MiB."""
    pack_threshold: int = 1024 * 1024
    """Tables of a checkpoint that are smaller than this share files; 0..8 MiB, 0: each has its own."""
    memory_snapshot_bytes_max: int = 5 * 1024 * 1024
    """State backend `memory`: bytes of tables below 64 KiB of one subtask of one operator, above which its checkpoint fails; larger
    tables are files. 1 KiB..2 GiB."""
    rocksdb: RocksDBConfig | None = None
    """Settings of the state backend `rocksdb`. None: its defaults."""
    local_recovery: bool = True
    """Workers keep copies of their newest checkpoint's files on their own disk, and state in slots in memory as that checkpoint has
    it, and restore from undamaged ones."""
    local_recovery_directory: str | None = None
    """Folder of those copies: an absolute path on every worker's host. None: the worker's local disk, as configured in Spark."""
    savepoint_directory: str | None = None
    """Directory of savepoints without a target: an absolute path or a URL. None: a target must be given."""
    restart: RestartStrategy = RestartStrategy()
    """Whether, how often and how soon a failed job is restarted; a keyword may also be the strategy's kind alone."""
    skipped_rows_max: int | None = 10_000
    """Rows that one operator with `on_error="skip"` may leave out in one subtask between two completed checkpoints; one more ends
    the job. None: any number; 0: none."""
    max_parallelism: int | None = None
    """Key groups of each operator, 1..32768: the largest parallelism at which its state can be restored. None: derived from the
    operator's parallelism, or adopted from the restored snapshot."""
    buffer_timeout_ms: int = 10
    """Longest time that a record waits for its batch to fill. 0: output is sent at once."""
    batch_rows_max: int = 65_536
    """Rows of one batch between operators; at least 1."""
    channel_credit_bytes: int = 4 * 1024 * 1024
    """Bytes that may be under way on one channel (a pair of subtasks) before its sender waits, at most: the memory of an exchange.
    As much again may wait at its sender. At least 1."""
    channel_credit_batches: int = 16
    """Batches that may be under way on one channel before its sender waits; at least 1."""
    heartbeat_interval_ms: int = 2_000
    """Time between two heartbeats of a worker; at least 1."""
    heartbeat_timeout_ms: int = 50_000
    """A worker without heartbeat for this time counts as hung: its job fails over and it is replaced. Above
    heartbeat_interval_ms."""
    reconcile_timeout_ms: int = 10_000
    """How long a new leader of the job (such as a restarted coordinator) waits for its workers to report before it fails the job
    over. 0: it does not wait."""
    step_budget_ms: int = 5
    """Time that a subtask works on its input before it checks for barriers, timers and commands again; at least 1."""
    cancellation_timeout_ms: int = 30_000
    """A subtask that does not end within this time after it was cancelled ends its worker process. 0..24 h."""
    row_table_bytes_max: int = 256 * 1024 * 1024
    """Of each row table of a subtask (joins, top-N, window buffers), with every state backend: rows in memory beyond this go to
    files on the worker's local disk, which are mapped. 1 MiB..1 TiB."""
    auto_watermark_interval_ms: int = 0
    """Time between two watermarks of a watermark strategy. 0: behind each batch that raises it."""
    latency_tracking_interval_ms: int = 0
    """Time between two latency markers of a source's subtask; the subtasks behind it measure how long they took. 0: no markers."""
    combine_aggregates: bool = True
    """Whether records of columnar aggregates are combined by key and window before an exchange, where it pays and the results are
    the same. A combined row waits `buffer_timeout_ms` at most."""
    checkpoint_interval_during_backlog_ms: int | None = None
    """The interval while a source processes a backlog (`SourceReader.is_processing_backlog`), from the first checkpoint on; at
    least checkpoint_interval_ms. 0: no periodic checkpoints meanwhile. None: the interval stays."""
    buffer_debloat: bool = True
    """Whether a channel may have only as much under way as its consumer has done in about `buffer_debloat_target_ms`, so that a
    barrier waits no longer for it. False: always `channel_credit_bytes`."""
    buffer_debloat_target_ms: int = 200
    """Time in which a consumer should be done with what a channel has under way and what waits at its sender; at least 1."""
    buffer_debloat_period_ms: int = 200
    """Time after which what a channel may have under way is looked at again; at least 1."""
    channel_credit_bytes_start: int = CREDIT_BYTES_START
    """Bytes that may be under way on a channel before its consumer's speed is known. 1..channel_credit_bytes; the default is less
    where that is less."""
    unaligned_checkpoints: bool = False
    """Barriers overtake what waits in front of them, and the checkpoint stores it: it is quick when queues are full, and larger.
    Savepoints stay aligned. Needs exactly_once and max_concurrent_checkpoints=1."""
    aligned_checkpoint_timeout_ms: int = 0
    """With `unaligned_checkpoints`: how long a checkpoint tries to do without overtaking, from its trigger. 0: it overtakes at
    once."""
    inflight_bytes_max: int = 256 * 1024 * 1024
    """With `unaligned_checkpoints`: overtaken data that one subtask may hold for one checkpoint; more, and it is declined. At least
    1."""
    retained_hourly: int = 0
    """Beside `retained_checkpoints`: of so many of the newest hours (UTC) in which one completed, the newest checkpoint is kept.
    0..1,000; counted over all three of these settings, at most 1,000 checkpoints are kept."""
    retained_daily: int = 0
    """As `retained_hourly`, of so many of the newest days. 0..1,000."""
    retained_within_ms: int = 0
    """Beside `retained_checkpoints`: checkpoints triggered within this time are kept, judged when one completes. 0..100 years."""
    drill_interval_ms: int | None = None
    """Time from one drill to the next: the coordinator reads every row of the newest checkpoint in a process of its own, beside the
    job. At least 60000. None: no drills but those that are asked for."""
    master_hooks: tuple[str, ...] = ()
    """Master hooks that take part in each checkpoint and savepoint: names of entry points `holdfast.master_hooks` where the
    coordinator is installed; 16 at most, each once."""
    master_hook_timeout_ms: int = 10_000
    """How long one call of a master hook may take before its process is killed; 1 ms..10 min. A checkpoint whose hook gave no
    answer is aborted, which counts as no failure."""

    standby_workers_per_host: int = 1
    """Workers that stand by on each host, in Spark slots that are free when the job starts: they have imported and read the plan,
    and one of them takes the place of a worker that died. At most as many as the job has slots. 0: none."""

    @property
    def is_incremental(self) -> bool:
        """Whether checkpoints build on earlier ones."""
        return self.incremental_checkpoints and self.state_backend in ("rocksdb", "filesystem")

    @property
    def credit_bytes_start(self) -> int:
        """What a channel may have under way at first, with debloating."""
        return min(self.channel_credit_bytes_start, self.channel_credit_bytes)

    def _check_retention(self) -> None:
        bounds = {"retained_hourly": RETAINED_MAX, "retained_daily": RETAINED_MAX, "retained_within_ms": WITHIN_MS_MAX}
        for name, most in bounds.items():
            if not 0 <= getattr(self, name) <= most:
                raise InvalidConfigError(f"{name} must be 0..{most}, got {getattr(self, name)}", setting=name)
        interval_ms = self.drill_interval_ms
        if interval_ms is not None and interval_ms < DRILL_INTERVAL_MS_MIN:
            message = f"drill_interval_ms must be at least {DRILL_INTERVAL_MS_MIN}, got {interval_ms}"
            raise InvalidConfigError(message, setting="drill_interval_ms")

    def check(self) -> None:
        """Raise InvalidConfigError naming the first setting out of bounds."""
        self._check_integers()
        positive: tuple[str, ...] = ("checkpoint_timeout_ms", "max_concurrent_checkpoints", "retained_checkpoints")
        positive += ("batch_rows_max", "channel_credit_bytes", "channel_credit_batches", "step_budget_ms", "heartbeat_interval_ms")
        positive += ("buffer_debloat_target_ms", "buffer_debloat_period_ms", "channel_credit_bytes_start", "inflight_bytes_max")
        for name in positive:
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"{name} must be at least 1, got {getattr(self, name)}", setting=name)
        at_least_zero: tuple[str, ...] = ("min_pause_ms", "tolerable_failed_checkpoints", "buffer_timeout_ms")
        at_least_zero += ("reconcile_timeout_ms", "aligned_checkpoint_timeout_ms", "auto_watermark_interval_ms")
        at_least_zero += ("latency_tracking_interval_ms",)
        self._check_standbys()
        self._check_retention()
        for name in at_least_zero:
            if getattr(self, name) < 0:
                raise InvalidConfigError(f"{name} must not be negative, got {getattr(self, name)}", setting=name)
        if not 0 <= self.cancellation_timeout_ms <= CANCELLATION_TIMEOUT_MS_MAX:
            message = f"cancellation_timeout_ms must be 0..{CANCELLATION_TIMEOUT_MS_MAX}, got {self.cancellation_timeout_ms}"
            raise InvalidConfigError(message, setting="cancellation_timeout_ms")
        if self.skipped_rows_max is not None and self.skipped_rows_max < 0:
            message = f"skipped_rows_max must not be negative, got {self.skipped_rows_max}"
            raise InvalidConfigError(message, setting="skipped_rows_max")
        if self.max_parallelism is not None:
            check_parallelism(self.max_parallelism, 1)
        interval = self.checkpoint_interval_ms
        if interval is not None and interval < 10:
            raise InvalidConfigError(
                f"checkpoint_interval_ms must be at least 10, got {interval}", setting="checkpoint_interval_ms"
            )
        self._check_backlog()
        if self.min_pause_ms > 0 and self.max_concurrent_checkpoints != 1:
            raise InvalidConfigError("min_pause_ms needs max_concurrent_checkpoints=1", setting="max_concurrent_checkpoints")
        if not 0 <= self.inline_threshold <= 1024 * 1024:
            raise InvalidConfigError(
                f"inline_threshold must be 0..1048576, got {self.inline_threshold}", setting="inline_threshold"
            )
        if not 0 <= self.pack_threshold <= 8 * 1024 * 1024:
            raise InvalidConfigError(f"pack_threshold must be 0..8388608, got {self.pack_threshold}", setting="pack_threshold")
        if not 1024 <= self.memory_snapshot_bytes_max <= 2**31:
            raise InvalidConfigError(
                f"memory_snapshot_bytes_max must be 1024..2147483648, got {self.memory_snapshot_bytes_max}",
                setting="memory_snapshot_bytes_max",
            )
        lowest, highest = ROW_TABLE_BYTES
        if not lowest <= self.row_table_bytes_max <= highest:
            raise InvalidConfigError(
                f"row_table_bytes_max must be {lowest}..{highest}, got {self.row_table_bytes_max}", setting="row_table_bytes_max"
            )
        if self.heartbeat_timeout_ms <= self.heartbeat_interval_ms:
            raise InvalidConfigError("heartbeat_timeout_ms must exceed heartbeat_interval_ms", setting="heartbeat_timeout_ms")
        self.restart.check()
        self._check_directories()
        if self.rocksdb is not None:
            self.rocksdb.check()
        self._check_choices()
        self._check_credit()
        self._check_unaligned()
        self._check_hooks()

    def _check_hooks(self) -> None:
        names = self.master_hooks
        for name in names:
            check_hook_name(name)
        if len(set(names)) < len(names) or len(names) > MASTER_HOOKS_MAX:
            message = f"master_hooks must name at most {MASTER_HOOKS_MAX} hooks, each once, got {', '.join(names[:20])}"
            raise InvalidConfigError(message, setting="master_hooks")
        if not 1 <= self.master_hook_timeout_ms <= MASTER_HOOK_TIMEOUT_MS_MAX:
            message = f"master_hook_timeout_ms must be 1..{MASTER_HOOK_TIMEOUT_MS_MAX}, got {self.master_hook_timeout_ms}"
            raise InvalidConfigError(message, setting="master_hook_timeout_ms")

    def _check_credit(self) -> None:
        if self.channel_credit_bytes_start not in (CREDIT_BYTES_START, self.credit_bytes_start):
            message = f"channel_credit_bytes_start must be at most channel_credit_bytes, which is {self.channel_credit_bytes}, "
            message += f"got {self.channel_credit_bytes_start}"
            raise InvalidConfigError(message, setting="channel_credit_bytes_start")

    def _check_standbys(self) -> None:
        found: object = self.standby_workers_per_host
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            message = f"standby_workers_per_host must be a whole number, at least 0, got {found!r}"
            raise InvalidConfigError(message, setting="standby_workers_per_host")

    def _check_integers(self) -> None:
        """What no message of ours can carry would fail each attempt, or each checkpoint."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) >= 2**63:
                shown = str(value) if abs(value) < 10**40 else "one of more than 40 digits"
                raise InvalidConfigError(f"{name} must be a whole number below 2^63, got {shown}", setting=name)

    def _check_unaligned(self) -> None:
        if not self.unaligned_checkpoints:
            return
        if self.checkpointing_mode != "exactly_once":
            message = f"unaligned_checkpoints needs checkpointing_mode exactly_once, got {self.checkpointing_mode}"
            raise InvalidConfigError(message, setting="unaligned_checkpoints")
        if self.max_concurrent_checkpoints != 1:
            message = f"unaligned_checkpoints needs max_concurrent_checkpoints=1, got {self.max_concurrent_checkpoints}"
            raise InvalidConfigError(message, setting="unaligned_checkpoints")

    def _check_backlog(self) -> None:
        name, interval, backlog = (
            "checkpoint_interval_during_backlog_ms",
            self.checkpoint_interval_ms,
            self.checkpoint_interval_during_backlog_ms,
        )
        if backlog is not None and backlog < 0:
            raise InvalidConfigError(f"{name} must not be negative, got {backlog}", setting=name)
        if backlog and interval is not None and backlog < interval:
            message = f"{name} must be 0 or at least checkpoint_interval_ms, which is {interval}, got {backlog}"
            raise InvalidConfigError(message, setting=name)

    def _check_directories(self) -> None:
        directory = self.savepoint_directory
        if directory and "://" not in directory and not directory.startswith("/"):  # an empty one is none
            raise InvalidConfigError(
                f"savepoint_directory must be an absolute path or a URL, got {directory!r}", setting="savepoint_directory"
            )
        directory = self.local_recovery_directory
        if directory is not None and (not directory.startswith("/") or "\0" in directory):
            raise InvalidConfigError(
                f"local_recovery_directory must be the absolute path of a folder, got {directory!r}",
                setting="local_recovery_directory",
            )

    def _check_choices(self) -> None:
        choices = (
            ("state_backend", self.state_backend, ("memory", "filesystem", "rocksdb")),
            ("checkpointing_mode", self.checkpointing_mode, ("exactly_once", "at_least_once")),
            ("retention_on_cancel", self.retention_on_cancel, ("delete", "retain")),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                raise InvalidConfigError(f"{name} is {value!r}, must be one of {', '.join(allowed)}", setting=name)


class JobGraph(msgspec.Struct, frozen=True, dict=True):
    """The graph of a job, as the coordinator has it: vertices, edges and settings, without code."""

    name: str
    vertices: tuple[JobVertex, ...]
    """Sources first, topological."""
    edges: tuple[JobEdge, ...]
    config: JobConfig
    explicit_max_parallelism: bool = False

    @property
    def slots_required(self) -> int:
        """Subtask i of every vertex runs in slot i."""
        return max(vertex.parallelism for vertex in self.vertices)

    def check_standbys(self) -> None:
        """Raise InvalidConfigError where more workers are to stand by on a host than the job has slots."""
        wanted, slots = self.config.standby_workers_per_host, self.slots_required
        if wanted > slots:
            message = f"standby_workers_per_host must be at most the slots of the job, which has {slots}, got {wanted}"
            raise InvalidConfigError(message, setting="standby_workers_per_host")

    def vertex(self, vertex_id: str) -> JobVertex:
        """Raises KeyError for an id that it does not have."""
        return self._by_id[vertex_id]

    def inputs(self, vertex_id: str) -> tuple[JobEdge, ...]:
        return self._inputs.get(vertex_id, ())

    def outputs(self, vertex_id: str) -> tuple[JobEdge, ...]:
        return self._outputs.get(vertex_id, ())

    @cached_property
    def _by_id(self) -> Mapping[str, JobVertex]:
        return {vertex.vertex_id: vertex for vertex in reversed(self.vertices)}

    @cached_property
    def _inputs(self) -> Mapping[str, tuple[JobEdge, ...]]:
        return _grouped(self.edges, lambda edge: edge.target)

    @cached_property
    def _outputs(self) -> Mapping[str, tuple[JobEdge, ...]]:
        return _grouped(self.edges, lambda edge: edge.source)


def _grouped(edges: Iterable[JobEdge], vertex_of: Callable[[JobEdge], str]) -> Mapping[str, tuple[JobEdge, ...]]:
    found: dict[str, list[JobEdge]] = {}
    for edge in edges:
        found.setdefault(vertex_of(edge), []).append(edge)
    return {vertex_id: tuple(some) for vertex_id, some in found.items()}


def with_uids(graph: dict[str, Any] | None, uids: Mapping[str, str]) -> dict[str, Any] | None:
    """The JSON of a graph with other uids for some operators, by their old ones, and with the ids that go with them.

    An operator that is not among them and whose uid another one takes is called by its id from then on. Sinks keep their sink ids,
    and operators their names. A graph of another version stays as it is, since it can't be read here."""
    if graph is None or not uids:
        return graph
    try:
        known = msgspec.convert(graph, JobGraph)
    except UNDECODABLE:
        return graph
    operators = [operator for vertex in known.vertices for operator in vertex.operators]
    taken = set(uids.values())
    to = {each.uid: uids.get(each.uid, each.operator_id if each.uid in taken else each.uid) for each in operators}
    ids = {each.operator_id: operator_id(to[each.uid]) for each in operators if to[each.uid] != each.uid}

    def vertex_of(vertex: JobVertex) -> JobVertex:
        renamed = (
            msgspec.structs.replace(each, uid=to[each.uid], operator_id=ids.get(each.operator_id, each.operator_id))
            for each in vertex.operators
        )
        inner = tuple((to.get(source, source), to.get(target, target)) for source, target in vertex.chain_edges)
        head, sides = ids.get(vertex.vertex_id, vertex.vertex_id), vertex.chain_side_outputs
        if sides is not msgspec.UNSET:
            sides = {to.get(uid, uid): tag for uid, tag in sides.items()}
        return msgspec.structs.replace(
            vertex, vertex_id=head, operators=tuple(renamed), chain_edges=inner, chain_side_outputs=sides
        )

    def edge_of(edge: JobEdge) -> JobEdge:
        source, target = (ids.get(each, each) for each in (edge.source, edge.target))
        origin = to.get(edge.source_operator, edge.source_operator)
        return msgspec.structs.replace(edge, source=source, source_operator=origin, target=target)

    vertices, edges = tuple(map(vertex_of, known.vertices)), tuple(map(edge_of, known.edges))
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(known, vertices=vertices, edges=edges))
    return found


class ClaimMode(StrEnum):
    """Owner of a snapshot by whose path a job is started."""

    NO_CLAIM = "NO_CLAIM"
    """Its user: it is never changed or deleted, and needed until the job's first checkpoint is complete."""
    CLAIM = "CLAIM"
    """The job: it deletes the snapshot once newer checkpoints have subsumed it."""


class SinkMode(StrEnum):
    """Handling of the sinks of a job that is started from a snapshot."""

    KEEP = "keep"
    """Each goes on in the log that the snapshot knows; one that writes elsewhere is refused."""
    FORK = "fork"
    """Each that writes elsewhere begins a new log there. Refused while rows are left over that no job is known to commit."""
    ABANDON = "abandon"
    """As FORK, and such rows are given up, and named."""


BRANCH_MARK = "@"
"""Between the name of a job and that of its branch."""
_BRANCH_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_branch_name(branch: object) -> None:
    """Raise InvalidConfigError unless a branch can have this name: it is part of a job's name, and of paths."""
    if not isinstance(branch, str) or _BRANCH_NAME.fullmatch(branch) is None:
        raise InvalidConfigError("the name of a branch is 1..64 letters, digits, '.', '_' and '-'", setting="branch")


def check_restored(restore: str | None, *, fresh: bool) -> None:
    """Raise InvalidConfigError where a job is to begin with a snapshot and without one."""
    if fresh and restore is not None:
        raise InvalidConfigError("restore= and fresh=True exclude each other", setting="fresh")


class Submission(msgspec.Struct, frozen=True):
    """Body of POST /v1/jobs: what a driver asks of the coordinator."""

    graph: JobGraph
    job_id: str | None = None
    """32 hex digits; None: derived from the name."""
    restore: str | None = None
    """`latest`, a checkpoint id, or the path of a snapshot; None: latest if the job is live, else empty."""
    allow_non_restored_state: bool = False
    allow_output_repeat: bool = False
    fresh: bool = False
    claim_mode: ClaimMode = ClaimMode.NO_CLAIM
    sinks: SinkMode = SinkMode.KEEP
    driver_nonce: str = ""
    """Makes a retried POST idempotent."""
    without_channel_state: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Id of the snapshot whose in-flight records are given up; of another snapshot they never are. None: of none."""
    branch: Annotated[str, msgspec.Meta(max_length=64)] | msgspec.UnsetType = msgspec.UNSET
    """The job is a branch of this name; the graph's is `<parent>@<branch>`. Unset: it is none."""
    launch_key: Annotated[str, msgspec.Meta(max_length=255)] = ""
    """Shared by launcher and coordinator: only workers that the launcher started can register (launches.py). Empty: any can."""


class SubmissionAccepted(msgspec.Struct, frozen=True):
    job_id: str
    submission: int
    slots: int
    epoch: int
    restored_checkpoint_id: int = 0
    directory: str = ""
    """The state directory, as workers must see it."""
    directory_nonce: str = ""
    notes: tuple[str, ...] = ()
    """Notes of the restore for the user: dropped state, rewritten values, output that may repeat."""
    restored_savepoint: str = ""
    """Location of the savepoint that the submission starts from, whether it was named now or by an earlier submission."""
    worker_token: str = ""
    """The token of the submission's workers: good for the worker protocol of this job alone. Empty: the service issues none."""


class DriverDeparture(msgspec.Struct, frozen=True):
    """The driver of a submission leaves a job that is not over."""

    submission: int
