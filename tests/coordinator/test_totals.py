"""What a submission has counted over its attempts: each record once, whatever was read again, and whoever leads the job."""

from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.barriers import codec
from holdfast.barriers.messages import (
    COUNTERS_MAX,
    INT_MAX,
    OPERATORS_MAX,
    AckBatch,
    AcknowledgeCheckpoint,
    CheckpointMetrics,
    Heartbeat,
    OperatorMetrics,
    SubtaskMetrics,
    TaskState,
)
from holdfast.coordinator.dispatcher.published import capture
from holdfast.coordinator.dispatcher.reading.queries import view_recorded_numbers
from holdfast.coordinator.ha.recorded_job import RecordedJob
from holdfast.coordinator.ha.recovery import Takeover, recover_job
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.restore.plan import derive_setup
from holdfast.coordinator.totals import JobTotals, OperatorTotals, Tally, decode_totals, derive_job_totals, encode_totals, reached
from holdfast.statebackends.errors import ProtocolError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB


def counted(rig: Rig, read: int, late: int = 0) -> tuple[tuple[OperatorMetrics, ...], ...]:
    """Of the operators of each vertex: so many records of the source, as many taken by the other one."""
    source, other = rig.graph.vertices
    return (
        (OperatorMetrics(source.operators[0].uid, records_out=read),),
        (OperatorMetrics(other.operators[0].uid, read, 0, late, late * 10, {"seen": read}),),
    )


def beat(rig: Rig, slot: int, attempt: int, read: int, late: int = 0) -> None:
    metrics = tuple(
        SubtaskMetrics(vertex.vertex_id, slot, operators=operators)
        for vertex, operators in zip(rig.graph.vertices, counted(rig, read, late), strict=True)
    )
    rig.heartbeat(slot, attempt, metrics=metrics)


def checkpoint(rig: Rig, attempt: int, *at: tuple[int, int]) -> int:
    """One whose cut is behind so many records of each slot, some of them late."""
    number = rig.master.coordinator.next_checkpoint_id
    rig.feed_request()
    for slot, (read, late) in enumerate(at):
        acks = tuple(
            msgspec.structs.replace(ack, metrics=CheckpointMetrics(operators=operators))
            for ack, operators in zip(rig.acks(slot, attempt, number), counted(rig, read, late), strict=True)
            if isinstance(ack, AcknowledgeCheckpoint)
        )
        batch = AckBatch(rig.setup.epoch, slot, rig.sessions[slot], acks)
        rig.call(lambda ticket, batch=batch: job_events.AckBatchReceived(ticket, batch))
    assert number in [each.checkpoint_id for each in rig.master.coordinator.retained]
    return number


def restart(rig: Rig, attempt: int) -> None:
    """The attempt fails in slot 0, and the next one runs."""
    rig.report(0, attempt, TaskState.FAILED, "UserFunctionError: no")
    for slot in (0, 1):
        rig.report(slot, attempt, TaskState.CANCELED)
    while rig.state != "RUNNING":
        rig.pass_time(1_000)
        for slot in (0, 1):
            rig.heartbeat(slot, attempt)
    for slot in (0, 1):
        rig.report(slot, attempt + 1, TaskState.RUNNING)
    assert (rig.state, rig.master.lifecycle.attempt) == ("RUNNING", attempt + 1)


def totals(rig: Rig) -> tuple[int, int, int]:
    """Read by the source; late records of the other operator, and by how much the latest."""
    found = capture(rig.master, 0, 0, monotonic_ms=0).job().totals
    source, other = (vertex.operators[0].uid for vertex in rig.graph.vertices)
    nothing = OperatorTotals()
    late = found.get(other, nothing)
    return found.get(source, nothing).records_out, late.late_dropped, late.late_ms_max


def test_counters_of_all_subtasks_add_up() -> None:
    rig = Rig().run()
    beat(rig, 0, 1, 7, 2)
    beat(rig, 1, 1, 5, 1)
    assert totals(rig) == (12, 3, 20)
    beat(rig, 1, 1, 6, 1)
    beat(rig, 1, 1, 6, 1)
    assert totals(rig) == (13, 3, 20), "told again is not counted again"


def test_what_another_attempt_counted_is_not_taken() -> None:
    rig = Rig().run()
    checkpoint(rig, 1, (40, 4), (50, 0))
    restart(rig, 1)
    beat(rig, 0, 1, 900, 90)
    assert totals(rig) == (90, 4, 40)


def test_what_is_read_again_after_a_restart_counts_once() -> None:
    rig = Rig().run()
    checkpoint(rig, 1, (40, 4), (50, 0))
    beat(rig, 0, 1, 60, 6)
    beat(rig, 1, 1, 70, 0)
    assert totals(rig) == (130, 6, 60)
    restart(rig, 1)
    assert totals(rig) == (90, 4, 40), "back at the cut"
    beat(rig, 0, 2, 30, 3)
    beat(rig, 1, 2, 50, 0)
    assert totals(rig) == (170, 7, 40)
    checkpoint(rig, 2, (30, 3), (50, 0))
    restart(rig, 2)
    assert totals(rig) == (170, 7, 40)


def skip(rig: Rig, slot: int, attempt: int, count: int, reason: str) -> None:
    vertex = rig.graph.vertices[1]
    operators = (OperatorMetrics(vertex.operators[0].uid, count, rows_skipped=count, first_skipped=reason),)
    rig.heartbeat(slot, attempt, metrics=(SubtaskMetrics(vertex.vertex_id, slot, operators=operators),))


def test_skipped_rows_are_counted_as_late_ones_are_and_the_first_reason_stays() -> None:
    rig = Rig().run()
    uid = rig.graph.vertices[1].operators[0].uid

    def skipped() -> tuple[int, str]:
        entry = capture(rig.master, 0, 0, monotonic_ms=0).job().totals.get(uid, OperatorTotals())
        return entry.rows_skipped, entry.first_skipped

    skip(rig, 0, 1, 4, "the first")
    skip(rig, 1, 1, 2, "another")
    assert skipped() == (6, "the first")
    number = rig.master.coordinator.next_checkpoint_id
    rig.feed_request()
    for slot, count in ((0, 4), (1, 2)):
        metrics = CheckpointMetrics(operators=(OperatorMetrics(uid, count, rows_skipped=count, first_skipped="the first"),))
        acks = [each for each in rig.acks(slot, 1, number) if isinstance(each, AcknowledgeCheckpoint)]
        acks[1] = msgspec.structs.replace(acks[1], metrics=metrics)
        batch = AckBatch(rig.setup.epoch, slot, rig.sessions[slot], tuple(acks))
        rig.call(lambda ticket, batch=batch: job_events.AckBatchReceived(ticket, batch))
    skip(rig, 0, 1, 9, "the first")
    assert skipped() == (11, "the first")
    restart(rig, 1)
    assert skipped() == (6, "the first"), "back at the cut, and not at 0"
    skip(rig, 0, 2, 5, "read again")
    assert skipped() == (11, "the first"), "what is read again counts once"
    assert derive_job_totals(rig.graph, capture(rig.master, 0, 0, monotonic_ms=0).job().totals).rows_skipped == 11
    led_on(rig)
    for slot in (0, 1):
        rig.register(slot, attempt=2)
    assert skipped() == (6, "the first"), "the next leader knows them"


def test_a_restart_without_a_checkpoint_begins_at_nothing() -> None:
    rig = Rig().run()
    beat(rig, 0, 1, 60, 6)
    restart(rig, 1)
    assert totals(rig) == (0, 0, 0)


def test_counters_for_monitoring_never_fall() -> None:
    rig = Rig().run()
    checkpoint(rig, 1, (40, 4), (0, 0))
    beat(rig, 0, 1, 60, 6)

    def shown() -> JobTotals:
        return derive_job_totals(rig.graph, capture(rig.master, 0, 0, monotonic_ms=0).numbers.reached)

    assert (shown().records_in, shown().late_dropped) == (60, 6)
    restart(rig, 1)
    assert (shown().records_in, shown().late_dropped) == (60, 6), "records are read again"
    beat(rig, 0, 2, 15, 1)
    assert (shown().records_in, shown().late_dropped) == (60, 6)
    beat(rig, 0, 2, 30, 3)
    assert (shown().records_in, shown().late_dropped) == (70, 7)


def led_on(rig: Rig) -> RecordedJob:
    """The next leader takes the job over as its directory shows it."""
    settled = run_flow(recover_job(JobPaths(JOB), Takeover(rig.setup.epoch, "next", 0)), rig.storage)
    record = settled.newest_submission
    assert record is not None
    rig.open(derive_setup(settled, record, epoch=rig.setup.epoch, directory_nonce="directory"))
    return settled


def test_the_next_leader_goes_on_from_the_same_totals() -> None:
    rig = Rig().run()
    checkpoint(rig, 1, (40, 4), (50, 0))
    restart(rig, 1)
    checkpoint(rig, 2, (5, 1), (5, 0))
    led_on(rig)
    for slot in (0, 1):
        rig.register(slot, attempt=2)
    assert (rig.state, totals(rig)) == ("RUNNING", (100, 5, 40)), "until workers tell what they have counted since"
    beat(rig, 0, 2, 8, 2)
    beat(rig, 1, 2, 6, 0)
    assert totals(rig) == (104, 6, 40)
    restart(rig, 2)
    assert totals(rig) == (100, 5, 40), "the checkpoint that the leader before it completed"


def test_the_result_keeps_them() -> None:
    rig = Rig().run()
    beat(rig, 0, 1, 60, 6)
    rig.call(job_events.CancelRequested)
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.CANCELED)
    assert rig.state == "CANCELED"
    numbers = view_recorded_numbers(run_flow(read_job(JobPaths(JOB)), rig.storage))
    assert derive_job_totals(rig.graph, numbers.totals).late_dropped == 6
    assert numbers.reached == numbers.totals


def test_counters_of_another_vertex_or_of_nobody_are_left_out() -> None:
    rig = Rig()
    source, other = rig.graph.vertices
    tally = Tally(rig.graph, {})
    foreign = OperatorMetrics(other.operators[0].uid, records_in=5)
    tally.count(source.vertex_id, 0, (foreign, OperatorMetrics("nobody", records_in=5)))
    assert tally.totals() == {}
    tally.count(other.vertex_id, 0, (foreign, foreign))
    assert tally.totals() == {foreign.operator: OperatorTotals(records_in=5)}, "named twice counts once"


def test_names_of_counters_are_bounded_whatever_workers_send() -> None:
    rig = Rig()
    vertex = rig.graph.vertices[0]
    uid = vertex.operators[0].uid
    tally = Tally(rig.graph, {uid: OperatorTotals(counters={"kept": 1})})
    for subtask in range(3):
        names = {f"c{subtask}_{number}": 1 for number in range(COUNTERS_MAX)}
        tally.count(vertex.vertex_id, subtask, (OperatorMetrics(uid, counters=names),))
        tally.count(vertex.vertex_id, subtask, (OperatorMetrics(uid, counters=names),))
    counters = tally.totals()[uid].counters
    assert (len(counters), counters["kept"], set(counters.values())) == (COUNTERS_MAX, 1, {1})


def test_numbers_stay_such_that_a_record_can_hold_them() -> None:
    rig = Rig()
    vertex = rig.graph.vertices[0]
    uid = vertex.operators[0].uid
    tally = Tally(rig.graph, {})
    for subtask in (0, 1):
        tally.count(vertex.vertex_id, subtask, (OperatorMetrics(uid, INT_MAX, counters={"c": INT_MAX}),))
    assert tally.totals()[uid] == OperatorTotals(INT_MAX, counters={"c": INT_MAX})
    assert decode_totals(encode_totals(tally.totals())) == tally.totals()


@pytest.mark.parametrize(
    "counters",
    [
        '{"a\\nb": 1}',
        '{"": 1}',
        '{"a b": 1}',
        '{"a\\n": 1}',
        '{"\\u00e4": 1}',
        json.dumps({"x" * 65: 1}),
        '{"a": -1}',
        '{"a": 9223372036854775808}',
        '{"a": "1"}',
        json.dumps({f"c{number}": 1 for number in range(COUNTERS_MAX + 1)}),
    ],
)
def test_a_worker_with_counters_that_can_be_none_is_refused(counters: str) -> None:
    metrics = '{"vertex": "v", "subtask": 0, "operators": [{"operator": "u", "counters": ' + counters + "}]}"
    text = '{"type": "heartbeat", "slot": 0, "session": "s", "attempt": 1, "metrics": [' + metrics + "]}"
    with pytest.raises(ProtocolError, match="not a valid Heartbeat"):
        codec.decode(text.encode(), Heartbeat)


def test_a_chain_of_more_operators_than_there_can_be_is_refused() -> None:
    metrics = SubtaskMetrics("v", 0, operators=(OperatorMetrics("u"),) * (OPERATORS_MAX + 1))
    with pytest.raises(ProtocolError, match="not a valid Heartbeat"):
        codec.decode(codec.encode(Heartbeat(0, "s", 1, (metrics,))), Heartbeat)


@pytest.mark.parametrize("text", ["", "[]", '{"u": 5}', '{"u": {"records_in": -1}}', "{" * 100_000])
def test_a_snapshot_without_readable_counters_has_none(text: str) -> None:
    assert decode_totals(text) == {}


def test_reached_is_the_higher_of_each_number() -> None:
    before = {"a": OperatorTotals(5, 9, counters={"x": 3, "y": 1}), "b": OperatorTotals(1)}
    now = {"a": OperatorTotals(7, 2, counters={"x": 1, "z": 4})}
    assert reached(before, now) == {"a": OperatorTotals(7, 9, counters={"x": 3, "y": 1, "z": 4}), "b": OperatorTotals(1)}


def test_two_sides_with_different_counters_keep_as_many_as_a_record_can_hold() -> None:
    """Subtasks of one function may count under names of their own; a result with more names than that can't be read again."""
    restored = OperatorTotals(counters={f"a{number}": 1 for number in range(40)})
    told = OperatorTotals(counters={f"b{number}": 2 for number in range(40)})
    both = told.at_least(restored)
    assert len(both.counters) == COUNTERS_MAX
    assert both.counters.items() >= restored.counters.items()
    assert codec.decode(codec.encode(both), OperatorTotals) == both
