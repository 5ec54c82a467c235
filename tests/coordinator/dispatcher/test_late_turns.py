"""A coordinator that stood still, and wakes: it asks storage whether it still leads before it acts upon what is long due."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.barriers.messages import Deploy
from holdfast.coordinator.ha.lead_check import LEAD_CHECK_MS_MAX
from holdfast.coordinator.ha.store import read_job
from holdfast.coordinator.history.store import HistoryQuery, read_history
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import Operation, StatFile, path_of, run_flow
from tests.coordinator.dispatcher.test_dispatcher import JOB, open_stream, run_tasks, submitted
from tests.coordinator.stepping import Process
from tests.coordinator.world import DictStorage

PATHS = JobPaths(JOB)
STOOD_MS = 69_000
"""Longer than any time in which workers are to be heard of."""


class Storage(DictStorage):
    """Does not say who leads while `is_down`."""

    is_down = False

    def execute(self, operation: Operation) -> Any:
        if self.is_down and isinstance(operation, StatFile) and path_of(operation).startswith(PATHS.leaders):
            raise StorageUnavailableError("the bucket is away")
        return super().execute(operation)


def running(storage: DictStorage, interval_ms: int | None = None) -> Process:
    """All of its tasks run."""
    process = Process(storage).begin()
    process.submit(submitted(interval_ms=interval_ms))
    streams = [open_stream(process, slot) for slot in range(2)]
    process.settle()
    for slot, stream in enumerate(streams):
        (deployment,) = (each.command.deployment for each in stream.take() if isinstance(each.command, Deploy))
        run_tasks(process, slot, stream.session, deployment)
    process.pass_time(5_000)
    return process


def told(storage: DictStorage, epoch: int) -> list[tuple[str, str]]:
    """Kind and text of each record of one leader."""
    page = run_flow(read_history(PATHS, HistoryQuery(limit=1_000), 0), storage)
    return [
        (each.kind, f"{each.facts.get('state', '')} {each.facts.get('reason', '')}{each.facts.get('error', '')}".strip())
        for each in page.entries
        if each.epoch == epoch
    ]


def test_leader_that_wakes_behind_its_successor_records_no_failure() -> None:
    storage = Storage()
    process = running(storage)
    before = told(storage, 1)
    Process(storage, seed=2).begin()
    process.pass_time(STOOD_MS)
    assert told(storage, 1) == [*before, ("state", f"SUSPENDED another coordinator leads: epoch 2 leads job {JOB}, not 1")]
    assert process.service(JOB).suspended


def test_leader_that_wakes_behind_its_successor_claims_no_checkpoint() -> None:
    storage = Storage()
    process = running(storage, interval_ms=10_000)
    Process(storage, seed=2).begin()
    fenced = run_flow(read_job(PATHS), storage).checkpoints.keys()
    for number in fenced:  # as retention does in time
        storage.files.pop(PATHS.claim(number), None)
    process.pass_time(STOOD_MS)
    claims = [each.claim for each in run_flow(read_job(PATHS), storage).checkpoints.values() if each.claim is not None]
    assert [claim for claim in claims if claim.epoch == 1] == []


@pytest.mark.parametrize("is_down", [False, True], ids=["it leads", "storage does not say"])
def test_leader_that_still_leads_acts_upon_what_is_due(is_down: bool) -> None:
    storage = Storage()
    process = running(storage)
    storage.is_down = is_down
    process.pass_time(STOOD_MS)
    process.pass_time(5_000)
    assert ("failure", "WorkerLost: nothing was heard from the worker in slot 0") in told(storage, 1)


def test_storage_that_hangs_holds_a_late_turn_up_for_some_time_only() -> None:
    process = running(Storage())
    process.clock.now_ms += STOOD_MS
    while process.turn():
        pass
    assert process.service(JOB).state == "RUNNING", "the check is under way"
    assert process.service(JOB).next_deadline_ms() == process.clock.now_ms + LEAD_CHECK_MS_MAX
    process.clock.now_ms += LEAD_CHECK_MS_MAX
    while process.turn():
        pass
    assert process.service(JOB).state == "RESTARTING"


def test_leader_in_doubt_can_be_stopped() -> None:
    process = running(Storage())
    process.clock.now_ms += STOOD_MS
    while process.turn():
        pass
    process.service(JOB).close("another member leads")
    assert process.service(JOB).suspended
    assert process.service(JOB).query(lambda master: master.lifecycle.failure).result() == "another member leads"
    process.settle()
