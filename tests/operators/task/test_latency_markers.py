"""Latency markers: sources send them, they go with the records, and each subtask measures how long they were under way."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

import holdfast as hf
from holdfast.barriers.elements import Batch, CheckpointBarrier, EndOfData, LatencyMarker
from holdfast.barriers.exchange.channels import OutputGate, OutputSettings
from holdfast.barriers.exchange.credits import CreditAnnouncement
from holdfast.barriers.exchange.frames import ChannelId, Frame
from holdfast.barriers.exchange.partition import BroadcastPartitioner
from holdfast.barriers.messages import SubtaskMetrics
from holdfast.operators.base import Poll
from holdfast.operators.task.source_operator import SourceOperator
from tests.operators.runtime import Bench, ListReader, ListSource, ManualClock, Recording


class PatientReader(ListReader):
    """Has nothing for a second, over and over."""

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        return super().poll(rows_max, now_ms) if self.position < len(self.rows) else Poll(ready_at_ms=now_ms + 1_000)


class PatientSource(ListSource):
    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> ListReader:
        return PatientReader(self.rows, self.rows_per_poll)


def source_bench(source: ListSource, interval_ms: int, **fields: Any) -> Bench:
    return Bench([SourceOperator(source)], latency_interval_ms=interval_ms, clock=ManualClock(1_000), **fields).started()


def markers(elements: list[Any]) -> list[int]:
    return [each.marked_ms for each in elements if isinstance(each, LatencyMarker)]


def test_a_source_sends_one_in_each_interval_also_without_records() -> None:
    bench = source_bench(PatientSource(["x"]), 300)
    bench.run()
    assert bench.port.take() == [LatencyMarker(1_000, "v", 0), "x"]
    assert bench.subtask.last_step.next_wakeup_ms == 1_300
    for now_ms in (1_299, 1_300, 1_301, 2_000):
        bench.clock.now_ms = now_ms
        bench.run()
    assert bench.port.take() == [LatencyMarker(1_300, "v", 0), LatencyMarker(2_000, "v", 0)]
    metrics = bench.subtask.metrics()
    assert (metrics.records_out, metrics.latencies) == (1, UNSET), "markers are no records, and a source measures none"


def test_no_markers_unless_they_are_asked_for_and_none_behind_the_end() -> None:
    bench = source_bench(PatientSource(["x"]), 0)
    bench.run()
    assert bench.port.take() == ["x"]
    assert bench.subtask.last_step.next_wakeup_ms == 2_000
    ended = source_bench(ListSource(["x"]), 10)
    ended.run()
    ended.clock.now_ms = 5_000
    ended.run()
    elements = ended.port.take()
    assert markers(elements) == [1_000]
    assert isinstance(elements[-1], EndOfData)
    assert ended.subtask.last_step.next_wakeup_ms is None


def test_a_full_output_gets_none() -> None:
    bench = source_bench(PatientSource([]), 10)
    bench.port.is_available = False
    bench.run()
    assert bench.port.take() == []
    bench.port.is_available = True
    bench.run()
    assert markers(bench.port.take()) == [1_000]


def test_a_subtask_measures_them_and_passes_them_on_behind_the_records() -> None:
    bench = Bench([Recording("a", []), Recording("b", [])], channels=2, clock=ManualClock(1_050)).started()
    bench.rows(0, "x")
    bench.events(0, LatencyMarker(1_000, "s", 3))
    bench.rows(0, "y")
    bench.run()
    assert bench.port.take() == ["x", LatencyMarker(1_000, "s", 3), "y"]
    bench.events(0, CheckpointBarrier(1, 1_050), LatencyMarker(1_050, "s", 0))
    bench.events(1, LatencyMarker(1_049, "t", 0))
    bench.run()
    assert bench.port.take() == [LatencyMarker(1_049, "t", 0)], "that of the blocked channel waits"
    bench.clock.now_ms = 1_250
    bench.events(1, CheckpointBarrier(1, 1_050))
    bench.settle()
    barrier, late = bench.port.take()
    assert isinstance(barrier, CheckpointBarrier)
    assert late == LatencyMarker(1_050, "s", 0)
    metrics = bench.subtask.metrics()
    assert metrics.records_in == 2
    assert metrics.latencies is not UNSET
    assert [(each.source, each.count, each.sum_ms, each.max_ms) for each in metrics.latencies] == [
        ("s", 2, 250, 200),
        ("t", 1, 1, 1),
    ]


def test_each_marker_takes_one_channel_in_turn() -> None:
    """To all channels of each exchange they would multiply."""
    to_all = BroadcastPartitioner(3, producer=0)
    gate = OutputGate(attempt=1, edge_id=0, producer=0, consumers=(0, 1, 2), partitioner=to_all, settings=OutputSettings())
    for consumer in range(3):
        channel = ChannelId(0, 0, consumer)
        gate.announced(Frame(1, channel, 0, CreditAnnouncement(1_000_000, 16, 0, 0)))
    gate.emit(Batch(rows=["x"]), now_ms=0)
    for marked_ms in range(4):
        gate.forward_marker(LatencyMarker(marked_ms, "s", 0))
    sent = [(frame.channel.consumer, frame.payload) for frame in gate.take_frames()]
    assert [(consumer, each.marked_ms) for consumer, each in sent if isinstance(each, LatencyMarker)] == [
        (0, 0), (0, 3), (1, 1), (2, 2),
    ]  # fmt: skip
    first = [payload for consumer, payload in sent if consumer == 0]
    assert isinstance(first[0], Batch), "behind what was emitted before"


def _latencies(job: hf.testing.Job) -> dict[str, SubtaskMetrics]:
    assert job._run is not None
    job._run.workers.beat()
    job._run.workers.settle()
    execution = job._ask(lambda master: master.lifecycle.execution)
    assert execution is not None
    return {each.vertex: each for each in execution.metrics() if each.latencies is not UNSET and each.latencies}


@pytest.mark.parametrize("interval_ms", [0, 100])
def test_a_job_with_markers_has_the_results_of_one_without(interval_ms: int) -> None:
    with hf.testing.Job(parallelism=2, latency_tracking_interval_ms=interval_ms) as job:
        feed = job.input("numbers", {"n": int})
        counts = feed.stream.key_by("n").window(hf.Tumbling(milliseconds=10)).aggregate(c=hf.count())
        out = job.output(counts.uid("counts"))
        job.start()
        feed.add([{"n": n} for n in (1, 2, 2, 11)], at=[1, 2, 2, 11])
        job.advance(by_ms=1_000)
        job.checkpoint()
        job.restart(parallelism=3)
        feed.watermark(25)
        job.advance(by_ms=1_000)
        assert sorted((row["n"], row["c"]) for row in out.rows()) == [(1, 1), (2, 2), (11, 1)]
        found = _latencies(job)
        assert bool(found) is bool(interval_ms)
        for each in found.values():
            assert each.latencies is not UNSET
            (histogram,) = each.latencies
            assert histogram.max_ms == 0, "no time passes while rows are under way here"
        feed.end()


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(hf.InvalidConfigError, match="latency_tracking_interval_ms"):
        hf.Environment("latency", latency_tracking_interval_ms=-1)
