"""Sinks without commits: one that only counts, for benchmarks, and one that keeps rows in this process, for tests.

Neither is exactly-once: after a failure what they saw is seen again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from barriers.elements import Batch
from operators.base import Operator


class Blackhole:
    """Takes everything, keeps a count (`blackhole` among the operator's named counters)."""

    needs_columns = False

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


_COLLECTED: dict[str, list[Any]] = {}


class CollectSink:
    """Keeps rows in the process that runs the subtask: `CollectSink.rows(sink_id)` finds them there and nowhere else."""

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
        """What has arrived so far, in order of arrival; includes what a failure made arrive twice."""
        return list(_COLLECTED.get(sink_id, ()))

    @staticmethod
    def clear(sink_id: str) -> None:
        _COLLECTED.pop(sink_id, None)


class _CollectWriter(Operator):
    def __init__(self, sink: CollectSink) -> None:
        self._sink = sink

    def process_batch(self, batch: Batch, input_index: int) -> None:
        _COLLECTED.setdefault(self._sink.sink_id, []).extend(batch.rows())
