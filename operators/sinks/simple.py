"""Sinks without commits: one that only counts, for benchmarks, one that keeps rows in this process, for tests, one that prints, and
one that stands in a branch for a sink that must not write there.

None is exactly-once: after a failure rows arrive again."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.base import Operator
from holdfast.operators.functions.context import FunctionContext
from holdfast.statebackends.errors import InvalidConfigError


class Blackhole:
    """Drops all rows and counts them (`blackhole` among the operator's named counters)."""

    needs_columns = False
    discards = True
    """Its rows are never visible, so that no output repeats."""

    def __init__(self, sink_id: str = "", *, name: str = "blackhole") -> None:
        self.sink_id = sink_id
        self.name = name

    def __repr__(self) -> str:
        return f"Blackhole({self.sink_id!r})"

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        return BlackholeWriter()

    def create_committer(self) -> Operator | None:
        return None


class BlackholeWriter(Operator):
    def process_batch(self, batch: Batch, input_index: int) -> None:
        counts = self.context.counters.named
        counts["blackhole"] = counts.get("blackhole", 0) + batch.num_rows


class MutedSink:
    """Stands for another sink: takes its rows, counts them (`muted` among the operator's counters, each row once over restarts),
    and writes nothing.

    The other sink makes no writer and no committer, and does not travel with the job: what it writes to is not even asked."""

    needs_columns = False
    discards = True

    def __init__(self, sink_id: str, name: str) -> None:
        self.sink_id = sink_id
        self.name = name

    def __repr__(self) -> str:
        return f"MutedSink({self.sink_id!r})"

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        return MutedWriter()

    def create_committer(self) -> Operator | None:
        return None


class MutedWriter(Operator):
    def open(self) -> None:
        self._rows = FunctionContext(self.context).counter("muted")

    def process_batch(self, batch: Batch, input_index: int) -> None:
        self._rows.inc(batch.num_rows)


_COLLECTED: dict[str, list[Any]] = {}


class CollectSink:
    """Keeps rows in the process that runs the subtask; `CollectSink.rows(sink_id)` returns them in that process only."""

    needs_columns = False

    def __init__(self, sink_id: str = "", *, name: str = "collect") -> None:
        self.sink_id = sink_id
        self.name = name

    def __repr__(self) -> str:
        return f"CollectSink({self.sink_id!r})"

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        return _CollectWriter(self)

    def create_committer(self) -> Operator | None:
        return None

    @staticmethod
    def rows(sink_id: str) -> list[Any]:
        """Rows so far, in order of arrival; rows repeated after a failure are included."""
        return list(_COLLECTED.get(sink_id, ()))

    @staticmethod
    def clear(sink_id: str) -> None:
        """Drop the rows kept in this process."""
        _COLLECTED.pop(sink_id, None)


class _CollectWriter(Operator):
    def __init__(self, sink: CollectSink) -> None:
        self._sink = sink

    def process_batch(self, batch: Batch, input_index: int) -> None:
        _COLLECTED.setdefault(self._sink.sink_id, []).extend(batch.rows())


PRINTED_ROWS_MAX = 1_000


class PrintSink:
    """Writes rows to the standard output of their worker, which Spark passes on to its executor's standard error: on `local[N]` the
    driver's terminal. Meant for inspection: each subtask stops after `limit` rows (None: never) and prints that it does."""

    needs_columns = False

    def __init__(self, sink_id: str = "", *, limit: int | None = PRINTED_ROWS_MAX, name: str = "print") -> None:
        """Raises InvalidConfigError for a limit below 1."""
        if limit is not None and limit < 1:
            raise InvalidConfigError(f"limit must be at least 1, or None, got {limit}", setting="limit")
        self.sink_id = sink_id
        self.limit = limit
        self.name = name

    def __repr__(self) -> str:
        return f"PrintSink({self.sink_id!r}, limit={self.limit})"

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        return _PrintWriter(self.limit)

    def create_committer(self) -> Operator | None:
        return None


class _PrintWriter(Operator):
    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._printed = 0

    def process_batch(self, batch: Batch, input_index: int) -> None:
        left = batch.num_rows if self._limit is None else min(batch.num_rows, self._limit - self._printed)
        if left < 1:
            return
        begin = f"{self.context.uid}[{self.context.subtask}]"
        lines = [f"{begin} {row!r}\n" for row in batch.slice(0, left).rows()]
        self._printed += left
        if self._printed == self._limit:
            lines.append(f"{begin} printed {self._limit} rows, and prints no more\n")
        sys.stdout.write("".join(lines))
        sys.stdout.flush()
