"""Settings that every workload draws: small and quick, so that a second of virtual time holds many checkpoints."""

from __future__ import annotations

import random
from typing import Any

from holdfast.barriers.jobgraph import RestartStrategy

MAX_PARALLELISM = 8
"""Key groups of every operator: fixed, so that a job may be rescaled."""

PARALLELISM_MAX = 4
BACKENDS = ("memory", "filesystem", "rocksdb")
_BACKEND_WEIGHTS = (14, 5, 1)


def draw_settings(rng: random.Random, interval_ms: tuple[int, int] = (50, 300)) -> dict[str, Any]:
    """Fields of a JobConfig; the checkpoint interval lies within `interval_ms`, both ends included."""
    concurrent = rng.choice((1, 1, 1, 2, 3))
    pause_ms = rng.choice((0, 0, 20, 80))
    settings = {
        "checkpoint_interval_ms": rng.randint(*interval_ms),
        "checkpoint_timeout_ms": rng.choice((2_000, 3_000, 5_000)),
        "min_pause_ms": pause_ms if concurrent == 1 else 0,
        "max_concurrent_checkpoints": concurrent,
        "tolerable_failed_checkpoints": rng.choice((0, 1, 3, 10)),
        "retained_checkpoints": rng.randint(1, 3),
        "retain_on_finish": pause_ms == 20,  # not a draw of its own, so that older seeds keep their meaning
        "state_backend": rng.choices(BACKENDS, _BACKEND_WEIGHTS)[0],
        "inline_threshold": rng.choice((0, 20_480, 20_480)),
        "restart": RestartStrategy(delay_ms=100, delay_max_ms=400),
        "max_parallelism": MAX_PARALLELISM,
        "buffer_timeout_ms": rng.choice((0, 5, 10, 40)),
        "batch_rows_max": rng.choice((16, 65_536, 65_536)),
        "channel_credit_bytes": rng.choice((2_048, 4 << 20, 4 << 20)),
        "channel_credit_batches": rng.choice((1, 2, 16, 16)),
        "heartbeat_interval_ms": 200,
        "heartbeat_timeout_ms": rng.choice((1_000, 1_500, 2_000)),
        "reconcile_timeout_ms": 1_000,
        "cancellation_timeout_ms": 5_000,
    }
    # not draws of their own, so that older seeds keep their meaning
    return {**settings, "combine_aggregates": settings["heartbeat_timeout_ms"] != 1_500, **_debloating(settings)}


def _debloating(settings: dict[str, Any]) -> dict[str, Any]:
    """Allocations that move, often and by much, or stay."""
    choice = settings["checkpoint_interval_ms"]
    target_ms, period_ms = ((200, 200), (20, 10), (1, 50))[choice % 3]
    return {
        "buffer_debloat": choice % 4 != 0,
        "buffer_debloat_target_ms": target_ms,
        "buffer_debloat_period_ms": period_ms,
        "channel_credit_bytes_start": min(settings["channel_credit_bytes"], (64, 4_096, 65_536)[choice % 5 % 3]),
    }


def draw_pace(rng: random.Random, rows: int) -> tuple[float, int]:
    """(rows per second, rows per step) of a feed that lasts about a second."""
    step_rows = rng.choice((10, 25, 50)) if rows > 100 else rng.choice((1, 5, 10))
    return max(1, rows) / rng.uniform(0.7, 1.5), step_rows
