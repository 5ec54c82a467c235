"""docs/testing.md: the tests that it shows are run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.test_page_examples import block, executed


def test_the_worked_example_passes() -> None:
    page = executed(block("docs/testing.md", "class Overspent"))
    page["test_who_has_spent_100_is_told_once_whatever_fails"]()


@pytest.mark.parametrize("batch_rows", [1, 7, 65_536])
def test_the_example_of_windows_passes(batch_rows: int) -> None:
    page: dict[str, Any] = executed(block("docs/testing.md", "def test_hours_are_counted"))
    page["test_hours_are_counted_wherever_batches_end"](batch_rows)
