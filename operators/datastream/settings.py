"""Settings of a job as keywords of `Environment`, in the form that type checkers and editors read.

JobConfig defines their defaults, bounds and meaning; a test compares its fields with these."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import msgspec

from holdfast.barriers.jobgraph import JobConfig, RestartStrategy, RocksDBConfig


class Settings(TypedDict, total=False):
    """Keyword settings, all optional; JobConfig has the defaults."""

    checkpoint_interval_ms: int | None
    checkpoint_timeout_ms: int
    min_pause_ms: int
    max_concurrent_checkpoints: int
    tolerable_failed_checkpoints: int
    retained_checkpoints: int
    retain_on_finish: bool
    retention_on_cancel: Literal["delete", "retain"]
    checkpointing_mode: Literal["exactly_once", "at_least_once"]
    unaligned_checkpoints: bool
    aligned_checkpoint_timeout_ms: int
    inflight_bytes_max: int
    state_backend: Literal["memory", "filesystem", "rocksdb"]
    incremental_checkpoints: bool
    inline_threshold: int
    pack_threshold: int
    memory_snapshot_bytes_max: int
    rocksdb: RocksDBConfig | None
    local_recovery: bool
    local_recovery_directory: str | None
    savepoint_directory: str | None
    restart: RestartStrategy | Literal["none", "fixed_delay", "exponential_delay", "failure_rate"]
    skipped_rows_max: int | None
    max_parallelism: int | None
    buffer_timeout_ms: int
    batch_rows_max: int
    channel_credit_bytes: int
    channel_credit_batches: int
    buffer_debloat: bool
    buffer_debloat_target_ms: int
    buffer_debloat_period_ms: int
    channel_credit_bytes_start: int
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    reconcile_timeout_ms: int
    step_budget_ms: int
    cancellation_timeout_ms: int
    row_table_bytes_max: int
    auto_watermark_interval_ms: int
    latency_tracking_interval_ms: int
    combine_aggregates: bool
    checkpoint_interval_during_backlog_ms: int | None
    retained_hourly: int
    retained_daily: int
    retained_within_ms: int
    drill_interval_ms: int | None
    master_hooks: tuple[str, ...]
    master_hook_timeout_ms: int
    standby_workers_per_host: int


def signature_with_settings(constructor: Callable[..., Any]) -> inspect.Signature:
    """Signature that `help()` and notebooks show for a constructor that takes `**settings`: each setting with its default."""
    own = list(inspect.signature(constructor).parameters.values())
    settings = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in msgspec.structs.fields(JobConfig)
    ]
    return inspect.Signature([parameter for parameter in own[1:] if parameter.kind is not parameter.VAR_KEYWORD] + settings)
