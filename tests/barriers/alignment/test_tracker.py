"""The at-least-once tracker: bounds, notices, end of input and metrics (its sequences are group E of the scenarios)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from holdfast.barriers.alignment.tracker import PENDING_IDS_MAX, BarrierTracker
from holdfast.barriers.elements import CheckpointBarrier
from holdfast.statebackends.errors import InvalidConfigError, ProtocolError
from tests.barriers.sequences import gate_inputs
from tests.examples import examples
from tests.scenarios.gates import run_gate
from tests.scenarios.notation import Event


def barrier(checkpoint_id: int, created_ms: int = 0) -> CheckpointBarrier:
    return CheckpointBarrier(checkpoint_id, created_ms)


def handle(tracker: BarrierTracker, event: BarrierEvent, at: int = 0) -> list[BarrierAction]:
    return tracker.handle(event, now_ms=at, wall_ms=at)


def test_no_channels_is_refused() -> None:
    with pytest.raises(InvalidConfigError):
        BarrierTracker(0)


def test_barrier_after_the_end_of_its_channel_is_a_protocol_error() -> None:
    tracker = BarrierTracker(2)
    handle(tracker, ChannelEnded(0))
    with pytest.raises(ProtocolError):
        handle(tracker, BarrierReceived(0, barrier(1)))


def test_end_of_input_aborts_everything_pending_when_after_finish_is_off() -> None:
    tracker = BarrierTracker(3, after_finish=False)
    handle(tracker, BarrierReceived(0, barrier(1)))
    handle(tracker, BarrierReceived(0, barrier(2)))
    assert handle(tracker, ChannelEnded(1)) == [
        AbortCheckpoint(1, AbortReason.END_OF_INPUT),
        AbortCheckpoint(2, AbortReason.END_OF_INPUT),
    ]
    assert handle(tracker, BarrierReceived(2, barrier(2))) == []
    assert tracker.pending == ()


def test_pending_ids_are_bounded() -> None:
    tracker = BarrierTracker(2)
    for checkpoint_id in range(1, 10 * PENDING_IDS_MAX):
        handle(tracker, BarrierReceived(0, barrier(checkpoint_id)))
        assert len(tracker.pending) <= PENDING_IDS_MAX


def test_notice_before_the_barrier() -> None:
    tracker = BarrierTracker(2)
    handle(tracker, AbortNotice(3))
    assert handle(tracker, BarrierReceived(0, barrier(3))) == [AbortCheckpoint(3, AbortReason.NOTIFIED)]
    assert tracker.pending == ()
    assert handle(tracker, BarrierReceived(1, barrier(3))) == []


def test_notice_while_pending_and_after() -> None:
    tracker = BarrierTracker(2)
    handle(tracker, BarrierReceived(0, barrier(3)))
    assert handle(tracker, AbortNotice(3)) == [AbortCheckpoint(3, AbortReason.NOTIFIED)]
    assert handle(tracker, AbortNotice(3)) == []
    assert handle(tracker, CancelReceived(1, 3)) == []
    assert handle(tracker, AbortNotice(2)) == []


def test_marker_for_a_noticed_id() -> None:
    tracker = BarrierTracker(2)
    handle(tracker, AbortNotice(3))
    assert handle(tracker, CancelReceived(1, 3)) == [AbortCheckpoint(3, AbortReason.NOTIFIED)]


def test_metrics_run_from_the_first_barrier_of_each_id() -> None:
    tracker = BarrierTracker(2)
    handle(tracker, BarrierReceived(0, barrier(1, 90)), at=100)
    handle(tracker, BatchDelivered(10))
    handle(tracker, BarrierReceived(0, barrier(2, 110)), at=130)
    handle(tracker, BatchDelivered(5))
    assert handle(tracker, BarrierReceived(1, barrier(1, 90)), at=140) == [
        TriggerSnapshot(barrier(1, 90), AlignmentMetrics(10, 40, 15))
    ]
    assert handle(tracker, BarrierReceived(1, barrier(2, 110)), at=141) == [
        TriggerSnapshot(barrier(2, 110), AlignmentMetrics(20, 11, 5))
    ]


# ------------------------------------------------------------------------------------------- channels that stay aligned


def test_an_aligned_channel_waits_for_its_snapshot_and_no_other_does() -> None:
    tracker = BarrierTracker(3, aligned=frozenset({1}))
    assert handle(tracker, BarrierReceived(0, barrier(1))) == []
    assert handle(tracker, BarrierReceived(1, barrier(1))) == [BlockChannel(1)]
    assert handle(tracker, BarrierReceived(0, barrier(2))) == []
    assert handle(tracker, BarrierReceived(2, barrier(1)), at=5) == [
        TriggerSnapshot(barrier(1), AlignmentMetrics(0, 5, 0)),
        UnblockChannels((1,)),
    ]
    assert handle(tracker, BarrierReceived(1, barrier(2))) == [BlockChannel(1)]


def test_the_last_barrier_blocks_nothing() -> None:
    tracker = BarrierTracker(2, aligned=frozenset({1}))
    handle(tracker, BarrierReceived(0, barrier(1)))
    assert handle(tracker, BarrierReceived(1, barrier(1))) == [TriggerSnapshot(barrier(1), AlignmentMetrics())]


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (AbortNotice(1), [AbortCheckpoint(1, AbortReason.NOTIFIED)]),
        (CancelReceived(0, 1), [AbortCheckpoint(1, AbortReason.CANCELLED)]),
        (BarrierReceived(0, barrier(2)), []),
        (CancelReceived(0, 2), [AbortCheckpoint(1, AbortReason.CANCELLED), AbortCheckpoint(2, AbortReason.CANCELLED)]),
    ],
)
def test_an_aligned_channel_is_let_go_when_its_snapshot_can_not_come_any_more(
    event: BarrierEvent, told: list[BarrierAction]
) -> None:
    tracker = BarrierTracker(2, aligned=frozenset({1}))
    assert handle(tracker, BarrierReceived(1, barrier(1))) == [BlockChannel(1)]
    assert handle(tracker, event) == [*told, UnblockChannels((1,))]


@pytest.mark.parametrize("first", ["aligned", "other"])
def test_an_aligned_channel_that_was_let_go_is_in_no_snapshot_of_that_id(first: str) -> None:
    """The channel that skipped the id ends: its barrier counts as come, and records behind the other one were read meanwhile."""
    tracker = BarrierTracker(3, aligned=frozenset({1}))
    handle(tracker, BarrierReceived(2, barrier(1)))
    if first == "aligned":
        assert handle(tracker, BarrierReceived(1, barrier(1))) == [BlockChannel(1)]
        assert handle(tracker, BarrierReceived(0, barrier(2))) == [UnblockChannels((1,))]
    else:
        handle(tracker, BarrierReceived(0, barrier(2)))
        assert handle(tracker, BarrierReceived(1, barrier(1))) == []
    assert handle(tracker, ChannelEnded(0)) == []
    assert handle(tracker, BarrierReceived(2, barrier(2))) == []
    (taken,) = handle(tracker, BarrierReceived(1, barrier(2)))
    assert isinstance(taken, TriggerSnapshot)
    assert taken.barrier.checkpoint_id == 2


def test_a_barrier_that_comes_too_late_blocks_nothing() -> None:
    tracker = BarrierTracker(2, aligned=frozenset({1}))
    handle(tracker, BarrierReceived(0, barrier(1)))
    handle(tracker, BarrierReceived(0, barrier(2)))
    handle(tracker, AbortNotice(2))
    assert handle(tracker, BarrierReceived(1, barrier(2))) == []


def test_a_channel_that_is_not_there_can_not_stay_aligned() -> None:
    with pytest.raises(InvalidConfigError, match=r"\[2\] can't stay aligned"):
        BarrierTracker(2, aligned=frozenset({2}))


def is_marker(event: Event) -> bool:
    return event.kind in ("barrier", "cancel")


def test_an_aligned_channel_that_skipped_an_id_and_ended_is_in_no_snapshot_of_it() -> None:
    tracker = BarrierTracker(3, aligned=frozenset({0}))
    handle(tracker, BarrierReceived(1, barrier(1)))
    handle(tracker, BarrierReceived(2, barrier(1)))
    assert handle(tracker, BarrierReceived(0, barrier(2))) == [BlockChannel(0)]
    assert handle(tracker, BarrierReceived(1, barrier(3))) == [UnblockChannels((0,))]
    assert handle(tracker, ChannelEnded(0)) == []


@settings(max_examples=examples(200), deadline=None)
@given(given_input=gate_inputs(skips=True), mask=st.integers(0, 15))
def test_the_cut_of_aligned_channels_is_exact_and_none_waits_for_what_can_not_come(
    given_input: tuple[int, list[list[Event]], list[Event]], mask: int
) -> None:
    channel_count, scripts, events = given_input
    aligned = frozenset(channel for channel in range(channel_count) if mask >> channel & 1)
    tracker = BarrierTracker(channel_count, aligned=aligned)
    run = run_gate(tracker, events)
    for checkpoint_id, cut in run.cuts.items():
        for channel in aligned:
            own = [index for index, event in enumerate(scripts[channel]) if event == Event("barrier", channel, checkpoint_id)]
            if own:
                assert cut["abcd"[channel]] == sum(event.kind == "record" for event in scripts[channel][: own[0]])
            later = [index for index, event in enumerate(scripts[channel]) if event.number > checkpoint_id and is_marker(event)]
            if not own and later:
                assert cut["abcd"[channel]] <= sum(event.kind == "record" for event in scripts[channel][: later[0]])
    ids = [[99 if event.kind == "end" else event.number for event in script if event.kind != "record"] for script in scripts]
    reached = [max(each, default=0) for each in ids]
    newest = max((number for each in ids for number in each if number < 99), default=0)
    if all(number >= newest for number in reached):  # no channel has still to bring what others wait for
        assert run.held == []


@settings(max_examples=examples(200), deadline=None)
@given(given_input=gate_inputs(skips=True))
def test_properties(given_input: tuple[int, list[list[Event]], list[Event]]) -> None:
    """Nothing waits, ids rise, no id both triggers and aborts, and a trigger has all that came before its barriers."""
    channel_count, scripts, events = given_input
    run = run_gate(BarrierTracker(channel_count), events)
    assert [token for token in run.trace if not token.startswith("[")] == [
        f"{'E.' if event.kind == 'end' else ''}{'abcd'[event.channel]}{event.number if event.kind == 'record' else ''}"
        for event in events
        if event.kind in ("record", "end")
    ]
    triggered = [trigger.barrier.checkpoint_id for trigger in run.triggered]
    assert triggered == sorted(set(triggered))
    assert not set(triggered) & {abort.checkpoint_id for abort in run.aborted}
    for checkpoint_id, cut in run.cuts.items():
        for channel, script in enumerate(scripts):
            own = [index for index, event in enumerate(script) if event == Event("barrier", channel, checkpoint_id)]
            before = script[: own[0] if own else len(script)]
            assert cut["abcd"[channel]] >= sum(event.kind == "record" for event in before)


def test_no_action_touches_a_channel() -> None:
    tracker = BarrierTracker(2)
    actions = [*handle(tracker, BarrierReceived(0, barrier(1))), *handle(tracker, BarrierReceived(1, barrier(1)))]
    assert not any(isinstance(action, BlockChannel | UnblockChannels) for action in actions)
