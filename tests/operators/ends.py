"""Ends for graphs under test: a source of declared columns and a sink that can do nothing but be there."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from holdfast.operators.base import Operator, SourceReader
from holdfast.statebackends.errors import InvariantError

FLIGHTS = pa.schema(
    [
        ("carrier", pa.string()),
        ("flight", pa.int64()),
        ("origin", pa.string()),
        ("scheduled", pa.int64()),
        ("delay", pa.float64()),
        ("at", pa.timestamp("us", tz="UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("small", pa.int32()),
    ]
)


class NamedSource:
    """A source that graphs can be built on."""

    def __init__(self, schema: pa.Schema | None = FLIGHTS, name: str = "flights") -> None:
        self.schema = schema
        self.name = name

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> SourceReader:
        raise InvariantError("this source is for graphs only")


class NamedSink:
    """A sink that graphs can end in."""

    def __init__(self, name: str = "out", *, sink_id: str = "", needs_columns: bool = True, commits: bool = True) -> None:
        self.name = name
        self.sink_id = sink_id
        self.needs_columns = needs_columns
        self.commits = commits
        self.schema: Any = None

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        self.schema = schema
        return Operator()

    def create_committer(self) -> Operator | None:
        return Operator() if self.commits else None
