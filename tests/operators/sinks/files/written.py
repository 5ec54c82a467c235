"""A Parquet sink's output in a folder, written commit by commit as a job does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.sinks.files.parquet import FileSink, ParquetSink
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import run_flow
from tests.operators.ports import Collected, ManualContext

_ATTEMPTS = count(1)


class Written:
    """One job's attempt that writes to a sink below a folder."""

    def __init__(
        self, folder: Path, schema: pa.Schema, *, sink_id: str = "out", job_id: str = "job-a", sink: FileSink | None = None
    ) -> None:
        self._schema = schema
        self._folder = folder
        sink = sink or ParquetSink(folder, sink_id)
        attempt = next(_ATTEMPTS)
        self._out, self._context = Collected(), ManualContext(job_id=job_id, attempt=attempt, nonce=f"n{attempt}")
        self._writer, self._committer = sink.create_writer(schema), sink.create_committer()
        self._committer.allow_output_repeat = True  # type: ignore[attr-defined]
        self._writer.setup(self._context, self._out)
        self._committer.setup(self._context, Collected())
        self._committer.initialize_state()
        self._committer.open()
        self._checkpoint = 0
        self._run()

    def _run(self) -> None:
        self._context.run_pool()
        if self._context.failures:
            raise self._context.failures[0]

    def stage(self, columns: Mapping[str, Sequence[object]]) -> None:
        """Rows of a checkpoint that is not complete."""
        self._checkpoint += 1
        arrays = [pa.array(columns[field.name], field.type) for field in self._schema]
        self._writer.process_batch(Batch(columns=pa.RecordBatch.from_arrays(arrays, schema=self._schema)), 0)
        self._writer.prepare_snapshot(self._checkpoint)
        work = self._writer.snapshot_work(self._checkpoint)
        assert work is not None
        run_flow(work, LocalStorage(self._folder))
        for batch in self._out.batches:
            self._committer.process_batch(batch, 0)
        self._out.batches.clear()

    def wait(self, duration_ms: int) -> None:
        """Time passes."""
        self._context.time_ms += duration_ms

    def commit(self, columns: Mapping[str, Sequence[object]]) -> None:
        self.stage(columns)
        self._committer.notify_checkpoint_complete(self._checkpoint)
        self._run()
