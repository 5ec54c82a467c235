"""What a window of row functions keeps of its records: all of them, or one value that is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.operators.functions.windows.evictors import TimestampedValue
from holdfast.statebackends.state import (
    AggregateFunction,
    AggregatingStateDescriptor,
    ListStateDescriptor,
    ReducingStateDescriptor,
    StateDescriptor,
)

CONTENTS = "window_contents"
"""Name of the state that holds what windows have got."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a window keeps of its records, and what its function gets of it."""

    type: Any
    """Of a row, or of the accumulator."""
    reduce: Callable[[Any, Any], Any] | None = None
    aggregate: AggregateFunction[Any, Any, Any] | None = None

    def descriptor(self, *, is_evicting: bool) -> StateDescriptor:
        """With an evictor all records are kept, with their times, whatever is made of them in the end."""
        if is_evicting:
            return ListStateDescriptor(CONTENTS, self._stamped_type())
        if self.reduce is not None:
            return ReducingStateDescriptor(CONTENTS, self.type, self.reduce)
        if self.aggregate is not None:
            return AggregatingStateDescriptor(CONTENTS, self.type, self.aggregate)
        return ListStateDescriptor(CONTENTS, self.type)

    def _stamped_type(self) -> Any:
        if isinstance(self.type, pa.DataType):
            return pa.struct([pa.field("timestamp", pa.int64()), pa.field("value", self.type, nullable=False)])
        return tuple[int | None, self.type]  # type: ignore[name-defined]

    def stamped(self, timestamp: int | None, row: Any) -> Any:
        """A record as it is kept for an evictor."""
        return {"timestamp": timestamp, "value": row} if isinstance(self.type, pa.DataType) else (timestamp, row)

    @staticmethod
    def unstamped(stored: Any) -> TimestampedValue:
        """Inverse of `stamped`."""
        return TimestampedValue(**stored) if isinstance(stored, dict) else TimestampedValue(*stored)

    def result(self, rows: list[Any]) -> list[Any]:
        """What the function gets of the records that an evictor has left."""
        if self.reduce is not None:
            if not rows:
                return []
            found = rows[0]
            for row in rows[1:]:
                found = self.reduce(found, row)
            return [found]
        if self.aggregate is not None:
            accumulator = self.aggregate.create_accumulator()
            for row in rows:
                accumulator = self.aggregate.add(row, accumulator)
            return [self.aggregate.get_result(accumulator)]
        return rows
