"""The aligner alone (groups B and K), and the gate over it against the property list and a reference."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.alignment.aligner import Aligner
from holdfast.barriers.alignment.handler import (
    AbortCheckpoint,
    AbortNotice,
    AbortReason,
    AlignmentMetrics,
    BarrierAction,
    BarrierEvent,
    BarrierReceived,
    BatchDelivered,
    BlockChannel,
    CancelReceived,
    ChannelEnded,
    TriggerSnapshot,
    UnblockChannels,
)
from holdfast.barriers.elements import CheckpointBarrier
from holdfast.barriers.messages import FailureReason
from holdfast.statebackends.errors import InvalidConfigError, InvariantError, ProtocolError
from tests.barriers.reference_gate import ReferenceGate
from tests.barriers.sequences import channel_script, gate_inputs, interleave
from tests.examples import examples
from tests.scenarios.gates import GateRun, run_gate
from tests.scenarios.notation import Event, channel_letter

A, B, C = 0, 1, 2


def barrier(checkpoint_id: int, created_ms: int = 0) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, created_ms)


def handle(aligner: Aligner, event: BarrierEvent, at: int = 0) -> list[BarrierAction]:
    return aligner.handle(event, now_ms=at, wall_ms=at)


# -------------------------------------------------------------------------------------------------- what goes wrong


def test_no_channels_is_refused() -> None:
    with pytest.raises(InvalidConfigError):
        Aligner(0)


@pytest.mark.parametrize("event", [BarrierReceived(A, barrier(1)), CancelReceived(A, 1), ChannelEnded(A)])
def test_anything_after_the_end_of_a_channel_is_a_protocol_error(event: BarrierEvent) -> None:
    aligner = Aligner(2)
    handle(aligner, ChannelEnded(A))
    with pytest.raises(ProtocolError, match="channel 0"):
        handle(aligner, event)


@pytest.mark.parametrize("event", [BarrierReceived(A, barrier(1)), CancelReceived(A, 1), ChannelEnded(A)])
def test_reading_a_blocked_channel_is_a_bug(event: BarrierEvent) -> None:
    aligner = Aligner(2)
    handle(aligner, BarrierReceived(A, barrier(1)))
    with pytest.raises(InvariantError, match="blocked"):
        handle(aligner, event)


def test_end_of_a_channel_during_an_alignment_aborts_it_when_after_finish_is_off() -> None:
    aligner = Aligner(3, after_finish=False)
    handle(aligner, BarrierReceived(A, barrier(1)))
    assert handle(aligner, ChannelEnded(C)) == [AbortCheckpoint(1, AbortReason.END_OF_INPUT), UnblockChannels((A,))]
    assert handle(aligner, BarrierReceived(B, barrier(1))) == []
    assert handle(aligner, BarrierReceived(A, barrier(2))) == [BlockChannel(A)]
    assert [type(action) for action in handle(aligner, BarrierReceived(B, barrier(2)))] == [TriggerSnapshot, UnblockChannels]


def test_reasons_tell_what_to_decline() -> None:
    assert AbortReason.NOTIFIED.decline_reason is None
    assert AbortReason.SUBSUMED.decline_reason is FailureReason.SUBSUMED
    assert all(reason.decline_reason or reason is AbortReason.NOTIFIED for reason in AbortReason)


# -------------------------------------------------------------------------------------------------- measurements: B


def test_b01_start_delay_and_alignment_duration() -> None:
    aligner = Aligner(2)
    assert handle(aligner, BarrierReceived(A, barrier(1, 100)), at=110) == [BlockChannel(A)]
    assert handle(aligner, BarrierReceived(B, barrier(1, 100)), at=150) == [
        TriggerSnapshot(barrier(1, 100), AlignmentMetrics(start_delay_ms=10, alignment_duration_ms=40)),
        UnblockChannels((A,)),
    ]


def test_b02_one_channel_has_a_start_delay_and_no_alignment() -> None:
    assert handle(Aligner(1), BarrierReceived(A, barrier(1, 100)), at=130) == [
        TriggerSnapshot(barrier(1, 100), AlignmentMetrics(start_delay_ms=30))
    ]


def test_b03_and_b04_bytes_count_from_the_first_barrier_to_the_last() -> None:
    aligner = Aligner(2)
    handle(aligner, BatchDelivered(1000))
    handle(aligner, BarrierReceived(A, barrier(1)))
    for _ in range(3):
        handle(aligner, BatchDelivered(10))
    trigger, _ = handle(aligner, BarrierReceived(B, barrier(1)))
    for _ in range(5):
        handle(aligner, BatchDelivered(10))
    assert isinstance(trigger, TriggerSnapshot)
    assert (trigger.metrics.bytes_processed, trigger.metrics.bytes_persisted) == (30, 0)


def test_b05_the_timer_restarts_when_a_higher_id_takes_over() -> None:
    aligner = Aligner(3)
    handle(aligner, BarrierReceived(A, barrier(1, 0)), at=0)
    assert handle(aligner, BarrierReceived(B, barrier(2, 30)), at=40) == [
        AbortCheckpoint(1, AbortReason.SUBSUMED),
        UnblockChannels((A,)),
        BlockChannel(B),
    ]
    handle(aligner, BarrierReceived(A, barrier(2, 30)), at=45)
    trigger, _ = handle(aligner, BarrierReceived(C, barrier(2, 30)), at=47)
    assert trigger == TriggerSnapshot(barrier(2, 30), AlignmentMetrics(start_delay_ms=10, alignment_duration_ms=7))


def test_b06_a_marker_for_an_id_never_started_leaves_the_next_numbers_alone() -> None:
    aligner = Aligner(2)
    assert handle(aligner, CancelReceived(A, 1), at=5) == [AbortCheckpoint(1, AbortReason.CANCELLED)]
    assert handle(aligner, CancelReceived(B, 1), at=6) == []
    handle(aligner, BarrierReceived(A, barrier(2, 10)), at=12)
    trigger, _ = handle(aligner, BarrierReceived(B, barrier(2, 10)), at=15)
    assert trigger == TriggerSnapshot(barrier(2, 10), AlignmentMetrics(start_delay_ms=2, alignment_duration_ms=3))


def test_b08_awaited_channels_are_those_open_at_the_first_barrier() -> None:
    aligner = Aligner(4)
    handle(aligner, ChannelEnded(3))
    handle(aligner, BarrierReceived(A, barrier(1)))
    handle(aligner, ChannelEnded(C))
    assert aligner.pending == (1,)
    assert [type(action) for action in handle(aligner, BarrierReceived(B, barrier(1)))] == [TriggerSnapshot, UnblockChannels]
    assert aligner.pending == ()


def test_b09_a_hundred_channels_and_a_thousand_checkpoints() -> None:
    rng = random.Random(9)
    channels, checkpoints = 100, 1000
    handler = Aligner(channels)
    # Channels run ahead of one another by at most three ids, so that the queues stay bounded as credit would keep them.
    events: list[Event] = []
    for first in range(1, checkpoints + 1, 4):
        last = min(first + 3, checkpoints)
        scripts = [[Event("barrier", c, n) for n in range(first, last + 1)] for c in range(channels)]
        events += interleave(rng, scripts)
    run = run_gate(handler, events)
    assert [trigger.barrier.checkpoint_id for trigger in run.triggered] == list(range(1, checkpoints + 1))
    assert (run.aborted, run.held, run.pending, run.held_bytes) == ([], [], (), 0)


def test_clocks_that_jump_back_give_no_negative_numbers() -> None:
    aligner = Aligner(2)
    aligner.handle(BarrierReceived(A, barrier(1, 500)), now_ms=10, wall_ms=400)
    trigger, _ = aligner.handle(BarrierReceived(B, barrier(1, 500)), now_ms=12, wall_ms=100)
    assert trigger == TriggerSnapshot(barrier(1, 500), AlignmentMetrics(alignment_duration_ms=2))


# ------------------------------------------------------------------------------------------------- abort notices: K


def test_k01_notice_before_the_barrier_means_no_snapshot_and_no_blocking() -> None:
    aligner = Aligner(2)
    assert handle(aligner, AbortNotice(6)) == []
    assert handle(aligner, BarrierReceived(A, barrier(6))) == [AbortCheckpoint(6, AbortReason.NOTIFIED)]
    assert handle(aligner, BarrierReceived(B, barrier(6))) == []
    assert handle(aligner, BarrierReceived(A, barrier(7))) == [BlockChannel(A)]


def test_k01_marker_after_the_notice_is_passed_on_and_not_declined_again() -> None:
    aligner = Aligner(2)
    handle(aligner, AbortNotice(6))
    assert handle(aligner, CancelReceived(A, 6)) == [AbortCheckpoint(6, AbortReason.NOTIFIED)]
    assert handle(aligner, CancelReceived(B, 6)) == []


def test_notice_during_the_alignment_releases_at_once() -> None:
    aligner = Aligner(2)
    handle(aligner, BarrierReceived(A, barrier(6)))
    assert handle(aligner, AbortNotice(6)) == [AbortCheckpoint(6, AbortReason.NOTIFIED), UnblockChannels((A,))]
    assert handle(aligner, AbortNotice(6)) == []
    assert handle(aligner, BarrierReceived(B, barrier(6))) == []


def test_notice_for_a_lower_or_completed_id_changes_nothing() -> None:
    aligner = Aligner(1)
    handle(aligner, BarrierReceived(A, barrier(6)))
    assert handle(aligner, AbortNotice(6)) == []
    assert handle(aligner, AbortNotice(3)) == []
    assert [type(action) for action in handle(aligner, BarrierReceived(A, barrier(7)))] == [TriggerSnapshot]


def test_a_dead_id_subsumes_the_one_under_alignment() -> None:
    aligner = Aligner(2)
    handle(aligner, AbortNotice(2))
    handle(aligner, BarrierReceived(A, barrier(1)))
    assert handle(aligner, BarrierReceived(B, barrier(2))) == [
        AbortCheckpoint(1, AbortReason.SUBSUMED),
        UnblockChannels((A,)),
        AbortCheckpoint(2, AbortReason.NOTIFIED),
    ]


def test_k02_notices_are_bounded_and_pruned() -> None:
    aligner = Aligner(1, aborted_ids_max=3)
    for checkpoint_id in range(1, 101):
        handle(aligner, AbortNotice(checkpoint_id))
    assert [type(action) for action in handle(aligner, BarrierReceived(A, barrier(97)))] == [TriggerSnapshot]
    assert handle(aligner, BarrierReceived(A, barrier(99))) == [AbortCheckpoint(99, AbortReason.NOTIFIED)]
    assert len(aligner._aborted) == 1


def test_k12_and_k13_the_same_or_a_lower_id_never_snapshots() -> None:
    aligner = Aligner(1)
    handle(aligner, BarrierReceived(A, barrier(5)))
    assert handle(aligner, BarrierReceived(A, barrier(5))) == []
    assert handle(aligner, BarrierReceived(A, barrier(4))) == []
    assert handle(aligner, CancelReceived(A, 5)) == []


# ------------------------------------------------------------------------------------------- random sequences: 0, A


def check_properties(run: GateRun, scripts: list[list[Event]], *, complete: bool) -> None:
    """(1)-(6) of section 0."""
    records = {channel_letter(c): [e.number for e in script if e.kind == "record"] for c, script in enumerate(scripts)}
    held = {letter: [int(token[1:]) for token in run.held if token[0] == letter] for letter in records}
    for letter, numbers in records.items():
        assert run.delivered[letter] + held[letter] == numbers, f"(1) (2) channel {letter}"
    for checkpoint_id, cut in run.cuts.items():
        for channel, script in enumerate(scripts):
            assert cut[channel_letter(channel)] == records_before(script, checkpoint_id), f"(3) {checkpoint_id} on {channel}"
    triggered = [trigger.barrier.checkpoint_id for trigger in run.triggered]
    assert triggered == sorted(set(triggered)), "(4)"
    aborted = [abort.checkpoint_id for abort in run.aborted]
    assert not set(triggered) & set(aborted), "(5)"
    assert len(set(aborted)) == len(aborted)
    if complete:
        assert (run.held, run.pending, run.held_bytes) == ([], (), 0), "(6)"


def records_before(script: list[Event], checkpoint_id: int) -> int:
    """Records in front of an id's barrier, or all if the channel ended before."""
    count = 0
    for event in script:
        count += event.kind == "record"
        if event.kind == "barrier" and event.number == checkpoint_id:
            return count
    assert script
    assert script[-1].kind == "end", f"checkpoint {checkpoint_id} triggered without its barrier"
    return count


@settings(max_examples=examples(300), deadline=None)
@given(given_input=gate_inputs(), after_finish=st.booleans())
def test_properties_of_section_0(given_input: tuple[int, list[list[Event]], list[Event]], after_finish: bool) -> None:
    channel_count, scripts, events = given_input
    run = run_gate(Aligner(channel_count, after_finish=after_finish), events)
    check_properties(run, scripts, complete=True)


@settings(max_examples=examples(300), deadline=None)
@given(given_input=gate_inputs(skips=True), after_finish=st.booleans())
def test_same_trace_as_the_reference(given_input: tuple[int, list[list[Event]], list[Event]], after_finish: bool) -> None:
    channel_count, scripts, events = given_input
    reference = ReferenceGate(channel_count, after_finish=after_finish)
    for event in events:
        reference.offer(event)
    run = run_gate(Aligner(channel_count, after_finish=after_finish), events)
    assert run.trace == reference.trace
    assert len(run.held) == len(reference.waiting)
    check_properties(run, scripts, complete=False)


def test_seeded_sequences() -> None:
    """The property list over a fixed population, so that a run is the same everywhere."""
    seen = {"T": 0, "A": 0}
    for seed in range(1500):
        rng = random.Random(seed)
        channel_count = rng.randint(1, 4)
        ids = rng.randint(1, 5)
        scripts = [channel_script(rng, channel, ids, skips=False) for channel in range(channel_count)]
        run = run_gate(Aligner(channel_count), interleave(rng, scripts))
        check_properties(run, scripts, complete=True)
        seen["T"] += len(run.triggered)
        seen["A"] += len(run.aborted)
    assert min(seen.values()) > 500
