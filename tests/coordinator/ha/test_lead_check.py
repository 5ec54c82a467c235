"""When a leader asks storage whether it still leads."""

from __future__ import annotations

import pytest

from holdfast.coordinator.ha.lead_check import LATE_MS, LEAD_CHECK_MS_MAX, LeadCheck, LeadVerdict

NOW_MS = 100_000
DUE_MS = NOW_MS - LATE_MS
"""Just late enough to be asked about."""


@pytest.mark.parametrize(
    ("due_ms", "verdict"),
    [
        pytest.param(None, LeadVerdict.GO_ON, id="nothing is due"),
        pytest.param(NOW_MS + 1, LeadVerdict.GO_ON, id="not yet due"),
        pytest.param(DUE_MS + 1, LeadVerdict.GO_ON, id="hardly late"),
        pytest.param(DUE_MS, LeadVerdict.ASK, id="late"),
    ],
)
def test_only_a_late_turn_asks(due_ms: int | None, verdict: LeadVerdict) -> None:
    check = LeadCheck()
    assert check.judge(NOW_MS, due_ms) is verdict
    assert check.deadline_ms == (NOW_MS + LEAD_CHECK_MS_MAX if verdict is LeadVerdict.ASK else None)


def test_turns_wait_for_the_answer_for_so_long() -> None:
    check = LeadCheck()
    check.judge(NOW_MS, DUE_MS)
    assert check.judge(NOW_MS + LEAD_CHECK_MS_MAX - 1, DUE_MS) is LeadVerdict.WAIT
    assert check.judge(NOW_MS + LEAD_CHECK_MS_MAX, DUE_MS) is LeadVerdict.GO_ON
    assert check.deadline_ms is None


def test_what_was_due_before_the_answer_is_not_asked_about_again() -> None:
    check = LeadCheck()
    check.judge(NOW_MS, DUE_MS)
    check.known(NOW_MS + 5)
    assert check.judge(NOW_MS + LATE_MS + 4, DUE_MS) is LeadVerdict.GO_ON
    assert check.judge(NOW_MS + LATE_MS + 5, DUE_MS) is LeadVerdict.ASK, "it stood still again"
