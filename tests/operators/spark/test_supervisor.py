from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from holdfast.barriers.jobgraph import JobConfig
from holdfast.operators.spark.slots import WorkerReport, outcome_of
from holdfast.operators.spark.supervisor import (
    ABSENCE_FIRST_MS,
    ABSENCE_MARGIN_MS,
    ABSENCE_MS_MAX,
    ABSENCE_MS_MIN,
    BACKOFF_MAX_MS,
    CANCEL_WAIT_MS,
    COOPERATIVE_STOP_MS,
    LOSS_GRACE_MS,
    POLL_GAP_MS,
    START_FAILURES_MAX,
    Action,
    AllEnded,
    CancelWorker,
    DeadlineReached,
    GiveUp,
    JobEnded,
    Launch,
    Question,
    SeenWorker,
    SlotSupervisor,
    SpawnWorker,
    StopRequested,
    WorkerEnd,
    WorkerEnded,
    WorkersSeen,
)
from tests.examples import examples


def launched(slots: int = 2) -> SlotSupervisor:
    supervisor = SlotSupervisor(slots)
    assert supervisor.handle(Launch(), now_ms=0) == [SpawnWorker(slot, 1) for slot in range(slots)]
    return supervisor


def there(slot: int, spawn: int = 1) -> WorkersSeen:
    return WorkersSeen((SeenWorker(slot, spawn, True, pid=40 + spawn, fingerprint="f"),))


def silent(slot: int, spawn: int = 1) -> WorkersSeen:
    return WorkersSeen((SeenWorker(slot, spawn, False, timed_out=True, pid=40 + spawn, fingerprint="f"),))


def missing(slot: int, spawn: int = 0) -> WorkersSeen:
    return WorkersSeen((SeenWorker(slot, spawn, False),))


def hung() -> SlotSupervisor:
    """Of two slots, 0 had a worker that nothing is heard from; it was cancelled."""
    supervisor = launched()
    assert supervisor.handle(there(0), now_ms=100) == []
    assert supervisor.handle(silent(0), now_ms=1_000) == []
    cancel = CancelWorker(0, 1, SeenWorker(0, 1, True, pid=41, fingerprint="f"))
    assert supervisor.handle(silent(0), now_ms=1_000 + LOSS_GRACE_MS) == [cancel]
    return supervisor


def test_a_hung_worker_is_cancelled_once_and_its_successor_starts_as_soon_as_its_task_has_ended() -> None:
    supervisor = hung()
    assert supervisor.handle(silent(0), now_ms=1_500) == []
    assert supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED, "cancelled"), now_ms=1_600) == [SpawnWorker(0, 2)]
    assert "no heartbeat" in supervisor.last_errors[0]


def test_a_hung_worker_that_does_not_end_is_abandoned_and_its_late_end_changes_nothing() -> None:
    supervisor = hung()
    due = 1_000 + LOSS_GRACE_MS + CANCEL_WAIT_MS
    assert supervisor.next_deadline_ms() == due
    assert supervisor.handle(DeadlineReached(), now_ms=due) == [SpawnWorker(0, 2)]
    assert supervisor.handle(WorkerEnded(0, 1, WorkerEnd.SUPERSEDED), now_ms=due + 1) == []
    assert supervisor.running == (0, 1)


def test_an_abandoned_worker_is_cancelled_again_when_the_driver_leaves_and_is_named_in_the_end() -> None:
    supervisor = hung()
    due = 1_000 + LOSS_GRACE_MS + CANCEL_WAIT_MS
    supervisor.handle(DeadlineReached(), now_ms=due)
    cancels = [CancelWorker(0, 1), CancelWorker(0, 2), CancelWorker(1, 1)]
    assert supervisor.handle(StopRequested(), now_ms=due) == cancels
    assert supervisor.handle(WorkerEnded(0, 2, WorkerEnd.DIED), now_ms=due) == []
    assert supervisor.handle(WorkerEnded(1, 1, WorkerEnd.DIED), now_ms=due) == [AllEnded((0,))]


def test_a_worker_that_is_back_at_the_next_look_is_not_cancelled() -> None:
    supervisor = launched()
    supervisor.handle(silent(0), now_ms=1_000)
    supervisor.handle(there(0), now_ms=1_250)
    assert supervisor.handle(silent(0), now_ms=1_500) == []
    assert supervisor.handle(there(0), now_ms=2_000) == []


def test_the_silence_of_a_predecessor_does_not_hit_its_successor() -> None:
    supervisor = launched()
    supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED), now_ms=10)
    for now in range(100, 5_000, 250):
        assert supervisor.handle(silent(0, spawn=1), now_ms=now) == []


def test_a_worker_that_died_is_no_affair_of_a_cancellation() -> None:
    """Its connection was closed: Spark runs its task again, or says that it ended."""
    supervisor = launched()
    supervisor.handle(there(0), now_ms=0)
    for now in range(100, 20_000, 250):
        assert supervisor.handle(missing(0, spawn=1), now_ms=now) == []


def absent_for(supervisor: SlotSupervisor, slot: int, spawn: int, *, begin_ms: int) -> int:
    """Milliseconds until a worker that nobody knows is cancelled."""
    for now in range(begin_ms, begin_ms + 3_600_000, 1_000):
        actions = supervisor.handle(missing(slot), now_ms=now)
        if actions:
            (cancel,) = actions
            assert isinstance(cancel, CancelWorker)
            assert (cancel.slot, cancel.spawn) == (slot, spawn)
            return now - begin_ms
    raise AssertionError("never cancelled")


def test_a_successor_that_never_registers_is_replaced_and_the_next_one_gets_twice_the_time() -> None:
    supervisor = launched(1)
    supervisor.handle(there(0), now_ms=0)
    supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED), now_ms=0)
    assert absent_for(supervisor, 0, 2, begin_ms=1_000) == ABSENCE_MS_MIN
    supervisor.handle(WorkerEnded(0, 2, WorkerEnd.DIED), now_ms=40_000)
    assert absent_for(supervisor, 0, 3, begin_ms=41_000) == 2 * ABSENCE_MS_MIN


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (JobConfig(reconcile_timeout_ms=120_000), 120_000 + ABSENCE_MARGIN_MS),
        (JobConfig(heartbeat_timeout_ms=70_000), 70_000),
        (JobConfig(reconcile_timeout_ms=1_000, heartbeat_timeout_ms=10_000), ABSENCE_MS_MIN),
        (JobConfig(reconcile_timeout_ms=2 * ABSENCE_MS_MAX), 2 * ABSENCE_MS_MAX + ABSENCE_MARGIN_MS),
    ],
)
def test_no_worker_is_given_up_that_the_coordinator_still_waits_for(config: JobConfig, expected: int) -> None:
    """A coordinator that started again knows of nobody until they have registered."""
    supervisor = SlotSupervisor.of(1, config)
    supervisor.handle(Launch(), now_ms=0)
    supervisor.handle(there(0), now_ms=0)
    assert absent_for(supervisor, 0, 1, begin_ms=1_000) == expected


def test_a_first_worker_may_take_longer() -> None:
    assert absent_for(launched(1), 0, 1, begin_ms=1_000) == ABSENCE_FIRST_MS


def test_an_absence_does_not_count_while_the_coordinator_is_away() -> None:
    supervisor = launched(1)
    supervisor.handle(there(0), now_ms=0)
    assert supervisor.handle(missing(0), now_ms=1_000) == []
    away = replace(missing(0), unanswered_ms=ABSENCE_MS_MIN)
    assert supervisor.handle(away, now_ms=1_000 + ABSENCE_MS_MIN) == []
    assert absent_for(supervisor, 0, 1, begin_ms=1_000 + ABSENCE_MS_MIN) == ABSENCE_MS_MIN


def test_a_hung_worker_is_cancelled_although_every_look_is_late() -> None:
    """The coordinator says quickly who is there, and slowly how the job does: each look was a gap, and nobody was ever missed."""
    supervisor = launched(1)
    supervisor.handle(there(0), now_ms=0)
    late = 2 * POLL_GAP_MS
    assert [supervisor.handle(silent(0), now_ms=number * late) for number in (1, 2)] == [[], []]
    assert isinstance(supervisor.handle(silent(0), now_ms=3 * late)[0], CancelWorker)


def test_a_worker_that_never_registers_is_cancelled_although_every_look_is_late() -> None:
    supervisor = launched(1)
    supervisor.handle(there(0), now_ms=0)
    for number in range(1, 7):
        assert supervisor.handle(missing(0), now_ms=number * 2 * POLL_GAP_MS) == []
    assert isinstance(supervisor.handle(missing(0), now_ms=7 * 2 * POLL_GAP_MS)[0], CancelWorker)


def test_a_driver_that_stood_still_with_its_workers_cancels_none_that_come_back() -> None:
    supervisor = launched(1)
    supervisor.handle(silent(0), now_ms=0)
    assert supervisor.handle(silent(0), now_ms=3_600_000) == []
    assert supervisor.handle(there(0), now_ms=3_600_250) == []
    assert supervisor.handle(silent(0), now_ms=3_600_500) == []


def test_a_question_is_unanswered_from_its_first_try_to_its_answer() -> None:
    question = Question()
    for now in (100, 400, 900):
        question.ask(now)
    assert question.answered(1_000) == 900
    question.ask(9_000)
    assert question.answered(9_010) == 10


def test_nobody_is_cancelled_for_a_loss_once_the_job_is_over() -> None:
    supervisor = launched(1)
    supervisor.handle(silent(0), now_ms=0)
    supervisor.handle(JobEnded(), now_ms=10)
    assert supervisor.handle(silent(0), now_ms=LOSS_GRACE_MS + 10) == []


def test_late_news_of_an_older_worker_changes_nothing() -> None:
    supervisor = launched()
    supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED), now_ms=10)
    assert supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED), now_ms=11) == []


def test_a_death_respawns_that_slot_alone_and_at_once() -> None:
    supervisor = launched()
    assert supervisor.handle(WorkerEnded(1, 1, WorkerEnd.DIED), now_ms=5) == [SpawnWorker(1, 2)]


def test_deaths_in_a_row_back_off_up_to_a_bound() -> None:
    supervisor = launched(1)
    now, spawn, delays = 0, 1, []
    for _ in range(14):
        actions = supervisor.handle(WorkerEnded(0, spawn, WorkerEnd.DIED), now_ms=now)
        due = supervisor.next_deadline_ms()
        delays.append(0 if actions else (due or 0) - now)
        if not actions:
            assert due is not None
            now = due
            assert supervisor.handle(DeadlineReached(), now_ms=now) == [SpawnWorker(0, spawn + 1)]
        spawn += 1
    assert delays[:5] == [0, 0, 100, 200, 400]
    assert delays[-1] == BACKOFF_MAX_MS


def test_a_registration_forgives_earlier_deaths() -> None:
    supervisor = launched(1)
    for spawn in range(1, 20):
        supervisor.handle(there(0, spawn), now_ms=spawn)
        assert supervisor.handle(WorkerEnded(0, spawn, WorkerEnd.DIED), now_ms=spawn) == [SpawnWorker(0, spawn + 1)]


def test_a_worker_that_never_starts_is_given_up() -> None:
    supervisor = launched(1)
    now = 0
    for spawn in range(1, START_FAILURES_MAX):
        supervisor.handle(WorkerEnded(0, spawn, WorkerEnd.RAISED, "ImportError: x"), now_ms=now)
        now = supervisor.next_deadline_ms() or now
        supervisor.handle(DeadlineReached(), now_ms=now)
    actions = supervisor.handle(WorkerEnded(0, START_FAILURES_MAX, WorkerEnd.RAISED, "ImportError: x"), now_ms=now)
    assert actions == [GiveUp(0, "ImportError: x"), AllEnded()]


def test_killed_processes_are_never_given_up() -> None:
    supervisor = launched(1)
    now = 0
    for spawn in range(1, 50):
        actions = supervisor.handle(WorkerEnded(0, spawn, WorkerEnd.DIED), now_ms=now)
        now = supervisor.next_deadline_ms() or now
        actions += supervisor.handle(DeadlineReached(), now_ms=now)
        assert actions == [SpawnWorker(0, spawn + 1)]


def test_a_superseded_driver_starts_nothing_again() -> None:
    supervisor = launched()
    assert supervisor.handle(WorkerEnded(0, 1, WorkerEnd.SUPERSEDED), now_ms=0) == []
    assert supervisor.handle(WorkerEnded(1, 1, WorkerEnd.DIED), now_ms=0) == [AllEnded()]


def test_only_the_order_says_how_a_worker_left() -> None:
    report = WorkerReport("superseded by a newer process in the same slot", False)
    assert outcome_of(report) == (WorkerEnd.LEFT, report.reason)
    assert outcome_of(WorkerReport("x", True)) == (WorkerEnd.RESPAWN, "x")
    assert outcome_of(WorkerReport("x", False, superseded=True)) == (WorkerEnd.SUPERSEDED, "x")


def test_a_slot_that_others_take_again_and_again_is_tried_ever_more_slowly() -> None:
    supervisor = launched(1)
    for spawn in (1, 2):
        assert supervisor.handle(WorkerEnded(0, spawn, WorkerEnd.RESPAWN), now_ms=0) == [SpawnWorker(0, spawn + 1)]
    assert supervisor.handle(WorkerEnded(0, 3, WorkerEnd.RESPAWN), now_ms=0) == []
    assert supervisor.next_deadline_ms() == 100


def test_workers_that_leave_end_the_job() -> None:
    supervisor = launched()
    assert supervisor.handle(WorkerEnded(0, 1, WorkerEnd.LEFT), now_ms=0) == []
    assert supervisor.handle(WorkerEnded(1, 1, WorkerEnd.LEFT), now_ms=0) == [AllEnded()]


def test_stopping_waits_then_cancels_then_abandons() -> None:
    supervisor = launched()
    assert supervisor.handle(JobEnded(), now_ms=0) == []
    assert supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED), now_ms=1) == []
    assert supervisor.next_deadline_ms() == COOPERATIVE_STOP_MS
    assert supervisor.handle(DeadlineReached(), now_ms=COOPERATIVE_STOP_MS) == [CancelWorker(1, 1)]
    end = COOPERATIVE_STOP_MS + CANCEL_WAIT_MS
    assert supervisor.next_deadline_ms() == end
    assert supervisor.handle(DeadlineReached(), now_ms=end) == [AllEnded((1,))]
    assert supervisor.handle(WorkerEnded(1, 1, WorkerEnd.LEFT), now_ms=end + 1) == []


def test_a_driver_that_leaves_cancels_its_workers_at_once() -> None:
    supervisor = launched()
    assert supervisor.handle(StopRequested(), now_ms=5) == [CancelWorker(0, 1), CancelWorker(1, 1)]
    assert supervisor.handle(StopRequested(), now_ms=6) == []
    assert supervisor.handle(WorkerEnded(0, 1, WorkerEnd.DIED), now_ms=7) == []
    assert supervisor.handle(WorkerEnded(1, 1, WorkerEnd.DIED), now_ms=8) == [AllEnded()]


def test_the_end_of_the_job_while_backing_off_ends_the_slot() -> None:
    supervisor = launched(1)
    for spawn in range(1, 4):
        supervisor.handle(WorkerEnded(0, spawn, WorkerEnd.DIED), now_ms=0)
    assert supervisor.handle(JobEnded(), now_ms=1) == [AllEnded()]


class SupervisedSlots(RuleBasedStateMachine):
    """Workers that die, hang, wake or never start, a coordinator that is late and forgets, and one supervisor of three slots."""

    def __init__(self) -> None:
        super().__init__()
        self.supervisor = SlotSupervisor(3)
        self.now = 0
        self.current: dict[int, int] = {}
        """slot -> spawn that its task was started as last, and that has not ended."""
        self.hanging: set[tuple[int, int]] = set()
        self.cancelled: dict[tuple[int, int], int] = {}
        self.known: dict[int, SeenWorker] = {}
        self.stopped = False
        self.take(self.supervisor.handle(Launch(), now_ms=0))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SpawnWorker):
                assert not self.stopped, "a worker is started although the job is over"
                before = self.current.get(action.slot)
                overdue = before is not None and self.now - self.cancelled.get((action.slot, before), self.now) >= CANCEL_WAIT_MS
                assert before is None or overdue, "two workers in one slot"
                self.current[action.slot] = action.spawn
            elif isinstance(action, CancelWorker):
                where = (action.slot, action.spawn)
                assert self.stopped or action.spawn == self.current[action.slot], "a cancellation hits somebody else"
                seen = self.known.get(action.slot)
                alive = seen is not None and seen.registered and seen.spawn == action.spawn
                assert self.stopped or not alive, "a worker is cancelled that the coordinator knows"
                if action.process is not None:
                    assert action.process.spawn == action.spawn, "the process of somebody else would be killed"
                self.cancelled.setdefault(where, self.now)
            elif isinstance(action, GiveUp):  # of a worker that never registered, as far as the driver has looked
                self.stopped = True

    @rule(ms=st.integers(0, 3_000))
    def time_passes(self, ms: int) -> None:
        self.now += ms
        due = self.supervisor.next_deadline_ms()
        if due is not None and due <= self.now:
            self.take(self.supervisor.handle(DeadlineReached(), now_ms=self.now))

    @rule(slot=st.integers(0, 2))
    def registers(self, slot: int) -> None:
        spawn = self.current.get(slot)
        if spawn is not None and (slot, spawn) not in self.hanging:
            self.known[slot] = SeenWorker(slot, spawn, True, pid=100 * slot + spawn, fingerprint=f"{slot}-{spawn}")

    @rule(slot=st.integers(0, 2))
    def hangs(self, slot: int) -> None:
        spawn = self.current.get(slot)
        if spawn is not None and self.known.get(slot, SeenWorker(slot, 0, False)).spawn == spawn:
            self.hanging.add((slot, spawn))
            self.known[slot] = SeenWorker(slot, spawn, False, timed_out=True)

    @rule()
    def coordinator_is_replaced(self) -> None:
        self.known.clear()

    @rule()
    def looks(self) -> None:
        self.take(self.supervisor.handle(WorkersSeen(tuple(self.known.values())), now_ms=self.now))

    @rule(slot=st.integers(0, 2), end=st.sampled_from([WorkerEnd.DIED, WorkerEnd.RAISED, WorkerEnd.RESPAWN]))
    def ends(self, slot: int, end: WorkerEnd) -> None:
        spawn = self.current.get(slot)
        if spawn is None or ((slot, spawn) in self.hanging and (slot, spawn) not in self.cancelled):
            return  # nobody ends a worker that hangs but who cancels it
        del self.current[slot]
        seen = self.known.get(slot)
        if seen is not None and seen.spawn == spawn:
            self.known[slot] = SeenWorker(slot, spawn, False)
        self.take(self.supervisor.handle(WorkerEnded(slot, spawn, end, "e"), now_ms=self.now))

    @rule(slot=st.integers(0, 2))
    def an_abandoned_one_ends(self, slot: int) -> None:
        for where in [each for each in self.cancelled if each[0] == slot and each[1] != self.current.get(slot)]:
            assert self.supervisor.handle(WorkerEnded(*where, WorkerEnd.SUPERSEDED), now_ms=self.now) == []

    @rule()
    @precondition(lambda self: not self.stopped)
    def job_ends(self) -> None:
        if self.now > 20_000:
            self.stopped = True
            self.take(self.supervisor.handle(JobEnded(), now_ms=self.now))

    def teardown(self) -> None:
        if not self.stopped:
            self._hung_are_replaced()
        self.stopped = True
        self.take(self.supervisor.handle(StopRequested(), now_ms=self.now))
        while (due := self.supervisor.next_deadline_ms()) is not None:
            self.now = max(self.now, due)
            self.take(self.supervisor.handle(DeadlineReached(), now_ms=self.now))
        assert self.supervisor.running == ()

    def _hung_are_replaced(self) -> None:
        """Whatever happened: with looks and deadlines alone every slot gets another worker in place of one that is silent."""
        for slot, spawn in self.current.items():
            self.known[slot] = SeenWorker(slot, spawn, False, timed_out=True)
        silent_now = dict(self.current)
        until = self.now + LOSS_GRACE_MS + 2 * CANCEL_WAIT_MS
        while self.now < until:
            self.time_passes(250)
            self.looks()
        for slot, spawn in silent_now.items():
            assert self.current[slot] > spawn, f"slot {slot} still waits for worker {spawn}"


TestSupervisedSlots = SupervisedSlots.TestCase
TestSupervisedSlots.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
