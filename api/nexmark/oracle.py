"""What a query gives, by DuckDB over the same events, and how rows are compared with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from holdfast.api.nexmark.events import SCHEMAS, Nexmark, count_of
from holdfast.api.nexmark.query import Query
from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    import duckdb

SHOWN = 5
"""Rows of a difference that are kept."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Row = tuple[Any, ...]
"""Times are microseconds since the epoch, and floats have twelve digits: equal values of either side are equal."""


@dataclass(frozen=True)
class Difference:
    """Some of the rows that one side lacks."""

    missing: tuple[Row, ...]
    extra: tuple[Row, ...]


@dataclass(frozen=True)
class Expected:
    """A query's result."""

    query: Query
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def difference(self, rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> Difference | None:
        """How rows of these columns, in their order, differ from it in what the query says must be equal; None: they don't."""
        places = [columns.index(name) for name in self.columns]
        found = self._judged(tuple(comparable(row[place]) for place in places) for row in rows)
        wanted = self._judged(self.rows)
        if found == wanted:
            return None
        return Difference(tuple(wanted - found)[:SHOWN], tuple(found - wanted)[:SHOWN])

    def _judged(self, rows: Iterable[Row]) -> Counter[Row]:
        keys = [self.columns.index(name) for name in self.query.key]
        others = [place for place in range(len(self.columns)) if place not in keys]
        match self.query.judged:
            case "rows":
                return Counter(rows)
            case "last":
                return Counter({tuple(row[place] for place in keys): row for row in rows}.values())
            case "totals":
                totals: Counter[Row] = Counter()
                for row in rows:
                    totals[tuple(row[place] for place in keys)] += sum(row[place] for place in others)
                return Counter((*key, total) for key, total in totals.items())


def comparable(value: Any) -> Any:
    """The value of a `Row` that a value stands for."""
    if isinstance(value, datetime):
        return ((value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
    return float(f"{value:.12g}") if isinstance(value, float) else value


class Oracle:
    """DuckDB with the events of the three streams."""

    def __init__(self, events: int, events_per_second: int, seed: int) -> None:
        """Raises InvalidConfigError where DuckDB is not installed."""
        self._database = _database()
        for kind in SCHEMAS:
            made = Nexmark(kind, seed=seed, events_per_second=events_per_second)(np.arange(count_of(kind, events)))
            self._database.register("made", pa.table(made))
            self._database.execute(f"CREATE TABLE {kind} AS SELECT * FROM made")

    def expected(self, query: Query) -> Expected:
        result = self._database.sql(query.sql).to_arrow_table()
        columns = [list(map(comparable, column.to_pylist())) for column in result.columns]
        return Expected(query, tuple(result.column_names), tuple(zip(*columns, strict=True)))


def _database() -> duckdb.DuckDBPyConnection:
    try:
        import duckdb
    except ImportError as error:
        raise InvalidConfigError("Nexmark's results come from DuckDB: pip install 'holdfast[sql]'", package="duckdb") from error
    database = duckdb.connect(":memory:", config={"threads": "1"})
    database.execute("SET TimeZone = 'UTC'")
    return database
