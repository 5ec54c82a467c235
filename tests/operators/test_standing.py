"""What a look at a job means to a driver."""

from __future__ import annotations

import pytest

from holdfast.operators.spark.handle import Standing, judge_look


@pytest.mark.parametrize(
    ("seen", "state", "standing"),
    [
        (2, "RUNNING", Standing.OURS),
        (2, "SUSPENDED", Standing.OURS),
        (2, "FINISHED", Standing.ENDED),
        (2, "CANCELED", Standing.ENDED),
        (2, "FAILED", Standing.ENDED),
        (3, "RUNNING", Standing.SUPERSEDED),
        (3, "FINISHED", Standing.SUPERSEDED),
        (1, "RUNNING", Standing.STALE),
        (1, "FINISHED", Standing.STALE),
    ],
)
def test_only_the_drivers_own_submission_can_end_for_it(seen: int, state: str, standing: Standing) -> None:
    assert judge_look(ours=2, seen=seen, state=state) is standing
