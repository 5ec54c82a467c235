"""Readers of brokers: what a failed fetch has taken is in no position, records that can't be read leave once or fail the job by
name, start and stop positions are said once, complete checkpoints are told, also behind a restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec import UNSET

import holdfast as hf
from holdfast.barriers.elements import Batch, WatermarkStatus
from holdfast.barriers.messages import SPLITS_REPORTED_MAX, SplitMetrics, TaskState
from holdfast.operators.functions.event_time.splits import SplitWatermarks
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator
from holdfast.operators.functions.schema import RowType
from holdfast.operators.sources.fetching import FetchingReader
from holdfast.operators.sources.split_source import CHECKPOINTS_AWAITED_MAX, SplitSource, SplitSourceReader, split_source_of
from holdfast.operators.sources.split_state import SplitCodec
from holdfast.operators.task.context import CallsInOrder, CancelSubtask
from holdfast.operators.task.source_operator import SPLIT_SCHEMA, SourceOperator
from holdfast.operators.task.subtask import THREADS_END_MS_MAX
from tests.operators.ports import ManualContext
from tests.operators.runtime import Bench, ManualPool

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False)])
FETCH_ROWS = 10


@dataclass
class Server:
    """Partitions of numbers; what its readers did."""

    partitions: dict[str, int] = field(default_factory=dict)
    """Partition -> its records, numbered from 0 on."""
    bad: set[int] = field(default_factory=set)
    """Numbers of records that can't be read, of every partition."""
    latest: dict[str, int] = field(default_factory=dict)
    """Partition -> where a source that starts now begins."""
    stop: int | None = None
    stops: dict[str, int] = field(default_factory=dict)
    """Of some partitions."""
    fetch_rows: int = FETCH_ROWS
    fails_at: set[int] = field(default_factory=set)
    """Fetches that raise, having taken their records; each once."""
    fetches: int = 0
    told: list[dict[str, tuple[int, ...]]] = field(default_factory=list)
    refuses: bool = False
    paused: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    wrong_position: Any = None
    """Said behind the first fetch."""


SERVERS: dict[str, Server] = {}


class Partition(hf.SourceSplit, frozen=True):
    start: int
    stop: int | None = None


class Partitions(hf.SplitEnumerator[Partition]):
    discovery_interval_ms = 100

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    def finds_more(self) -> bool:
        return self.server.stop is None

    def discover(self) -> list[Partition]:
        """From the end for those that are there at the start, from the beginning for those that come later."""
        first = {} if self.has_discovered else self.server.latest
        server = self.server
        return [Partition(name, first.get(name, 0), server.stops.get(name, server.stop)) for name in sorted(server.partitions)]

    def owner_of(self, split: Partition, parallelism: int) -> int | None:
        return int(split.split_id[1:]) % parallelism


class PartitionReader(hf.SplitReader[Partition]):
    def __init__(self, server: Server) -> None:
        self.server = server
        self.offsets: dict[str, int] = {}
        self.stops: dict[str, int | None] = {}

    def add_splits(self, splits: Sequence[hf.AssignedSplit[Partition]]) -> None:
        for each in splits:
            self.offsets[each.split_id] = each.position[0] if each.position else each.split.start
            self.stops[each.split_id] = each.split.stop

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        assert {*to_pause, *to_resume} <= set(self.offsets)
        self.server.paused.append((tuple(to_pause), tuple(to_resume)))

    def fetch(self) -> Sequence[hf.SplitRecords]:
        server, found = self.server, []
        for name, offset in list(self.offsets.items()):
            behind, stop = min(offset + server.fetch_rows, server.partitions[name]), self.stops[name]
            if offset == stop:
                del self.offsets[name]
                found.append(hf.SplitRecords(name, finished=True))
            if behind == offset:
                continue
            self.offsets[name] = behind
            server.fetches += 1
            if server.fetches in server.fails_at:
                raise OSError(f"fetch {server.fetches} failed")
            records = self._records(name, range(offset, behind))
            if stop is not None:
                records = records.until(stop)
            if records.finished:
                del self.offsets[name]
            found.append(records)
        return found

    def _records(self, name: str, numbers: range) -> hf.SplitRecords:
        good = np.array([number for number in numbers if number not in self.server.bad], np.int64)
        letters = [
            hf.DeadLetter((number,), (number + 1,), "not a number", b"x%d" % number, row=int(np.searchsorted(good, number)))
            for number in numbers
            if number in self.server.bad
        ]
        columns = pa.RecordBatch.from_arrays([pa.array(good)], schema=SCHEMA)
        left = self.server.partitions[name] - numbers.stop
        records = hf.SplitRecords(name, columns, good + 1, pending_records=left, dead_letters=letters)
        return records if self.server.wrong_position is None else replace(records, position=self.server.wrong_position)

    def notify_checkpoint_complete(self, positions: Mapping[str, tuple[int, ...]]) -> None:
        self.server.told.append(dict(positions))
        if self.server.refuses:
            raise OSError("the group is gone")


@dataclass
class PartitionSource(hf.Source[Partition]):
    key: str
    name: str = "partitions"
    split_type = Partition
    schema = SCHEMA

    @property
    def server(self) -> Server:
        return SERVERS[self.key]

    def create_enumerator(self) -> Partitions:
        return Partitions(self.server)

    def create_split_reader(self, context: hf.ReaderContext) -> PartitionReader:
        return PartitionReader(self.server)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    SERVERS[request.node.nodeid] = Server()
    yield SERVERS[request.node.nodeid]
    del SERVERS[request.node.nodeid]


@pytest.fixture
def source(request: pytest.FixtureRequest, server: Server) -> PartitionSource:
    return PartitionSource(request.node.nodeid)


def numbers(output: Any) -> list[int]:
    return sorted(row["n"] for row, _ in output.committed())


# --------------------------------------------------------------------------------------------------- fetches that fail


class ClientThread(CallsInOrder):
    """As a subtask has it; outcomes come at once, and not as mails."""

    def close(self, *, awaited: bool = False) -> None:
        assert awaited


def reader_of(server: Server) -> tuple[FetchingReader[Partition], ManualPool, ManualContext]:
    """Calls run when the test says so; outcomes come at once."""
    pool, context = ManualPool(), ManualContext()
    context.open_thread = lambda name: ClientThread(pool)  # type: ignore[method-assign,assignment,return-value]
    reader: FetchingReader[Partition] = FetchingReader(PartitionReader(server), splits_max=1)
    reader.open(context)
    return reader, pool, context


def poll_all(reader: FetchingReader[Partition], pool: ManualPool) -> list[int]:
    """What it gives until it has nothing; all that waits runs between two polls, as with a fast client."""
    found: list[int] = []
    read_into(found, reader, pool)
    return found


def read_into(found: list[int], reader: FetchingReader[Partition], pool: ManualPool) -> None:
    has_more = True
    while has_more:
        polled = reader.poll(100)
        has_more = isinstance(polled, hf.SplitRecords) or bool(pool.waiting)
        if isinstance(polled, hf.SplitRecords):
            assert polled.columns is not None
            found += polled.columns.column("n").to_pylist()
        while pool.waiting:
            pool.step()


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4, 5, 6])
def test_what_comes_behind_a_failed_fetch_is_not_given(server: Server, fails_at: int) -> None:
    """The client has gone on: later records would have positions behind those that were lost."""
    server.partitions, server.fails_at = {"p0": 1_000}, {fails_at}
    reader, pool, _ = reader_of(server)
    reader.add_splits([hf.AssignedSplit(Partition("p0", 0))])
    found: list[int] = []
    with pytest.raises(OSError, match=f"fetch {fails_at} failed"):
        read_into(found, reader, pool)
    assert found == list(range((fails_at - 1) * FETCH_ROWS))
    assert server.fetches == fails_at


@pytest.mark.parametrize("fails_at", [1, 2, 3, 5])
def test_records_come_once_though_a_fetch_fails_between_checkpoints(source: PartitionSource, server: Server, fails_at: int) -> None:
    server.partitions, server.stop = {"p0": 80, "p1": 33}, 80
    server.fails_at = {fails_at}
    with hf.testing.Job(batch_rows=7, restart=hf.RestartStrategy("fixed_delay", delay_ms=0), checkpoint_interval_ms=10) as job:
        out = job.output(job.environment.from_source(source).uid("partitions"))
        job.start()
        job.advance(by_ms=500)
        server.partitions["p1"] = 90
        job.advance(by_ms=500)
        assert job.status == "FINISHED"
        assert numbers(out) == sorted([*range(80), *range(80)])


def test_a_call_that_fails_ends_the_reading(server: Server) -> None:
    """`add_splits` may have taken some of its splits."""
    server.partitions = {"p0": 20}
    reader, pool, _ = reader_of(server)
    reader._reader.add_splits = lambda splits: 1 // 0  # type: ignore[method-assign,assignment]
    reader.add_splits([hf.AssignedSplit(Partition("p0", 0))])
    with pytest.raises(ZeroDivisionError):
        poll_all(reader, pool)
    assert server.fetches == 0


def test_a_fetch_gives_way_to_a_call_that_waits_and_none_begins_behind_close(server: Server) -> None:
    server.partitions = {"p0": 1_000}
    reader, pool, _ = reader_of(server)
    reader.add_splits([hf.AssignedSplit(Partition("p0", 0))])
    while pool.waiting:
        pool.step()
    assert reader.poll(10) is None  # two fetches are on their way
    reader.pause_or_resume_splits([], ["p0"])
    while pool.waiting:
        pool.step()
    assert server.fetches == 0
    assert server.paused == [((), ("p0",))]
    assert reader.poll(10) is None
    reader.close()
    while pool.waiting:
        pool.step()
    assert server.fetches == 0


def test_a_split_that_has_finished_is_neither_paused_nor_resumed(server: Server) -> None:
    server.partitions = {"p0": 3}
    reader, pool, _ = reader_of(server)
    reader.add_splits([hf.AssignedSplit(Partition("p0", 0, 3))])
    assert poll_all(reader, pool) == [0, 1, 2]
    reader.pause_or_resume_splits(["p0"], [])
    reader.pause_or_resume_splits([], ["p0"])
    while pool.waiting:
        pool.step()
    assert server.paused == []


def test_records_that_wait_count_once(server: Server) -> None:
    server.partitions = {"p0": 100, "p1": 35}
    reader, pool, _ = reader_of(server)
    reader.add_splits([hf.AssignedSplit(Partition(name, 0)) for name in server.partitions])
    assert reader.pending_records() is None
    found = 0
    while found < 100:
        polled = reader.poll(100)
        if isinstance(polled, hf.SplitRecords):
            found += polled.num_rows
            if found > 10:
                assert reader.pending_records() == 135 - found
        while pool.waiting:
            pool.step()


# -------------------------------------------------------------------------------------------------------- dead letters


def letters_of(output: Any) -> list[tuple[Any, ...]]:
    return sorted((row["split"], row["position"], row["error"], row["raw"]) for row, _ in output.committed())


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("batch_rows", [1, 3, 65_536])
def test_records_that_cant_be_read_leave_once(source: PartitionSource, server: Server, batch_rows: int, timed: bool) -> None:
    """In front of, among and behind others, alone in a fetch, and over a restart."""
    server.partitions, server.stop, server.bad = {"p0": 45, "p1": 45}, 60, {0, 4, 9, 14, 15, *range(20, 30), 44, 59}
    strategy = hf.WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("n") if timed else None
    with hf.testing.Job(batch_rows=batch_rows) as job:
        records = job.environment.from_source(source, watermark_strategy=strategy).uid("partitions")
        out, bad = job.output(records, "good"), job.output(records.side_output(hf.DEAD_LETTERS), "bad")
        job.start()
        job.advance(by_ms=50)
        job.checkpoint()
        server.partitions = {"p0": 60, "p1": 50}
        job.advance(by_ms=50)  # lost by the restart
        job.restart(parallelism=2)
        server.partitions["p1"] = 70
        job.advance(by_ms=50)
        assert job.status == "FINISHED"
        assert numbers(out) == sorted(n for n in range(60) if n not in server.bad for _ in "01")
        wanted = [(name, [n], "not a number", b"x%d" % n) for name in ("p0", "p1") for n in sorted(server.bad)]
        assert letters_of(bad) == wanted


@pytest.mark.parametrize("timed", [False, True])
def test_a_record_that_cant_be_read_fails_the_job_by_name_where_nothing_reads_dead_letters(
    source: PartitionSource, server: Server, timed: bool
) -> None:
    server.partitions, server.bad = {"p0": 20}, {13, 15}
    strategy = hf.WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("n") if timed else None
    with hf.testing.Job() as job:
        job.output(job.environment.from_source(source, watermark_strategy=strategy).uid("partitions"))
        with pytest.raises(hf.InvalidRecordError, match=r"source partitions: split 'p0', record at 13: not a number") as found:
            job.start()
    assert (found.value.operator, found.value.split, found.value.position) == ("partitions", "p0", (13,))


def test_dead_letters_have_no_event_times(source: PartitionSource) -> None:
    strategy = hf.WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("n")
    with hf.testing.Job() as job:
        bad = job.environment.from_source(source, watermark_strategy=strategy).side_output(hf.DEAD_LETTERS).key_by("split")
        with pytest.raises(hf.GraphError, match="event times"):
            bad.window(hf.Tumbling(10))


# ------------------------------------------------------------------------------------------------------ stop and start


def records(*at: int, position: tuple[int, ...] | None = None, letters: Sequence[hf.DeadLetter] = ()) -> hf.SplitRecords:
    columns = pa.RecordBatch.from_arrays([pa.array(at, pa.int64())], schema=SCHEMA)
    return hf.SplitRecords("p0", columns, np.array(at, np.int64) + 1, np.array(at, np.int64), position, dead_letters=letters)


@pytest.mark.parametrize(
    ("given", "stop", "kept", "finished"),
    [
        (records(0, 1, 2), 4, [0, 1, 2], False),
        (records(0, 1, 2), 3, [0, 1, 2], True),
        (records(0, 1, 2), 2, [0, 1], True),
        (records(0, 1, 2), 0, [], True),
        (records(0, 1, 7), 5, [0, 1], True),
        (records(position=(5,)), 5, [], True),
        (records(0, position=(4,)), 5, [0], False),
        (records(0, 1, letters=[hf.DeadLetter((2,), (3,), "", row=2)]), 3, [0, 1], True),
    ],
)
def test_a_split_ends_at_its_stop_position(given: hf.SplitRecords, stop: int, kept: list[int], finished: bool) -> None:
    """Also where the record in front of it is gone, and where none is behind it."""
    found = given.until(stop)
    assert (found.finished, found.columns.column("n").to_pylist() if found.num_rows and found.columns else []) == (finished, kept)
    assert not finished or found.position == (stop,)
    assert not finished or len(found.dead_letters) == len(given.dead_letters)


def test_dead_letters_behind_a_stop_position_stay() -> None:
    letters = [hf.DeadLetter((1,), (2,), "", row=1), hf.DeadLetter((3,), (4,), "", row=2)]
    found = records(0, 2, letters=letters).until(3)
    assert [each.position for each in found.dead_letters] == [(1,)]
    assert found.num_rows == 2


def test_where_a_split_starts_is_said_once(source: PartitionSource, server: Server) -> None:
    """Partitions that are there at the start are read from their end, those that come later from their beginning, and a restart
    changes neither."""
    server.partitions, server.latest = {"p0": 10, "p1": 5}, {"p0": 10, "p1": 5, "p2": 3}
    with hf.testing.Job() as job:
        out = job.output(job.environment.from_source(source).uid("partitions"))
        job.start()
        job.checkpoint()  # no record was read
        server.partitions = {"p0": 12, "p1": 5, "p2": 3}
        server.latest = {"p0": 12, "p1": 5, "p2": 3}
        job.restart(parallelism=2)
        job.advance(by_ms=150)
        job.checkpoint()
        assert numbers(out) == [0, 1, 2, 10, 11]


# ----------------------------------------------------------------------------------------------------------- telling


def test_a_restored_checkpoint_counts_as_complete(source: PartitionSource, server: Server) -> None:
    server.partitions = {"p0": 10, "p1": 0}
    with hf.testing.Job() as job:
        job.output(job.environment.from_source(source).uid("partitions"))
        job.start()
        job.checkpoint()
        assert server.told == [{"p0": (10,)}]  # p1 is at its beginning
        server.partitions["p0"] = 15
        job.advance(by_ms=50)
        server.told.clear()
        job.restart()
        assert server.told == [{"p0": (10,)}]
        server.refuses = True
        job.restart()
        assert job.status == "RUNNING"


def test_positions_of_many_checkpoints_are_told_together_while_the_client_is_slow(server: Server) -> None:
    server.partitions = {"p0": 0}
    reader, pool, _ = reader_of(server)
    for number in range(1, 50):
        reader.notify_checkpoint_complete(number, {"p0": (number,), f"p{number}": (1,)})
    assert len(pool.waiting) == 1
    while pool.waiting:
        pool.step()
    assert server.told == [
        {"p0": (1,), "p1": (1,)},
        {"p0": (49,), **{f"p{number}": (1,) for number in range(2, 50)}},
    ]
    reader.notify_checkpoint_complete(50, {"p0": (50,)})
    reader.notify_checkpoint_complete(51, {"p0": (51,)})
    reader.close()
    while pool.waiting:
        pool.step()
    assert server.told[2:] == [{"p0": (50,)}, {"p0": (51,)}], "what is to be told is told in front of the end"


def opened(source: PartitionSource, *names: str) -> tuple[SplitSourceReader[Partition], ManualContext]:
    context = ManualContext()
    reader: SplitSourceReader[Partition] = SplitSourceReader(source)
    codec = SplitCodec(Partition, context.uid)
    reader.open(context, [codec.encode(hf.AssignedSplit(Partition(name, 0, 5))) for name in names])
    context.run_pool()
    return reader, context


def test_what_has_finished_is_told_though_a_hundred_checkpoints_do_not_complete(source: PartitionSource, server: Server) -> None:
    server.partitions = {"p0": 5, "p1": 5}
    reader, context = opened(source, "p0", "p1")
    while reader.splits:
        reader.poll(100, 0)
        context.run_pool()
    for number in range(1, CHECKPOINTS_AWAITED_MAX + 20):
        reader.snapshot_of(number)
    reader.notify_checkpoint_complete(CHECKPOINTS_AWAITED_MAX + 19)
    context.run_pool()
    assert server.told == [{"p0": (5,), "p1": (5,)}]


@pytest.mark.parametrize("position", [5, (), (5, 6), (True,), ("5",), (2**63,), [5]])
def test_a_position_that_no_restore_could_read_is_refused(source: PartitionSource, server: Server, position: Any) -> None:
    server.partitions, server.wrong_position = {"p0": 5}, position
    with hf.testing.Job() as job:
        job.output(job.environment.from_source(source).uid("partitions"))
        with pytest.raises(hf.InvalidSplitError, match="position") as found:
            job.start()
    assert (found.value.operator, found.value.split) == ("partitions", "p0")


@pytest.mark.parametrize("wrong", ["more", "fewer", "twice", "position", "split"])
def test_a_reader_that_keeps_other_splits_is_refused(source: PartitionSource, server: Server, wrong: str) -> None:
    server.partitions = {"p0": 3, "p1": 3}
    reader, _ = opened(source, "p0", "p1")

    def kept(checkpoint_id: int, splits: Sequence[hf.AssignedSplit[Partition]]) -> list[Any]:
        first, second = splits
        choices: dict[str, list[Any]] = {
            "more": [first, second, hf.AssignedSplit(Partition("p2", 0))],
            "fewer": [first],
            "twice": [first, first, second],
            "position": [first, replace(second, position=5)],  # type: ignore[arg-type]
            "split": [first, Partition("p1", 0)],
        }
        return choices[wrong]

    reader._reader.snapshot_state = kept  # type: ignore[union-attr,method-assign]
    with pytest.raises(hf.InvalidSplitError, match="snapshot_state"):
        reader.snapshot_of(1)


# ---------------------------------------------------------------------------------------------------------- event time


def timed(job: hf.testing.Job, source: PartitionSource, strategy: hf.WatermarkStrategy) -> Any:
    stream = job.environment.from_source(source, watermark_strategy=strategy.with_timestamp_assigner("n")).uid("partitions")
    return job.output(stream.rebalance())


@pytest.mark.parametrize("rows", [0, 9])
@pytest.mark.parametrize("interval_ms", [0, 20])
def test_a_reader_whose_splits_have_ended_holds_no_event_time(
    source: PartitionSource, server: Server, interval_ms: int, rows: int
) -> None:
    """Also where a split had no record, and where the last one ended between two periodic watermarks."""
    server.partitions = {"p0": 20}
    with hf.testing.Job(parallelism=2, auto_watermark_interval_ms=interval_ms) as job:
        out = timed(job, source, hf.WatermarkStrategy.for_monotonous_timestamps())
        job.start()
        job.advance(by_ms=50)
        assert out.watermark == 18
        server.partitions["p1"] = server.stops["p1"] = rows
        job.advance(by_ms=150)
        server.partitions["p0"] = 1_000
        for _ in range(100):
            job.advance(by_ms=30)
        assert out.watermark == 998


def busy_bench(source: PartitionSource, strategy: hf.WatermarkStrategy) -> Bench:
    """One reader whose steps never come to the end of what is there."""
    split_source: SplitSource[Partition] | None = split_source_of(source)
    assert split_source is not None
    head, times = SourceOperator(split_source), TimestampsOperator("n", strategy, RowType(SCHEMA))
    head.times = times
    bench = Bench([head, times], channels=1, rows_max=1).started()
    give(bench, *source.server.partitions)
    return bench


def give(bench: Bench, *names: str) -> None:
    codec = SplitCodec(Partition, "op0")
    entries = [codec.encode(hf.AssignedSplit(Partition(name, 0))) for name in names]
    columns = [pa.array([0] * len(entries), pa.int32()), pa.array(entries, pa.binary())]
    bench.gate.offer(0, Batch(columns=pa.RecordBatch.from_arrays(columns, schema=SPLIT_SCHEMA)), 10)


def test_a_reader_whose_new_split_is_silent_goes_idle_again(source: PartitionSource, server: Server) -> None:
    server.partitions = {}
    bench = busy_bench(source, hf.WatermarkStrategy.for_monotonous_timestamps().with_idleness(1_000))
    step_for(bench, 2_000)
    assert bench.port.take() == [WatermarkStatus(idle=True)]
    server.partitions = {"p0": 0}
    give(bench, "p0")
    step_for(bench, 500)
    assert bench.port.take() == [WatermarkStatus(idle=False)]
    step_for(bench, 1_000)
    assert bench.port.take() == [WatermarkStatus(idle=True)]


def step_for(bench: Bench, time_ms: int) -> int:
    """Steps, 50 ms apart; the last watermark."""
    for _ in range(time_ms // 50):
        bench.subtask.step(bench.clock.now_ms)
        for _ in range(len(bench.pool.waiting)):
            bench.pool.step()
        bench.clock.now_ms += 50
    return bench.chain.output_watermark_ms


def test_a_silent_split_goes_idle_while_another_is_read_without_a_pause(source: PartitionSource, server: Server) -> None:
    server.partitions, server.fetch_rows = {"p1": 3, "p0": 1_000_000}, 10_000
    bench = busy_bench(source, hf.WatermarkStrategy.for_monotonous_timestamps().with_idleness(1_000))
    assert step_for(bench, 800) == 1
    assert step_for(bench, 600) > 1_000


def test_backpressure_is_no_silence_of_a_split(source: PartitionSource, server: Server) -> None:
    server.partitions, server.fetch_rows = {"p1": 3, "p0": 1_000_000}, 10_000
    bench = busy_bench(source, hf.WatermarkStrategy.for_monotonous_timestamps().with_idleness(1_000))
    assert step_for(bench, 400) == 1
    bench.port.is_available = False
    step_for(bench, 5_000)
    bench.port.is_available = True
    assert step_for(bench, 400) == 1
    assert step_for(bench, 400) > 1_000


def test_of_silent_splits_the_last_one_says_event_time() -> None:
    """As a look between the two timeouts would have found it."""
    splits = SplitWatermarks(1_000)
    for name, at_ms in (("a", 0), ("b", 0), ("c", 400)):
        splits.add(name, hf.WatermarkStrategy.for_monotonous_timestamps().make_generator, 0)
        splits.enter(name, at_ms)
        splits.advance({"a": 5, "b": 7, "c": 900}[name], at_ms)
    assert splits.idle(1_399) == {"a", "b"}
    assert splits.idle(1_400) == {"a", "b", "c"}
    assert splits.last_ms() == 900
    splits.pause_or_resume(["c", "gone"], [], 1_300)
    assert splits.idle(9_000) == {"a", "b"}, "one that is paused is not silent"
    splits.pause_or_resume([], ["c", "gone"], 9_000)
    assert splits.idle(9_999) == {"a", "b"}
    assert splits.idle(10_000) == {"a", "b", "c"}


def test_event_time_moves_in_every_file(tmp_path: Path) -> None:
    """The file that is read next is with the reader already."""
    for number in range(4):
        times = range(100 * number, 100 * number + 100)
        (tmp_path / f"{number}.csv").write_text("n\n" + "".join(f"{time}\n" for time in times))
    with hf.testing.Job(batch_rows=10) as job:
        strategy = hf.WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("n")
        source = hf.FileSource(tmp_path, pattern="*.csv", schema={"n": int})
        files = job.environment.from_source(source, watermark_strategy=strategy)
        out = job.output(files.process(WithWatermark(), returns={"n": int, "watermark_ms": int}))
        job.start()
        behind = [row["n"] - row["watermark_ms"] for row, _ in out.committed() if row["n"] >= 20]
    assert len(behind) == 380
    assert max(behind) <= 21


class WithWatermark(hf.ProcessFunction):
    def process_element(self, value: dict[str, int], ctx: hf.ProcessContext, out: hf.Collector) -> None:
        out({"n": value["n"], "watermark_ms": max(-1, ctx.watermark)})


# ------------------------------------------------------------------------------------------------------------- metrics


def test_metrics_tell_of_the_splits_that_hold_event_time_back(source: PartitionSource, server: Server) -> None:
    server.partitions = {f"p{number}": 100 + number for number in range(40)}
    bench = busy_bench(source, hf.WatermarkStrategy.for_monotonous_timestamps().with_idleness(1_000))
    bench.subtask.chain.head.operator.has_splits = True  # type: ignore[attr-defined]
    for _ in range(60):
        bench.settle()
        bench.clock.now_ms += 10
    metrics = bench.subtask.metrics()
    assert (metrics.splits, metrics.pending_records) == (40, 0)
    assert metrics.slowest_splits is not UNSET
    assert [each.split for each in metrics.slowest_splits] == [f"p{number}" for number in range(SPLITS_REPORTED_MAX)]
    now_ms = bench.clock.wall_ms()
    assert metrics.slowest_splits[3] == SplitMetrics("p3", 101, now_ms - 101, idle=False, pending_records=0)
    server.partitions = {"p2": 5_000, **{name: count for name, count in server.partitions.items() if name != "p2"}}
    step_for(bench, 1_500)
    found = bench.subtask.metrics()
    assert found.slowest_splits is not UNSET
    assert isinstance(found.pending_records, int)
    assert 0 < found.pending_records < 5_000
    first = found.slowest_splits[0]
    assert (first.split, first.idle, first.pending_records) == ("p2", False, found.pending_records), "all others are silent"
    assert found.slowest_splits[1].idle


# ------------------------------------------------------------------------------------------------------------- threads


def ending_bench(source: PartitionSource) -> Bench:
    """An attempt that was cancelled while its client does something."""
    bench = busy_bench(source, hf.WatermarkStrategy.for_monotonous_timestamps())
    bench.subtask.step(bench.clock.now_ms)
    assert bench.pool.waiting
    bench.mailbox.put(CancelSubtask())
    bench.run()
    return bench


def test_an_attempt_ends_when_its_client_has_left(source: PartitionSource, server: Server) -> None:
    server.partitions = {"p0": 10}
    bench = ending_bench(source)
    assert (bench.subtask.state, bench.subtask.is_disposed) == (TaskState.CANCELING, False)
    while bench.pool.waiting:
        assert not bench.subtask.is_disposed
        bench.pool.step()
        bench.run()
    assert (bench.subtask.state, bench.subtask.is_disposed) == (TaskState.CANCELED, True)


def test_an_attempt_does_not_wait_for_ever_for_its_client(source: PartitionSource, server: Server) -> None:
    server.partitions = {"p0": 10}
    bench = ending_bench(source)
    due_ms = bench.subtask.last_step.next_wakeup_ms
    assert due_ms == bench.clock.monotonic_ms() + THREADS_END_MS_MAX
    bench.clock.now_ms = due_ms - 1
    bench.run()
    assert not bench.subtask.is_disposed
    bench.clock.now_ms = due_ms
    bench.run()
    assert bench.subtask.is_disposed
    assert bench.subtask.last_step.next_wakeup_ms is None
