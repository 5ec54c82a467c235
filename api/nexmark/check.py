"""Each query beside the same in SQL: on the same events, with a restart at another parallelism in the middle.

The job runs in this process (`hf.testing.Job`): a clock moved by hand makes the events, so that the cut lies in their middle."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Literal

from holdfast.api.nexmark.oracle import Difference, Oracle, Row
from holdfast.api.nexmark.query import Auctions, Query
from holdfast.api.testing.job import Job
from holdfast.operators.sinks.files.parquet import FileSink, read_committed

EVENTS = 200_000
EVENTS_PER_SECOND = 1_000
"""Of event time: one in each ms, so that no two bids come at one time."""
MADE_MS = 100
"""By the job's clock, in which all events are made: in some 10 steps."""
BEGINS_MS = 9_950
"""The job's clock at the start: a window by the clock ends in the middle."""

Backend = Literal["memory", "filesystem", "rocksdb"]


@dataclass(frozen=True)
class Checked:
    """One query's rows beside those of DuckDB."""

    query: Query
    rows: int
    """Of DuckDB's result."""
    difference: Difference | None
    seconds: float
    """That the job took, of real time."""


class Checker:
    """Checks queries on the same events."""

    def __init__(
        self, events: int = EVENTS, *, seed: int = 0, state_backend: Backend = "filesystem", parallelism: tuple[int, int] = (2, 3)
    ) -> None:
        """parallelism: before the restart, and behind it. Raises InvalidConfigError where DuckDB is not installed."""
        self._events = events
        self._seed = seed
        self._state_backend: Backend = state_backend
        self._parallelism = parallelism
        self._oracle = Oracle(events, EVENTS_PER_SECOND, seed)

    def check(self, query: Query) -> Checked:
        expected = self._oracle.expected(query)
        began = time.perf_counter()
        rows = self.rows(query, expected.columns)
        seconds = time.perf_counter() - began
        return Checked(query, len(expected.rows), expected.difference(rows, expected.columns), seconds)

    def rows(self, query: Query, columns: Sequence[str]) -> list[Row]:
        """These columns of all that the query's job has committed at its end, in the order of commits; of one that writes files, as
        they are read from there."""
        before, after = self._parallelism
        with (
            Job(query.name, parallelism=before, at_ms=BEGINS_MS, seed=self._seed, state_backend=self._state_backend) as job,
            TemporaryDirectory(prefix="holdfast-nexmark-") as folder,
        ):
            rate = self._events * 1_000 / MADE_MS
            stream = query.build(Auctions(job.environment, self._events, EVENTS_PER_SECOND, rate, self._seed))
            if query.partition_by:
                stream.sink_to(FileSink(folder, partition_by=query.partition_by), uid="out")
            else:
                out = job.output(stream)
            job.start()
            job.advance(by_ms=MADE_MS // 2)
            job.checkpoint()
            job.advance(by_ms=MADE_MS // 5)  # what comes out now is not committed, and comes once more
            job.restart(parallelism=after)
            while job.status != "FINISHED":
                job.advance(by_ms=MADE_MS)
            rows = read_committed(folder).to_pylist() if query.partition_by else [row for row, _ in out.committed()]
            return [tuple(row[name] for name in columns) for row in rows]
