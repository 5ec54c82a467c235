"""A job that this process stopped leading can be submitted again here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.service import CoordinatorService
from tests.coordinator.doubles import leading, submission, word_count


@pytest.fixture
def service(tmp_path: Path) -> Iterator[CoordinatorService]:
    opened = leading(ServiceConfig(str(tmp_path / "state"), seed=1))
    yield opened
    opened.close()


def test_job_whose_leadership_was_lost_is_led_again_by_a_new_submission(service: CoordinatorService) -> None:
    accepted = service.submit(submission(word_count()))
    current = service._registry.led(accepted.job_id)
    current.post(job_events.LeadershipEnded("another epoch leads"))
    assert current.ended.wait(10)
    again = service.submit(submission(word_count()))
    assert (again.submission, again.epoch) == (2, 2)
    assert service.job(accepted.job_id).overview.state == "CREATED"


def test_job_whose_core_failed_is_led_again_by_a_new_submission(service: CoordinatorService) -> None:
    accepted = service.submit(submission(word_count()))
    current = service._registry.led(accepted.job_id)
    current.post(job_events.AttemptPrepared)  # type: ignore[arg-type]  # no event at all: the core crashes
    assert current.ended.wait(10)
    again = service.submit(submission(word_count()))
    assert (again.submission, service.job(accepted.job_id).overview.state) == (2, "CREATED")
