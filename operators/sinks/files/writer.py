"""The writing half of the two-phase Parquet sink: rows become staged files, whose names are sent to the committer.

A file's name is fixed at the barrier or when it is full; its bytes are durable before the acknowledgement. The writer deletes
nothing.

A file is written by one flow at a time. With two, the later one might end behind the commit of the file and the deletion of its
staged form, and bring that back, for good if no attempt follows."""

from __future__ import annotations

import threading
from typing import Protocol

import msgspec
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.barriers.sinks.log import LOG_VERSION, SinkPaths, StagedFile
from holdfast.operators.base import Operator, OperatorContext, Output
from holdfast.operators.sinks.calls import CallPort, pause_flow
from holdfast.operators.sinks.files.formats import SUFFIXES, FileFormat, encode
from holdfast.operators.sinks.files.log import Committable, FileName, SinkSettings, job_tag, nonce_tag
from holdfast.operators.sinks.files.partitions import split_rows
from holdfast.operators.sinks.refused_rows import check_times
from holdfast.statebackends.storage.port import Flow, Storage, WriteFile, copies_links

COMMITTABLE_SCHEMA = pa.schema([pa.field("committable", pa.binary(), nullable=False)])

TURN_PAUSE_MS = 20
"""Time between two looks of a flow whose file another one is writing, ms."""


class StagedFolder(Protocol):
    """Where a sink's staged files are, relative to a storage root."""

    @property
    def sink_id(self) -> str: ...

    @property
    def staged_folder(self) -> str: ...

    def staged(self, name: str) -> str: ...


class _StagedWrite:
    """Rows on their way to one file. Several flows may want it written, eagerly and for one barrier or more: the first one writes
    it, and the next one only if that failed."""

    def __init__(
        self,
        path: str,
        batches: list[pa.RecordBatch],
        schema: pa.Schema,
        format: FileFormat,
        *,
        marker: str | None = None,
        is_output: bool = True,
    ) -> None:
        """`marker`: path of a file that is written first. is_output=False: a committer alone reads the file, once."""
        self._path = path
        self._marker = marker
        self._batches = batches
        self._schema = schema
        self._format = format
        self._is_output = is_output
        self._turn = threading.Lock()
        """Of the flow that writes."""
        self.durable = False
        """Set by the pool once the bytes are safe; read on the loop thread."""

    def flow(self) -> Flow[None]:
        """On a `CallPort`. It ends when the file is durable."""
        while not self._turn.acquire(blocking=False):
            yield from pause_flow(self._path, TURN_PAUSE_MS)
        try:
            if self.durable:
                return
            if self._marker is not None:
                yield WriteFile(self._marker, [])
            yield WriteFile(self._path, encode(self._format, self._batches, self._schema, is_output=self._is_output))
            self.durable = True
            self._batches = []
        finally:
            self._turn.release()


class ParquetSinkWriter(Operator):
    """Operator kind `sink_writer`. Emits one committable per checkpoint with rows, and nothing else."""

    def __init__(self, settings: SinkSettings, schema: pa.Schema) -> None:
        self._settings = settings
        self._schema = schema

    def setup(self, context: OperatorContext, output: Output) -> None:
        super().setup(context, output)
        self._paths, self._storage = self._staging(context)
        self._port = CallPort(self._storage)
        self._held: list[pa.RecordBatch] = []
        self._held_size = 0
        self._files: list[StagedFile] = []
        """Files named since the last committable."""
        self._writes: list[_StagedWrite] = []
        """Writes whose file has a name and is not known to be durable."""
        self._sequence = 0
        self._next_checkpoint = context.restored_checkpoint_id + 1
        """Lowest checkpoint id that rows arriving now can belong to."""

    def _staging(self, context: OperatorContext) -> tuple[StagedFolder, Storage]:
        """Where its files go."""
        storage = self._settings.storage(context.storage)
        return SinkPaths(self._settings.sink_id, in_place=copies_links(storage)), storage

    def process_batch(self, batch: Batch, input_index: int) -> None:
        if batch.num_rows == 0:
            return
        columns = batch.columns()
        if self._settings.format != "parquet":
            check_times(columns, f"sink {self._settings.sink_id}: ")
        self._held.append(columns if columns.schema.equals(self._schema) else columns.cast(self._schema))
        self._held_size += columns.nbytes
        if self._held_size >= self._settings.file_size_max:
            # Written at once, so that memory stays bounded between two checkpoints. A failure is found at the barrier.
            for write in self._roll(self._next_checkpoint):
                self.context.submit_flow(write.flow(), self._port, lambda result, error: None)

    def _roll(self, first_checkpoint: int) -> list[_StagedWrite]:
        """Name a file for the rows that are held, or for those of each partition."""
        held, self._held, self._held_size = self._held, [], 0
        columns = self._settings.partition_by
        if not columns:
            return [self._file(first_checkpoint, "", held, self._schema)]
        parts = split_rows(pa.Table.from_batches(held, self._schema), columns, self._paths.sink_id)
        return [self._file(first_checkpoint, folder, part.to_batches(), part.schema) for folder, part in parts]

    def _file(self, first_checkpoint: int, folder: str, batches: list[pa.RecordBatch], schema: pa.Schema) -> _StagedWrite:
        context, format = self.context, self._settings.format
        name = FileName(
            sink_id=self._paths.sink_id,
            job=job_tag(context.job_id),
            attempt=context.attempt,
            subtask=context.subtask,
            first_checkpoint=first_checkpoint,
            nonce=nonce_tag(context.nonce),
            sequence=self._sequence,
            suffix=SUFFIXES[format],
            folder=folder,
        ).text
        self._sequence += 1
        self._files.append(StagedFile(name, sum(batch.num_rows for batch in batches)))
        write = self._write(name, batches, schema)
        self._writes = [*(each for each in self._writes if not each.durable), write]
        return write

    def _write(self, name: str, batches: list[pa.RecordBatch], schema: pa.Schema) -> _StagedWrite:
        paths, format = self._paths, self._settings.format
        if isinstance(paths, SinkPaths) and paths.in_place:
            return _StagedWrite(paths.data(name), batches, schema, format, marker=paths.marker(name))
        return _StagedWrite(paths.staged(name), batches, schema, format, is_output=isinstance(paths, SinkPaths))

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
        return self._port

    @staticmethod
    def _write_all(writes: list[_StagedWrite]) -> Flow[None]:
        for write in writes:
            yield from write.flow()
