"""Dispatcher and JobMasterRunner on one thread: started, used, replaced, closed, and killed between any two operations."""

from __future__ import annotations

import gc
import logging
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.barriers.jobgraph import JobGraph, Submission
from holdfast.barriers.messages import (
    CheckpointKind,
    Deploy,
    Deployment,
    FailureReason,
    Registered,
    RegisterWorker,
    StatusBatch,
    SubtaskStatus,
    TaskState,
    TriggerCheckpoint,
)
from holdfast.coordinator.dispatcher.command_stream import Subscription
from holdfast.coordinator.dispatcher.dispatcher import Await, HostFlow, JobRegistry, RecoveryBackoff, run_host_flow
from holdfast.coordinator.dispatcher.submit import Starter, start_submission
from holdfast.coordinator.ha.records import AbortRecord, ClaimRecord, ResultRecord, derive_job_id
from holdfast.coordinator.ha.store import (
    abort_checkpoint,
    claim_checkpoint,
    decide_checkpoint,
    drop_checkpoint,
    read_job,
    write_result,
)
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.statebackends.errors import (
    FencedError,
    GraphError,
    InvalidConfigError,
    NotFoundError,
    RestoreError,
    StorageUnavailableError,
)
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.layout import JobPaths
from holdfast.statebackends.snapshot.metadata import SnapshotMetadata, encode_metadata
from holdfast.statebackends.storage.port import DeleteFile, DeleteFolder, Operation, PutIfAbsent, one_by_one, run_flow
from tests.coordinator.doubles import operator, submission, word_count
from tests.coordinator.stepping import Killed, Process, retry_recoveries
from tests.coordinator.world import DictStorage, Steps

JOB = derive_job_id("word count")


def submitted(nonce: str = "driver", *, interval_ms: int | None = None) -> Submission:
    return submission(word_count(checkpoint_interval_ms=interval_ms), driver_nonce=nonce)


def registration(process: Process, slot: int, *, submission: int = 1) -> RegisterWorker:
    nonce = f"worker-{submission}-{slot}"
    address = f"tcp://localhost:{7000 + slot}"
    return RegisterWorker(JOB, slot, submission, 0, nonce, 1000 + slot, "localhost", address, process.host.directory_nonce)


def register(process: Process, slot: int, *, submission: int = 1) -> Registered:
    message = registration(process, slot, submission=submission)
    answer = process.call(JOB, lambda ticket: job_events.RegistrationReceived(ticket, message))
    assert isinstance(answer, Registered)
    return answer


def open_stream(process: Process, slot: int, *, submission: int = 1) -> Subscription:
    registered = register(process, slot, submission=submission)
    subscription, opened = process.service(JOB).subscribe(slot, registered.session, 0)
    process.wait_for(opened)
    return subscription


def deployed(process: Process, *, submission: int = 1) -> list[int]:
    """Register both workers; the attempts that they are told to deploy."""
    streams = [open_stream(process, slot, submission=submission) for slot in range(2)]
    process.settle()
    commands = [numbered.command for stream in streams for numbered in stream.take()]
    return [command.deployment.attempt for command in commands if isinstance(command, Deploy)]


def run_tasks(process: Process, slot: int, session: str, deployment: Deployment) -> None:
    """Report every task of a deployment as running."""
    statuses = tuple(
        SubtaskStatus(deployment.attempt, task.vertex, task.subtask, TaskState.RUNNING) for task in deployment.subtasks
    )
    batch = StatusBatch(1, slot, session, statuses)
    process.call(JOB, lambda ticket: job_events.StatesReceived(ticket, batch))


# ------------------------------------------------------------------------------------------------------------ one thread


def test_submitted_job_deploys_once_both_workers_registered() -> None:
    process = Process(DictStorage()).begin()
    accepted = process.submit(submitted())
    assert (accepted.job_id, accepted.submission, accepted.epoch, accepted.slots) == (JOB, 1, 1, 2)
    assert deployed(process) == [1, 1]


def test_repeated_submission_of_the_same_driver_is_answered_alike() -> None:
    process = Process(DictStorage()).begin()
    assert process.submit(submitted()) == process.submit(submitted())


def test_invalid_submission_yields_nothing() -> None:
    process = Process(DictStorage()).begin()
    done = len(process.operations)
    with pytest.raises(InvalidConfigError):
        process.submit(submission(word_count(), job_id="no id"))
    assert len(process.operations) == done


def graph_with(index: int = 1, **changes: Any) -> JobGraph:
    """word_count, one vertex of it changed."""
    graph = word_count()
    vertices = list(graph.vertices)
    vertices[index] = replace(vertices[index], **changes)
    return replace(graph, vertices=tuple(vertices))


def graph_with_edge(**changes: Any) -> JobGraph:
    """word_count, its first edge changed."""
    graph = word_count()
    return replace(graph, edges=(replace(graph.edges[0], **changes), *graph.edges[1:]))


@pytest.mark.parametrize(
    ("graph", "problem"),
    [
        (graph_with_edge(input_index=1), "not numbered from 0 on"),
        (graph_with_edge(input_index=-1), "not numbered from 0 on"),
        (graph_with_edge(input_index=2**60), "not numbered from 0 on"),
        (graph_with_edge(source_operator="nothing"), "operators and edges"),
        (replace(word_count(), edges=word_count().edges[:1] * 2), "operators and edges"),
        (graph_with(chain_side_outputs={"nothing": "late"}), "operators and edges"),
        (graph_with(operators=()), "a vertex without operators"),
        (graph_with(0, operators=()), "a vertex without operators"),
        (graph_with(vertex_id=word_count().vertices[0].vertex_id), "don't fit together"),
        (graph_with(vertex_id="f" * 32), "don't fit together"),
        (graph_with(max_parallelism=32_769), "max parallelism 32769"),
        (graph_with(parallelism=0), "parallelism 0"),
        (graph_with(operators=(replace(operator("count", "process"), uid=""),)), "without uid"),
        (graph_with(operators=(operator("count", "process", StateMeta("", "value", "int", "utf8")),)), "without name"),
        (graph_with(operators=(operator("source", "process"),)), "given twice"),
    ],
)
def test_a_graph_that_no_environment_builds_is_refused_before_anything_is_written(graph: JobGraph, problem: str) -> None:
    """None of its checkpoints could ever be written, or its tasks be deployed."""
    process = Process(DictStorage()).begin()
    done = len(process.operations)
    with pytest.raises(GraphError, match=problem):
        process.submit(submission(graph))
    assert len(process.operations) == done


def test_deadline_is_a_turn_of_its_own_when_time_has_come() -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    deployed(process)
    service = process.service(JOB)
    deadline = service.next_deadline_ms()
    assert deadline is not None
    assert not service.turn()
    process.clock.now_ms = deadline - 1
    assert not service.turn()
    process.clock.now_ms = deadline
    assert service.turn()


def test_silent_workers_are_lost_by_virtual_time_alone() -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    deployed(process)
    for _ in range(100):
        process.pass_time(1_000)
    state = process.service(JOB).query(lambda master: master.state)
    assert process.wait_for(state) is JobState.RESTARTING


def test_query_waits_for_its_turn_and_is_answered_at_once_when_closed() -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    service = process.service(JOB)
    waiting = service.query(lambda master: master.state)
    assert not waiting.done()
    assert process.wait_for(waiting) is JobState.CREATED
    service.close("enough")
    assert service.query(lambda master: master.state).result(0) is JobState.SUSPENDED


def test_close_on_one_thread_ends_streams_and_fails_calls() -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    stream = open_stream(process, 0)
    service = process.service(JOB)
    late = service.call(job_events.CancelRequested)
    service.close("the coordinator stops")
    service.close("again")
    assert service.closed
    assert service.ended.is_set()
    assert stream.closed
    assert late.done()
    assert not service.turn()
    assert service.next_deadline_ms() is None
    with pytest.raises(StorageUnavailableError):
        service.call(job_events.CancelRequested).result(0)


def test_close_during_a_turn_returns_and_takes_effect_behind_it() -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    service = process.service(JOB)
    states: list[bool] = []

    def close(_: Future[JobState]) -> None:
        service.close("from within")
        states.append(service.closed)

    service.query(lambda master: master.state).add_done_callback(close)
    process.settle()
    assert (states, service.closed) == ([False], True)


def test_locks_of_jobs_are_kept_while_they_are_held_alone() -> None:
    registry = JobRegistry(jobs_max=2)
    with registry.lock_of(JOB):
        for number in range(1_000):  # ids that strangers name
            with registry.lock_of(f"{number:032x}"):
                pass
        gc.collect()
        assert not registry.lock_of(JOB).acquire(blocking=False), "a job has one lock"
        assert registry.lock_of("another").acquire(blocking=False)
        assert len(registry._job_locks) <= 2
    assert registry.lock_of(JOB).acquire(blocking=False)


def test_the_same_seed_performs_the_same_operations() -> None:
    def operations() -> list[object]:
        process = Process(DictStorage(), seed=7).begin()
        process.submit(submitted())
        deployed(process)
        process.submit(submitted("second"))
        deployed(process, submission=2)
        process.service(JOB).close("end")
        return list(process.operations)

    assert operations() == operations()


# --------------------------------------------------------------------------------------------------- what can't be told


def test_flow_that_fails_in_an_undescribed_way_ends_the_leadership(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    for slot in range(2):
        register(process, slot)
    process.turn()
    running = process.runner.flows.pop()
    with caplog.at_level(logging.CRITICAL):
        running.ended(None, ZeroDivisionError("a bug"))
    process.settle()
    assert process.service(JOB).ended.is_set()
    assert "PrepareAttempt failed unexpectedly" in caplog.text


def test_core_that_fails_closes_its_service(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    service = process.service(JOB)
    service.post(job_events.AttemptPrepared)  # type: ignore[arg-type]  # no event at all
    with caplog.at_level(logging.CRITICAL):
        process.settle()
    assert service.closed
    assert service.ended.is_set()
    assert "the core failed" in caplog.text


def test_end_of_the_process_passes_through_a_turn_unhandled() -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted())
    service = process.service(JOB)

    def die(*_: object, **__: object) -> None:
        raise Killed

    process.runner.run = die  # type: ignore[method-assign]
    for slot in range(2):
        message = registration(process, slot)
        service.call(lambda ticket, message=message: job_events.RegistrationReceived(ticket, message))  # type: ignore[misc]
    with pytest.raises(Killed):
        process.settle()
    assert not service.closed


# ---------------------------------------------------------------------------------------------------------------- crashes


def start(process: Process, *submissions: Submission) -> Process:
    process.begin()
    for entry in submissions:
        process.submit(entry)
    return process


def kill_during(storage: DictStorage, operations: int, *submissions: Submission) -> None:
    """A process that dies after that many operations; what it was doing is simply not continued."""
    with pytest.raises(Killed):
        start(Process(storage, operations_max=operations), *submissions)


def test_kill_between_any_two_operations_of_a_submission_leaves_nothing_or_the_job() -> None:
    total = len(start(Process(DictStorage()), submitted()).operations)
    assert total > 10
    led = 0
    for operations in range(1, total + 1):
        storage = DictStorage()
        kill_during(storage, operations, submitted())
        process = Process(storage, seed=1).begin()
        recovered = process.host.registry.find(JOB)
        recorded = any(path.startswith(f"{JOB}/submissions/") for path in storage.files)
        assert (recovered is not None) == recorded
        led += recorded
        accepted = process.submit(submitted())
        assert accepted.submission == 1
        assert deployed(process) == [1, 1]
    assert 0 < led < total


def test_kill_between_any_two_operations_of_a_replacement_leaves_the_older_or_the_newer_submission() -> None:
    first, second = submitted("first"), submitted("second")
    before = len(start(Process(DictStorage()), first).operations)
    total = len(start(Process(DictStorage()), first, second).operations)
    seen: set[int] = set()
    for operations in range(before, total + 1):
        storage = DictStorage()
        kill_during(storage, operations, first, second)
        process = Process(storage, seed=1).begin()
        seen.add(process.service(JOB).submission)
        number = process.submit(second).submission  # a leader that leads on takes a number, so that no older one can
        assert number in (2, 3)
        assert len(deployed(process, submission=number)) == 2
    assert seen == {1, 2}


def test_kill_between_any_two_operations_of_a_recovery_is_recovered_from() -> None:
    def left_behind() -> DictStorage:
        storage = DictStorage()
        first = Process(storage).begin()
        first.submit(submitted())
        deployed(first)
        return storage

    probe = Process(left_behind(), seed=1).begin()
    for operations in range(1, len(probe.operations) + 1):
        storage = left_behind()
        with pytest.raises(Killed):
            Process(storage, seed=1, operations_max=operations).begin()
        process = Process(storage, seed=2).begin()
        assert process.service(JOB).epoch in (2, 3)
        assert process.submit(submitted()).submission == 1


def test_replaced_job_decides_its_pending_checkpoint_before_the_newer_one_leads() -> None:
    process = Process(DictStorage()).begin()
    process.submit(submitted("first", interval_ms=10))
    sessions = [register(process, slot).session for slot in range(2)]
    streams = [process.service(JOB).subscribe(slot, session, 0)[0] for slot, session in enumerate(sessions)]
    process.settle()
    for slot, stream in enumerate(streams):
        for numbered in stream.take():
            if isinstance(numbered.command, Deploy):
                run_tasks(process, slot, sessions[slot], numbered.command.deployment)
    process.pass_time(100)
    assert any(isinstance(numbered.command, TriggerCheckpoint) for numbered in streams[0].take())
    older = process.service(JOB)
    process.submit(submitted("second"))
    paths = [operation.path for operation in process.operations if isinstance(operation, PutIfAbsent)]
    assert paths.index(f"{JOB}/chk-1/_metadata") < paths.index(f"{JOB}/leader/2")
    assert older.closed
    assert all(stream.closed for stream in streams)
    with pytest.raises(FencedError):
        register(process, 0, submission=1)


def test_paused_leader_loses_the_job_that_another_process_took_over() -> None:
    storage = DictStorage()
    older = Process(storage).begin()
    older.submit(submitted())
    newer = Process(storage, seed=1).begin()
    assert newer.service(JOB).epoch == 2
    for slot in range(2):
        register(older, slot)
    older.settle()
    assert older.service(JOB).ended.is_set()
    assert deployed(newer) == [2, 2]


def test_job_that_ends_while_it_is_taken_over_is_remembered_as_ended() -> None:
    """The leader before writes the result between any two reads of its successor: the job is ended, not damaged."""
    ended = 0
    for operations in range(1, 40):
        storage = DictStorage()
        start(Process(storage), submitted())
        process = Process(storage, seed=1)
        run_host_flow(process.host.open(), storage, wait_for=lambda future: future.result())
        flow: Any = one_by_one(process.host.recover_job(JOB))  # type: ignore[arg-type]
        try:
            operation = next(flow)
            for _ in range(operations):
                assert not isinstance(operation, Await)
                operation = flow.send(storage.execute(operation))
            record = ResultRecord(1, "FINISHED", 1, "older leader", 0, 0)
            run_flow(write_result(JobPaths(JOB), record), storage)
            while True:
                assert not isinstance(operation, Await)
                operation = flow.send(storage.execute(operation))
        except StopIteration:
            pass
        registry = process.host.registry
        remembered = registry.recorded(JOB)
        ended += remembered is not None
        assert remembered is not None or registry.find(JOB) is not None
    assert ended > 3


class _Failing(DictStorage):
    """Every call from the n-th on fails, until it is mended."""

    def __init__(self, files: dict[str, bytes], calls: int) -> None:
        super().__init__()
        self.files = dict(files)
        self.calls = calls

    def execute(self, operation: Operation) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise StorageUnavailableError("storage is away")
        return super().execute(operation)


def perform(process: Process, flow: HostFlow[None], storage: DictStorage) -> None:
    run_host_flow(flow, storage, wait_for=lambda future: future.result())


def test_job_that_storage_kept_from_being_recovered_is_led_once_it_works_again() -> None:
    """It used to stay unled until somebody restarted the coordinator."""
    first = DictStorage()
    start(Process(first), submitted())
    waited = 0
    for calls in range(1, 60):
        storage = _Failing(first.files, calls)
        process = Process(storage, seed=1)
        perform(process, process.host.recover_job(JOB), storage)
        if process.host.registry.find(JOB) is not None:
            break
        waited += 1
        assert process.host.unrecovered == {JOB}
        with pytest.raises(StorageUnavailableError):
            process.host.registry.led(JOB)
        storage.calls = 10_000
        perform(process, retry_recoveries(process.host), storage)
        assert process.service(JOB).epoch >= 2
        assert process.host.unrecovered == set()
    assert waited > 10


def test_what_an_ended_job_does_not_keep_goes_when_its_last_leader_died_over_it() -> None:
    """Result first, deletions after: a leader that dies between them leaves them to the next one."""
    storage = DictStorage()
    start(Process(storage), submitted())
    paths = JobPaths(JOB)
    claim = ClaimRecord(1, 1, 1, 1, CheckpointKind.CHECKPOINT, paths.checkpoint(1), "leader")
    run_flow(claim_checkpoint(paths, claim), storage)
    run_flow(abort_checkpoint(paths, AbortRecord(1, FailureReason.EXPIRED, 1, "leader")), storage)
    run_flow(write_result(paths, ResultRecord(1, "FINISHED", 1, "leader", 1, 0)), storage)
    left_behind = dict(storage.files)
    probe = Process(storage, seed=1).begin()
    for operations in range(1, len(probe.operations) + 1):
        torn = DictStorage()
        torn.files = dict(left_behind)
        with pytest.raises(Killed):
            Process(torn, seed=1, operations_max=operations).begin()
        process = Process(torn, seed=2).begin()
        assert process.host.registry.recorded(JOB) is not None
        assert not any("/chk-" in path for path in torn.files)


def test_what_a_failed_job_keeps_stays() -> None:
    storage = DictStorage()
    start(Process(storage), submitted())
    paths = JobPaths(JOB)
    claim = ClaimRecord(1, 1, 1, 1, CheckpointKind.CHECKPOINT, paths.checkpoint(1), "leader")
    run_flow(claim_checkpoint(paths, claim), storage)
    run_flow(write_result(paths, ResultRecord(1, "FAILED", 1, "leader", 1, 0)), storage)
    Process(storage, seed=1).begin()
    assert paths.claim(1) in storage.files


def test_id_that_a_cut_off_restart_took_is_not_taken_again() -> None:
    """A leader fences the next id before it records its submission; should it die in between, the id is used up."""
    storage = DictStorage()
    start(Process(storage), submitted())
    paths = JobPaths(JOB)
    run_flow(write_result(paths, ResultRecord(1, "FINISHED", 1, "leader", 4, 4)), storage)
    begun = ClaimRecord(5, 2, 0, 0, CheckpointKind.CHECKPOINT, paths.checkpoint(5), "starter")
    run_flow(claim_checkpoint(paths, begun), storage)
    Process(storage, seed=1).begin()
    assert paths.claim(5) in storage.files
    process = Process(storage, seed=2).begin()
    process.submit(replace(submitted("next"), fresh=True))
    first = run_flow(read_job(paths), storage).newest_submission
    assert first is not None
    assert first.first_checkpoint_id > 5


def test_job_that_an_older_coordinator_started_meanwhile_is_found_when_somebody_asks() -> None:
    """It was paused over the submission, woke behind its successor's start, and is gone: nobody else will lead the job."""
    storage = DictStorage()
    newer = Process(storage, seed=1).begin()
    start(Process(storage), submitted())
    assert newer.host.registry.find(JOB) is None
    newer.host.look_for(JOB)
    newer.host.look_for("../../etc")
    assert newer.host.unrecovered == {JOB}
    perform(newer, retry_recoveries(newer.host), storage)
    assert newer.service(JOB).epoch == 2
    newer.host.look_for("0" * 32)
    perform(newer, retry_recoveries(newer.host), storage)
    assert newer.host.registry.find("0" * 32) is None
    assert newer.host.unrecovered == set()


class _Undeletable(DictStorage):
    """Read and write, but delete nothing."""

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, DeleteFile | DeleteFolder):
            raise StorageUnavailableError("not permitted")
        return super().execute(operation)


def ended_with_leftover(storage: DictStorage) -> JobPaths:
    """A job that is FINISHED; its last leader died before it deleted the completed checkpoint 1."""
    start(Process(storage), submitted())
    paths = JobPaths(JOB)
    run_flow(claim_checkpoint(paths, ClaimRecord(1, 1, 1, 1, CheckpointKind.CHECKPOINT, paths.checkpoint(1), "leader")), storage)
    metadata = SnapshotMetadata(
        job_id=JOB,
        job_name="j",
        checkpoint_id=1,
        kind="checkpoint",
        attempt=1,
        epoch=1,
        trigger_timestamp_ms=1,
        completion_timestamp_ms=1,
    )
    run_flow(decide_checkpoint(paths, 1, encode_metadata(metadata)), storage)
    run_flow(write_result(paths, ResultRecord(1, "FINISHED", 1, "leader", 1, 1)), storage)
    return paths


def test_ended_job_can_be_read_though_what_it_does_not_keep_can_not_be_deleted() -> None:
    """How a job ended is known whatever becomes of its files; its workers must be sent home, not kept waiting."""
    storage = _Undeletable()
    paths = ended_with_leftover(storage)
    process = Process(storage, seed=1).begin()
    recorded = process.host.registry.recorded(JOB)
    assert recorded is not None
    assert recorded.result is not None
    assert recorded.result.state == "FINISHED"
    assert process.host.unrecovered == {JOB}
    working = DictStorage()
    working.files = storage.files
    perform(process, retry_recoveries(process.host), working)
    assert paths.claim(1) not in working.files
    assert process.host.unrecovered == set()


def test_job_that_turns_out_never_to_have_begun_is_not_called_broken() -> None:
    storage = _Failing({}, 0)
    process = Process(storage)
    perform(process, process.host.recover_job(JOB), storage)
    storage.calls = 10_000
    perform(process, retry_recoveries(process.host), storage)
    with pytest.raises(NotFoundError):
        process.host.registry.led(JOB)


def test_start_of_a_job_again_bears_with_a_deletion_that_was_under_way() -> None:
    """A deletion that looked who leads before the new leader came may reach storage at any moment behind that."""
    before = DictStorage()
    paths = ended_with_leftover(before)
    starter = Starter("starter", "", "", 1)
    again = replace(submitted("next"), fresh=True)
    for operations in range(1, 200):
        storage = DictStorage()
        storage.files = dict(before.files)
        steps = Steps(start_submission(JOB, again, starter), storage)
        for _ in range(operations):
            if not steps.done:
                steps.step()
        if steps.done:
            break
        run_flow(drop_checkpoint(paths, 1), storage)
        assert steps.run().submission == 2
    assert operations > 20


def test_job_that_can_not_be_recovered_is_tried_less_and_less_often() -> None:
    """Each try writes an epoch: once a second for a day, on a folder that somebody made read-only, they were 86,400 files."""
    backoff = RecoveryBackoff()
    tried = [number for number in range(1, 301) if backoff.due(["a"])]
    assert tried == [1, 3, 7, 15, 31, 63, 127, 191, 255]
    assert backoff.due(["a", "new"]) == ["new"]
    assert backoff.due([]) == []
    assert backoff.due(["a"]) == ["a"]


def test_job_does_not_go_on_from_what_its_end_does_not_keep() -> None:
    """It may be gone a moment later: its last leader is still deleting it, or the next recovery does."""
    storage = DictStorage()
    ended_with_leftover(storage)
    for restore in ("latest", "1"):
        with pytest.raises((RestoreError, NotFoundError)):
            run_flow(start_submission(JOB, replace(submitted("next"), restore=restore), Starter("starter", "", "", 1)), storage)


def test_leader_that_only_waits_notices_that_another_one_leads() -> None:
    """It writes nothing, so no write tells it; its workers would stay with it for ever."""
    storage = DictStorage()
    older = start(Process(storage), submitted())
    perform(older, older.host.check_leaderships(), storage)
    older.settle()
    assert not older.service(JOB).ended.is_set()
    Process(storage, seed=1).begin()
    perform(older, older.host.check_leaderships(), storage)
    older.settle()
    assert older.service(JOB).ended.is_set()


def test_who_slept_since_it_took_its_epoch_takes_no_id_from_the_leader_that_lives() -> None:
    storage = DictStorage()
    first = Process(storage).begin()
    first.submit(submitted())
    first.service(JOB).close("it stops")
    asleep = Process(storage, seed=1)
    asleep.drive(asleep.host.open())
    steps = Steps(asleep.host.recover(), asleep)
    while JobPaths(JOB).leader(2) not in storage.files:
        steps.step()
    newer = Process(storage, seed=2).begin()
    claimed = sorted(path for path in storage.files if path.endswith("/_claim"))
    while not steps.done:
        steps.step()
    assert (newer.service(JOB).epoch, asleep.host.registry.find(JOB)) == (3, None)
    assert sorted(path for path in storage.files if path.endswith("/_claim")) == claimed
    with pytest.raises(StorageUnavailableError, match="epoch 3"):
        asleep.service(JOB)
