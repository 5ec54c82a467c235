"""A leader that slept in the middle of starting a job again, and wakes when another one has led it on."""

from __future__ import annotations

from holdfast.coordinator.dispatcher.submit import Starter, resume_submission, start_submission
from holdfast.coordinator.ha.store import read_job
from holdfast.statebackends.errors import FencedError
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.storage.port import one_by_one, run_flow
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.world import DictStorage

PATHS = JobPaths("f" * 32)
FIRST = submission(word_count(), job_id=PATHS.job_id, driver_nonce="first")
SECOND = submission(word_count(), job_id=PATHS.job_id, driver_nonce="second")


def begun() -> DictStorage:
    storage = DictStorage()
    run_flow(start_submission(PATHS.job_id, FIRST, Starter("one", "", "directory", 0)), storage)
    return storage


def test_stale_starter_records_nothing_behind_the_back_of_who_leads_on() -> None:
    """However far it had come: it is newer than who led on, or it is refused; once recorded, it is what is led on."""
    outcomes = set()
    for cut in range(200):
        storage = begun()
        flow = one_by_one(start_submission(PATHS.job_id, SECOND, Starter("starter", "", "directory", 0)))
        try:
            operation = next(flow)
            for _ in range(cut):
                operation = flow.send(storage.execute(operation))
        except StopIteration:
            assert run_flow(resume_submission(PATHS.job_id, Starter("newer", "", "directory", 0)), storage).submission == 2
            break
        led = run_flow(resume_submission(PATHS.job_id, Starter("newer", "", "directory", 0)), storage)
        outcome = "unknown"
        try:
            while True:
                operation = flow.send(storage.execute(operation))
        except FencedError:
            outcome = "refused"
        except StopIteration as stop:
            if stop.value.epoch > led.epoch:
                outcome, led = "newer", stop.value
        job = run_flow(read_job(PATHS), storage)
        assert job.newest_submission is not None
        assert job.newest_submission.number == led.submission
        outcomes.add(outcome)
    assert outcomes == {"newer", "refused"}


def test_numbers_go_on_behind_one_that_was_taken() -> None:
    storage = begun()
    run_flow(resume_submission(PATHS.job_id, Starter("two", "", "directory", 0)), storage)
    run_flow(resume_submission(PATHS.job_id, Starter("three", "", "directory", 0)), storage)
    setup = run_flow(start_submission(PATHS.job_id, SECOND, Starter("four", "", "directory", 0)), storage)
    assert setup.submission == 4
    job = run_flow(read_job(PATHS), storage)
    assert (sorted(job.submissions), job.last_submission) == ([1, 4], 4)
