"""Scenarios N01-N14: which timers fire, in which order, with which key, and what a snapshot holds of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.barriers.elements import MAX_WATERMARK, MIN_WATERMARK
from holdfast.operators.task import timers
from holdfast.operators.task.timers import InternalTimerService, Timer, TimerQueue, timer_metas
from holdfast.statebackends.backend import FrozenTimerRows
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.heap.state_table import visible_keys
from holdfast.statebackends.heap.timers import TimerRows
from holdfast.statebackends.keygroups import assign_key_groups
from tests.examples import examples

K1, K2 = (b"k1", 3), (b"k2", 90)


class Keys:
    """Whose key is current, and every change of it."""

    def __init__(self) -> None:
        self.current_key: tuple[bytes, int] = K1

    def set_current_key(self, encoded_key: bytes, key_group: int) -> None:
        self.current_key = (encoded_key, key_group)


class Rig:
    """A timer service with a recorder as callback."""

    def __init__(self, now_ms: int = 0, **settings: Any) -> None:
        self.keys = Keys()
        self.now_ms = now_ms
        self.service = InternalTimerService(self.keys, lambda: self.now_ms, operator="op", **settings)
        self.fired: list[tuple[int, bytes, bytes]] = []
        self.on: dict[int, Callable[[], None]] = {}

    def at(self, key: tuple[bytes, int]) -> InternalTimerService:
        self.keys.set_current_key(*key)
        return self.service

    def callback(self, time: int, namespace: bytes) -> None:
        self.fired.append((time, self.keys.current_key[0], namespace))
        self.on.get(time, lambda: None)()

    def watermark(self, watermark_ms: int) -> list[tuple[int, bytes, bytes]]:
        self.fired = []
        for _ in self.service.advance_watermark(watermark_ms, self.callback):
            pass
        return self.fired

    def alarm(self, now_ms: int) -> list[tuple[int, bytes, bytes]]:
        self.now_ms, self.fired = now_ms, []
        for _ in self.service.advance_processing_time(now_ms, self.callback):
            pass
        return self.fired


def count(queue: TimerQueue, namespace: bytes) -> int:
    """Timers of a namespace."""
    table = queue.table
    return sum(timer[2] == namespace for timer in visible_keys((table.active, *table.immutable), maps=False))


def freeze(queue: TimerQueue) -> FrozenTimerRows:
    """What the backend does at a barrier."""
    return TimerRows(queue.table, queue.load).freeze()


def test_n01_a_timer_registered_twice_fires_once() -> None:
    rig = Rig()
    rig.at(K1).register_event_time_timer(10)
    rig.at(K1).register_event_time_timer(10)
    assert rig.watermark(10) == [(10, b"k1", b"")]
    assert rig.watermark(20) == []


def test_n02_key_and_namespace_set_processing_timers_apart() -> None:
    rig = Rig()
    rig.at(K1).register_event_time_timer(10, b"ns")
    rig.at(K2).register_event_time_timer(10, b"ns")
    rig.at(K1).register_event_time_timer(10, b"ns2")
    assert (count(rig.service.event, b"ns"), count(rig.service.event, b"ns2"), len(rig.service.event)) == (2, 1, 3)
    assert len(rig.watermark(10)) == 3
    assert (count(rig.service.event, b"ns"), count(rig.service.event, b"ns2")) == (0, 0)


def test_n03_timers_fire_in_time_order_and_see_the_new_watermark() -> None:
    rig = Rig()
    for key, time in ((K1, 15), (K2, 10), (K1, 10), (K1, 5)):
        rig.at(key).register_event_time_timer(time)
    seen: list[int] = []
    rig.on = dict.fromkeys((5, 10), lambda: seen.append(rig.service.current_watermark))
    assert rig.watermark(10) == [(5, b"k1", b""), (10, b"k1", b""), (10, b"k2", b"")]
    assert seen == [10, 10, 10]


def test_n04_a_timer_registered_by_a_callback_fires_in_the_same_pass() -> None:
    rig = Rig()
    rig.at(K1).register_event_time_timer(5)
    rig.on[5] = lambda: rig.service.register_event_time_timer(7)
    assert [time for time, *_ in rig.watermark(10)] == [5, 7]


def test_n05_a_timer_deleted_by_a_callback_does_not_fire() -> None:
    rig = Rig()
    rig.at(K1).register_event_time_timer(5)
    rig.at(K1).register_event_time_timer(10)
    rig.on[5] = lambda: rig.service.delete_event_time_timer(10)
    assert [time for time, *_ in rig.watermark(10)] == [5]


def test_n06_a_timer_in_the_past_fires_at_the_next_advance() -> None:
    rig = Rig()
    rig.watermark(10)
    rig.at(K1).register_event_time_timer(8)
    assert rig.fired == []
    assert rig.watermark(10) == []
    assert [time for time, *_ in rig.watermark(11)] == [8]


def test_n07_an_earlier_timer_replaces_the_alarm() -> None:
    rig = Rig()
    assert rig.service.next_processing_time_ms is None
    rig.at(K1).register_processing_time_timer(100)
    assert rig.service.next_processing_time_ms == 101
    rig.at(K1).register_processing_time_timer(50)
    assert rig.service.next_processing_time_ms == 51


def test_n08_after_an_alarm_the_next_one_is_for_the_head() -> None:
    rig = Rig()
    rig.at(K1).register_processing_time_timer(100)
    rig.at(K1).register_processing_time_timer(50)
    rig.on[50] = lambda: rig.service.register_processing_time_timer(60)
    assert [time for time, *_ in rig.alarm(51)] == [50]
    assert rig.service.next_processing_time_ms == 61


def test_n09_a_timer_fires_when_its_time_has_passed_in_full() -> None:
    rig = Rig()
    rig.at(K1).register_processing_time_timer(100)
    assert rig.service.next_processing_time_ms == 101
    assert rig.alarm(100) == []
    assert len(rig.alarm(101)) == 1
    assert rig.service.next_processing_time_ms is None


def test_n10_the_key_of_each_timer_is_current_in_its_callback() -> None:
    rig = Rig()
    for key in (K1, K2, K1):
        rig.at(key).register_event_time_timer(1 if key is K2 else 2)
    rig.keys.set_current_key(b"other", 1)
    assert rig.watermark(2) == [(1, b"k2", b""), (2, b"k1", b"")]


def test_n11_a_snapshot_restores_by_key_group_and_rebuilds_the_order() -> None:
    rig = Rig()
    for key, time in ((K1, 30), (K1, 10), (K2, 20)):
        rig.at(key).register_event_time_timer(time, b"ns")
    frozen = freeze(rig.service.event)
    found = []
    for subtask in range(2):
        owned = assign_key_groups(128, 2, subtask)
        other = Rig()
        other.service.event.load([timer for timer in frozen.rows() if timer[3] in owned])
        assert other.service.current_watermark == MIN_WATERMARK
        found.append(other.watermark(100))
    frozen.release()
    assert found == [[(10, b"k1", b"ns"), (30, b"k1", b"ns")], [(20, b"k2", b"ns")]]


def test_n12_overdue_processing_timers_fire_once_in_order_after_a_restore() -> None:
    rig = Rig(now_ms=1_000)
    rig.service.processing.load([(70, b"k1", b"", 3), (50, b"k2", b"", 90)])
    assert rig.service.next_processing_time_ms == 51
    assert [time for time, *_ in rig.alarm(1_001)] == [50, 70]
    assert rig.alarm(2_000) == []


def test_n14_the_maximum_watermark_fires_everything_once() -> None:
    rig = Rig()
    for time in (MIN_WATERMARK, 0, MAX_WATERMARK):
        rig.at(K1).register_event_time_timer(time)
    assert [time for time, *_ in rig.watermark(MAX_WATERMARK)] == [MIN_WATERMARK, 0, MAX_WATERMARK]
    assert rig.watermark(MAX_WATERMARK) == []


@pytest.mark.parametrize("time", [1.5, None, 2**63])
def test_a_time_that_is_not_int64_is_refused(time: Any) -> None:
    with pytest.raises(InvalidConfigError, match="int64 ms"):
        Rig().service.register_event_time_timer(time)


def test_firing_yields_between_slices_and_keeps_what_has_not_fired() -> None:
    rig = Rig(fired_per_slice_max=2)
    for time in range(5):
        rig.at(K1).register_event_time_timer(time)
    slices = rig.service.advance_watermark(10, rig.callback)
    next(slices)
    frozen = freeze(rig.service.event)
    assert [time for time, *_ in rig.fired] == [0, 1]
    assert sorted(time for time, *_ in frozen.rows()) == [2, 3, 4]
    for _ in slices:
        pass
    assert [time for time, *_ in rig.fired] == [0, 1, 2, 3, 4]
    assert sorted(time for time, *_ in frozen.rows()) == [2, 3, 4]
    frozen.release()


def test_deleted_timers_do_not_pile_up_in_the_heap() -> None:
    rig = Rig()
    for time in range(20_000):
        rig.at(K1).register_event_time_timer(time)
        rig.at(K1).delete_event_time_timer(time)
    assert rig.service.event._entries < 3_000
    assert len(rig.service.event) == 0


def test_both_kinds_of_timers_are_declared_as_state() -> None:
    assert [(meta.kind, meta.key_type) for meta in timer_metas("utf8")] == [("timers", "utf8")] * 2


@pytest.mark.parametrize("looks", [False, True])
def test_many_timers_of_one_time_are_not_sorted_in_one_step(looks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timers, "_SORTED_MAX", 8)
    rig = Rig()
    made = [(b"%03d" % (37 * number % 100), number) for number in range(100)]
    rig.service.register_event_time_timers(9, b"", made)
    if looks:
        rig.service.event.head()
    rig.on[9] = lambda: rig.service.register_event_time_timer(8, b"again") if len(rig.fired) == 50 else None
    slices = rig.service.advance_watermark(9, rig.callback)
    assert rig.service.event.take_due(9) == (9, b"000", b"", 0)
    assert not rig.service.event._due
    for _ in slices:
        pass
    expected = [(9, b"%03d" % number, b"") for number in range(1, 100)]
    assert rig.fired == [*expected[:50], (8, b"050", b"again"), *expected[50:]]
    assert len(rig.service.event) == rig.service.event._entries == 0


TIMES = st.integers(-5, 20).map(lambda number: 80 * number)
"""Some three in one of the queue's stretches of time."""
TIMERS = st.tuples(TIMES, st.sampled_from([K1, K2]), st.sampled_from([b"", b"n"]))


class QueueMachine(RuleBasedStateMachine):
    """A queue against a plain set, with freezes held and released in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(most=st.sampled_from([0, 2, timers._SORTED_MAX]))
    def begin(self, most: int) -> None:
        self.patch.setattr(timers, "_SORTED_MAX", most)
        self.queue = TimerQueue()
        self.model: set[Timer] = set()
        self.frozen: list[tuple[Any, set[Timer]]] = []

    @rule(timer=TIMERS)
    def add(self, timer: tuple[int, tuple[bytes, int], bytes]) -> None:
        made = (timer[0], timer[1][0], timer[2], timer[1][1])
        self.queue.add(made)
        self.model.add(made)

    @rule(time=TIMES, keys=st.sets(st.sampled_from([K1, K2, (b"k3", 5)])))
    def add_all(self, time: int, keys: set[tuple[bytes, int]]) -> None:
        made = [(time, key, b"n", group) for key, group in sorted(keys)]
        self.queue.add_all(made)
        self.model.update(made)

    @rule(timer=TIMERS)
    def remove(self, timer: tuple[int, tuple[bytes, int], bytes]) -> None:
        made = (timer[0], timer[1][0], timer[2], timer[1][1])
        assert self.queue.remove(made) == (made in self.model)
        self.model.discard(made)

    def teardown(self) -> None:
        self.patch.undo()

    @rule()
    def compact(self) -> None:
        self.queue.compact()

    @rule(time=TIMES)
    def take(self, time: int) -> None:
        taken = self.queue.take_due(time)
        due = [timer for timer in self.model if timer[0] <= time]
        assert taken == min(due, default=None)
        self.model.discard(taken or (-10**9, b"", b"", 0))

    @rule()
    def look(self) -> None:
        """Not after each step: a stretch whose earliest timer was asked for lies in another order."""
        assert self.queue.head() == min(self.model, default=None)

    @precondition(lambda self: len(self.frozen) < 3)
    @rule()
    def freeze(self) -> None:
        self.frozen.append((freeze(self.queue), set(self.model)))

    @precondition(lambda self: self.frozen)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        frozen, expected = self.frozen.pop(data.draw(st.integers(0, len(self.frozen) - 1)))
        assert sorted(frozen.rows()) == sorted(expected)
        frozen.release()

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.model)
        assert self.queue._entries >= len(self.model)
        for namespace in (b"", b"n"):
            assert count(self.queue, namespace) == sum(timer[2] == namespace for timer in self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
