"""The threads that jobs share: each job's turns one at a time, at its wakes and deadlines, whatever other jobs' turns do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.dispatcher import threads
from holdfast.coordinator.dispatcher.threads import JobAlarms, PoolRunner, SharedJobThread, SharedThreads, SystemClock
from holdfast.coordinator.service import CoordinatorService
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.storage.port import Flow, ReadFile
from tests.coordinator.doubles import Crew, leading, submission, word_count
from tests.coordinator.world import DictStorage

DEADLINE_S = 30.0
LONG_MS = 10**9


class Job:
    """Implements `Turns`: handles what is posted, one item a turn."""

    def __init__(self, shared: SharedThreads, name: str = "job") -> None:
        self.job_id = name
        self.thread: SharedJobThread = shared.new_thread()
        self.posted: list[Callable[[], None]] = []
        self.handled = 0
        self.taken_by: set[str] = set()
        self.overlapped = False
        self.closed = False
        self.due_ms: int | None = None
        self.due_turns = 0
        self._turning = threading.Lock()
        self.thread.start(self)

    def post(self, act: Callable[[], None] = lambda: None) -> None:
        self.posted.append(act)
        self.thread.wake()

    def turn(self) -> bool:
        if not self._turning.acquire(blocking=False):
            self.overlapped = True
            return False
        try:
            self.taken_by.add(threading.current_thread().name)
            if self.posted:
                self.posted.pop(0)()
                self.handled += 1
                return True
            if self.due_ms is not None and SystemClock().monotonic_ms() >= self.due_ms:
                self.due_ms = None
                self.due_turns += 1
                return True
            return False
        finally:
            self._turning.release()

    @property
    def has_waiting(self) -> bool:
        return bool(self.posted)

    def next_deadline_ms(self) -> int | None:
        return self.due_ms

    def set_due(self, due_ms: int | None) -> None:
        self.post(lambda: setattr(self, "due_ms", due_ms))

    def hang(self, until: threading.Event) -> None:
        self.post(lambda: _wait(until))

    def close(self) -> None:
        self.post(lambda: setattr(self, "closed", True))


def _wait(until: threading.Event) -> None:
    until.wait(DEADLINE_S)


@pytest.fixture
def shared() -> Iterator[SharedThreads]:
    made = SharedThreads(SystemClock())
    yield made
    made.close()


def await_true(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.002)


def test_many_jobs_and_posters_lose_no_item_and_no_two_turns_of_a_job_overlap(shared: SharedThreads) -> None:
    jobs = [Job(shared, str(number)) for number in range(20)]

    def post_to_all() -> None:
        for _ in range(100):
            for job in jobs:
                job.post()

    posters = [threading.Thread(target=post_to_all) for _ in range(4)]
    for poster in posters:
        poster.start()
    for poster in posters:
        poster.join()
    await_true(lambda: all(job.handled == 400 for job in jobs))
    assert not any(job.overlapped for job in jobs)


def test_items_are_handled_in_order(shared: SharedThreads) -> None:
    job, seen = Job(shared), list[int]()
    for number in range(200):
        job.post(lambda number=number: seen.append(number))  # type: ignore[misc]
    await_true(lambda: len(seen) == 200)
    assert seen == list(range(200))


def test_short_turns_of_all_jobs_are_taken_by_one_thread(shared: SharedThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "STALL_MS", LONG_MS)
    jobs = [Job(shared, str(number)) for number in range(50)]
    for job in jobs:
        job.post()
    await_true(lambda: all(job.handled == 1 for job in jobs))
    assert len(set.union(*(job.taken_by for job in jobs))) == 1


def test_turns_that_hang_hold_up_their_own_jobs_alone(shared: SharedThreads) -> None:
    release = threading.Event()
    hanging, others = [Job(shared, f"h{n}") for n in range(5)], [Job(shared, f"o{n}") for n in range(5)]
    try:
        for job in hanging:
            job.hang(release)
        for job in others:
            job.post()
        await_true(lambda: all(job.handled == 1 for job in others))
        due_ms = SystemClock().monotonic_ms() + 1
        others[0].set_due(due_ms)  # deadlines pass beside them, too
        await_true(lambda: others[0].due_turns == 1)
        assert all(job.handled == 0 for job in hanging)
    finally:
        release.set()
    await_true(lambda: all(job.handled == 1 for job in hanging))


def test_threads_that_helped_end_once_there_is_nothing_to_do(shared: SharedThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "IDLE_S", 0.01)
    release = threading.Event()
    hanging, other = Job(shared), Job(shared)
    hanging.hang(release)
    other.post()
    await_true(lambda: other.handled == 1)
    assert len(hanging.taken_by | other.taken_by) >= 2
    release.set()
    await_true(lambda: len(shared._helpers) == 1)
    other.post()
    hanging.post()
    await_true(lambda: other.handled == 2 and hanging.handled == 2)


def test_job_whose_turns_never_end_leaves_others_theirs(shared: SharedThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "STALL_MS", LONG_MS)  # no thread helps: the one that there is takes turns of both
    busy, other = Job(shared), Job(shared)

    def again() -> None:
        if not busy.closed:
            busy.post(again)

    busy.post(again)
    await_true(lambda: busy.handled > 100)
    other.post()
    await_true(lambda: other.handled == 1)
    busy.closed = True


def test_turn_is_taken_at_the_deadline_and_at_an_earlier_one_that_is_set_later(shared: SharedThreads) -> None:
    job, now_ms = Job(shared), SystemClock().monotonic_ms
    job.set_due(now_ms() + LONG_MS)
    await_true(lambda: job.thread.alarm_ms is not None)
    began_ms = now_ms()
    job.set_due(began_ms + 30)
    await_true(lambda: job.due_turns == 1)
    assert now_ms() >= began_ms + 30


def test_deadline_that_moved_away_wakes_nobody_and_the_new_one_holds(shared: SharedThreads) -> None:
    job, now_ms = Job(shared), SystemClock().monotonic_ms
    job.set_due(now_ms() + 20)
    due_ms = now_ms() + 60
    job.set_due(due_ms)
    await_true(lambda: job.due_turns == 1)
    assert now_ms() >= due_ms


def test_deadline_beyond_what_a_thread_can_wait_is_none(shared: SharedThreads) -> None:
    job = Job(shared)
    job.set_due(2**62)
    await_true(lambda: job.thread.alarm_ms == 2**62)
    job.post()
    await_true(lambda: job.handled == 2)


def test_turn_that_fails_ends_its_own_job_alone(shared: SharedThreads, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise SystemExit

    failing, other = Job(shared, "failing"), Job(shared, "other")
    failing.post(fail)
    failing.thread.join()
    other.post()
    await_true(lambda: other.handled == 1)
    assert "job failing takes no more turns" in caplog.text


def test_join_returns_once_the_job_is_closed_and_a_closed_job_takes_no_turn(shared: SharedThreads) -> None:
    job = Job(shared)
    job.close()
    job.thread.join()
    job.post()
    other = Job(shared)
    other.post()
    await_true(lambda: other.handled == 1)
    assert job.handled == 1


def test_close_ends_all_threads_and_threads_that_never_began_need_none() -> None:
    before = set(threading.enumerate())
    SharedThreads(SystemClock()).close()
    assert set(threading.enumerate()) <= before
    shared = SharedThreads(SystemClock())
    job = Job(shared)
    job.post()
    await_true(lambda: job.handled == 1)
    job.close()
    job.thread.join()
    shared.close()
    shared.close()
    await_true(lambda: not {each for each in threading.enumerate() if each not in before})


# ------------------------------------------------------------------------------------------------------- thread limit


class ThreadLimit:
    """While `is_reached`, no thread with one of these names starts."""

    def __init__(self, *prefixes: str) -> None:
        self.prefixes = prefixes
        self.is_reached = True
        self.refused: list[str] = []
        self._start = threading.Thread.start

    def start(self, thread: threading.Thread) -> None:
        if self.is_reached and thread.name.startswith(self.prefixes):
            self.refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        self._start(thread)

    def set(self, monkeypatch: pytest.MonkeyPatch) -> ThreadLimit:
        monkeypatch.setattr(threading.Thread, "start", lambda thread: self.start(thread))
        return self


def test_at_the_thread_limit_jobs_wait_for_a_thread_and_alarms_go_on(
    shared: SharedThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release, job, other = threading.Event(), Job(shared), Job(shared)
    await_true(lambda: job.taken_by == {"jobs-1"} and bool(other.taken_by))
    limit = ThreadLimit("jobs-").set(monkeypatch)
    job.hang(release)
    other.post()
    await_true(lambda: len(limit.refused) >= 3)
    assert (other.handled, len(shared._helpers)) == (0, 1)
    limit.is_reached = False
    await_true(lambda: other.handled == 1)
    other.set_due(SystemClock().monotonic_ms() + 1)
    await_true(lambda: other.due_turns == 1)
    release.set()
    await_true(lambda: job.handled == 1)
    told = [each for each in caplog.records if "no thread can be started" in each.message]
    assert len(told) == 1, "it is tried again each 20 ms, and told once"


def test_alarms_that_could_not_begin_do_so_with_the_next_job(shared: SharedThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = ThreadLimit("jobs-").set(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        shared.begin()
    limit.is_reached = False
    job = Job(shared)
    job.set_due(SystemClock().monotonic_ms() + 1)
    await_true(lambda: job.due_turns == 1)


def test_alarms_go_on_behind_an_unexpected_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(threads, "FAILED_PAUSE_S", 0.0)
    looks: list[int] = []

    def look() -> bool:
        looks.append(1)
        if len(looks) == 1:
            raise ValueError("a bug")
        return False

    alarms = JobAlarms(SystemClock(), look)
    alarms.begin()
    alarms.look_soon()
    await_true(lambda: len(looks) == 2)
    alarms.look_soon()
    await_true(lambda: len(looks) == 3)
    alarms.close()
    assert "the alarms of jobs failed" in caplog.text


def test_pools_that_have_begun_need_no_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = PoolRunner(DictStorage(), decision_threads=3, cleanup_threads=2, record_threads=1)
    pools.begin()
    limit = ThreadLimit("storage", "cleanup", "history").set(monkeypatch)
    together, ended = threading.Barrier(7), list[object]()

    def flow() -> Flow[str]:
        together.wait(DEADLINE_S)
        return "done"
        yield ReadFile("never")

    def end(result: str | None, error: BaseException | None) -> None:
        ended.append(error or result)

    for _ in range(3):
        pools.run(flow(), end, cleanup=False)
    for _ in range(2):
        pools.run(flow(), end, cleanup=True)
    pools.record(flow(), end)
    together.wait(DEADLINE_S)
    pools.close()
    assert (ended, limit.refused) == (["done"] * 6, [])


def test_a_coordinator_that_leads_takes_checkpoints_at_the_thread_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1))
    ThreadLimit("").set(monkeypatch)
    crew = Crew(service, service.submit(submission(word_count(checkpoint_interval_ms=20))).job_id, 2)
    crew.register()
    crew.until_completed(3)
    service.close()


@pytest.mark.parametrize("prefix", ["jobs-alarms", "storage", "history_1"])
def test_a_coordinator_without_threads_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    before = set(threading.enumerate())
    ThreadLimit(prefix).set(monkeypatch)
    with pytest.raises(StorageUnavailableError, match="can't begin: can't start new thread"):
        CoordinatorService(ServiceConfig(str(tmp_path / "state"), seed=1))
    await_true(lambda: set(threading.enumerate()) <= before)
