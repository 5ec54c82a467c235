"""The interval of periodic checkpoints while sources process a backlog."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.barriers.jobgraph import JobConfig
from holdfast.barriers.messages import TaskState
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.checkpoints.requests import PeriodicSchedule
from holdfast.statebackends.errors import InvalidConfigError
from tests.coordinator.bench import A, B, Bench


def report(bench: Bench, *, backlog: bool) -> None:
    states = ((A, TaskState.RUNNING), (B, TaskState.RUNNING))
    bench.handle(events.TaskStatesChanged(bench.attempt, states, backlog=backlog))


def begun(bench: Bench, until_ms: int) -> list[int]:
    """When periodic checkpoints began, each being completed at once."""
    times = []
    while True:
        for number in bench.pending:
            times.append(bench.now)
            bench.ack_all(number)
        deadline = bench.machine.next_deadline_ms()
        if deadline is None or deadline > until_ms:
            bench.now = until_ms
            return times
        bench.advance(max(deadline, bench.now))


def test_with_interval_0_none_begins_from_the_start_and_the_end_brings_one_at_once() -> None:
    """FLINK-39108: the first checkpoint did not look at the backlog."""
    bench = Bench(checkpoint_interval_ms=100, checkpoint_interval_during_backlog_ms=0, running=False)
    report(bench, backlog=True)
    bench.start_scheduler()
    assert begun(bench, 5_000) == []
    report(bench, backlog=False)
    assert begun(bench, 5_250) == [5_000, 5_100, 5_200]


def test_the_backlog_interval_holds_from_the_first_checkpoint_on() -> None:
    bench = Bench(checkpoint_interval_ms=100, min_pause_ms=100, checkpoint_interval_during_backlog_ms=1_000, running=False)
    report(bench, backlog=True)
    bench.start_scheduler()
    first, *others = begun(bench, 4_000)
    assert 100 <= first <= 1_000
    assert others == [first + 1_000, first + 2_000, first + 3_000]
    report(bench, backlog=False)
    assert begun(bench, 4_000)[:1] == [4_000]


def test_a_backlog_that_begins_later_puts_the_next_checkpoint_off() -> None:
    bench = Bench(checkpoint_interval_ms=100, checkpoint_interval_during_backlog_ms=1_000)
    bench.start_scheduler()
    last = begun(bench, 450)[-1]
    report(bench, backlog=True)
    assert begun(bench, last + 1_999) == [last + 1_000]


def test_a_request_that_waits_for_its_place_is_dropped_when_a_backlog_forbids_it() -> None:
    bench = Bench(checkpoint_interval_ms=100, checkpoint_interval_during_backlog_ms=0, max_concurrent_checkpoints=1)
    bench.start_scheduler()
    bench.request()
    bench.advance(150)
    report(bench, backlog=True)
    bench.ack_all(1)
    assert bench.pending == []
    bench.request()
    assert bench.pending == [2], "by hand"


def test_a_backlog_ends_with_its_attempt() -> None:
    bench = Bench(checkpoint_interval_ms=100, checkpoint_interval_during_backlog_ms=0)
    report(bench, backlog=True)
    bench.handle(events.JobFailing(""))
    bench.restart(2)
    bench.start_scheduler()
    bench.advance(150)
    assert bench.all(actions.SendTriggers)


@pytest.mark.parametrize(("interval", "backlog", "fits"), [(100, 99, False), (100, -1, False), (100, 100, True), (None, 5, True)])
def test_the_backlog_interval_is_0_or_no_shorter_than_the_interval(interval: int | None, backlog: int, *, fits: bool) -> None:
    config = JobConfig(checkpoint_interval_ms=interval, checkpoint_interval_during_backlog_ms=backlog)
    if fits:
        config.check()
        return
    with pytest.raises(InvalidConfigError) as caught:
        config.check()
    assert caught.value.fields["setting"] == "checkpoint_interval_during_backlog_ms"


class ScheduleMachine(RuleBasedStateMachine):
    """Every tick, of a schedule whose shell may sleep too long, is judged by what held when it came."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.interval, self.pause = 0, 100, 0
        self.backlog_interval: int | None = None
        self.in_backlog = self.runs = False
        self.is_late = False
        """The last tick came late: the next one keeps to the rate."""
        self.last: int | None = None
        self.started = 0
        self.at_start: int | None = None
        """The interval that was in force when the schedule was started: the first delay is drawn from it."""
        self.make(100, None, 0, 1)

    @property
    def in_force(self) -> int | None:
        if self.in_backlog and self.backlog_interval is not None:
            return self.backlog_interval or None
        return self.interval

    @precondition(lambda self: not self.runs)
    @rule(
        interval=st.integers(10, 500), factor=st.sampled_from([None, 0, 1, 2, 7]), pause=st.integers(0, 300), seed=st.integers(0, 9)
    )
    def make(self, interval: int, factor: int | None, pause: int, seed: int) -> None:
        self.interval, self.pause = interval, pause
        self.backlog_interval = None if factor is None else factor * interval
        self.schedule = PeriodicSchedule(interval, self.backlog_interval, pause, random.Random(seed))
        self.schedule.note_backlog(in_backlog=self.in_backlog)

    @rule()
    def start(self) -> None:
        self.schedule.start(self.now)
        self.is_late = False
        self.runs, self.last, self.started, self.at_start = True, None, self.now, self.in_force

    @rule()
    def stop(self) -> None:
        self.schedule.stop()
        self.runs = False

    @rule(in_backlog=st.booleans())
    def note(self, *, in_backlog: bool) -> None:
        self.in_backlog = in_backlog
        self.schedule.note_backlog(in_backlog=in_backlog)

    @rule(ms=st.integers(0, 2_000))
    def sleep(self, ms: int) -> None:
        self.now += ms
        due = self.schedule.next_ms
        ticked = self.schedule.take_tick(self.now)
        if ticked:
            assert self.runs, "a tick while it is stopped"
            assert self.in_force is not None, "a tick without an interval"
            drawn = self.in_force if self.at_start is None else self.at_start
            first_ms = min(self.pause, drawn) - max(0, drawn - self.in_force)
            since, least = (self.started, first_ms) if self.last is None else (self.last, self.in_force)
            assert due is not None
            assert self.now >= due >= since + least or self.is_late, "a tick before the interval was over"
            self.is_late = self.now > due
            self.last = self.now
        assert not self.schedule.take_tick(self.now), "two ticks at one moment"
        if self.runs and self.in_force is not None:
            since = self.last if self.last is not None else self.started
            assert ticked or self.now < since + self.in_force, "no tick although an interval is over"

    @precondition(lambda self: self.runs and self.in_force is not None and self.last == self.now)
    @rule(ms=st.integers(1, 300))
    def postpone(self, ms: int) -> None:
        until = self.now + ms
        self.schedule.postpone(until)
        assert self.schedule.next_ms == until
        self.now = until
        assert self.schedule.take_tick(until)
        self.last, self.is_late = until, False

    @invariant()
    def deadline_is_one_interval_away_at_most(self) -> None:
        due, in_force = self.schedule.next_ms, self.in_force
        assert (due is None) == (not self.runs or in_force is None)
        assert due is None or in_force is None or due <= self.now + in_force


TestSchedule = ScheduleMachine.TestCase
