"""The one setting to change for a first cause, if one is known to help. Pure.

A setting of the running job is named with its command; others, and all of a job that has ended, hold from the next submission on.
A cause that is not known, or not seen any more, gets none: what would help is not known either."""

from __future__ import annotations

from holdfast.barriers.exchange.guarantee import AT_LEAST_ONCE
from holdfast.barriers.jobgraph import MASTER_HOOK_TIMEOUT_MS_MAX
from holdfast.barriers.tunable import TUNABLE, SettingValue, apply_settings
from holdfast.coordinator.explain.facts import Facts
from holdfast.coordinator.explain.records import CauseKind, SettingChange
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.settings import RocksDBConfig

_MIB = 1024 * 1024
DEFAULT_INTERVAL_MS = 10_000
PACK_BYTES_MAX = 8 * _MIB
MEMORY_SNAPSHOT_BYTES_MAX = 2**31
WRITE_BUFFER_BYTES_MAX, WRITE_BUFFERS_BYTES_MAX = 512 * _MIB, 8 * 1024 * _MIB
"""Larger memtables are not recommended: a worker has them in memory, and a checkpoint waits for one to be written."""
TIME_MS_MAX = 24 * 3_600_000
"""Beyond a day no interval or timeout is recommended."""

_OF_BARRIERS = frozenset({CauseKind.BUSY_VERTEX, CauseKind.BUSY_SUBTASK, CauseKind.SKEW, CauseKind.OUTSIDE})
_OF_WRITES = frozenset(
    {CauseKind.MORE_STATE, CauseKind.SLOW_STORAGE, CauseKind.SLOW_ENCODE, CauseKind.STATE_SKEW, CauseKind.SLOW_DECIDE}
)

_OF_ROCKSDB = "rocksdb_"
"""In front of the names of settings of RocksDB."""


def advise(facts: Facts, kind: CauseKind, *, vertex_id: str = "", duration_ms: int = 0) -> SettingChange | None:
    """`vertex_id`: of the bottleneck; `duration_ms`: of the checkpoint so far."""
    if kind in _OF_BARRIERS:
        return _for_barriers(facts, kind, vertex_id)
    if kind in _OF_WRITES:
        return _for_writes(facts, duration_ms)
    config = facts.config
    match kind:
        case CauseKind.STORE_STALLED:
            return _for_stalls(config.rocksdb or RocksDBConfig())
        case CauseKind.SMALL_FILES if config.pack_threshold < PACK_BYTES_MAX:
            new = min(PACK_BYTES_MAX, max(_MIB, 4 * config.pack_threshold))
            return _change(facts, "pack_threshold", new, "small tables share files, and there are fewer of them to write")
        case CauseKind.PAUSED:
            interval_ms = facts.graph.config.checkpoint_interval_ms or DEFAULT_INTERVAL_MS
            return _change(facts, "checkpoint_interval_ms", interval_ms, "periodic checkpoints go on")
        case CauseKind.BACKLOG:
            new = min(TIME_MS_MAX, 10 * (config.checkpoint_interval_ms or DEFAULT_INTERVAL_MS))
            return _change(facts, "checkpoint_interval_during_backlog_ms", new, "a failure during the backlog replays less")
        case CauseKind.MINIMUM_PAUSE:
            interval_ms = config.checkpoint_interval_ms or DEFAULT_INTERVAL_MS
            if config.min_pause_ms > interval_ms:
                return _change(
                    facts, "min_pause_ms", interval_ms, "the pause is longer than the interval, and bounds how often one is taken"
                )
        case CauseKind.IN_FLIGHT_LIMIT:
            new = 2 * config.inflight_bytes_max
            return _change(facts, "inflight_bytes_max", new, "a subtask may hold more of what its barrier overtook")
        case CauseKind.STATE_TOO_LARGE if config.memory_snapshot_bytes_max < MEMORY_SNAPSHOT_BYTES_MAX:
            new = min(MEMORY_SNAPSHOT_BYTES_MAX, 4 * config.memory_snapshot_bytes_max)
            return _change(
                facts, "memory_snapshot_bytes_max", new, "the small tables of one subtask are more than the memory backend may send"
            )
        case CauseKind.MASTER_HOOK_TIMEOUT:
            old = config.master_hook_timeout_ms
            new = max(old, min(2 * old, config.checkpoint_timeout_ms, MASTER_HOOK_TIMEOUT_MS_MAX))
            return _change(facts, "master_hook_timeout_ms", new, "a hook that only takes long would answer")
        case CauseKind.EXPIRED:
            new = min(TIME_MS_MAX, 2 * config.checkpoint_timeout_ms)
            return _change(facts, "checkpoint_timeout_ms", new, "a checkpoint that only takes long would complete")
        case _:
            pass
    return None


def _for_barriers(facts: Facts, kind: CauseKind, vertex_id: str) -> SettingChange | None:
    """Barriers that wait behind records: let them overtake; where they do so already, more subtasks."""
    if not facts.inputs.get(vertex_id):
        return None  # it waited in a source, which has no records in front of it that it could overtake
    config = facts.config
    overtakable = facts.takes_checkpoint and any(edge.overtakable for edge in facts.graph.edges)
    may_overtake = overtakable and config.checkpointing_mode != AT_LEAST_ONCE and config.max_concurrent_checkpoints == 1
    if not config.unaligned_checkpoints and may_overtake:
        return _change(facts, "unaligned_checkpoints", True, "barriers overtake the records that they wait behind")
    if config.unaligned_checkpoints and config.aligned_checkpoint_timeout_ms > 0:
        return _change(facts, "aligned_checkpoint_timeout_ms", 0, "barriers overtake at once, and not only from that age on")
    view = facts.views.get(vertex_id)
    if kind is CauseKind.BUSY_VERTEX and view is not None and view.parallelism < view.max_parallelism:
        new = min(2 * view.parallelism, view.max_parallelism)
        why = f"{facts.place(vertex_id)} is the bottleneck, and its barriers overtake already or can't"
        return SettingChange("parallelism", view.parallelism, new, why)
    return None


def _for_writes(facts: Facts, duration_ms: int) -> SettingChange | None:
    """Checkpoints that write for long: only what changed; else less often, if they leave the job no time between them."""
    config, interval_ms = facts.config, facts.interval_ms
    if not config.incremental_checkpoints and config.state_backend in ("rocksdb", "filesystem"):
        return _change(facts, "incremental_checkpoints", True, "a checkpoint stores only what changed since the one before it")
    if interval_ms is not None and 2 * duration_ms > interval_ms:
        new = min(TIME_MS_MAX, -(-2 * duration_ms // 1_000) * 1_000)
        if new > interval_ms and not facts.situation.is_processing_backlog:
            return _change(facts, "checkpoint_interval_ms", new, "a checkpoint takes more than half of the interval")
    return None


def _for_stalls(rocksdb: RocksDBConfig) -> SettingChange | None:
    """Writes that wait for background work: larger memtables, which are flushed less often and leave fewer sorted runs to merge;
    else more room for all memtables of a worker, which bounds each of them."""
    old, shared = rocksdb.write_buffer_bytes, rocksdb.write_buffers_bytes_max
    new = min(2 * old, shared, WRITE_BUFFER_BYTES_MAX)
    if new > old:
        why = "larger memtables are flushed less often, and leave fewer sorted runs to merge"
        return SettingChange("rocksdb_write_buffer_bytes", old, new, why)
    if shared < WRITE_BUFFERS_BYTES_MAX:
        why = "all memtables of a worker share this, and are flushed early beyond it"
        return SettingChange("rocksdb_write_buffers_bytes_max", shared, min(2 * shared, WRITE_BUFFERS_BYTES_MAX), why)
    return None


def _change(facts: Facts, name: str, new: SettingValue, why: str) -> SettingChange | None:
    """None for a change that the job would refuse."""
    old: SettingValue = getattr(facts.config, name)
    if old == new:
        return None
    try:
        return SettingChange(name, old, new, why, command_of(facts, name, new))
    except InvalidConfigError:
        return None


def command_of(facts: Facts, name: str, new: SettingValue) -> str:
    """What changes a setting while the job runs; empty: it holds from the job's next submission on. Raises InvalidConfigError for a
    change that the job would refuse."""
    if name not in TUNABLE or facts.job.overview.is_terminal:  # settings of a job that has ended can't be changed
        return ""
    apply_settings(facts.config, {name: new})
    value = "none" if new is None else str(new).lower()
    return f"holdfast checkpoints {facts.job.overview.job_id} --set {name}={value}"


def is_changed(facts: Facts, name: str, old: SettingValue) -> bool:
    """Whether a setting is not `old` any more: of the job, or of each of its vertices. One that is not known counts as changed."""
    if name == "parallelism":
        return all(vertex.parallelism != old for vertex in facts.graph.vertices)
    of = (facts.config.rocksdb or RocksDBConfig()) if name.startswith(_OF_ROCKSDB) else facts.config
    name = name.removeprefix(_OF_ROCKSDB)
    return name not in of.__struct_fields__ or getattr(of, name) != old
