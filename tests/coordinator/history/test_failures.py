"""Failures of a job with what came behind each, from records of its history."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.coordinator.history.failures import FailureView, RestartView, derive_failures, page_of
from holdfast.coordinator.history.records import HistoryEntry


def entry(number: int, kind: str, *, epoch: int = 1, **facts: Any) -> HistoryEntry:
    return HistoryEntry(epoch, number, 1_000 * number, kind, facts)


def failure(number: int, attempt: int = 1, **facts: Any) -> HistoryEntry:
    told = {"error": "Boom: bang", "restarts": attempt, "restart_in_ms": 250, "vertex": "v", "subtask": 2, "slot": 2, **facts}
    return entry(number, "failure", attempt=attempt, **told)


def restart(number: int, attempt: int = 2, **facts: Any) -> HistoryEntry:
    return entry(number, "restart", attempt=attempt, **{"checkpoint_id": 41, "savepoint": False, "replayed": 8_204, **facts})


def first(number: int, attempt: int = 2) -> HistoryEntry:
    facts = {"since_deployed_ms": 700, "since_failure_ms": 1_200, "heartbeat_ms": 2_000}
    return entry(number, "first_record", attempt=attempt, **facts)


FAILED = FailureView("1-3", 3_000, 1, "Boom: bang", 1, 250, "v", 2, 2)
RESTARTED = RestartView(4_000, 2, 41, False, 8_204)


def test_a_failure_has_its_restart_and_the_first_record_after_it() -> None:
    begun = (restart(1, 1, checkpoint_id=0), first(2, 1))
    (found,) = derive_failures((*begun, failure(3), restart(4), first(5)))
    assert found.restart is not None
    assert (found.position, found.error, found.vertex, found.subtask) == ("1-3", "Boom: bang", "v", 2)
    assert found.restart == RestartView(4_000, 2, 41, False, 8_204, 5_000, 1_200, 2_000)


@pytest.mark.parametrize(
    ("entries", "restart_view"),
    [
        ((failure(3),), None),
        ((failure(3), restart(4)), RESTARTED),
        ((failure(3), first(5)), None),
        ((failure(3), restart(4), first(5, attempt=7)), RESTARTED),
        ((restart(1), first(2), failure(3)), None),
        ((failure(3), restart(4), restart(6, 3)), RESTARTED),
        ((failure(3), entry(4, "restart", attempt="x"), restart(4)), RESTARTED),
    ],
    ids=["none", "no record yet", "no restart", "of another attempt", "of before", "again", "unreadable"],
)
def test_what_is_not_there_is_not_made_up(entries: tuple[HistoryEntry, ...], restart_view: RestartView | None) -> None:
    (found,) = derive_failures(entries)
    assert found.restart == restart_view


def test_newest_first_over_leaders() -> None:
    behind = entry(1, "restart", epoch=2, attempt=3, checkpoint_id=50, savepoint=False, replayed=None)
    found = derive_failures((failure(3), restart(4), failure(6, 2), behind))
    assert [(each.attempt, each.restart.checkpoint_id if each.restart else -1) for each in found] == [(2, 50), (1, 41)]


def test_a_record_that_lacks_facts_hides_no_other() -> None:
    assert [each.attempt for each in derive_failures((entry(1, "failure"), failure(3)))] == [1]


def test_pages_go_on_in_front_of_the_oldest_failure() -> None:
    found = derive_failures((failure(3), restart(4), failure(6, 2)))
    assert page_of(found, 10, "", 5).since == ""
    assert page_of(found, 1, "", 5).since == "1-6"
    assert page_of(found, 10, "1-2", 5).since == "1-3"
    assert page_of((), 10, "1-2", 5).since == "1-2"
