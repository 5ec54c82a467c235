"""What a query of Nexmark is: a pipeline over the three streams, the same in SQL, and how the two are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.api.nexmark.events import count_of, source
from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.stream import Stream

Judged = Literal["rows", "last", "totals"]


@dataclass(frozen=True)
class Auctions:
    """The streams of an auction house, as sources of one job."""

    environment: Environment
    events: int
    """Of all kinds together."""
    events_per_second: int = 100_000
    """Of event time."""
    rate: float | None = None
    """Events made per second, of all kinds together; None: as fast as they are taken."""
    seed: int = 0

    def persons(self, *columns: str) -> Stream:
        return self.read("person", columns)

    def auctions(self, *columns: str) -> Stream:
        return self.read("auction", columns)

    def bids(self, *columns: str) -> Stream:
        return self.read("bid", columns)

    def read(self, kind: str, columns: Sequence[str]) -> Stream:
        """The events of a kind with these columns; with event times if `dateTime` is among them."""
        rate = None if self.rate is None else self.rate * count_of(kind, self.events) / max(1, self.events)
        made = source(
            kind,
            self.events,
            columns=columns,
            rows_per_second=rate or None,
            seed=self.seed,
            events_per_second=self.events_per_second,
        )
        stream = self.environment.from_source(made).uid(f"{kind}s")
        return stream.assign_timestamps("dateTime", 0).uid(f"{kind}-times") if "dateTime" in columns else stream


@dataclass(frozen=True)
class Query:
    """One of Nexmark's queries."""

    name: str
    meaning: str
    build: Callable[[Auctions], Stream]
    sql: str
    """In DuckDB's dialect, over the tables `person`, `auction` and `bid`. Its columns are those that are compared."""
    kinds: tuple[str, ...] = ("bid",)
    """Streams that it reads."""
    judged: Judged = "rows"
    """What has to be equal: all rows; the last row of each key, where a newer row replaces one; or a sum for each key."""
    key: tuple[str, ...] = ()
    """Of `last` and `totals`."""
