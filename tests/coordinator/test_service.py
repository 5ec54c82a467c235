"""CoordinatorService end to end, with workers that are doubles: submit, run, kill, restart, stop, restore, cancel."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.barriers.jobgraph import ClaimMode
from holdfast.barriers.messages import AckStatus, Heartbeat, TaskState
from holdfast.coordinator.config import ServiceConfig
from holdfast.coordinator.history import recorder
from holdfast.coordinator.history.store import HistoryQuery
from holdfast.coordinator.service import CoordinatorService
from holdfast.coordinator.views import SavepointPlaces
from holdfast.statebackends.errors import (
    BackendMismatchError,
    FencedError,
    InvalidConfigError,
    JobExistsError,
    NotFoundError,
    OutputMayRepeatError,
    RecoveringError,
    RestoreError,
    SnapshotClaimedError,
    StateDirectoryNotSharedError,
    StorageUnavailableError,
    UnclaimedStateError,
)
from holdfast.statebackends.handles import InlineHandle
from holdfast.statebackends.layout import HISTORY_FOLDER, JobPaths
from holdfast.statebackends.snapshot.metadata import NATIVE_PROPERTY, decode_metadata
from holdfast.statebackends.storage.directory import LocalStorage
from holdfast.statebackends.storage.port import DescribeFiles, ListFolder, Operation, PutIfAbsent, Storage
from tests.coordinator.doubles import (
    COUNTS,
    NO_RESTARTS,
    WAIT_S,
    Crew,
    FakeWorker,
    leading,
    operator,
    submission,
    vertex,
    wait_until,
    word_count,
)

Open = Callable[[], CoordinatorService]


@pytest.fixture
def open_service(tmp_path: Path) -> Iterator[Open]:
    """Opens coordinators on one state directory; closes all of them."""
    opened: list[CoordinatorService] = []

    def make() -> CoordinatorService:
        config = ServiceConfig(str(tmp_path / "state"), seed=len(opened), view_interval_ms=0)  # tests wait for what holds now
        service = leading(config)
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


# ------------------------------------------------------------------------------------------------------------- failover


def test_killed_worker_fails_the_job_over_from_the_newest_checkpoint(open_service: Open) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(2)
    crew.replace(1).register()
    crew.until(lambda: crew.states() == [2, 2], what="attempt 2")
    for worker in crew.workers:
        assert worker.deployment is not None
        assert worker.deployment.restored_checkpoint_id >= 2
        assert worker.deployment.addresses == {0: "tcp://localhost:7000", 1: "tcp://localhost:7001"}
    assert worker.deployment is not None
    restored = worker.deployment.restored_checkpoint_id
    crew.until(lambda: min(crew.workers[0].completed[-1:]) > restored, what="a checkpoint of attempt 2")
    view = service.job(crew.job_id)
    assert (view.overview.state, view.restarts, view.attempt) == ("RUNNING", 1, 2)


def test_failures_seen_by_survivors_before_the_successor_comes_count_once(open_service: Open) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20, parallelism=3)
    crew.until_completed(1)
    successor = crew.replace(2)
    for survivor in crew.workers[:2]:
        survivor.fail("ProtocolError: peer lost")
    crew.until_state("RESTARTING")
    crew.pump()
    successor.register()
    crew.until(lambda: crew.states() == [2, 2, 2], what="attempt 2")
    assert service.job(crew.job_id).restarts == 1
    assert service.job(crew.job_id).exceptions[0].error == "ProtocolError: peer lost"


def test_worker_that_comes_back_within_the_grace_changes_nothing(open_service: Open) -> None:
    service = open_service()
    crew = running(service)
    crew.workers[0].die()
    crew.workers[0].register()
    crew.pump()
    assert crew.states() == [1, 1]
    assert service.job(crew.job_id).restarts == 0


@pytest.mark.parametrize("setting", ["heartbeat_timeout_ms", "checkpoint_interval_ms", "checkpoint_timeout_ms"])
def test_a_time_that_never_comes_ends_no_owner_thread(open_service: Open, setting: str) -> None:
    """The largest number of ms stands for "never" in Flink, and is longer than a thread can be told to wait."""
    service = open_service()
    crew = running(service, **{setting: 2**63 - 1})
    finished(crew, service.request_checkpoint(crew.job_id))
    assert service.checkpoints(crew.job_id).counts.completed == 1


def test_lost_worker_without_successor_leaves_the_job_restarting(open_service: Open) -> None:
    service = open_service()
    crew = running(service)
    crew.workers[1].die()
    crew.until_state("RESTARTING")
    view = service.job(crew.job_id)
    assert [worker.registered for worker in view.workers] == [True, False]
    assert view.failure is not None
    assert "WorkerLost" in view.failure


def test_zombie_is_refused_after_its_successor_registered(open_service: Open) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20)
    zombie = crew.workers[1]
    crew.workers[1] = FakeWorker(service, crew.job_id, 1, task_attempt=1)
    crew.workers[1].register()
    zombie.pump()
    assert zombie.shutdown is not None
    assert zombie.stream is not None
    assert zombie.stream.closed
    with pytest.raises(FencedError):
        zombie.register()
    with pytest.raises(FencedError):
        zombie.acknowledge(1)
    crew.until(lambda: crew.states() == [2, 2], what="attempt 2")


def test_task_failure_with_no_restarts_fails_the_job_with_its_cause(open_service: Open) -> None:
    service = open_service()
    crew = running(service, restart=NO_RESTARTS, checkpoint_interval_ms=20)
    crew.until_completed(1)
    crew.workers[0].fail("UserFunctionError: operator 'count' raised")
    crew.until_state("FAILED")
    view = service.job(crew.job_id)
    assert view.failure == "UserFunctionError: operator 'count' raised"
    crew.until(lambda: all(worker.shutdown for worker in crew.workers), what="shutdown")
    with pytest.raises(JobExistsError, match="restore='latest'"):
        service.submit(submission(word_count()))


def test_a_job_whose_driver_left_waits_for_the_next_one_though_it_may_not_restart(open_service: Open) -> None:
    service = open_service()
    crew = running(service, restart=NO_RESTARTS, checkpoint_interval_ms=20)
    crew.until_completed(1)
    with pytest.raises(FencedError):
        service.leave(crew.job_id, 2)
    for _ in range(2):
        service.leave(crew.job_id, 1)
    for worker in crew.workers:
        worker.die()
    crew.until_state("RESTARTING")
    view = service.job(crew.job_id)
    assert (view.restarts, view.exceptions, "left" in str(view.failure)) == (0, (), True)
    accepted = service.submit(submission(word_count(restart=NO_RESTARTS), driver_nonce="second"))
    assert (accepted.submission, accepted.restored_checkpoint_id >= 1) == (2, True)
    newer = Crew(service, crew.job_id, 2, submission=2)
    newer.register()
    newer.until(lambda: newer.states() == [2, 2], what="attempt 2")
    service.cancel(crew.job_id)
    newer.until_state("CANCELED")
    service.leave(crew.job_id, 2)
    assert service.job(crew.job_id).overview.state == "CANCELED"


def test_acknowledgements_of_a_fenced_attempt_are_refused_and_discarded(open_service: Open) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(1)
    crew.workers[1].acknowledges = False
    crew.until(lambda: service.checkpoints(crew.job_id).counts.in_progress == 1, what="a pending checkpoint")
    pending = service.checkpoints(crew.job_id).history[0].checkpoint_id
    crew.replace(1).register()
    crew.until(lambda: crew.states() == [2, 2], what="attempt 2")
    with pytest.raises(FencedError):
        crew.workers[0].acknowledge(pending, attempt=1)
    assert service.checkpoint(crew.job_id, pending).failure_reason == "job_failure"


# --------------------------------------------------------------------------------------------------- coordinator restart


def test_workers_run_on_through_a_restart_of_the_coordinator(open_service: Open) -> None:
    first = open_service()
    crew = running(first, checkpoint_interval_ms=20)
    crew.until_completed(2)
    first.close()
    second = open_service()
    assert second.job(crew.job_id).overview.state == "RECONCILING"
    for worker in crew.workers:
        worker.service = second
        worker.register()
    crew.service = second
    crew.until_state("RUNNING")
    crew.until_completed(2)
    assert all(worker.deployed == [1] for worker in crew.workers)
    assert second.job(crew.job_id).restarts == 0
    assert second.job(crew.job_id).epoch == 2


def test_a_job_whose_records_can_not_be_read_is_named_and_no_list_has_it(open_service: Open, tmp_path: Path) -> None:
    first = open_service()
    crew = running(first)
    assert first.broken_jobs() == {}
    first.close()
    record = tmp_path / "state" / JobPaths(crew.job_id).submission(1)
    content = record.read_bytes()
    record.write_bytes(b"{")
    second = open_service()
    wait_until(lambda: second.ready, lambda: time.sleep(0.001), what="recovery")
    before = second.moment()
    assert second.jobs() == second.numbers() == ()
    assert list(second.broken_jobs()) == [crew.job_id]
    assert "submissions/1.json can't be decoded" in second.broken_jobs()[crew.job_id]
    assert crew.job_id in before.tag, "who asks again is not told that nothing has changed"
    second.close()
    record.write_bytes(content)
    third = open_service()
    assert third.job(crew.job_id).overview.state == "RECONCILING"
    assert third.broken_jobs() == {}


def test_a_new_leader_shows_what_the_one_before_has_completed_and_counts_none_of_it(open_service: Open, tmp_path: Path) -> None:
    first = open_service()
    crew = running(first)
    first.request_checkpoint(crew.job_id)
    crew.until_completed(1)
    number = first.checkpoints(crew.job_id).history[0].checkpoint_id
    first.request_savepoint(crew.job_id, str(tmp_path / "savepoints"))
    crew.until_completed(2)
    savepoint = first.checkpoints(crew.job_id).history[0].location
    first.close()
    second = open_service()
    stats = second.checkpoints(crew.job_id)
    assert [(view.checkpoint_id, view.status, view.is_savepoint) for view in stats.history] == [
        (number + 1, "COMPLETED", True),
        (number, "COMPLETED", False),
    ]
    assert (stats.counts.completed, stats.counts.total, stats.recent) == (0, 0, ())
    newest = stats.latest_completed
    assert newest is not None
    assert (newest.checkpoint_id, newest.end_to_end_ms, newest.checkpointed_size) == (number, -1, -1)
    assert newest.trigger_ms > 0
    assert stats.latest_savepoint is not None
    assert (stats.latest_savepoint.checkpoint_id, stats.latest_savepoint.location) == (number + 1, savepoint)
    assert second.checkpoint(crew.job_id, number).location == newest.location
    (numbers,) = second.numbers()
    assert numbers.latest_completed == newest, "an alert about its age must not fall silent"
    assert second.explain(crew.job_id, number).summary.startswith(f"checkpoint {number} completed")


def test_restarted_coordinator_aborts_what_was_pending_and_answers_its_acks(open_service: Open, tmp_path: Path) -> None:
    first = open_service()
    crew = running(first, checkpoint_interval_ms=20)
    crew.until_completed(1)
    crew.workers[1].acknowledges = False
    crew.until(lambda: first.checkpoints(crew.job_id).counts.in_progress == 1, what="a pending checkpoint")
    pending = first.checkpoints(crew.job_id).history[0].checkpoint_id
    first.close()
    second = open_service()
    decision = (tmp_path / "state" / crew.job_id / f"chk-{pending}" / "_metadata").read_text()
    assert '"leader_changed"' in decision
    crew.service = second
    for worker in crew.workers:
        worker.service = second
        worker.acknowledges = True
        worker.register()
    crew.until_completed(1)
    newest = second.checkpoints(crew.job_id).history[0].checkpoint_id
    assert newest > pending


def test_worker_that_restarted_meanwhile_makes_the_new_coordinator_fail_over(open_service: Open) -> None:
    first = open_service()
    crew = running(first, checkpoint_interval_ms=20)
    crew.until_completed(1)
    first.close()
    second = open_service()
    crew.service = second
    crew.workers[0].service = second
    crew.workers[0].register()
    crew.workers[1] = FakeWorker(second, crew.job_id, 1, task_attempt=1)
    crew.workers[1].register()
    crew.until(lambda: crew.states() == [2, 2], what="attempt 2")
    assert crew.workers[0].deployment is not None
    assert crew.workers[0].deployment.restored_checkpoint_id >= 1


def test_slots_that_do_not_come_back_in_time_fail_over(open_service: Open) -> None:
    first = open_service()
    crew = running(first, reconcile_timeout_ms=50)
    first.close()
    second = open_service()
    crew.service = second
    crew.workers[0].service = second
    crew.workers[0].register()
    crew.until_state("RESTARTING")
    assert "did not come back" in (second.job(crew.job_id).failure or "")


def test_second_coordinator_takes_the_jobs_and_the_first_can_complete_nothing(open_service: Open) -> None:
    first = open_service()
    crew = running(first, checkpoint_interval_ms=20)
    crew.until_completed(1)
    second = open_service()
    crew.until_state("SUSPENDED")
    completed = first.checkpoints(crew.job_id).counts.completed
    with pytest.raises(StorageUnavailableError):
        first.request_checkpoint(crew.job_id)
    crew.service = second
    for worker in crew.workers:
        worker.service = second
        worker.register()
    crew.until_completed(1)
    assert first.checkpoints(crew.job_id).counts.completed == completed


# -------------------------------------------------------------------------------------------------- savepoints and ends


def finished(crew: Crew, trigger: str) -> None:
    crew.until(lambda: not crew.service.trigger_status(crew.job_id, trigger).in_progress, what="the request's answer")


def test_savepoint_is_kept_outside_and_releases_nothing(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew = running(service)
    trigger = service.request_savepoint(crew.job_id, str(tmp_path / "savepoints"), trigger_id="t" * 32)
    assert service.request_savepoint(crew.job_id, str(tmp_path / "savepoints"), trigger_id=trigger) == trigger
    finished(crew, trigger)
    view = service.trigger_status(crew.job_id, trigger)
    assert view.location is not None
    assert (Path(view.location) / "_metadata").exists()
    assert Path(view.location).name.startswith(f"savepoint-{crew.job_id[:6]}-")
    assert len(list((tmp_path / "savepoints").glob("savepoint-*"))) == 1
    assert all(worker.completed == [] for worker in crew.workers)
    shown = service.checkpoints(crew.job_id).latest_savepoint
    assert shown is not None
    assert shown.savepoint_format == "CANONICAL"


def test_places_of_savepoints_are_known_of_jobs_that_are_led_and_of_jobs_on_record(open_service: Open, tmp_path: Path) -> None:
    """Whoever disposes of savepoints over REST finds them by these, also after a restart and when the job has ended."""
    service = open_service()
    assert service.savepoint_places() == SavepointPlaces()
    crew = running(service, savepoint_directory=str(tmp_path / "own"))
    finished(crew, service.request_savepoint(crew.job_id, str(tmp_path / "once"), trigger_id="5" * 32))
    finished(crew, service.request_checkpoint(crew.job_id, "c" * 32))
    finished(crew, service.request_savepoint(crew.job_id, str(tmp_path / ("long" * 100)), trigger_id="6" * 32))
    (folder,) = (tmp_path / "once").glob("savepoint-*")
    expected = SavepointPlaces(frozenset({str(tmp_path / "own")}), frozenset({str(folder)}))
    assert service.savepoint_places() == service.published_savepoint_places() == expected
    service.close()
    again = open_service()
    assert again.savepoint_places() == expected
    crew.service = again
    for worker in crew.workers:
        worker.service = again
        worker.register()
    again.cancel(crew.job_id)
    crew.until_state("CANCELED")
    assert again.savepoint_places() == again.published_savepoint_places() == expected
    again.close()
    assert open_service().savepoint_places() == expected


def test_a_trigger_id_is_that_of_one_request(open_service: Open, tmp_path: Path) -> None:
    """The answer to a checkpoint's would be taken for a savepoint that is kept, and that to a savepoint's for a stop."""
    crew = running(open_service())
    service = crew.service
    finished(crew, service.request_checkpoint(crew.job_id, "c" * 32))
    finished(crew, service.request_savepoint(crew.job_id, str(tmp_path), trigger_id="5" * 32))
    with pytest.raises(InvalidConfigError, match=f"trigger id {'c' * 32} is that of a checkpoint"):
        service.request_savepoint(crew.job_id, str(tmp_path), trigger_id="c" * 32)
    with pytest.raises(InvalidConfigError, match="is that of a savepoint: choose another one"):
        service.stop(crew.job_id, str(tmp_path), trigger_id="5" * 32)
    with pytest.raises(InvalidConfigError, match="is that of a savepoint"):
        service.request_checkpoint(crew.job_id, "5" * 32)
    assert service.request_checkpoint(crew.job_id, "c" * 32) == "c" * 32
    assert service.checkpoints(crew.job_id).counts.total == 2
    assert service.job(crew.job_id).overview.state == "RUNNING"


def test_r17_a_native_savepoint_says_so_to_the_workers_and_in_its_metadata(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew = running(service, state_backend="rocksdb")
    trigger = service.request_savepoint(crew.job_id, str(tmp_path / "savepoints"), format_type="native")
    crew.until(lambda: not service.trigger_status(crew.job_id, trigger).in_progress, what="the savepoint")
    assert [command.native for command in crew.workers[0].triggered] == [True]
    location = service.trigger_status(crew.job_id, trigger).location
    assert location is not None
    metadata = decode_metadata((Path(location) / "_metadata").read_bytes(), location)
    assert metadata.properties == {NATIVE_PROPERTY: "rocksdb"}
    shown = service.checkpoints(crew.job_id).latest_savepoint
    assert shown is not None
    assert shown.savepoint_format == "NATIVE"
    asked = submission(word_count(name="another"), restore=location)
    with pytest.raises(BackendMismatchError, match="operator 'count': its state is stored in the rocksdb backend's own files"):
        service.submit(asked)
    assert service.preflight(asked).refusals[0].fields["requested"] == "memory"
    with pytest.raises(InvalidConfigError, match="no savepoint format 'AVRO'"):
        service.stop(crew.job_id, str(tmp_path / "savepoints"), format_type="AVRO")


def test_r19_savepoint_without_a_target_is_refused_before_any_trigger(open_service: Open) -> None:
    service = open_service()
    crew = running(service)
    with pytest.raises(InvalidConfigError, match="target directory"):
        service.request_savepoint(crew.job_id)
    assert service.checkpoints(crew.job_id).counts.total == 0


@pytest.mark.parametrize("below", ["", "/", "/chk-1", "/shared", "/chk-1/deeper"])
def test_r19_savepoint_into_the_directory_of_a_job_is_refused(open_service: Open, tmp_path: Path, below: str) -> None:
    """It would be deleted with the checkpoint that it lies in."""
    service = open_service()
    crew = running(service)
    directory = f"{service.directory}/{crew.job_id}{below}"
    (tmp_path / "link").symlink_to(directory)
    for target in (directory, f"file://{directory}", str(tmp_path / "link")):
        with pytest.raises(InvalidConfigError, match=f"lies in the directory of job {crew.job_id}"):
            service.request_savepoint(crew.job_id, target)
        with pytest.raises(InvalidConfigError, match="lies in the directory of job"):
            service.stop(crew.job_id, target)
    assert service.job(crew.job_id).overview.state == "RUNNING"


@pytest.mark.parametrize("below", ["", "/savepoints", "/a/b"])
def test_a_file_in_place_of_the_directory_of_a_savepoint_is_named_before_any_trigger(
    open_service: Open, tmp_path: Path, below: str
) -> None:
    service = open_service()
    crew = running(service)
    (tmp_path / "file").write_text("in the way")
    for ask in (service.request_savepoint, service.stop):
        with pytest.raises(InvalidConfigError, match=f"^{tmp_path}/file is no directory: name another folder$"):
            ask(crew.job_id, f"{tmp_path}/file{below}")
    assert service.job(crew.job_id).overview.state == "RUNNING"


def test_r20_savepoint_to_an_unwritable_place_fails_with_the_words_of_the_storage(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew = running(service)
    trigger = service.request_savepoint(crew.job_id, str(tmp_path / ("long" * 100)))
    finished(crew, trigger)
    view = service.trigger_status(crew.job_id, trigger)
    assert view.failure_reason == "trigger_failure"
    assert re.fullmatch(r"creating savepoint-.* in .*: File name too long", view.failure or ""), "and no name of ours"
    assert service.job(crew.job_id).overview.state == "RUNNING"


def test_stop_with_savepoint_ends_the_job_and_latest_restores_it_at_another_parallelism(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(1)
    trigger = service.stop(crew.job_id, str(tmp_path / "savepoints"), drain=True)
    crew.until_state("FINISHED")
    crew.until(lambda: all(worker.shutdown for worker in crew.workers), what="shutdown")
    stopped = service.trigger_status(crew.job_id, trigger)
    assert stopped.checkpoint_id is not None
    assert all(stopped.checkpoint_id in worker.completed for worker in crew.workers)
    assert crew.workers[0].triggered[-1].drain
    with pytest.raises(JobExistsError):
        service.submit(submission(word_count(parallelism=3)))
    accepted = service.submit(submission(word_count(parallelism=3), restore="latest"))
    assert (accepted.submission, accepted.slots, accepted.restored_checkpoint_id) == (2, 3, stopped.checkpoint_id)
    wider = Crew(service, crew.job_id, 3, submission=2)
    wider.register()
    wider.until(lambda: all(worker.attempt for worker in wider.workers), what="the next attempt")
    entries = []
    groups = []
    for worker in wider.workers:
        assert worker.deployment is not None
        for subtask in worker.deployment.subtasks:
            for uid, state in subtask.restore.items():
                if uid == "source":
                    assert isinstance(state.operator[0].part, InlineHandle)
                    entries.append(state.operator[0].count)
                else:
                    groups.append([handle.key_groups for handle in state.keyed])
    assert sorted(entries) == [1, 1, 2]
    assert [len(handles) for handles in groups] == [1, 2, 1]


def test_restoring_a_savepoint_that_lacks_an_operator_is_refused_before_anything_changes(
    open_service: Open, tmp_path: Path
) -> None:
    service = open_service()
    crew = running(service)
    trigger = service.stop(crew.job_id, str(tmp_path / "savepoints"))
    crew.until_state("FINISHED")
    location = service.trigger_status(crew.job_id, trigger).location
    graph = word_count(name="another name")
    tally = vertex(operator("tally", "process", COUNTS, key_type="utf8"))
    changed = msgspec.structs.replace(graph, vertices=(graph.vertices[0], tally), edges=())
    with pytest.raises(UnclaimedStateError, match="was 'count' renamed to 'tally'") as caught:
        service.submit(submission(changed, restore=location))
    assert caught.value.operators == {"count": 8}
    with pytest.raises(NotFoundError):
        service.job(submission(changed).graph.name)


def test_a_submission_says_which_savepoint_it_goes_on_from_also_where_an_earlier_one_named_it(
    open_service: Open, tmp_path: Path
) -> None:
    service = open_service()
    crew = running(service)
    trigger = service.stop(crew.job_id, str(tmp_path / "savepoints"))
    crew.until_state("FINISHED")
    location = service.trigger_status(crew.job_id, trigger).location
    graph = word_count(name="another name")
    for restore in (location, None):  # the driver of the first one died
        assert service.submit(submission(graph, restore=restore)).restored_savepoint == location


def test_older_checkpoint_needs_a_flag_because_output_may_repeat(open_service: Open) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20, retained_checkpoints=3, retention_on_cancel="retain")
    crew.until_completed(4)
    service.cancel(crew.job_id)
    crew.until_state("CANCELED")
    history = service.checkpoints(crew.job_id).history
    kept = [view.checkpoint_id for view in history if view.status == "COMPLETED" and not view.discarded]
    assert len(kept) == 3
    with pytest.raises(OutputMayRepeatError):
        service.submit(submission(word_count(), restore=str(kept[-1])))
    accepted = service.submit(submission(word_count(), restore=str(kept[-1]), allow_output_repeat=True))
    assert accepted.restored_checkpoint_id == kept[-1]


def test_bounded_job_takes_its_final_checkpoint_at_once_and_finishes(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=None)
    crew.report(TaskState.RUNNING, drained=True)
    crew.until_state("FINISHED")
    crew.until(lambda: all(worker.shutdown for worker in crew.workers), what="shutdown")
    assert all(worker.completed[0] == 1 for worker in crew.workers)
    assert (tmp_path / "state" / crew.job_id / "results" / "1.json").exists()
    crew.until(lambda: not list((tmp_path / "state" / crew.job_id).glob("chk-*/_metadata")), what="retention")
    assert service.wait(crew.job_id, 1) == "FINISHED"
    with pytest.raises(JobExistsError, match="fresh=True") as ended:
        service.submit(submission(word_count()))
    assert "latest" not in ended.value.message
    with pytest.raises(RestoreError, match="its checkpoints went with it"):
        service.submit(submission(word_count(), restore="latest"))


def test_finished_job_is_remembered_after_a_restart_and_refuses_its_workers(open_service: Open) -> None:
    first = open_service()
    crew = running(first)
    crew.report(TaskState.RUNNING, drained=True)
    crew.until_state("FINISHED")
    first.close()
    second = open_service()
    assert second.job(crew.job_id).overview.state == "FINISHED"
    assert [view.state for view in second.jobs()] == ["FINISHED"]
    crew.workers[0].service = second
    with pytest.raises(FencedError):
        crew.workers[0].register()
    fresh = second.submit(submission(word_count(), fresh=True))
    assert fresh.submission == 2


def test_cancel_ends_the_job_and_drops_its_checkpoints(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(1)
    service.cancel(crew.job_id)
    crew.until_state("CANCELED")
    service.cancel(crew.job_id)
    crew.until(lambda: not list((tmp_path / "state" / crew.job_id).glob("chk-*")), what="retention")
    crew.until(lambda: all(worker.shutdown for worker in crew.workers), what="shutdown")


def test_savepoint_with_cancel_job_cancels_once_it_is_complete(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew = running(service)
    trigger = service.request_savepoint(crew.job_id, str(tmp_path / "savepoints"), cancel=True)
    crew.until_state("CANCELED")
    assert service.trigger_status(crew.job_id, trigger).location is not None


# ---------------------------------------------------------------------------------------------------------- submissions


def test_submitting_a_live_name_supersedes_the_other_driver_and_restores_latest(open_service: Open) -> None:
    service = open_service()
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(2)
    accepted = service.submit(submission(word_count(), driver_nonce="second"))
    assert accepted.submission == 2
    assert accepted.restored_checkpoint_id >= 2
    assert service.submit(submission(word_count(), driver_nonce="second")) == accepted
    crew.until(lambda: all(worker.shutdown for worker in crew.workers), what="shutdown of the older workers")
    with pytest.raises(FencedError):
        crew.workers[0].register()
    newer = Crew(service, crew.job_id, 2, submission=2)
    newer.register()
    newer.until(lambda: newer.states() == [2, 2], what="attempt 2")


def test_worker_that_sees_another_directory_is_refused(open_service: Open) -> None:
    service = open_service()
    accepted = service.submit(submission(word_count()))
    worker = FakeWorker(service, accepted.job_id, 0)
    message = worker.registration()
    other = msgspec.structs.replace(message, directory_nonce="")
    with pytest.raises(StateDirectoryNotSharedError):
        service.register_async(other).result(WAIT_S)


def test_unknown_jobs_slots_and_triggers_are_named(open_service: Open) -> None:
    service = open_service()
    with pytest.raises(NotFoundError):
        service.job("0" * 32)
    crew = running(service)
    with pytest.raises(NotFoundError):
        FakeWorker(service, crew.job_id, 7).register()
    with pytest.raises(NotFoundError):
        service.trigger_status(crew.job_id, "nothing")
    with pytest.raises(NotFoundError):
        service.checkpoint(crew.job_id, 99)


def test_missed_trigger_is_repeated_to_a_worker_that_registers_again(open_service: Open) -> None:
    service = open_service()
    crew = running(service)
    stream = crew.workers[1].stream
    crew.workers[1].stream = None
    service.request_checkpoint(crew.job_id)
    crew.until(lambda: service.checkpoints(crew.job_id).counts.in_progress == 1, what="a pending checkpoint")
    assert stream is not None
    crew.workers[1].register()
    crew.until_completed(1)
    assert crew.workers[1].answers == [AckStatus.SUCCESS] * 2


class _Moody:
    """A storage whose next listing of a job's submissions fails in a way that no storage should."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self.root = inner.root
        self.bugs = 0

    def at(self, location: str) -> Storage:
        return self._inner.at(location)

    def execute(self, operation: Operation) -> Any:
        if self.bugs and isinstance(operation, ListFolder) and operation.prefix.endswith("/submissions"):
            self.bugs -= 1
            raise ZeroDivisionError("a bug")
        return self._inner.execute(operation)


def test_recovery_outlives_a_job_that_it_chokes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw used to end the thread: no job was looked for any more."""
    monkeypatch.setattr("holdfast.coordinator.service.RECOVERY_RETRY_S", 0.01)
    storage = _Moody(LocalStorage(tmp_path / "state"))
    newer = leading(ServiceConfig(str(tmp_path / "state"), seed=1), storage)
    older = leading(ServiceConfig(str(tmp_path / "state"), seed=2))
    job_id = older.submit(submission(word_count())).job_id
    older.close()
    storage.bugs = 1
    with pytest.raises(NotFoundError):
        newer.heartbeat_async(job_id, Heartbeat(0, "", 0)).result(WAIT_S)
    wait_until(lambda: newer._registry.find(job_id) is not None, lambda: None, what="the job being led")
    newer.close()


def test_a_job_that_recovery_chokes_on_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was neither waiting nor known any more, and a 404 sends its workers home."""
    monkeypatch.setattr("holdfast.coordinator.service.RECOVERY_RETRY_S", 0.01)
    older = leading(ServiceConfig(str(tmp_path / "state"), seed=2))
    job_id = older.submit(submission(word_count())).job_id
    older.close()
    storage = _Moody(LocalStorage(tmp_path / "state"))
    storage.bugs = 10**9
    newer = leading(ServiceConfig(str(tmp_path / "state"), seed=1), storage)
    for tries in (1, 3):
        wait_until(lambda tries=tries: storage.bugs <= 10**9 - tries, lambda: None, what="another try")  # type: ignore[misc]
        with pytest.raises(StorageUnavailableError, match="a bug"):
            newer.job(job_id)
    storage.bugs = 0
    wait_until(lambda: newer._registry.find(job_id) is not None, lambda: None, what="the job being led")
    assert newer.job(job_id).overview.job_id == job_id
    newer.close()


def test_before_recovery_ends_nobody_is_told_where_savepoints_may_be(tmp_path: Path) -> None:
    """A savepoint that is to be disposed of was refused for good, as one of no job."""
    older = leading(ServiceConfig(str(tmp_path / "state")))
    older.submit(submission(word_count(savepoint_directory="/savepoints")))
    older.close()
    newer = CoordinatorService(ServiceConfig(str(tmp_path / "state")))
    with pytest.raises(RecoveringError):
        newer.savepoint_places()
    newer.lead()
    wait_until(lambda: newer.ready, lambda: None, what="the recovery of its jobs")
    assert newer.savepoint_places().directories == {"/savepoints"}
    newer.close()


def test_jobs_that_were_settled_otherwise_are_not_looked_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They filled the list of those that may be looked for, and a job that was really unknown was not looked for any more."""
    monkeypatch.setattr("holdfast.coordinator.service.RECOVERY_RETRY_S", 0.01)
    service = leading(ServiceConfig(str(tmp_path / "state")))
    job_id = service.submit(submission(word_count())).job_id
    service._host.look_for(job_id)  # somebody asked just before the submission was done
    wait_until(lambda: not service._host.unrecovered, lambda: None, what="nothing unrecovered")
    assert service._registry.find(job_id) is not None
    service.close()


# -------------------------------------------------------------------------------------------------- ownership of snapshots


def stopped_at(service: CoordinatorService, folder: Path) -> tuple[Crew, Path]:
    """A job that was stopped with a savepoint, and where that is."""
    crew = running(service, checkpoint_interval_ms=20)
    crew.until_completed(1)
    trigger = service.stop(crew.job_id, str(folder))
    crew.until_state("FINISHED")
    crew.until(lambda: all(worker.shutdown for worker in crew.workers), what="shutdown")
    location = service.trigger_status(crew.job_id, trigger).location
    assert location is not None
    return crew, Path(location)


def submitted_again(service: CoordinatorService, job_id: str, **options: Any) -> Crew:
    accepted = service.submit(submission(word_count(checkpoint_interval_ms=20), **options))
    crew = Crew(service, job_id, accepted.slots, submission=accepted.submission)
    crew.register()
    crew.until(lambda: all(worker.attempt for worker in crew.workers), what="the next attempt")
    return crew


def test_r15_a_claimed_savepoint_is_gone_once_the_job_has_a_checkpoint_of_its_own(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    (tmp_path / "savepoints").mkdir()
    (tmp_path / "savepoints" / "mine.txt").write_text("stays")
    crew, savepoint = stopped_at(service, tmp_path / "savepoints")
    again = submitted_again(service, crew.job_id, restore=str(savepoint), claim_mode=ClaimMode.CLAIM)
    again.until(lambda: not savepoint.exists(), what="the deletion of the savepoint")
    assert {path.name for path in (tmp_path / "savepoints").iterdir()} <= {"mine.txt", ".tmp"}
    assert (tmp_path / "savepoints" / "mine.txt").read_text() == "stays"
    assert service.checkpoints(crew.job_id).counts.completed >= 1
    with pytest.raises(SnapshotClaimedError, match="was claimed by this job, which deleted it"):
        service.submit(submission(word_count(), restore=str(savepoint), allow_output_repeat=True))


def test_i25_an_unclaimed_savepoint_stays_as_it_is(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    crew, savepoint = stopped_at(service, tmp_path / "savepoints")
    before = {path.name: path.read_bytes() for path in savepoint.iterdir()}
    again = submitted_again(service, crew.job_id, restore=str(savepoint))
    again.until_completed(3)
    assert {path.name: path.read_bytes() for path in savepoint.iterdir()} == before


def test_r15_a_claim_is_followed_by_the_next_coordinator(open_service: Open, tmp_path: Path) -> None:
    first = open_service()
    crew, savepoint = stopped_at(first, tmp_path / "savepoints")
    again = submitted_again(first, crew.job_id, restore=str(savepoint), claim_mode=ClaimMode.CLAIM)
    first.close()
    second = open_service()
    assert savepoint.exists() or second.checkpoints(crew.job_id).counts.completed
    again.service = second
    for worker in again.workers:
        worker.service = second
        worker.register()
    again.until(lambda: not savepoint.exists(), what="the deletion of the savepoint")


def test_r02_what_a_restore_dropped_is_listed_in_the_answer_and_on_record(open_service: Open, tmp_path: Path) -> None:
    service = open_service()
    _, savepoint = stopped_at(service, tmp_path / "savepoints")
    graph = word_count(name="without")
    smaller = msgspec.structs.replace(graph, vertices=graph.vertices[:1], edges=())
    asked = submission(smaller, restore=str(savepoint), allow_non_restored_state=True, driver_nonce="d" * 32)
    accepted = service.submit(asked)
    assert [note for note in accepted.notes if "'count'" in note] == [
        "operator 'count' is not in the job: its state is dropped (8 bytes)"
    ]
    assert service.submit(asked).notes == accepted.notes, "a repeat is answered alike"


# ---------------------------------------------------------------------------------------------------- views and history


def test_history_outlives_the_coordinator_and_names_each_leader(open_service: Open) -> None:
    first = open_service()
    crew = running(first, checkpoint_interval_ms=20)
    crew.until_completed(2)
    first.close()
    found = open_service().history(crew.job_id, HistoryQuery(limit=1_000))
    assert found.gaps == ()
    assert found.damage == ()
    kinds = [each.kind for each in found.entries if each.epoch == found.entries[0].epoch]
    assert kinds[0] == "leader"
    assert kinds.count("checkpoint") >= 2
    assert (found.entries[-1].kind, found.entries[-1].facts["state"]) == ("state", "SUSPENDED")
    with pytest.raises(NotFoundError):
        open_service().history("f" * 32, HistoryQuery())
    with pytest.raises(NotFoundError):
        open_service().history("../etc", HistoryQuery())


def test_many_viewers_take_no_turn_of_the_job(open_service: Open) -> None:
    service = open_service()
    crew = running(service)
    seen: list[str] = []

    def view() -> None:
        seen.extend(service.job(crew.job_id).overview.state for _ in range(50))

    viewers = [threading.Thread(target=view) for _ in range(8)]
    for viewer in viewers:
        viewer.start()
    for viewer in viewers:
        viewer.join(30)
    assert seen == ["RUNNING"] * 400
    service.cancel(crew.job_id)
    assert service.job(crew.job_id).overview.state in ("CANCELLING", "CANCELED")


class HistoryStuck:
    """Storage that does not answer writes of histories before `answers` is set."""

    def __init__(self, inner: Storage, answers: threading.Event) -> None:
        self._inner = inner
        self.root = inner.root
        self._answers = answers
        self.is_asked = threading.Event()

    def at(self, location: str) -> Storage:
        return self._inner.at(location)

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, PutIfAbsent) and f"/{HISTORY_FOLDER}/" in operation.path:
            self.is_asked.set()
            assert self._answers.wait(WAIT_S)
        return self._inner.execute(operation)


def test_periodic_checkpoints_go_on_while_histories_can_t_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for deletions, once these fall behind: a history that had their threads would stop them."""
    monkeypatch.setattr(recorder, "WRITE_INTERVAL_MS", 1)
    answers = threading.Event()
    storage = HistoryStuck(LocalStorage(tmp_path / "state"), answers)
    config = ServiceConfig(str(tmp_path / "state"), cleanup_threads=1, history_threads=1, view_interval_ms=0)
    service = leading(config, storage)
    try:
        crew = running(service, checkpoint_interval_ms=20, retained_checkpoints=1)
        crew.until(storage.is_asked.is_set, what="a write of the history")
        crew.until_completed(8)
    finally:
        answers.set()
        service.close()


class _Watched:
    """A storage that counts looks at files, and may hold reads of drills until it is told to answer."""

    def __init__(self, inner: LocalStorage) -> None:
        self._inner = inner
        self.root = inner.root
        self.described = 0
        self.holds_drills = False
        self.reading, self.answers = threading.Event(), threading.Event()

    def at(self, location: str) -> Storage:
        return self._inner.at(location)

    def execute(self, operation: Operation) -> Any:
        if isinstance(operation, DescribeFiles):
            self.described += 1
        if self.holds_drills and isinstance(operation, ListFolder) and operation.prefix.endswith("/drills"):
            self.reading.set()
            assert self.answers.wait(WAIT_S)
        return self._inner.execute(operation)


def test_the_files_of_a_job_are_listed_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _Watched(LocalStorage(tmp_path / "state"))
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1), storage)
    with pytest.raises(NotFoundError):
        service.cost("a" * 32)
    job_id = service.submit(submission(word_count())).job_id
    storage.described = 0
    first = service.cost(job_id)
    assert first.files > 0
    assert all(service.cost(job_id) is first for _ in range(20))
    assert storage.described == 1
    monkeypatch.setattr("holdfast.coordinator.dispatcher.reading.costs.KEPT_MS", 0)
    assert service.cost(job_id).as_of_ms >= first.as_of_ms
    assert storage.described == 2
    service.close()


def test_a_coordinator_stops_though_storage_holds_what_it_reads_of_drills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.coordinator.service.READER_JOIN_S", 0.1)
    storage = _Watched(LocalStorage(tmp_path / "state"))
    service = leading(ServiceConfig(str(tmp_path / "state"), seed=1), storage)
    job_id = service.submit(submission(word_count())).job_id
    storage.holds_drills = True
    service._drills.remembered(job_id)
    assert storage.reading.wait(WAIT_S)
    closing = threading.Thread(target=service.close, daemon=True)
    closing.start()
    try:
        closing.join(WAIT_S / 2)
        assert not closing.is_alive()
    finally:
        storage.answers.set()
    drills = service._readers[0]
    drills.join(WAIT_S)
    assert not drills.is_alive()
