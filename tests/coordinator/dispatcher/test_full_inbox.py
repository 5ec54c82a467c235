"""A job that takes no turns: its inbox gets full, and nobody but those who ask that job notices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.errors import encode_error
from holdfast.barriers.messages import Heartbeat
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.hooks.calls import HookCall
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.actions import RestoreHook
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.service import CoordinatorService
from holdfast.operators.worker.gateway import check_answer
from holdfast.statebackends.errors import NotLeaderError, StorageUnavailableError, TooManyRequestsError
from tests.coordinator.dispatcher.test_dispatcher import JOB, deployed, register, registration, submitted
from tests.coordinator.doubles import WAIT_S, Crew, leading, submission, wait_until, word_count
from tests.coordinator.stepping import Process
from tests.coordinator.world import DictStorage

MAX = 4


def state_of(master: JobMaster) -> JobState:
    return master.state


def begun() -> Process:
    process = Process(DictStorage(), inbox_events_max=MAX).begin()
    process.submit(submitted())
    process.settle()
    return process


def filled(process: Process) -> list[Future[JobState]]:
    """Queries that take all the room there is."""
    return [process.service(JOB).query(state_of) for _ in range(MAX)]


def refused(future: Future[Any]) -> None:
    assert future.done(), "nobody waits for room"
    error = future.exception()
    assert isinstance(error, TooManyRequestsError)
    assert (error.job, error.retry_after_ms) == (JOB, 1_000)


def test_requests_to_a_full_inbox_are_refused_at_once_and_leave_nothing() -> None:
    process = begun()
    service, waiting = process.service(JOB), filled(process)
    made: list[int] = []

    def cancel(ticket: int) -> job_events.CancelRequested:
        made.append(ticket)
        return job_events.CancelRequested(ticket)

    refused(service.call(cancel))
    refused(service.subscribe(0, "session", 0)[1])
    refused(service.query(state_of))
    with pytest.raises(TooManyRequestsError):
        service.check_room()
    assert (made, len(service._calls), len(service._opening), len(service._queries)) == ([], 0, 0, MAX)
    process.settle()
    assert [each.result(0) for each in waiting] == [JobState.CREATED] * MAX
    assert process.wait_for(service.query(state_of)) is JobState.CREATED, "there is room again"
    service.check_room()


def test_outcomes_of_the_jobs_own_actions_find_room_however_full_the_inbox_is() -> None:
    process = Process(DictStorage(), inbox_events_max=MAX).begin()
    process.submit(submitted())
    for slot in range(2):
        message = registration(process, slot)
        process.service(JOB).call(lambda ticket, message=message: job_events.RegistrationReceived(ticket, message))  # type: ignore[misc]
    while process.turn():
        pass
    waiting = filled(process)
    assert process.runner.flows, "the first attempt is being prepared"
    while process.runner.step():  # its outcome waits for no turn
        pass
    assert not any(each.done() for each in waiting)
    process.settle()
    assert process.service(JOB).state == "RUNNING"
    registered = register(process, 0).deployment
    assert registered is not None
    assert registered.attempt == 1


def test_stream_that_closes_while_the_inbox_is_full_is_noticed() -> None:
    process = begun()
    assert deployed(process) == [1, 1]
    service = process.service(JOB)
    stream = service._streams[0]
    filled(process)
    stream.close()
    process.settle()
    connected = service.query(lambda master: [slot.connected for slot in master.slot_pool.slots])
    assert process.wait_for(connected) == [False, True]


def test_close_ends_a_job_behind_what_waited_in_its_full_inbox() -> None:
    process = begun()
    service, waiting = process.service(JOB), filled(process)
    service.stop("the coordinator stops")
    assert not any(each.done() for each in waiting)
    service.close("the coordinator stops")
    assert [each.result(0) for each in waiting] == [JobState.CREATED] * MAX
    assert service.query(state_of).result(0) is JobState.SUSPENDED
    with pytest.raises(NotLeaderError):
        service.call(job_events.CancelRequested).result(0)


def test_worker_that_is_refused_for_lack_of_room_tries_again() -> None:
    wire = encode_error(TooManyRequestsError("no room", job=JOB, retry_after_ms=1_000))
    assert (wire.status, wire.headers["Retry-After"]) == (429, "1")
    with pytest.raises(StorageUnavailableError) as found:  # neither RefusedError, nor RejectedError, by which it would leave
        check_answer(wire.status, wire.headers, wire.body)
    assert type(found.value) is StorageUnavailableError


def test_hook_that_finds_no_thread_fails_its_checkpoint_alone() -> None:
    class NoThreads:
        def call(self, call: HookCall, ended: Callable[..., None]) -> None:
            raise RuntimeError("can't start new thread")

        def close(self) -> None:
            pass

    process = begun()
    service = process.service(JOB)
    service._hooks = NoThreads()
    service._perform(RestoreHook(1, 1, "offsets", 0, 0, None, 1_000))
    outcome = service._inbox[-1]
    assert isinstance(outcome, job_events.HookNotRestored)
    assert outcome.message == "it can't be called now: can't start new thread"
    process.settle()
    assert not service.failed


# ------------------------------------------------------------------------------------------------- one turn that hangs


@pytest.fixture
def release() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def test_turn_that_hangs_holds_up_its_own_job_alone(tmp_path: Path, release: threading.Event) -> None:
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1, inbox_events_max=MAX))
    crews = [
        Crew(service, service.submit(submission(word_count(name=name, checkpoint_interval_ms=20))).job_id, 2)
        for name in ("hangs", "goes on")
    ]
    for crew in crews:
        crew.register()
        crew.until_completed(1)
    hanging, other = crews
    entered = hang(service, hanging.job_id, release)
    assert entered.wait(WAIT_S)
    beats = [beat(service, hanging) for _ in range(3 * MAX)]
    late = [each for each in beats if each.done()]
    assert len(late) >= 2 * MAX, "their callers, of whom one is the event loop, do not wait"
    assert all(isinstance(each.exception(), TooManyRequestsError) for each in late)
    with pytest.raises(TooManyRequestsError):
        service.add_label(hanging.job_id, 1, "kept")
    other.until_completed(service.checkpoints(other.job_id).counts.completed + 5)
    closing = threading.Thread(target=service.close)
    closing.start()
    led = service._registry.led(other.job_id)
    wait_until(lambda: led.closed, lambda: None, what="the end of the other job")  # its workers' requests would be refused
    assert closing.is_alive()
    release.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert [each.done() for each in beats] == [True] * len(beats)


def hang(service: CoordinatorService, job_id: str, release: threading.Event) -> threading.Event:
    """Have a turn of a job last; set once it has begun."""
    entered = threading.Event()

    def last(_: JobMaster) -> None:
        entered.set()
        release.wait(WAIT_S)

    service._registry.led(job_id).query(last)
    return entered


def beat(service: CoordinatorService, crew: Crew) -> Future[int]:
    worker = crew.workers[0]
    assert worker.registered is not None
    return service.heartbeat_async(crew.job_id, Heartbeat(0, worker.registered.session, worker.attempt))
