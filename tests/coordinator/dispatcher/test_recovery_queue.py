"""Jobs that are still to be led on after a start: which comes next, who waits, and when it is over."""

from __future__ import annotations

import pytest

from holdfast.coordinator.dispatcher.recovery_queue import RecoveryQueue
from holdfast.statebackends.errors import RecoveringError


def queue(*jobs: str) -> RecoveryQueue:
    recovery = RecoveryQueue()
    recovery.begin(jobs)
    return recovery


def test_a_directory_without_jobs_is_recovered_at_once() -> None:
    assert not RecoveryQueue().is_over
    assert queue().is_over


def test_jobs_that_are_asked_for_come_first_in_the_order_of_asking() -> None:
    recovery = queue("a", "b", "c", "d")
    assert [recovery.ask("d"), recovery.ask("b"), recovery.ask("d")] == [True, True, True]
    assert [recovery.next() for _ in range(5)] == ["d", "b", "a", "c", None]


def test_it_is_over_when_the_last_job_is_done_and_not_before() -> None:
    recovery = queue("a", "b")
    assert recovery.next() == "a"
    assert recovery.next() == "b"
    recovery.done("a")
    assert (recovery.is_over, recovery.covers("a"), recovery.covers("b")) == (False, False, True)
    with pytest.raises(RecoveringError):
        recovery.check("b")
    with pytest.raises(RecoveringError):
        recovery.check_all()
    recovery.done("b")
    recovery.check("b")
    recovery.check_all()
    assert recovery.is_over


def test_who_waits_for_a_job_is_told_when_it_is_done() -> None:
    recovery = queue("a", "b")
    first, second = recovery.when_done("b"), recovery.when_done("b")
    assert recovery.when_done("unknown") is None
    assert recovery.next() == "b"
    assert first is not None
    assert second is not None
    assert not first.done()
    recovery.done("b")
    assert (first.done(), second.done(), recovery.when_done("b")) == (True, True, None)


def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.coordinator.dispatcher.recovery_queue.WAITERS_MAX", 2)
    recovery = queue("a", "b", "c")
    assert recovery.when_done("a") is not None
    assert recovery.when_done("b") is not None
    with pytest.raises(RecoveringError, match="too many"):
        recovery.when_done("c")
    assert recovery.covers("c")


def test_who_gave_up_waiting_and_who_waits_in_vain() -> None:
    recovery = queue("a")
    given_up, waiting = recovery.when_done("a"), recovery.when_done("a")
    assert given_up is not None
    assert waiting is not None
    given_up.cancel()
    recovery.close()
    with pytest.raises(RecoveringError):
        waiting.result(0)
    with pytest.raises(RecoveringError, match="is stopping"):
        recovery.when_done("a")
    assert recovery.when_done("unknown") is None, "nobody would have settled it"
