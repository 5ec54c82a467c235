from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from operators.supervisor import (
    BACKOFF_MAX_MS,
    CANCEL_WAIT_MS,
    COOPERATIVE_STOP_MS,
    START_FAILURES_MAX,
    AllEnded,
    CancelWorker,
    DeadlineReached,
    Event,
    GiveUp,
    JobEnded,
    Launch,
    SlotSupervisor,
    SpawnWorker,
    StopRequested,
    WorkerEnd,
    WorkerEnded,
    WorkersRegistered,
)
from tests.examples import examples


def launched(slots: int = 2) -> SlotSupervisor:
    supervisor = SlotSupervisor(slots)
    assert supervisor.handle(Launch(), now_ms=0) == [SpawnWorker(slot, 1) for slot in range(slots)]
    return supervisor


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
        supervisor.handle(WorkersRegistered(frozenset({0})), now_ms=spawn)
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


def test_a_worker_that_asks_for_a_fresh_process_gets_it_without_blame() -> None:
    supervisor = launched(1)
    for spawn in range(1, 9):
        assert supervisor.handle(WorkerEnded(0, spawn, WorkerEnd.RESPAWN), now_ms=0) == [SpawnWorker(0, spawn + 1)]


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_one_worker_per_slot_and_always_an_end(data: st.DataObject) -> None:
    supervisor = launched(3)
    alive = dict.fromkeys(range(3), 1)
    now = 0
    for _ in range(data.draw(st.integers(0, 30))):
        now += data.draw(st.integers(0, 5000))
        slot = data.draw(st.integers(0, 2))
        event: Event = data.draw(
            st.sampled_from(
                [
                    WorkerEnded(slot, alive.get(slot, 0), data.draw(st.sampled_from(list(WorkerEnd))), "e"),
                    WorkersRegistered(frozenset({slot})),
                    DeadlineReached(),
                    JobEnded(),
                ]
            )
        )
        if isinstance(event, WorkerEnded):
            alive.pop(slot, None)
        for action in supervisor.handle(event, now_ms=now):
            if isinstance(action, SpawnWorker):
                assert action.slot not in alive
                alive[action.slot] = action.spawn
    ended = supervisor.handle(StopRequested(), now_ms=now)
    while (due := supervisor.next_deadline_ms()) is not None:
        now = max(now, due)
        ended += supervisor.handle(DeadlineReached(), now_ms=now)
    assert supervisor.running == ()
