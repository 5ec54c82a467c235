from __future__ import annotations

import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from holdfast.barriers.elements import Batch
from holdfast.operators.sinks.calls import Pause
from holdfast.operators.sinks.files.parquet import ParquetSink, committed_files, read_committed, sink_ids
from holdfast.operators.sinks.files.writer import ParquetSinkWriter
from holdfast.operators.sinks.simple import Blackhole, CollectSink
from holdfast.statebackends.errors import GraphError, InvalidConfigError, NotFoundError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from holdfast.statebackends.storage.directory import LocalStorage
from tests.operators.ports import Collected, DictStorage, ManualContext
from tests.operators.sinks.files.minijob import MiniJob, MortalStorage, committed

SCHEMA = pa.schema([("i", pa.int64())])


def batch(*values: int) -> Batch:
    return Batch(columns=pa.RecordBatch.from_arrays([pa.array(values, pa.int64())], schema=SCHEMA))


def run_once(path: Path, sink_id: str, *values: int) -> ParquetSink:
    """Write and commit one checkpoint in a real folder, through pickled operators."""
    sink = ParquetSink(path, sink_id)
    writer, committer = pickle.loads(pickle.dumps((sink.create_writer(SCHEMA), sink.create_committer())))
    out, context = Collected(), ManualContext()
    writer.setup(context, out)
    committer.setup(context, Collected())
    committer.initialize_state()
    committer.open()
    writer.process_batch(batch(*values), 0)
    writer.prepare_snapshot(1)
    for each in out.batches:
        committer.process_batch(each, 0)
    ops.run_flow(writer.snapshot_work(1), LocalStorage(path))
    context.run_pool()
    committer.notify_checkpoint_complete(1)
    context.run_pool()
    assert context.failures == []
    return sink


def test_rows_without_columns_and_nanoseconds_are_refused_when_the_graph_is_built(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="returns="):
        ParquetSink(tmp_path).create_writer(None)
    with pytest.raises(GraphError, match="nanoseconds"):
        ParquetSink(tmp_path).create_writer(pa.schema([("t", pa.timestamp("ns"))]))
    with pytest.raises(InvalidConfigError):
        ParquetSink("")


def test_nothing_written_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_committed(tmp_path)
    assert committed_files(LocalStorage(tmp_path), "out") == []


def test_a_real_folder_shows_committed_rows_to_every_reader(tmp_path: Path) -> None:
    sink = run_once(tmp_path, "out", 1, 2, 3)
    assert read_committed(tmp_path).column("i").to_pylist() == [1, 2, 3]
    assert ds.dataset(tmp_path, format="parquet").to_table().column("i").to_pylist() == [1, 2, 3]
    (data,) = sink.committed_files()
    (plain,) = tmp_path.glob("part-*.parquet")
    assert os.path.samefile(data, plain)


def test_two_sinks_share_a_path(tmp_path: Path) -> None:
    run_once(tmp_path, "a/b", 1)
    run_once(tmp_path, "c", 2)
    assert sink_ids(LocalStorage(tmp_path)) == ["a/b", "c"]
    assert read_committed(tmp_path, "a/b").column("i").to_pylist() == [1]
    with pytest.raises(InvalidConfigError, match="give the sink_id"):
        read_committed(tmp_path)
    with pytest.raises(InvalidConfigError, match="a/b, c: give the sink_id of one"):
        ParquetSink(tmp_path).committed_files()
    assert len(ParquetSink(tmp_path, sink_id="c").committed_files()) == 1


def test_a_sink_that_was_made_to_read_finds_the_only_one_at_its_path(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no sink has written to"):
        ParquetSink(tmp_path).committed_files()
    written = run_once(tmp_path, "out", 1, 2)
    assert ParquetSink(tmp_path).committed_files() == written.committed_files()


class FullDisk(DictStorage):
    full = True

    def execute(self, operation: ops.Operation) -> object:
        if self.full and isinstance(operation, ops.WriteFile):
            raise StorageUnavailableError("no space", path=operation.path)
        return super().execute(operation)


def test_a_write_that_failed_is_part_of_the_next_snapshot() -> None:
    disk = FullDisk()
    sink = ParquetSink("/sink", "out", open_storage=lambda url: disk)
    writer, out, context = sink.create_writer(SCHEMA), Collected(), ManualContext()
    assert isinstance(writer, ParquetSinkWriter)
    writer.setup(context, out)
    writer.process_batch(batch(1), 0)
    writer.prepare_snapshot(1)
    with pytest.raises(StorageUnavailableError):
        ops.run_flow(writer.snapshot_work(1), disk)  # type: ignore[arg-type]
    disk.full = False
    writer.prepare_snapshot(2)
    ops.run_flow(writer.snapshot_work(2), disk)  # type: ignore[arg-type]
    assert len(disk.files) == 1
    assert writer.snapshot_work(3) is None
    assert len(out.batches) == 1


@pytest.mark.parametrize("opened", [True, False])
def test_a_workers_sink_lies_beside_its_state_directory_unless_it_names_a_storage(opened: bool) -> None:
    sinks, named = {"/sink": DictStorage()}, DictStorage()

    class Near(DictStorage):
        def at(self, location: str) -> DictStorage:
            return sinks[location]

    sink = ParquetSink("/sink", "out", file_size_max=16, open_storage=(lambda url: named) if opened else None)
    writer, context = sink.create_writer(SCHEMA), ManualContext(storage=Near())
    committer = sink.create_committer()
    writer.setup(context, Collected())
    committer.setup(context, Collected())
    committer.open()
    writer.process_batch(batch(1, 2), 0)
    context.run_pool()
    assert not context.failures
    assert [len(storage.files) for storage in (sinks["/sink"], named)] == ([0, 2] if opened else [2, 0])


def test_files_are_rolled_by_size_and_written_before_the_barrier() -> None:
    disk = DictStorage()
    sink = ParquetSink("/sink", "out", file_size_max=16, open_storage=lambda url: disk)
    writer, context = sink.create_writer(SCHEMA), ManualContext()
    writer.setup(context, Collected())
    for value in range(4):
        writer.process_batch(batch(value), 0)
    context.run_pool()
    assert len(disk.files) == 2


def test_blackhole_counts_and_collect_keeps() -> None:
    context = ManualContext()
    writer = Blackhole().create_writer(None)
    writer.setup(context, Collected())
    writer.process_batch(batch(1, 2), 0)
    assert context.counters.named["blackhole"] == 2
    collect = CollectSink("rows")
    kept = collect.create_writer(None)
    kept.process_batch(batch(7), 0)
    assert CollectSink.rows("rows") == [{"i": 7}]
    CollectSink.clear("rows")
    assert CollectSink.rows("rows") == []


def test_rows_of_files_that_are_safe_are_not_held_until_the_next_checkpoint() -> None:
    job = MiniJob(MortalStorage({}), DictStorage())
    job.file_size_max = 1
    job.start()
    for _ in range(50):
        job.emit(2)
        job.run_pool()
    assert sum(bool(write._batches) for write in job.writer._writes) == 0
    assert len(job.writer._writes) <= 1
    job.checkpoint()
    assert committed(job.storage) == list(range(100))


def test_a_file_is_written_by_one_flow_at_a_time_and_again_only_if_that_failed() -> None:
    job = MiniJob(MortalStorage({}), DictStorage())
    job.start()
    job.emit(2)
    [write] = job.writer._roll(1)
    first, second, late = write.flow(), write.flow(), write.flow()
    wanted = next(first)
    assert isinstance(wanted, ops.WriteFile)
    assert isinstance(next(second), Pause)
    with pytest.raises(StorageUnavailableError):
        first.throw(StorageUnavailableError("no answer", path=wanted.path))
    assert second.send(None) == wanted
    assert isinstance(next(late), Pause)
    with pytest.raises(StopIteration):
        second.send((1, ""))
    with pytest.raises(StopIteration):
        late.send(None)
    assert write.durable


def test_a_cancelled_write_leaves_its_turn_to_the_next_one() -> None:
    job = MiniJob(MortalStorage({}), DictStorage())
    job.start()
    job.emit(2)
    [write] = job.writer._roll(1)
    first, second = write.flow(), write.flow()
    next(first)
    first.close()
    assert isinstance(next(second), ops.WriteFile)


@pytest.mark.parametrize(("rows", "compression"), [(10, "UNCOMPRESSED"), (10_000, "ZSTD")])
def test_files_of_a_few_rows_are_not_compressed(tmp_path: Path, rows: int, compression: str) -> None:
    (data,) = run_once(tmp_path, "out", *range(rows)).committed_files()
    assert pq.read_metadata(data).row_group(0).column(0).compression == compression
    assert read_committed(tmp_path).column("i").to_pylist() == [*range(rows)]
