"""Real data in and out beside the raw clients, on the same rows in the same run: `make bench ARGS='--only connectors'`.

    python -m benchmarks.connectors [part ...] [--scale 0.1]

A scale below 1 shortens the runs: their figures have more of what each job pays once."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from benchmarks.connectors import kafka, nats, postgres, recovery, spark, visible
from benchmarks.connectors.measuring import COLUMNS, FAILED, Row
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
    """A line for each figure. scale: of rows, checkpoints and kills. A part that fails has a line that says so, and
    the others have their figures."""
    rows: list[Row] = []
    for part in parts:
        try:
            rows += PARTS[part](bench, scale)
        except Exception as error:
            traceback.print_exc()
            rows.append({**dict.fromkeys(COLUMNS, ""), "row": part, "met": FAILED, "how": f"{type(error).__name__}: {error}"})
    return rows
