"""Each query beside the same in SQL: on the same events, with a restart at another parallelism in the middle.

The job runs in this process (`hf.testing.Job`): a clock moved by hand makes the events, so that the cut lies in the middle of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from holdfast.api.nexmark.events import SCHEMAS, Nexmark, count_of
from holdfast.api.nexmark.query import Auctions, Query
from holdfast.api.testing.job import Job
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    import duckdb

EVENTS = 200_000
EVENTS_PER_SECOND = 1_000
"""Of event time: one in each ms, so that no two bids come at one time."""
MADE_MS = 200
"""By the job's clock, in which all events are made: in some 20 steps."""
BEGINS_MS = 9_900
"""The job's clock at the start: a window by the clock ends in the middle."""
PARALLELISM, PARALLELISM_AFTER = 2, 3

Row = tuple[Any, ...]


@dataclass(frozen=True)
class Checked:
    """One query's rows beside those of DuckDB."""

    query: Query
    rows: int
    """Of DuckDB's result."""
    missing: tuple[Row, ...]
    extra: tuple[Row, ...]
    seconds: float
    """That the job took, of real time."""

    @property
    def ok(self) -> bool:
        return not self.missing and not self.extra


class Checker:
    """Checks queries on the same events."""

    def __init__(self, events: int = EVENTS, *, seed: int = 0, state_backend: str = "filesystem") -> None:
        """Raises InvalidConfigError where DuckDB is not installed."""
        self.events = events
        self.seed = seed
        self.state_backend = state_backend
        self._duckdb = _database(events, seed)

    def check(self, query: Query) -> Checked:
        """Run it, and compare."""
        expected = self._duckdb.sql(query.sql).to_arrow_table()
        began = time.perf_counter()
        rows = self.rows(query, expected.column_names)
        seconds = time.perf_counter() - began
        wanted = _judged(query, _plain(expected), expected.column_names)
        found = _judged(query, rows, expected.column_names)
        return Checked(query, expected.num_rows, _some(wanted - found), _some(found - wanted), seconds)

    def rows(self, query: Query, columns: Sequence[str]) -> list[Row]:
        """All that the query's job has committed at its end, in the order of commits."""
        with Job(query.name, parallelism=PARALLELISM, at_ms=BEGINS_MS, seed=self.seed, state_backend=self.state_backend) as job:
            rate = max(1.0, self.events * 1_000 / MADE_MS)
            house = Auctions(job.environment, self.events, EVENTS_PER_SECOND, rate, self.seed)
            out = job.output(query.build(house))
            job.start()
            job.advance(by_ms=MADE_MS // 2)
            job.checkpoint()
            job.advance(by_ms=MADE_MS // 5)  # what comes out now is not committed, and comes once more
            job.restart(parallelism=PARALLELISM_AFTER)
            while job.status != "FINISHED":
                job.advance(by_ms=MADE_MS // 2)
            return [tuple(_value(row[name]) for name in columns) for row, _ in out.committed()]


def _database(events: int, seed: int) -> duckdb.DuckDBPyConnection:
    """The three tables."""
    try:
        import duckdb
    except ImportError as error:
        raise InvalidConfigError("the check compares with DuckDB: pip install 'holdfast[sql]'", package="duckdb") from error
    database = duckdb.connect(":memory:", config={"threads": "1"})
    database.execute("SET TimeZone = 'UTC'")
    for kind in SCHEMAS:
        made = Nexmark(kind, seed=seed, events_per_second=EVENTS_PER_SECOND)(np.arange(count_of(kind, events)))
        database.register("made", pa.table(made))
        database.execute(f"CREATE TABLE {kind} AS SELECT * FROM made")
    return database


def _plain(table: pa.Table) -> Iterable[Row]:
    return zip(*([_value(value) for value in column.to_pylist()] for column in table.columns), strict=True)


def _value(value: Any) -> Any:
    """Times as microseconds since the epoch, floats to twelve digits: equal values of either side are equal."""
    if isinstance(value, datetime):
        return value if value.tzinfo is None else value.replace(tzinfo=None)
    return float(f"{value:.12g}") if isinstance(value, float) else value


def _judged(query: Query, rows: Iterable[Row], columns: list[str]) -> Counter[Row]:
    """What has to be equal of these rows."""
    places = [columns.index(name) for name in query.key]
    others = [place for place in range(len(columns)) if place not in places]
    if query.judged == "last":
        return Counter({tuple(row[place] for place in places): row for row in rows}.values())
    if query.judged == "totals":
        totals: Counter[Row] = Counter()
        for row in rows:
            totals[tuple(row[place] for place in places)] += sum(row[place] for place in others)
        return Counter((*key, total) for key, total in totals.items())
    return Counter(rows)


def _some(rows: Counter[Row], limit: int = 5) -> tuple[Row, ...]:
    return tuple(row for row, _ in zip(rows, range(limit), strict=False))
