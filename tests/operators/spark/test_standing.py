"""What a look at a job means to a driver."""

from __future__ import annotations

import pytest

from holdfast.operators.spark.handle import SubmissionStatus, submission_status


@pytest.mark.parametrize(
    ("seen", "state", "standing"),
    [
        (2, "RUNNING", SubmissionStatus.OURS),
        (2, "SUSPENDED", SubmissionStatus.OURS),
        (2, "FINISHED", SubmissionStatus.ENDED),
        (2, "CANCELED", SubmissionStatus.ENDED),
        (2, "FAILED", SubmissionStatus.ENDED),
        (3, "RUNNING", SubmissionStatus.SUPERSEDED),
        (3, "FINISHED", SubmissionStatus.SUPERSEDED),
        (1, "RUNNING", SubmissionStatus.STALE),
        (1, "FINISHED", SubmissionStatus.STALE),
    ],
)
def test_only_the_drivers_own_submission_can_end_for_it(seen: int, state: str, standing: SubmissionStatus) -> None:
    assert submission_status(ours=2, seen=seen, state=state) is standing
