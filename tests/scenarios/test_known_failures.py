"""Each row of what went wrong elsewhere names tests that exist."""

from __future__ import annotations

import pytest

from tests.scenarios.known_failures import KNOWN_FAILURES
from tests.scenarios.runner import exists


@pytest.mark.parametrize("what", KNOWN_FAILURES)
def test_each_row_has_tests(what: str) -> None:
    issues, tests = KNOWN_FAILURES[what]
    assert issues
    assert tests
    assert [test for test in tests if not exists(test)] == []


def test_each_issue_is_in_one_row() -> None:
    issues = [issue for row, _ in KNOWN_FAILURES.values() for issue in row]
    assert len(issues) == len(set(issues)) == 26
