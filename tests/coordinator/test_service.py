"""CoordinatorService end to end, with workers that are doubles: submit, run, kill, restart, stop, restore, cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from barriers.messages import AckStatus, TaskState
from coordinator.config import ServiceConfig
from coordinator.service import CoordinatorService
from statebackends.errors import (
    FencedError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    OutputMayRepeatError,
    StateDirectoryNotSharedError,
    StorageUnavailableError,
    UnclaimedStateError,
)
from statebackends.handles import InlineHandle
from tests.coordinator.doubles import NO_RESTARTS, Crew, FakeWorker, submission, word_count

Open = Callable[[], CoordinatorService]


@pytest.fixture
def open_service(tmp_path: Path) -> Iterator[Open]:
    """Opens coordinators on one state directory; closes all of them."""
    opened: list[CoordinatorService] = []

    def make() -> CoordinatorService:
        service = CoordinatorService(ServiceConfig(str(tmp_path / "state"), seed=len(opened)))
        opened.append(service)
        return service

    yield make
    for service in opened:
        service.close()


def running(service: CoordinatorService, **settings: Any) -> Crew:
    accepted = service.submit(submission(word_count(**settings)))
    crew = Crew(service, accepted.job_id, accepted.slots)
    crew.register()
    crew.until(lambda: all(worker.attempt == 1 for worker in crew.workers), what="attempt 1")
    crew.until(lambda: service.job(crew.job_id).vertices[0].state is TaskState.RUNNING, what="running tasks")
    return crew


def test_periodic_checkpoints_complete_and_are_announced(open_service: Open) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20, retained_checkpoints=2)
    crew.until_completed(4)
    crew.until(lambda: all(worker.completed[:4] == [1, 2, 3, 4] for worker in crew.workers), what="four notices")
    stats = service.checkpoints(crew.job_id)
    assert stats.latest_completed is not None
    assert stats.latest_completed.num_acknowledged_subtasks == 4
    assert service.checkpoint(crew.job_id, stats.latest_completed.checkpoint_id).status == "COMPLETED"
