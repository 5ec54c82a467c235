"""The writing half of the two-phase Parquet sink: rows become staged files, whose names are sent to the committer.

A file's name is fixed at the barrier or when it is full; its bytes are durable before the acknowledgement. The writer deletes
nothing."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.barriers.elements import Batch
from holdfast.barriers.sinklog import LOG_VERSION, SinkPaths, StagedFile
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.operators.sinks.log import Committable, FileName, SinkSettings, job_tag, nonce_tag
from holdfast.statebackends.storage.port import Flow, Storage, WriteFile

_COMPRESSED_BYTES_MIN = 8 * 1024
"""Bytes of a file's rows in memory from which it is compressed. For a smaller file the compressor alone takes as long as everything
else, when writing and when reading."""

COMMITTABLE_SCHEMA = pa.schema([pa.field("committable", pa.binary(), nullable=False)])


class _StagedWrite:
    """Rows on their way to one file; may be written twice, to the same bytes: eagerly, and again for a barrier."""

    def __init__(self, path: str, batches: list[pa.RecordBatch], schema: pa.Schema) -> None:
        self._path = path
        self._batches = batches
        self._schema = schema
        self.durable = False
        """Set by the pool once the bytes are safe; read on the loop thread."""

    def flow(self) -> Flow[None]:
        batches = self._batches  # taken before `durable` is read: another run of this flow drops them after it set that
        if self.durable:
            return
        yield WriteFile(self._path, [_encode(batches, self._schema)])
        self.durable = True
        self._batches = []


def _encode(batches: list[pa.RecordBatch], schema: pa.Schema) -> memoryview:
    target = pa.BufferOutputStream()
    table = pa.Table.from_batches(batches, schema)
    compression = "zstd" if table.get_total_buffer_size() >= _COMPRESSED_BYTES_MIN else "none"
    pq.write_table(table, target, compression=compression, write_page_checksum=True, row_group_size=max(1, table.num_rows))
    return memoryview(target.getvalue())


class ParquetSinkWriter(Operator):
    """Operator kind `sink_writer`. Emits one committable per checkpoint with rows, and nothing else."""

    def __init__(self, settings: SinkSettings, schema: pa.Schema) -> None:
        self._settings = settings
        self._schema = schema

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._paths = SinkPaths(self._settings.sink_id)
        self._storage = self._settings.storage(context.storage)
        self._held: list[pa.RecordBatch] = []
        self._held_size = 0
        self._files: list[StagedFile] = []
        """Files named since the last committable."""
        self._writes: list[_StagedWrite] = []
        """Writes whose file has a name and is not known to be durable."""
        self._sequence = 0
        self._next_checkpoint = context.restored_checkpoint_id + 1
        """Lowest checkpoint id that rows arriving now can belong to."""

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if batch.num_rows == 0:
            return
        columns = batch.columns()
        self._held.append(columns if columns.schema.equals(self._schema) else columns.cast(self._schema))
        self._held_size += columns.nbytes
        if self._held_size >= self._settings.file_size_max:
            # Written at once, so that memory stays bounded between two checkpoints. A failure is found at the barrier.
            self.context.submit_flow(self._roll(self._next_checkpoint).flow(), self._storage, lambda result, error: None)

    def _roll(self, first_checkpoint: int) -> _StagedWrite:
        context = self.context
        name = FileName(
            sink_id=self._paths.sink_id,
            job=job_tag(context.job_id),
            attempt=context.attempt,
            subtask=context.subtask,
            first_checkpoint=first_checkpoint,
            nonce=nonce_tag(context.nonce),
            sequence=self._sequence,
        ).text
        self._sequence += 1
        self._files.append(StagedFile(name, sum(batch.num_rows for batch in self._held)))
        write = _StagedWrite(self._paths.staged(name), self._held, self._schema)
        self._writes = [*(each for each in self._writes if not each.durable), write]
        self._held, self._held_size = [], 0
        return write

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        if self._held:
            self._roll(self._next_checkpoint)
        self._next_checkpoint = checkpoint_id + 1
        if self._files:
            committable = Committable(LOG_VERSION, checkpoint_id, self.context.subtask, tuple(self._files))
            self._files = []
            column = pa.array([msgspec.msgpack.encode(committable)], pa.binary())
            self.output.collect(Batch(columns=pa.RecordBatch.from_arrays([column], schema=COMMITTABLE_SCHEMA)))

    def snapshot_work(self, checkpoint_id: int) -> Flow[None] | None:
        # A write for an earlier checkpoint that failed or still runs belongs to this one, too: its rows are before the cut.
        self._writes = [write for write in self._writes if not write.durable]
        return self._write_all(list(self._writes)) if self._writes else None

    def snapshot_storage(self) -> Storage:
        return self._storage

    @staticmethod
    def _write_all(writes: list[_StagedWrite]) -> Flow[None]:
        for write in writes:
            yield from write.flow()
