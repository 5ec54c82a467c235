"""Sources with splits: each split is with the enumerator or with one reader, so that every record is read once, in the order of its
split, over checkpoints, restarts, rescales, stops and new splits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import holdfast as hf
from holdfast.barriers.elements import Batch, CheckpointBarrier, EndOfData, WatermarkStatus
from holdfast.barriers.exchange.split_entries import EnumeratorEntry
from holdfast.barriers.messages import AcknowledgeCheckpoint, AlignWatermarks
from holdfast.operators.sources.enumerator import EnumeratorReader
from holdfast.operators.sources.split_source import SplitSource, split_source_of
from holdfast.operators.sources.split_state import SplitCodec
from holdfast.operators.task.source_operator import SPLIT_SCHEMA, SourceOperator
from holdfast.statebackends.handles import InlineHandle
from tests.operators.ports import ManualContext
from tests.operators.runtime import Bench

SCHEMA = pa.schema([pa.field("topic", pa.string(), nullable=False), pa.field("n", pa.int64(), nullable=False)])


@dataclass
class Broker:
    """Topics that a test appends to; what readers did with it."""

    topics: dict[str, int] = field(default_factory=dict)
    """Topic -> its records, which are numbered from 0 on."""
    closed: set[str] = field(default_factory=set)
    """Topics that end behind their records."""
    told: dict[str, int] = field(default_factory=dict)
    """Topic -> the offset that was told on complete."""
    owners: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    failures: list[Exception] = field(default_factory=list)
    """Of the next discoveries."""
    wrong: str = ""
    """What the connector does wrong."""
    paused: set[str] = field(default_factory=set)


BROKERS: dict[str, Broker] = {}


class Topic(hf.SourceSplit, frozen=True):
    first: int = 0


class Topics(hf.SplitEnumerator[Topic]):
    def __init__(self, source: TopicSource) -> None:
        self.broker = source.broker
        self.owned = source.owned
        self.discovery_interval_ms = source.discovery_interval_ms

    def discover(self) -> list[Topic]:
        if self.broker.failures:
            raise self.broker.failures.pop(0)
        return [Topic(name) for name in sorted(self.broker.topics)]

    def handle_discovered(self, found: list[Topic]) -> Sequence[Topic]:
        return found if self.broker.wrong == "finds twice" else super().handle_discovered(found)

    def owner_of(self, split: Topic, parallelism: int) -> int | None:
        return int(split.split_id[1:]) % parallelism if self.owned else None


class TopicReader(hf.SplitReader[Topic]):
    def __init__(self, broker: Broker, subtask: int) -> None:
        self.broker = broker
        self.subtask = subtask
        self.offsets: dict[str, int] = {}

    def add_splits(self, splits: Sequence[hf.AssignedSplit[Topic]]) -> None:
        for assigned in splits:
            self.broker.owners[assigned.split_id].append(self.subtask)
            self.offsets[assigned.split_id] = assigned.position[0] if assigned.position else assigned.split.first

    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None:
        self.broker.paused.update(to_pause)
        self.broker.paused.difference_update(to_resume)

    def fetch(self) -> Sequence[hf.SplitRecords]:
        found = []
        for topic, offset in list(self.offsets.items()):
            stop = min(offset + 5, self.broker.topics[topic])
            ends = topic in self.broker.closed and stop == self.broker.topics[topic]
            if (stop == offset and not ends) or topic in self.broker.paused:
                continue
            numbers = np.arange(offset, stop)
            columns = pa.RecordBatch.from_arrays([pa.array([topic] * len(numbers)), pa.array(numbers)], schema=SCHEMA)
            found.append(self._records(topic, columns, numbers + 1, finished=ends))
            self.offsets[topic] = stop
            if ends:
                del self.offsets[topic]
        return found

    def _records(self, topic: str, columns: pa.RecordBatch, positions: Any, *, finished: bool) -> hf.SplitRecords:
        match self.broker.wrong:
            case "unknown split":
                topic = "t99"
            case "positions":
                positions = positions[1:]
            case "columns":
                columns = columns.select(["n"])
        return hf.SplitRecords(topic, columns, positions, finished=finished)

    def notify_checkpoint_complete(self, positions: Mapping[str, tuple[int, ...]]) -> None:
        self.broker.told.update({topic: position[0] for topic, position in positions.items() if position})
        if self.broker.wrong == "tells":
            raise OSError("the broker is gone")


@dataclass
class TopicSource(hf.Source[Topic]):
    key: str
    owned: bool = False
    discovery_interval_ms: int | None = None
    name: str = "topics"
    split_type = Topic
    schema = SCHEMA

    @property
    def broker(self) -> Broker:
        return BROKERS[self.key]

    def create_enumerator(self) -> Topics:
        return Topics(self)

    def create_split_reader(self, context: hf.ReaderContext) -> TopicReader:
        return TopicReader(self.broker, context.subtask)


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    BROKERS[request.node.nodeid] = Broker()
    yield BROKERS[request.node.nodeid]
    del BROKERS[request.node.nodeid]


def source_of(broker: Broker, **settings: Any) -> TopicSource:
    return TopicSource(next(key for key, each in BROKERS.items() if each is broker), **settings)


def job_of(source: TopicSource, **settings: Any) -> tuple[hf.testing.Job, Any]:
    job = hf.testing.Job(**settings)
    return job, job.output(job.environment.from_source(source).uid("topics"))


def by_topic(rows: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for row, _ in rows:
        found[row["topic"]].append(row["n"])
    return found


def all_of(broker: Broker) -> dict[str, list[int]]:
    return {topic: list(range(count)) for topic, count in broker.topics.items() if count}


@pytest.mark.parametrize("parallelism", [1, 3])
@pytest.mark.parametrize("batch_rows", [1, 7])
def test_a_bounded_source_gives_all_splits_and_ends(broker: Broker, parallelism: int, batch_rows: int) -> None:
    broker.topics = {f"t{i}": 3 + i for i in range(7)}
    broker.closed = set(broker.topics)
    job, out = job_of(source_of(broker), parallelism=parallelism, batch_rows=batch_rows)
    with job:
        job.start()
        assert job.status == "FINISHED"
        assert by_topic(out.committed()) == all_of(broker)
    assert all(len(owners) == 1 for owners in broker.owners.values())


@pytest.mark.parametrize("owned", [False, True])
def test_records_come_once_over_restarts_and_rescales(broker: Broker, owned: bool) -> None:
    """A reader takes one split at a time where the enumerator gives to those that ask; all others wait in its state."""
    broker.topics = {f"t{i}": 4 for i in range(5)}
    job, out = job_of(source_of(broker, owned=owned, discovery_interval_ms=100), parallelism=2, batch_rows=3)
    with job:
        job.start()
        for turn, parallelism in enumerate((3, 1, 4)):
            job.checkpoint()
            broker.topics = {topic: count + 7 for topic, count in broker.topics.items()}
            broker.topics[f"t{5 + turn}"] = 6
            job.advance(by_ms=250)  # read, and lost by the restart
            job.restart(parallelism=parallelism)
            job.advance(by_ms=250)
        broker.closed = set(broker.topics)
        for _ in range(len(broker.topics)):
            job.advance(by_ms=250)
        job.checkpoint()
        assert by_topic(out.committed()) == all_of(broker)


@pytest.mark.parametrize("drain", [False, True])
def test_a_stopped_job_goes_on_behind_what_it_read(broker: Broker, drain: bool) -> None:
    broker.topics = {"t0": 4, "t1": 5}
    job, out = job_of(source_of(broker, owned=True, discovery_interval_ms=100), parallelism=2)
    with job:
        job.start()
        job.stop(drain=drain)
        assert job.status == "FINISHED"
        assert by_topic(out.committed()) == all_of(broker)
        broker.topics = {"t0": 9, "t1": 5, "t2": 3}
        job.restart(parallelism=3)
        job.advance(by_ms=150)
        job.checkpoint()
        assert by_topic(out.committed()) == all_of(broker)


@pytest.mark.parametrize("drain", [False, True])
def test_a_job_stops_whose_enumerator_has_finished(broker: Broker, drain: bool) -> None:
    broker.topics = {"t0": 4, "t1": 5}
    job, out = job_of(source_of(broker, owned=True), parallelism=2)
    with job:
        job.start()
        assert job.status == "RUNNING"
        job.stop(drain=drain)
        assert job.status == "FINISHED"
        broker.topics, broker.closed = {"t0": 6, "t1": 7}, {"t0", "t1"}
        job.restart()
        assert job.status == "FINISHED"
        assert by_topic(out.committed()) == all_of(broker)


def test_positions_are_told_when_a_checkpoint_is_complete_and_not_of_a_savepoint(broker: Broker) -> None:
    broker.topics = {"t0": 4, "t1": 5}
    broker.closed = {"t1"}
    job, _ = job_of(source_of(broker, owned=True, discovery_interval_ms=100))
    with job:
        job.start()
        assert broker.told == {}
        job.savepoint()
        assert broker.told == {}
        job.checkpoint()
        assert broker.told == {"t0": 4, "t1": 5}
        broker.topics["t0"] = 6
        job.advance(by_ms=50)
        broker.wrong = "tells"
        job.checkpoint()
        assert (broker.told["t0"], job.status) == (6, "RUNNING")


@pytest.mark.parametrize("wrong", ["unknown split", "positions", "columns", "no event times"])
def test_a_connector_whose_records_are_not_as_it_says_is_refused(broker: Broker, wrong: str) -> None:
    broker.topics, broker.wrong = {"t0": 4}, wrong
    source = source_of(broker)
    source.gives_event_times = wrong == "no event times"
    job, _ = job_of(source)
    with job, pytest.raises(hf.InvalidSplitError) as found:
        job.start()
    assert (found.value.operator, found.value.split) == ("topics", "t99" if wrong == "unknown split" else "t0")


NO_LISTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: None, "a NoneType"),
    (lambda: hf.SplitRecords("t0"), "a SplitRecords"),
    (lambda: (records for records in [hf.SplitRecords("t0")]), "a generator"),
    (lambda: ["t0", None], "a list of NoneType, str"),
]


@pytest.mark.parametrize(("given", "told"), NO_LISTS, ids=[told for _, told in NO_LISTS])
def test_a_fetch_that_gives_no_list_of_records_is_told_by_name(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, given: Callable[[], Any], told: str
) -> None:
    broker.topics = {"t0": 4}
    monkeypatch.setattr(TopicReader, "fetch", lambda reader: given())
    job, _ = job_of(source_of(broker))
    with job, pytest.raises(hf.InvalidSplitError, match=rf"^source topics: fetch\(\) gave {told}, not a list of SplitRecords$"):
        job.start()


@pytest.mark.parametrize(("given", "told"), [(None, "a NoneType"), ("t0", "a list of str"), (["t0"], "a list of str")])
def test_a_discovery_that_gives_no_list_of_splits_is_told(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, given: Any, told: str
) -> None:
    monkeypatch.setattr(Topics, "discover", lambda enumerator: given)
    job, _ = job_of(source_of(broker))
    with job, pytest.raises(hf.InvalidSplitError, match=rf"^Topics: discover\(\) gave {told}, not a list of splits$"):
        job.start()


@pytest.mark.parametrize("columns", [[1, 2], pa.table({"n": [1, 2]})])
def test_columns_that_are_none_are_told_by_name(broker: Broker, monkeypatch: pytest.MonkeyPatch, columns: Any) -> None:
    broker.topics = {"t0": 4}
    monkeypatch.setattr(TopicReader, "fetch", lambda reader: [hf.SplitRecords("t0", columns, np.array([1, 2]))])
    job, _ = job_of(source_of(broker))
    kind = type(columns).__name__
    with job, pytest.raises(hf.InvalidSplitError, match=f"source topics: split 't0': its columns are a {kind}, no pa.RecordBatch"):
        job.start()


def test_a_split_is_not_handed_out_twice(broker: Broker) -> None:
    broker.topics, broker.wrong = {"t0": 4}, "finds twice"
    job, _ = job_of(source_of(broker, owned=True, discovery_interval_ms=100))
    with job:
        job.start()
        with pytest.raises(hf.InvalidSplitError, match="t0"):
            job.advance(by_ms=150)


def test_what_waits_costs_nothing_until_it_is_asked_for(broker: Broker) -> None:
    """An owner is asked for once for each split, and an entry made once, however often the enumerator is polled or stored."""
    asked: list[str] = []

    class Lazy(Topics):
        def owner_of(self, split: Topic, parallelism: int) -> int | None:
            asked.append(split.split_id)
            return None

        def handle_split_request(self, subtask: int, splits: Sequence[Topic]) -> int | None:
            each = list(splits)
            assert (splits[0], splits[-1], splits[1:3]) == (each[0], each[-1], each[1:3])
            return len(splits) // 2 if len(splits) > 15 else 0

    class LazySource(TopicSource):
        def create_enumerator(self) -> Topics:
            return Lazy(self)

    broker.topics = {f"t{i:02}": 1 for i in range(20)}
    source = source_of(broker)
    enumerator, context = EnumeratorReader(LazySource(source.key), 2), ManualContext()
    enumerator.open(context, None)
    enumerator.poll(100, 0)
    context.run_pool()
    entries = enumerator.snapshot_of(1)[1:]
    for _ in range(3):
        assert enumerator.poll(100, 0).batch is None
        assert [a is b for a, b in zip(enumerator.snapshot_of(1)[1:], entries, strict=True)] == [True] * 20
    given: list[bytes] = []
    for total in range(1, 11):
        enumerator.split_requested(0, total)
        enumerator.split_requested(1, total)
        batch = enumerator.poll(100, 0).batch
        assert batch is not None
        given += batch.columns().column("split").to_pylist()
        restored = EnumeratorReader(LazySource(source.key), 2)
        restored.open(ManualContext(), enumerator.snapshot_of(2))
        assert sorted([*given, *restored.snapshot_of(3)[1:]]) == sorted(entries)
    assert sorted(given) == sorted(entries)
    assert asked[:20] == sorted(broker.topics)
    assert enumerator.poll(100, 0).finished


def test_discoveries_may_fail_for_a_while_behind_the_first(broker: Broker) -> None:
    broker.topics = {"t0": 4}
    job, out = job_of(source_of(broker, owned=True, discovery_interval_ms=100))
    with job:
        job.start()
        broker.failures = [OSError("away") for _ in range(9)]
        broker.topics["t1"] = 3
        for _ in range(10):
            job.advance(by_ms=100)
        assert by_topic(out.emitted) == all_of(broker)
        broker.failures = [OSError("away") for _ in range(10)]
        with pytest.raises(hf.JobFailedError, match="OSError: away"):
            job.advance(by_ms=1_100)


def test_the_first_discovery_must_not_fail(broker: Broker) -> None:
    broker.failures = [OSError("no such broker")]
    job, _ = job_of(source_of(broker, discovery_interval_ms=100))
    with job, pytest.raises(hf.JobFailedError, match="OSError: no such broker"):
        job.start()


# ------------------------------------------------------------------------------------------------- one subtask, by hand


def reader_of(broker: Broker, **settings: Any) -> Bench:
    source: SplitSource[Topic] | None = split_source_of(source_of(broker, **settings))
    assert source is not None
    return Bench([SourceOperator(source)], channels=1).started()


def splits(*names: str) -> Batch:
    codec = SplitCodec(Topic, "op0")
    entries = [codec.encode(hf.AssignedSplit(Topic(name))) for name in names]
    subtasks = pa.array([0] * len(entries), pa.int32())
    return Batch(columns=pa.RecordBatch.from_arrays([subtasks, pa.array(entries)], schema=SPLIT_SCHEMA))


def test_a_reader_without_splits_is_idle_and_comes_back_with_the_first_record(broker: Broker) -> None:
    broker.topics = {"t0": 2}
    bench = reader_of(broker)
    bench.settle()
    assert bench.port.take() == [WatermarkStatus(idle=True)]
    bench.gate.offer(0, splits("t0"), 10)
    bench.settle()
    assert bench.port.take() == [WatermarkStatus(idle=False), {"topic": "t0", "n": 0}, {"topic": "t0", "n": 1}]


def test_the_end_of_the_enumerator_is_not_that_of_the_reader(broker: Broker) -> None:
    broker.topics = {"t0": 2}
    bench = reader_of(broker)
    bench.gate.offer(0, splits("t0"), 10)
    bench.events(0, EndOfData(drain=True))
    bench.settle()
    assert not bench.subtask.is_drained
    broker.closed = {"t0"}
    bench.clock.now_ms += 50
    bench.settle()
    assert bench.subtask.is_drained


def test_a_split_in_front_of_a_barrier_is_the_readers_and_one_behind_it_is_not(broker: Broker) -> None:
    """The checkpoint tells the position behind the last row in front of the barrier."""
    broker.topics = {"t0": 9, "t1": 9}
    bench = reader_of(broker)
    bench.gate.offer(0, splits("t0"), 10)
    bench.run()
    while bench.pool.waiting and len(bench.port.elements) < 4:
        bench.pool.step()
        bench.run(1_000)
    bench.events(0, CheckpointBarrier(1, 1_000))
    bench.gate.offer(0, splits("t1"), 10)
    bench.settle()
    elements = bench.port.take()
    barrier = elements.index(CheckpointBarrier(1, 1_000))
    in_front = [row["n"] for row in elements[:barrier] if isinstance(row, dict)]
    answer = next(answer for answer in bench.answers() if isinstance(answer, AcknowledgeCheckpoint))
    (handle,) = answer.states["op0"].operator
    assert isinstance(handle.part, InlineHandle)
    kept = SplitCodec(Topic, "op0").decode(handle.part.data)  # one entry: it can't be decoded if there are two
    assert kept == hf.AssignedSplit(Topic("t0"), (len(in_front),))
    assert sum(isinstance(row, dict) for row in elements) == 18


def test_entries_of_a_checkpoint_keep_their_form() -> None:
    """Checkpoints of this version must open in all later ones."""
    codec = SplitCodec(Topic, "op0")
    entry = codec.encode(hf.AssignedSplit(Topic("t0", 7), (300, 3)))
    assert entry == b"\x94\xa5split\x01\xc4\x14\x82\xa8split_id\xa2t0\xa5first\x07\x92\xcd\x01,\x03"
    assert codec.decode(entry) == hf.AssignedSplit(Topic("t0", 7), (300, 3))
    own = b"\x94\xaaenumerator\x01\xc3\xc4\x03\x91\xa1a"
    assert codec.decode_enumerator([own, entry]) == (EnumeratorEntry(1, True, b"\x91\xa1a"), [Topic("t0", 7)])
    for damaged in (entry[:-1], entry.replace(b"split\x01", b"split\x02"), own, b""):
        with pytest.raises(hf.CorruptStateError):
            codec.decode(damaged)
    with pytest.raises(hf.CorruptStateError):
        codec.decode_enumerator([entry])


# ----------------------------------------------------------------------------------------------------------- event time


def timed_job(broker: Broker, strategy: hf.WatermarkStrategy, **settings: Any) -> tuple[hf.testing.Job, Any]:
    job = hf.testing.Job(batch_rows=2, **settings)
    timed = strategy.with_timestamp_assigner("n")
    source = source_of(broker, owned=True, discovery_interval_ms=100)
    stream = job.environment.from_source(source, watermark_strategy=timed).uid("topics")
    return job, job.output(stream.rebalance())


def test_event_time_is_that_of_the_slowest_split(broker: Broker) -> None:
    """One topic is read far ahead of another in the same reader: no record is behind the watermark."""
    broker.topics = {"t0": 500, "t1": 3}
    job, out = timed_job(broker, hf.WatermarkStrategy.for_monotonous_timestamps())
    with job:
        job.start()
        job.advance(by_ms=300)
        assert out.watermark == 1  # of t1, whose last record has 2
        broker.topics["t1"] = 400
        job.advance(by_ms=300)
        assert out.watermark == 398
        broker.closed = {"t1"}
        job.advance(by_ms=300)
        assert out.watermark == 498  # t1 is not waited for any more


def test_a_silent_split_is_not_waited_for_behind_its_timeout(broker: Broker) -> None:
    broker.topics = {"t0": 10, "t1": 3}
    job, out = timed_job(broker, hf.WatermarkStrategy.for_monotonous_timestamps().with_idleness(1_000))
    with job:
        job.start()
        job.advance(by_ms=900)
        assert out.watermark == 1
        for _ in range(4):
            broker.topics["t0"] += 10
            job.advance(by_ms=300)
        assert out.watermark == 48


def test_a_reader_without_a_split_holds_no_event_time(broker: Broker) -> None:
    broker.topics = {"t0": 10}
    job, out = timed_job(broker, hf.WatermarkStrategy.for_monotonous_timestamps(), parallelism=3)
    with job:
        job.start()
        job.advance(by_ms=100)
        assert out.watermark == 8


@dataclass
class Ahead:
    """Event time by split, as a test says it."""

    at_ms: dict[str, int]

    def add_split(self, split_id: str) -> None: ...
    def enter_split(self, split_id: str) -> None: ...
    def leave_split(self, split_id: str) -> None: ...
    def has_no_splits(self) -> None: ...
    def pause_or_resume_splits(self, to_pause: Sequence[str], to_resume: Sequence[str]) -> None: ...

    def split_watermarks_ms(self) -> dict[str, int]:
        return self.at_ms

    def idle_splits(self) -> set[str]:
        return set()


def test_a_split_that_is_ahead_of_its_group_waits_and_the_others_go_on(broker: Broker) -> None:
    broker.topics = {"t0": 3, "t1": 3}
    source: SplitSource[Topic] | None = split_source_of(source_of(broker))
    assert source is not None
    operator = SourceOperator(source)
    operator.times = Ahead({"t0": 100, "t1": 5})
    bench = Bench([operator], channels=1, properties={"watermark_alignment": {"group": "g", "max_drift_ms": 0}}).started()
    bench.gate.offer(0, splits("t0", "t1"), 10)
    bench.settle()
    bench.port.take()
    bench.mailbox.put(AlignWatermarks(1, {"g": 50}))
    bench.settle()
    assert broker.paused == {"t0"}
    broker.topics = {"t0": 4, "t1": 4}
    bench.clock.now_ms += 50
    bench.settle()
    assert bench.port.take() == [{"topic": "t1", "n": 3}]
    bench.mailbox.put(AlignWatermarks(1, {"g": 150}))
    bench.clock.now_ms += 50
    bench.settle()
    assert bench.port.take() == [{"topic": "t0", "n": 3}]
