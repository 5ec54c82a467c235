"""A job of one source, one Parquet sink and nothing else, driven step by step, whose storage can die at any operation.

Records are 0, 1, 2 ...; the committed output must hold each once. Snapshots live outside the storage, as a coordinator's do."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.sinks.files.committer import FileCommitter
from holdfast.operators.sinks.files.log import MergeSettings
from holdfast.operators.sinks.files.parquet import ParquetSink, read_committed
from holdfast.operators.sinks.files.writer import ParquetSinkWriter
from holdfast.statebackends.storage import port as ops
from tests.operators.ports import Collected, DictStorage, ManualContext

SCHEMA = pa.schema([("i", pa.int64())])
ROOT = "/sink"


class Crash(BaseException):
    """The process died: nobody handles this."""


class MortalStorage(DictStorage):
    """Dies before or after the k-th operation that changes something (0-based); never when dies_at is None."""

    def __init__(self, files: dict[str, bytes], root: str = ROOT) -> None:
        super().__init__(files, root)
        self.changes = 0
        self.dies_at: int | None = None
        self.after = False
        self.ambiguous: set[int] = set()
        self.copies_links = False
        """Links are copies, as on S3: files are staged in place."""

    def execute(self, operation: ops.Operation) -> Any:
        if isinstance(operation, (ops.ReadFile, ops.StatFile, ops.ListFiles, ops.ListFolder)):
            return super().execute(operation)
        number, self.changes = self.changes, self.changes + 1
        if self.dies_at == number and not self.after:
            raise Crash
        result = super().execute(operation)
        if self.dies_at == number:
            raise Crash
        return result


class Snapshot(msgspec.Struct):
    checkpoint_id: int
    position: int
    committer: list[bytes]


class MiniJob:
    """One job over storage that outlives its attempts; `attempts` and checkpoint ids rise over its whole life."""

    def __init__(self, storage: MortalStorage, state: DictStorage, job_id: str = "job-a", restored: Snapshot | None = None) -> None:
        self.storage = storage
        self.state = state
        self.job_id = job_id
        self.completed = restored or Snapshot(0, 0, [])
        self.checkpoint_id = self.completed.checkpoint_id
        self.attempt = 0
        self.allow_output_repeat = False
        self.file_size_max = 128 << 20
        self.merging: MergeSettings | None = None
        self.time_ms = 0
        self.path = ROOT
        self.stores: dict[str, MortalStorage] = {}
        """Path -> storage of sinks that are elsewhere than in `storage`."""
        self.properties: dict[str, Any] = {}
        """Of the committer, as the coordinator decided."""

    def start(self, flows: int | None = None) -> None:
        """A new attempt from the newest completed snapshot; `flows`: only so many of its committer's are over when this returns.

        Raises what the committer failed with."""
        self.attempt += 1
        sink = ParquetSink(self.path, file_size_max=self.file_size_max, open_storage=lambda url: self.stores.get(url, self.storage))
        sink.sink_id = "out"
        sink._settings.merging = self.merging
        writer, committer = sink.create_writer(SCHEMA), sink.create_committer()
        assert isinstance(writer, ParquetSinkWriter)
        assert isinstance(committer, FileCommitter)
        committer.allow_output_repeat = self.allow_output_repeat
        self.committables = Collected()
        self.contexts = [self._context(), self._context()]
        self.contexts[1].properties = self.properties
        self.writer, self.committer = writer, committer
        writer.setup(self.contexts[0], self.committables)
        committer.setup(self.contexts[1], Collected())
        self.contexts[1].operator_state.list_state("committables").update(self.completed.committer)
        committer.initialize_state()
        committer.open()
        writer.open()
        self.position = self.completed.position
        if flows is None:
            self.run_pool()
        else:
            for _ in range(min(flows, 1 + len(self.completed.committer))):
                if self.contexts[1].tasks:
                    self.contexts[1].tasks.pop(0)()

    def _context(self) -> ManualContext:
        return ManualContext(
            storage=self.state,
            job_id=self.job_id,
            attempt=self.attempt,
            nonce=f"n{self.job_id[-1]}{self.attempt}",
            restored_checkpoint_id=self.completed.checkpoint_id,
            time_ms=self.time_ms,
        )

    def wait(self, duration_ms: int) -> None:
        """Time passes."""
        self.time_ms += duration_ms
        for context in self.contexts:
            context.time_ms = self.time_ms

    def run_pool(self) -> None:
        for context in self.contexts:
            context.run_pool()
            if context.failures:
                raise context.failures[0]

    def emit(self, rows: int) -> None:
        values = pa.array(range(self.position, self.position + rows), pa.int64())
        self.writer.process_batch(Batch(columns=pa.RecordBatch.from_arrays([values], schema=SCHEMA)), 0)
        self.position += rows

    def snapshot(self) -> Snapshot:
        """Take a checkpoint up to the acknowledgements; not yet decided."""
        self.checkpoint_id += 1
        number = self.checkpoint_id
        claim = msgspec.json.encode({"attempt": self.attempt})
        self.state.execute(ops.PutIfAbsent(f"{self.job_id}/chk-{number}/_claim", claim))
        self.writer.prepare_snapshot(number)
        for batch in self.committables.batches:
            self.committer.process_batch(batch, 0)
        self.committables.batches.clear()
        self.committer.prepare_snapshot(number)
        self.writer.snapshot_state(number)
        self.committer.snapshot_state(number)
        entries = copy.copy(self.contexts[1].operator_state.list_state("committables").entries)
        work = self.writer.snapshot_work(number)
        if work is not None:
            ops.run_flow(work, self.writer.snapshot_storage())
        return Snapshot(number, self.position, entries)

    def decide(self, snapshot: Snapshot, *, savepoint: bool = False) -> None:
        path = f"{self.job_id}/chk-{snapshot.checkpoint_id}/_metadata"
        self.state.execute(ops.PutIfAbsent(path, b'{"decision":"savepoint"}' if savepoint else b"{}"))
        if not savepoint:
            self.completed = snapshot

    def abort(self, snapshot: Snapshot) -> None:
        path = f"{self.job_id}/chk-{snapshot.checkpoint_id}/_metadata"
        self.state.execute(ops.PutIfAbsent(path, b'{"decision":"aborted"}'))
        self.writer.notify_checkpoint_aborted(snapshot.checkpoint_id)
        self.committer.notify_checkpoint_aborted(snapshot.checkpoint_id)

    def notify(self, checkpoint_id: int) -> None:
        self.committer.notify_checkpoint_complete(checkpoint_id)
        self.run_pool()

    def checkpoint(self) -> None:
        snapshot = self.snapshot()
        self.decide(snapshot)
        self.notify(snapshot.checkpoint_id)

    def abort_undecided(self) -> None:
        """What a new leader does first."""
        for number in range(1, self.checkpoint_id + 1):
            self.state.execute(ops.PutIfAbsent(f"{self.job_id}/chk-{number}/_metadata", b'{"decision":"aborted"}'))

    def committed(self) -> list[int]:
        return committed(self.storage)


def committed(storage: DictStorage) -> list[int]:
    if not any("/log/" in path for path in storage.files):
        return []
    rows: list[int] = read_committed(ROOT, "out", open_storage=lambda url: storage).column("i").to_pylist()
    return rows


def published(storage: DictStorage) -> list[int]:
    """What a reader of plain Parquet sees."""
    import pyarrow.parquet as pq

    rows: list[int] = []
    for path, data in storage.files.items():
        if path.startswith("part-"):
            rows += pq.read_table(pa.BufferReader(data)).column("i").to_pylist()
    return sorted(rows)
