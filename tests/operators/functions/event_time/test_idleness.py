"""Silence of one subtask: when it goes idle, what is no silence, and that event time neither waits for it nor goes back (scenario
N16)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK, CheckpointBarrier, Watermark, WatermarkStatus
from holdfast.barriers.messages import AlignWatermarks, CheckpointKind, TriggerCheckpoint
from holdfast.barriers.watermark_alignment import ALIGNMENT_PROPERTY
from holdfast.operators.base import Operator, Poll
from holdfast.operators.functions.event_time.silence import Quiet, Silence, find_quiet
from holdfast.operators.functions.event_time.timestamps import TimestampsOperator
from holdfast.operators.functions.event_time.watermarks import WatermarkStrategy
from holdfast.operators.functions.schema import UNDECLARED
from holdfast.operators.task.source_operator import SourceOperator
from tests.operators.runtime import Batch, Bench, Recording

IDLE, ACTIVE = WatermarkStatus(idle=True), WatermarkStatus(idle=False)


@dataclass
class Tap:
    """A source that gives what the test puts in, and waits otherwise."""

    waiting: list[Any] = field(default_factory=list)
    finished: bool = False
    name: str = "tap"
    schema: Any = None

    def create_reader(self, subtask: int, parallelism: int, max_parallelism: int) -> Tap:
        return self

    def open(self, context: Any, entries: list[bytes] | None) -> None: ...

    def poll(self, rows_max: int, now_ms: int) -> Poll:
        if self.waiting:
            return Poll(batch=Batch(rows=[self.waiting.pop(0)]))
        return Poll(finished=True) if self.finished else Poll(ready_at_ms=now_ms + 1)

    def snapshot(self) -> list[bytes]:
        return []

    def external_files(self) -> tuple[str, ...]:
        return ()

    def notify_checkpoint_complete(self, checkpoint_id: int) -> None: ...

    def close(self) -> None: ...


def strategy() -> WatermarkStrategy:
    return WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner(lambda row: row)


def source(made: WatermarkStrategy, *rest: Operator) -> tuple[Bench, Tap]:
    tap = Tap()
    bench = Bench([SourceOperator(tap), TimestampsOperator(made.assigner, made, UNDECLARED), *rest])
    bench.subtask.start()
    return bench, tap


def pass_time(bench: Bench, ms: int) -> None:
    """Time passes 1 ms at a time; the subtask steps each time, as it asked for."""
    bench.subtask.step(bench.clock.now_ms)
    for _ in range(ms):
        bench.clock.now_ms += 1
        for _ in range(3):
            bench.subtask.step(bench.clock.now_ms)


def test_a_subtask_goes_idle_exactly_one_timeout_after_its_last_record() -> None:
    bench, tap = source(strategy().with_idleness(50))
    tap.waiting = [10]
    pass_time(bench, 30)
    assert bench.port.take() == [10, Watermark(9)]
    tap.waiting = [11]
    pass_time(bench, 1)
    assert bench.port.take() == [11, Watermark(10)]
    pass_time(bench, 48)
    assert bench.port.take() == []
    pass_time(bench, 2)
    assert bench.port.take() == [IDLE]
    pass_time(bench, 200)
    assert bench.port.take() == [], "once per change"
    tap.waiting = [12]
    pass_time(bench, 1)
    assert bench.port.take() == [ACTIVE, 12, Watermark(11)]


def test_a_subtask_that_never_gets_a_record_goes_idle() -> None:
    bench, _ = source(strategy().with_idleness(50))
    pass_time(bench, 51)
    assert bench.port.take() == [IDLE]


def test_waiting_for_room_in_the_output_is_no_silence() -> None:
    bench, tap = source(strategy().with_idleness(50))
    tap.waiting = [10]
    pass_time(bench, 10)
    bench.port.is_available = False
    pass_time(bench, 1_000)
    bench.port.is_available = True
    pass_time(bench, 30)
    assert bench.port.take() == [10, Watermark(9)]
    pass_time(bench, 20)
    assert bench.port.take() == [IDLE]


def test_time_in_which_the_worker_did_something_else_is_judged_by_what_has_come() -> None:
    bench, tap = source(strategy().with_idleness(50))
    pass_time(bench, 10)
    tap.waiting = [10]
    bench.clock.now_ms += 10_000
    bench.run()
    assert bench.port.take() == [10, Watermark(9)]


def test_the_alignment_of_a_barrier_is_no_silence() -> None:
    made = strategy().with_idleness(50)
    bench = Bench([TimestampsOperator(made.assigner, made, UNDECLARED)], 2)
    bench.subtask.start()
    bench.rows(0, 10)
    pass_time(bench, 10)
    bench.events(0, CheckpointBarrier(1, 0, folder="chk-1"))
    pass_time(bench, 1_000)
    assert bench.port.take() == [10, Watermark(9)]
    bench.events(1, CheckpointBarrier(1, 0, folder="chk-1"))
    pass_time(bench, 30)
    assert [type(element) for element in bench.port.take()] == [CheckpointBarrier]
    pass_time(bench, 20)
    assert bench.port.take() == [IDLE]


def test_an_idle_subtask_that_ends_sends_its_maximum_as_an_active_one() -> None:
    """The watermark of an idle channel would be dropped, and its reader would wait for ever."""
    bench, tap = source(strategy().with_idleness(50))
    pass_time(bench, 60)
    tap.finished = True
    pass_time(bench, 5)
    assert bench.port.take()[:3] == [IDLE, ACTIVE, Watermark(MAX_WATERMARK)]
    pass_time(bench, 500)
    assert IDLE not in bench.port.take(), "nothing is said behind the end"


def test_an_idle_subtask_snapshots() -> None:
    bench, _ = source(strategy().with_idleness(50))
    pass_time(bench, 60)
    bench.mailbox.put(TriggerCheckpoint(1, 1, 0, CheckpointKind.CHECKPOINT, "chk-1"))
    bench.subtask.step(bench.clock.now_ms)
    bench.pool.settle()
    bench.subtask.step(bench.clock.now_ms)
    assert [type(answer).__name__ for answer in bench.answers()] == ["AcknowledgeCheckpoint"]


def test_an_assigner_swallows_idleness_of_its_input_and_others_pass_it_on() -> None:
    made = strategy()
    log: list[str] = []
    bench = Bench([Recording("a", log)], 1, log=log).started()
    bench.events(0, IDLE)
    bench.run()
    assert bench.port.take() == [IDLE]
    assigned = Bench([TimestampsOperator(made.assigner, made, UNDECLARED)], 1).started()
    assigned.events(0, IDLE)
    assigned.run()
    assert assigned.port.take() == []


# ------------------------------------------------------------------------------------------------------ following the clock


def test_in_silence_the_watermark_follows_the_clock() -> None:
    bench, tap = source(strategy().advance_when_idle(300))
    tap.waiting = [1_000]
    pass_time(bench, 1)
    assert bench.port.take() == [1_000, Watermark(999)]
    pass_time(bench, 298)
    assert bench.port.take() == []
    pass_time(bench, 2)
    (first,) = bench.port.take()
    assert 999 + 300 <= first.timestamp_ms <= 999 + 301
    pass_time(bench, 1_000)
    rising = [watermark.timestamp_ms for watermark in bench.port.take()]
    assert len(rising) == 5
    assert rising == sorted(set(rising))
    assert rising[-1] <= 999 + 1_301, "no more than has passed"


def test_a_record_behind_the_clock_turns_no_time_back() -> None:
    bench, tap = source(strategy().advance_when_idle(300))
    tap.waiting = [1_000]
    pass_time(bench, 400)
    bench.port.take()
    tap.waiting = [1_001, 5_000]
    pass_time(bench, 1)
    assert bench.port.take() == [1_001, 5_000, Watermark(4_999)]


def test_without_a_record_there_is_no_time_to_go_on_from() -> None:
    bench, _ = source(strategy().advance_when_idle(300))
    pass_time(bench, 2_000)
    assert bench.port.take() == []


def test_an_idle_subtask_comes_back_for_the_watermark_alone() -> None:
    bench, tap = source(strategy().with_idleness(50).advance_when_idle(300))
    tap.waiting = [1_000]
    pass_time(bench, 60)
    assert bench.port.take() == [1_000, Watermark(999), IDLE]
    pass_time(bench, 250)
    active, watermark, idle = bench.port.take()
    assert (active, idle) == (ACTIVE, IDLE)
    assert watermark.timestamp_ms >= 999 + 300


@pytest.mark.parametrize("idle_after", [None, 10])
def test_silence_begins_again_with_each_record(idle_after: int | None) -> None:
    silence = Silence(idle_after_ms=idle_after, advance_after_ms=20, step_ms=5)
    silence.said(100)
    silence.record(7)
    assert silence.next_ms == (27 if idle_after is None else 17)
    silence.due(30)
    silence.record(40)
    assert not silence.is_idle
    assert silence.next_ms == (60 if idle_after is None else 50)


# ------------------------------------------------------------------------------------------------------ watermark alignment


def aligned(made: WatermarkStrategy) -> tuple[Bench, Tap]:
    """A source in the group "g"."""
    tap = Tap()
    fields = msgspec.to_builtins(made.with_watermark_alignment("g", 10).alignment)
    bench = Bench(
        [SourceOperator(tap), TimestampsOperator(made.assigner, made, UNDECLARED)], properties={ALIGNMENT_PROPERTY: fields}
    )
    bench.subtask.start()
    return bench, tap


def test_a_source_too_far_ahead_of_its_group_waits() -> None:
    bench, tap = aligned(strategy())
    bench.mailbox.put(AlignWatermarks(1, {"g": 50, "other": 0}))
    tap.waiting = [10, 51, 60, 70]
    pass_time(bench, 5)
    assert bench.port.take() == [10, Watermark(9), 51, Watermark(50), 60, Watermark(59)]
    assert bench.subtask.last_step.next_wakeup_ms is None, "it waits for a command, and does not turn in circles"
    bench.mailbox.put(AlignWatermarks(1, {"g": 59}))
    pass_time(bench, 5)
    assert bench.port.take() == [70, Watermark(69)]


def test_a_pause_is_no_silence() -> None:
    bench, tap = aligned(strategy().with_idleness(50).advance_when_idle(50))
    bench.mailbox.put(AlignWatermarks(1, {"g": 5}))
    tap.waiting = [10, 11]
    pass_time(bench, 1_000)
    assert bench.port.take() == [10, Watermark(9)]
    assert bench.subtask.metrics().aligned == {"op1": 9}


def test_a_checkpoint_and_a_stop_go_through_a_paused_source() -> None:
    bench, tap = aligned(strategy())
    bench.mailbox.put(AlignWatermarks(1, {"g": 5}))
    tap.waiting = [10, 11]
    pass_time(bench, 5)
    bench.mailbox.put(TriggerCheckpoint(1, 1, 0, CheckpointKind.CHECKPOINT, "chk-1"))
    bench.mailbox.put(TriggerCheckpoint(1, 2, 0, CheckpointKind.STOP_SAVEPOINT, "chk-2", drain=True))
    pass_time(bench, 5)
    bench.pool.settle()
    pass_time(bench, 5)
    assert [type(answer).__name__ for answer in bench.answers()] == ["AcknowledgeCheckpoint"] * 2
    assert bench.subtask.is_drained
    assert bench.subtask.metrics().aligned == {"op1": None}, "an ended source holds nobody"


def test_an_idle_source_and_one_without_a_watermark_hold_nobody() -> None:
    bench, tap = aligned(strategy().with_idleness(50))
    assert bench.subtask.metrics().aligned == {"op1": None}
    tap.waiting = [10]
    pass_time(bench, 5)
    assert bench.subtask.metrics().aligned == {"op1": 9}
    pass_time(bench, 60)
    assert bench.subtask.metrics().aligned == {"op1": None}


def test_the_metrics_of_a_source_tell_how_it_keeps_up() -> None:
    bench, tap = source(strategy().with_idleness(500))
    bench.clock.now_ms = 10_000
    bench.run()
    before = bench.subtask.metrics()
    assert (before.output_watermark_ms, before.watermark_lag_ms, before.emit_lag_ms) == (msgspec.UNSET,) * 3
    assert (before.source_idle_ms, before.idle, before.watermark_ms) == (9_000, False, None)
    tap.waiting += [9_000, 9_400]
    bench.clock.now_ms = 10_001
    bench.run()
    now = bench.subtask.metrics()
    assert (now.emit_lag_ms, now.output_watermark_ms, now.watermark_lag_ms) == (601, 9_399, 602)
    assert (now.source_idle_ms, now.idle) == (0, False)
    assert now.watermark_ms is None, "a source has no input"
    pass_time(bench, 600)
    silent = bench.subtask.metrics()
    assert (silent.source_idle_ms, silent.idle) == (600, True)
    assert (silent.emit_lag_ms, silent.watermark_lag_ms) == (601, 1_202), "of its last record; of the clock"
    tap.waiting.append(20_000)
    pass_time(bench, 1)
    assert bench.subtask.metrics().emit_lag_ms == -9_398, "event times may be ahead of the clock"
    tap.finished = True
    bench.clock.now_ms = 11_600
    bench.run()
    ended = bench.subtask.metrics()
    told = (ended.emit_lag_ms, ended.source_idle_ms, ended.idle, ended.watermark_lag_ms, ended.output_watermark_ms)
    assert told == (msgspec.UNSET,) * 5, "event time has ended"


def test_the_lag_of_a_reader_is_that_of_its_input() -> None:
    bench = Bench([Recording("a", [])], channels=2).started()
    bench.clock.now_ms = 5_000
    bench.events(0, Watermark(4_500))
    bench.events(1, Watermark(3_000))
    bench.run()
    metrics = bench.subtask.metrics()
    assert (metrics.watermark_ms, metrics.output_watermark_ms, metrics.watermark_lag_ms) == (3_000, 3_000, 2_000)
    assert (metrics.emit_lag_ms, metrics.source_idle_ms, metrics.idle) == (msgspec.UNSET,) * 3
    assert not {b"source_idle_ms", b"idle\"", b"latencies"} & set(msgspec.json.encode(metrics).split(b'"'))
    bench.events(0, Watermark(MAX_WATERMARK))
    bench.events(1, Watermark(-(2**63) + 5))
    bench.events(1, Watermark(MAX_WATERMARK))
    bench.run()
    assert bench.subtask.metrics().watermark_lag_ms is msgspec.UNSET


# --------------------------------------------------------------------------------------------------------------- restores


def following(job: hf.testing.Job) -> tuple[Any, Any]:
    """A feed whose event time follows the clock after a second of silence, and windows of 10 s of it."""
    feed = job.input("feed", {"at": int})
    times = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at").advance_when_idle(1_000)
    timed = feed.stream.assign_timestamps_and_watermarks(times).uid("times")
    return feed, job.output(timed.key_by("at").window(hf.Tumbling(seconds=10)).aggregate(n=hf.count()).uid("windows"))


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_the_last_windows_of_a_quiet_stream_close_behind_a_restore(parallelism: int) -> None:
    with hf.testing.Job(parallelism=2) as job:
        feed, out = following(job)
        job.start()
        feed.add([{"at": 5_000}, {"at": 5_001}])
        job.advance(by_ms=3_000)
        before_ms = job.watermark("times")
        assert before_ms is not None
        assert 4_999 + 2_700 <= before_ms <= 4_999 + 3_000
        job.checkpoint()
        job.restart(parallelism=parallelism)
        job.advance(by_ms=1)
        again_ms = job.watermark("times")
        assert again_ms is not None
        assert before_ms <= again_ms <= 4_999 + 3_001, "nothing turns back, and nothing is waited for twice"
        assert out.rows() == []
        job.advance(by_ms=2_400)
        assert sorted(row["at"] for row in out.rows()) == [5_000, 5_001]


def test_silence_in_front_of_a_snapshot_counts() -> None:
    with hf.testing.Job() as job:
        feed, _ = following(job)
        job.start()
        feed.add({"at": 5_000})
        job.advance(by_ms=800)
        job.checkpoint()
        job.restart(at_ms=100_000)
        job.advance(by_ms=100)
        assert job.watermark("times") == 4_999, "the time that it was down does not"
        job.advance(by_ms=300)
        assert (job.watermark("times") or 0) >= 4_999 + 1_000


def test_a_record_that_was_late_stays_late_behind_a_restore() -> None:
    with hf.testing.Job() as job:
        feed, out = following(job)
        job.start()
        feed.add({"at": 5_000})
        job.advance(by_ms=7_000)
        assert len(out.take()) == 1
        feed.add({"at": 6_000})
        before_ms = job.watermark("times")
        assert (before_ms or 0) >= 9_999, "a record behind the clock turns no time back"
        job.checkpoint()
        job.restart()
        feed.add({"at": 7_000})
        assert job.watermark("times") == before_ms
        assert (out.take(), job.progress("windows").late_dropped) == ([], 1)


def test_what_has_ended_holds_nobody_behind_a_restore_at_another_parallelism() -> None:
    entries = [msgspec.msgpack.encode(Quiet(subtask, 3, base_ms, 0, base_ms)) for subtask, base_ms in ((0, 50), (2, 70))]
    assert (find_quiet(entries, 2, 3) or Quiet(0, 0, 0, 0, 0)).base_ms == 70
    assert (find_quiet(entries, 2, 4) or Quiet(0, 0, 0, 0, 0)).base_ms == 50
    assert find_quiet([], 0, 1) is None


def test_a_subtask_that_has_yet_to_begin_holds_all_behind_a_restore_at_another_parallelism() -> None:
    """Its records may be older than what the others have passed; an idle one without a watermark held nobody before either."""
    silence = Silence(idle_after_ms=10, advance_after_ms=20, step_ms=5)
    assert silence.quiet(3) == (MIN_WATERMARK, 3)
    silence.due(10)
    assert silence.quiet(10) is None
    entries = [msgspec.msgpack.encode(Quiet(0, 2, 50, 0, 50)), msgspec.msgpack.encode(Quiet(1, 2, MIN_WATERMARK, 9, MIN_WATERMARK))]
    assert (find_quiet(entries, 0, 3) or Quiet(0, 0, 0, 0, 0)).base_ms == MIN_WATERMARK


def test_a_strategy_that_follows_no_clock_stores_nothing() -> None:
    made = strategy().with_idleness(50)
    assert TimestampsOperator(made.assigner, made, UNDECLARED).declared_states() == ()
