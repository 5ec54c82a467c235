"""Views of a job: who captures them and when, what readers see after their own requests, and what captures share."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from holdfast.barriers.messages import CheckpointKind, Heartbeat, OperatorMetrics, SubtaskMetrics, TaskState
from holdfast.coordinator.checkpoints.actions import CompleteRequest
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.dispatcher import published
from holdfast.coordinator.dispatcher.calls import JobCalls
from holdfast.coordinator.dispatcher.published import Look, PublishedJob, capture, wait_for_look
from holdfast.coordinator.dispatcher.reading.queries import Queries
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.jobmaster import JobMaster
from holdfast.coordinator.views import SavepointPlaces
from holdfast.statebackends.errors import NotFoundError, NotLeaderError, StorageUnavailableError
from tests.coordinator.dispatcher.test_dispatcher import JOB, deployed, register, submitted
from tests.coordinator.doubles import submission, word_count
from tests.coordinator.rig import Rig
from tests.coordinator.stepping import Process
from tests.coordinator.world import DictStorage


def started() -> Process:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    process.settle()
    return process


def settled(process: Process) -> Look:
    found, coming = process.service(JOB).look()
    if coming is None:
        assert found is not None
        return found
    view = process.wait_for(coming)
    return Look(view, view.as_of_ms)


def beat(process: Process, session: str) -> None:
    message = Heartbeat(0, session, 1, ())
    process.call(JOB, lambda ticket: job_events.HeartbeatReceived(ticket, message))


# --------------------------------------------------------------------------------------------------- when one is captured


def test_first_reader_waits_for_a_capture_and_the_next_ones_share_it() -> None:
    process = started()
    first, second = process.service(JOB).look(), process.service(JOB).look()
    assert first[0] is None
    assert first[1] is not None
    assert first[1] is second[1]
    view = process.wait_for(first[1])
    assert view.overview.state == "CREATED"
    assert settled(process).published is view


def test_first_view_of_a_recovered_job_is_behind_its_first_event() -> None:
    process = started()
    deployed(process)
    process.settle()
    successor = Process(process.storage).begin()
    _, coming = successor.service(JOB).look()
    assert coming is not None
    assert successor.wait_for(coming).overview.state == "RECONCILING"


def test_capture_does_not_wait_for_what_waits_in_the_inbox() -> None:
    process = started()
    service = process.service(JOB)
    waiting = [service.query(lambda master: master.state) for _ in range(3)]
    _, coming = service.look()
    assert coming is not None
    assert service.turn()
    assert (coming.done(), [each.done() for each in waiting]) == (True, [True, False, False])


def test_view_of_a_job_that_changes_is_made_once_per_interval_and_only_for_readers() -> None:
    process = started()
    session = register(process, 0).session
    made: list[int] = []
    for _ in range(20):
        process.pass_time(100)
        beat(process, session)
        made.append(settled(process).published.changes)
    assert len(set(made)) == 4
    before = settled(process).published
    for _ in range(20):
        process.pass_time(100)
        beat(process, session)  # nobody looks
    found, coming = process.service(JOB).look()
    assert found is not None
    assert (found.published, found.as_of_ms) == (before, before.as_of_ms)
    assert coming is not None


def test_nothing_is_due_for_a_view_that_nobody_waits_for() -> None:
    process = started()
    settled(process)
    process.call(JOB, job_events.CancelRequested)
    service = process.service(JOB)
    deadline = service.next_deadline_ms()
    assert deadline is None or deadline > process.clock.now_ms
    assert not service.turn()


def test_quiet_job_is_not_woken_and_its_view_is_as_of_now() -> None:
    process = started()
    view = settled(process)
    process.clock.now_ms += 3_600_000
    later, coming = process.service(JOB).look()
    assert coming is None
    assert later is not None
    assert later.published is view.published
    assert later.as_of_ms == view.as_of_ms + 3_600_000
    assert later.moment.tag != view.moment.tag  # its age is in the bodies


# ----------------------------------------------------------------------------------------- what was answered is in the next view


def snapshot(ticket: int) -> job_events.Event:
    return job_events.SnapshotRequested(ticket, CheckpointKind.SAVEPOINT, "t" * 32, target="/savepoints")


def test_accepted_cancellation_is_in_the_next_view() -> None:
    process = started()
    deployed(process)
    assert settled(process).published.overview.state == "RUNNING"
    process.call(JOB, job_events.CancelRequested)
    assert settled(process).published.overview.state in ("CANCELLING", "CANCELED")


def test_changed_settings_are_in_the_next_view() -> None:
    process = started()
    settled(process)
    changes = {"checkpoint_interval_ms": 7_000}
    process.call(JOB, lambda ticket: job_events.SettingsRequested(ticket, changes))
    assert settled(process).published.config.checkpoint_interval_ms == 7_000


def test_what_a_trigger_poll_said_is_in_the_next_view() -> None:
    process = started()
    settled(process)
    process.call(JOB, snapshot)
    process.settle()
    settled(process)
    session = register(process, 0).session
    beat(process, session)
    view = process.wait_for(process.service(JOB).query(lambda master: master.triggers.get("t" * 32)))
    assert view is not None
    _, coming = process.service(JOB).look()
    assert coming is not None


def test_a_savepoint_that_a_trigger_poll_told_of_is_among_the_places_of_savepoints_and_readers_take_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = started()
    session = register(process, 0).session
    settled(process)
    assert queries(process).published_savepoint_places() == SavepointPlaces()
    triggers = process.service(JOB)._master.triggers
    triggers.begin("t" * 32, CheckpointKind.SAVEPOINT)
    completed = CompletedCheckpoint(7, CheckpointKind.SAVEPOINT, "/once/savepoint-7", 1_000)
    triggers.end(CompleteRequest(CheckpointRequest(CheckpointKind.SAVEPOINT, "t" * 32), 7, completed))
    beat(process, session)
    process.wait_for(process.service(JOB).query(lambda master: master.triggers.get("t" * 32)))
    settled(process)

    def refuse(read: object) -> None:
        pytest.fail("a reader took a turn")

    monkeypatch.setattr(process.service(JOB), "query", refuse)
    assert queries(process).published_savepoint_places() == SavepointPlaces(folders=frozenset({"/once/savepoint-7"}))


def test_new_state_of_the_job_is_in_the_next_view() -> None:
    process = started()
    assert settled(process).published.overview.state == "CREATED"
    assert deployed(process) == [1, 1]
    assert settled(process).published.overview.state == "RUNNING"


def test_last_view_of_a_job_that_was_closed_stays() -> None:
    process = started()
    service = process.service(JOB)
    _, coming = service.look()
    assert coming is not None
    service.close("enough")
    assert coming.done()
    last = settled(process)
    assert last.published.overview.state == "SUSPENDED"
    process.clock.now_ms += 10_000
    assert settled(process).published is last.published


# ------------------------------------------------------------------------------------------------------------- bad cases


def test_reader_takes_an_older_view_when_the_jobs_thread_is_held_up() -> None:
    process = started()
    session = register(process, 0).session
    older = settled(process)
    process.pass_time(600)
    beat(process, session)
    look = process.service(JOB).look()
    assert look[1] is not None
    found = wait_for_look(look, 0.01, process.wait_for)
    assert found == older


def test_capture_that_fails_is_an_error_of_the_reader_and_the_job_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process = started()

    def broken(*_: Any) -> PublishedJob:
        raise ValueError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(published, "capture", broken)
        _, coming = process.service(JOB).look()
        assert coming is not None
        with pytest.raises(StorageUnavailableError):
            process.wait_for(coming)
    assert settled(process).published.overview.state == "CREATED"
    with monkeypatch.context() as patched:
        patched.setattr(published, "capture", broken)
        beat(process, register(process, 0).session)
        process.service(JOB).close("enough")
    assert not process.service(JOB).failed
    assert settled(process).published.overview.state == "CREATED"


def test_job_that_was_never_shown_and_can_not_be_is_not_led(monkeypatch: pytest.MonkeyPatch) -> None:
    process = started()

    def broken(*_: Any) -> PublishedJob:
        raise ValueError("a bug")

    monkeypatch.setattr(published, "capture", broken)
    process.service(JOB).close("enough")
    with pytest.raises(NotLeaderError):
        process.service(JOB).look()


# -------------------------------------------------------------------------------------------------------------- captures


def metrics(rig: Rig, vertex: str, subtask: int, records: int) -> SubtaskMetrics:
    operator = next(each for each in rig.graph.vertices if each.vertex_id == vertex).operators[0]
    counts = (OperatorMetrics(operator.uid, records_in=records),)
    return SubtaskMetrics(vertex, subtask, records_in=records, operators=counts)


def test_captures_share_the_tasks_that_did_not_change_and_keep_those_that_did() -> None:
    rig = Rig().run()
    execution = rig.master.lifecycle.execution
    assert execution is not None
    first = execution.capture({0: "host-a"})
    vertex = rig.graph.vertices[0].vertex_id
    before = first.views()
    execution.measure([metrics(rig, vertex, 0, 5)])
    second = execution.capture({0: "host-a"})
    after = second.views()
    assert first.views() == before
    assert before[0].subtasks[0].metrics.records_in == 0
    assert after[0].subtasks[0].metrics.records_in == 5
    assert after[0].subtasks[0].metrics.operators[0].records_in == 5
    assert after[0].subtasks[1] is before[0].subtasks[1]
    assert all(new.subtasks[1] is old.subtasks[1] for new, old in zip(after, before, strict=True))
    assert execution.capture({0: "host-b"}).views()[0].subtasks[0].host == "host-b"


def test_view_of_an_older_capture_does_not_change_with_the_job() -> None:
    rig = Rig()
    older = capture(rig.master, 0, 1, monotonic_ms=0)
    rig.run()
    newer = capture(rig.master, 1, 2, monotonic_ms=0)
    assert {each.state for vertex in older.job().vertices for each in vertex.subtasks} == {TaskState.CREATED}
    assert {each.state for vertex in newer.job().vertices for each in vertex.subtasks} == {TaskState.RUNNING}
    assert "RUNNING" in newer.job().timestamps
    assert "RUNNING" not in older.job().timestamps


def test_view_of_a_pending_checkpoint_keeps_the_acknowledgements_that_it_was_made_with() -> None:
    rig = Rig().run()
    rig.feed_request()
    older = capture(rig.master, 0, 1, monotonic_ms=0)
    rig.acknowledge(0, 1, 1)
    newer = capture(rig.master, 1, 2, monotonic_ms=0)
    first, second = older.stats.checkpoint(1), newer.stats.checkpoint(1)
    assert first is not None
    assert second is not None
    assert (first.num_acknowledged_subtasks, second.num_acknowledged_subtasks) == (0, 2)
    assert sum(each.acknowledged for vertex in first.vertices.values() for each in vertex.subtasks) == 0
    assert sum(each.acknowledged for vertex in second.vertices.values() for each in vertex.subtasks) == 2


# --------------------------------------------------------------------------------------------------------------- queries


def queries(process: Process) -> Queries:
    host = process.host
    calls = JobCalls(host.registry, host.recovery, 1_000)
    return Queries(calls, host.registry, host.recovery, process.root, process.clock)


def test_moment_is_that_of_the_view_and_differs_whenever_the_job_does() -> None:
    process = started()
    settled(process)
    found = queries(process)
    moment = found.moment(JOB)
    assert moment == found.moment(JOB)
    assert found.job(JOB).now_ms == moment.as_of_ms
    assert found.numbers()[0].as_of_ms == moment.as_of_ms
    assert found.checkpoint_config(JOB).as_of_ms == moment.as_of_ms
    assert found.moment(None).as_of_ms == moment.as_of_ms
    deployed(process)
    settled(process)
    assert found.moment(JOB).tag != moment.tag
    assert found.moment(None).tag != moment.tag


@pytest.mark.parametrize("job_id", [JOB, None], ids=["one job", "all jobs"])
def test_moment_now_is_the_moment_and_says_what_is_to_be_waited_for(job_id: str | None) -> None:
    process = started()
    found = queries(process)
    unseen = found.moment_now(job_id)
    assert (unseen.moment, len(unseen.coming)) == (None, 1)
    process.settle()
    assert unseen.coming[0].done()
    settled(process)
    assert found.moment_now(job_id) == (found.moment(job_id), ())
    older = found.moment(job_id)
    process.call(JOB, job_events.CancelRequested)  # its user is to see it
    outdated = found.moment_now(job_id)
    assert outdated.moment is not None
    assert (outdated.moment.tag, len(outdated.coming)) == (older.tag, 1)
    settled(process)
    newer = found.moment(job_id)
    assert found.moment_now(job_id) == (newer, ())
    assert newer.tag != older.tag


def test_moment_now_of_jobs_on_record_and_of_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    process = started()
    process.call(JOB, job_events.CancelRequested)
    process.settle()
    found = queries(Process(process.storage, seed=9).begin())
    assert found.moment_now(JOB) == (found.moment(JOB), ())
    assert found.moment_now(None) == (found.moment(None), ())
    monkeypatch.setattr("holdfast.coordinator.dispatcher.reading.queries.JOBS_AT_ONCE_MAX", 0)
    assert found.moment_now(None) == (None, ())
    with pytest.raises(NotFoundError):
        found.moment_now("e" * 32)


def test_moment_now_of_all_jobs_without_one_that_can_not_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    process, other = two_jobs(monkeypatch)
    found = queries(process)
    process.service(other).close("enough")
    now = found.moment_now(None)
    assert now.moment is not None
    assert f"{other}-unseen-SUSPENDED" in now.moment.tag


def two_jobs(monkeypatch: pytest.MonkeyPatch) -> tuple[Process, str]:
    """A job that can be shown and one that can't; the second one's id."""
    process = started()
    other = process.submit(submission(word_count(), job_id="f" * 32)).job_id
    process.settle()
    before = published.capture

    def capture(master: JobMaster, *args: Any, **kwargs: Any) -> PublishedJob:
        if master.setup.job_id == other:
            raise ValueError("a bug")
        return before(master, *args, **kwargs)

    monkeypatch.setattr(published, "capture", capture)
    for job_id in (JOB, other):
        process.service(job_id).look()
    process.settle()
    return process, other


def test_a_job_that_can_not_be_shown_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    process, other = two_jobs(monkeypatch)
    found = queries(process)
    monkeypatch.setattr(process.service(other), "look", lambda: _unseen())
    assert {view.job_id: view.state for view in found.jobs()} == {JOB: "CREATED", other: "CREATED"}
    assert [view.overview.job_id for view in found.numbers()] == [JOB]
    assert found.cluster().jobs_running == 2
    assert [view.job.overview.job_id for view in found.whole_jobs()] == [JOB]
    assert f"{other}-unseen-CREATED" in found.moment(None).tag
    with pytest.raises(StorageUnavailableError):
        found.job(other)


def _unseen() -> tuple[Look | None, Future[PublishedJob] | None]:
    failed: Future[PublishedJob] = Future()
    failed.set_exception(StorageUnavailableError("the job could not be shown; the coordinator's log has the error"))
    return None, failed


def test_a_job_that_ended_before_it_could_be_shown_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    process, other = two_jobs(monkeypatch)
    process.service(other).close("enough")
    with pytest.raises(NotLeaderError):
        process.service(other).look()
    assert {view.job_id: view.state for view in queries(process).jobs()} == {JOB: "CREATED", other: "SUSPENDED"}


def test_a_job_whose_thread_is_held_up_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    process, other = two_jobs(monkeypatch)
    monkeypatch.setattr("holdfast.coordinator.dispatcher.calls.FIRST_VIEW_WAIT_MS", 50)
    monkeypatch.setattr(process.service(other), "look", lambda: (None, Future()))
    assert {view.job_id for view in queries(process).jobs()} == {JOB, other}


def test_a_whole_job_is_of_one_view(monkeypatch: pytest.MonkeyPatch) -> None:
    process = started()
    settled(process)
    looks: list[str] = []
    service = process.service(JOB)
    look = service.look

    def counted() -> tuple[Look | None, Future[PublishedJob] | None]:
        looks.append(JOB)
        return look()

    monkeypatch.setattr(service, "look", counted)
    found = queries(process)
    for whole in (found.whole_job(JOB), *found.whole_jobs(), *found.whole_jobs({JOB}, live_only=True)):
        assert whole.job == found.job(JOB)
        assert whole.checkpoints == found.checkpoints(JOB)
    assert len(looks) == 3 + 2 * 3
    assert found.whole_jobs({"e" * 32}) == ()


def test_moment_of_an_ended_job_that_is_only_on_record_has_the_same_tag_always() -> None:
    process = started()
    process.call(JOB, job_events.CancelRequested)
    process.settle()
    assert process.service(JOB).ended.is_set()
    later = Process(process.storage, seed=9).begin()
    first = queries(later).moment(JOB)
    later.clock.now_ms += 60_000
    second = queries(later).moment(JOB)
    assert (first.tag, second.as_of_ms - first.as_of_ms) == (second.tag, 60_000)
    assert queries(later).moment(None).tag == first.tag
