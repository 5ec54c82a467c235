"""Real data in and out beside the raw clients, on the same rows in the same run: `make bench ARGS='--only connectors'`.

    python -m benchmarks.connectors [part ...] [--scale 0.1]

A scale below 1 shortens the runs: their figures have more of what each job pays once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.connectors import kafka, nats, postgres, recovery, spark, visible
from benchmarks.connectors.measuring import Row
from benchmarks.harness import Bench

PARTS: dict[str, Callable[[Bench, float], list[Row]]] = {
    "kafka": kafka.measure,
    "postgres": postgres.measure,
    "nats": nats.measure,
    "visible": visible.measure,
    "recovery": recovery.measure,
    "spark": spark.measure,
}


def measure(bench: Bench, scale: float, parts: Sequence[str] = tuple(PARTS)) -> list[Row]:
    """A line for each figure. scale: of rows, checkpoints and kills."""
    return [row for part in parts for row in PARTS[part](bench, scale)]
