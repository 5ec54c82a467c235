"""What comes out of a job under test: every row as it is emitted, and the rows that a two-phase sink has committed.

The sink is the product's own, of files: its writer stages what came between two checkpoints, its committer commits. Beside that
the writer tells the test each row at once, as a sink without commits would have shown it to the world."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import pyarrow as pa

from holdfast.barriers.elements import MIN_WATERMARK, Batch
from holdfast.operators.base import Operator
from holdfast.operators.sinks.files.log import SinkSettings
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sinks.files.writer import ParquetSinkWriter
from holdfast.operators.task.chain import ChainNode
from holdfast.statebackends.errors import NotFoundError
from holdfast.statebackends.storage.port import Storage

Emitted = tuple[Any, int | None]
"""A row and its event time in ms; None: it has none."""

_ROWS = pa.schema([pa.field("rows", pa.binary(), nullable=False)])
"""Rows with their times, pickled: those of a test may be of any type."""


class OutputSink(ParquetSink):
    """The two-phase sink of one output."""

    needs_columns = False

    def __init__(self, path: str, uid: str) -> None:
        super().__init__(path, uid, name="output")
        self.record: Callable[..., Any] | None = None
        """What rows are made of, if they are of a declared record type."""

    def create_writer(self, schema: pa.Schema | None) -> Operator:
        super().create_writer(_ROWS)
        return OutputWriter(self._settings, self.record)


class OutputWriter(ParquetSinkWriter):
    """Stages rows, and tells the test of them."""

    def __init__(self, settings: SinkSettings, record: Callable[..., Any] | None) -> None:
        super().__init__(settings, _ROWS)
        self.sink_id = settings.sink_id
        self.emitted: list[Emitted] = []
        """The test's own, put in place where a worker has unpickled the operator."""
        self._record = record

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if batch.schema is not None:
            batch = batch.unshared()  # by way of columns, as to any sink: a row that does not fit them is an error here, too
        times = [None] * batch.num_rows if batch.timestamps is None else batch.timestamps.tolist()
        pickled = cloudpickle.dumps(list(zip(batch.rows(self._record), times, strict=True)))
        columns = pa.RecordBatch.from_arrays([pa.array([pickled], pa.binary())], schema=_ROWS)
        super().process_batch(Batch(columns=columns), input_index)
        self.emitted += pickle.loads(pickled)  # copies: what the job does to its own later is not seen here


class Output:
    """An output of a `Job`.

    What is visible, and when: `take` shows rows as they are emitted, checkpoint or not; after a restart, once more those that were
    emitted behind the checkpoint. `committed` shows what an exactly-once sink shows: a row once, when a checkpoint covers it."""

    def __init__(
        self, sink: OutputSink, storage: Storage, *, check: Callable[[], None], nodes: Callable[[str], Sequence[ChainNode]]
    ) -> None:
        """`check` raises when the job's files are gone."""
        self.uid = sink.sink_id
        self.emitted: list[Emitted] = []
        self._sink = sink
        self._storage = storage
        self._check = check
        self._nodes = nodes

    def __repr__(self) -> str:
        return f"<Output {self.uid!r}: {len(self.emitted)} rows to take>"

    def take(self) -> list[Emitted]:
        """(row, event time) of what was emitted since the last call, in order of arrival; rows of one subtask keep their order."""
        taken = self.emitted[:]
        self.emitted.clear()
        return taken

    def rows(self) -> list[Any]:
        """As `take`, without the times."""
        return [row for row, _ in self.take()]

    def committed(self) -> list[Emitted]:
        """All that is committed, in the order of commits; nothing is taken away.

        Raises InvalidConfigError once the job is closed."""
        self._check()
        try:
            table = read_committed(self._sink.path, self._sink.sink_id, open_storage=self._storage.at)
        except NotFoundError:  # the sink has not written anything yet
            return []
        return [pair for pickled in table.column("rows").to_pylist() for pair in pickle.loads(pickled)]

    @property
    def watermark(self) -> int | None:
        """Event time that has come this far: the least over the sink's subtasks, in ms. None before there is any."""
        return least_watermark(self._nodes(self.uid))


def least_watermark(nodes: Sequence[ChainNode]) -> int | None:
    """Of one operator over its subtasks; None where one has none yet."""
    found = min((node.watermark_ms for node in nodes), default=MIN_WATERMARK)
    return None if found == MIN_WATERMARK else found
