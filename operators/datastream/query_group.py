"""Stock streaming queries of Spark under one coordinator: a job whose sources are the queries, each with its sink.

A checkpoint has whole micro-batches: the barrier passes a query between two of them, and an idle one at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from holdfast.operators.datastream.environment import Environment
from holdfast.operators.datastream.launcher import JobHandle
from holdfast.operators.datastream.stream import Stream
from holdfast.operators.sources.stream import StreamSource
from holdfast.operators.sources.stream_savepoint import check_saveable, save_queries
from holdfast.statebackends.errors import GraphError, InvalidConfigError
from holdfast.statebackends.state_processor.contents import Location

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from holdfast.operators.sinks.connector import Sink
    from holdfast.operators.sources.stream_query import StreamQuery

HOLD_S = 120.0
"""Time that a savepoint waits, for the batches under way to end and for their rows to be read."""
POLL_S = 0.05


class QueryGroup:
    """Streaming queries whose sinks commit together: checkpoint n has the rows of whole micro-batches of every query, and is in no
    sink before it is complete in all.

    The environment has the job's name and settings, and no other streams."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._names: list[str] = []
        self._job: JobHandle | None = None

    def add(
        self,
        dataframe: DataFrame,
        sink: Sink,
        *,
        name: str,
        output_mode: str = "append",
        available_now: bool = False,
        trigger_interval: Any = None,
        checkpoint: str | None = None,
    ) -> Stream:
        """A streaming DataFrame, and where its rows go; the other arguments are those of `Environment.from_stream`.

        name: of the query within the group, which savepoints know it by: the uid of its source; its sink's is `<name>-sink`. Raises
        GraphError for one that is taken, and InvalidConfigError."""
        if name in self._names:
            raise GraphError(f"the group has a query named {name!r} already", operator=name)
        source = StreamSource(
            dataframe,
            output_mode=output_mode,
            available_now=available_now,
            trigger_interval=trigger_interval,
            checkpoint=checkpoint,
            name=name,
        )
        source.whole_batches = True
        self._names.append(name)
        rows = self.environment.from_source(source).uid(name).set_parallelism(1)
        rows.sink_to(sink).uid(f"{name}-sink")
        return rows

    def start(self, **options: Any) -> JobHandle:
        """Start the queries, and the job that reads them; `options` are those of `Environment.execute`.

        restore: also a savepoint that this group, or another one with queries of these names, took by `savepoint`: each query then
        goes on from the copy of its checkpoint, in a new folder. Raises InvalidConfigError naming a setting of the session that is
        another than the query's."""
        if not self._names:
            raise GraphError("the group has no query")
        self._job = self.environment.execute(**options)
        return self._job

    def savepoint(self, target: Location | None = None, *, stop: bool = False, timeout_s: float = HOLD_S) -> str:
        """Take a savepoint that has the queries' own checkpoints, and return its location. The queries are held between two batches
        meanwhile, until all that they gave was read. stop: the job ends with it.

        Raises TimeoutError where a batch, or what reads it, takes longer. If copying the queries' checkpoints fails, a note of the
        error says where the savepoint is: without them, a job goes on from it where the queries' own checkpoints are."""
        job = self._job
        queries: Sequence[StreamQuery] = getattr(job, "inputs", ())
        if job is None or not queries:
            raise InvalidConfigError("the group was not started here", setting="group")
        check_saveable(queries)
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as held:
            for query in queries:
                held.enter_context(query.held(max(0.0, deadline - time.monotonic())))
            while not all(query.has_been_read for query in queries):
                if time.monotonic() >= deadline:
                    waiting = ", ".join(query.uid for query in queries if not query.has_been_read)
                    raise TimeoutError(f"rows of {waiting} were not read within {timeout_s:.0f} s")
                time.sleep(POLL_S)
            location = job.stop(target) if stop else job.savepoint(target)
            try:
                save_queries(location, queries)
            except Exception as error:
                error.add_note(f"the savepoint is at {location}, without the checkpoints of the queries")
                raise
        return location
