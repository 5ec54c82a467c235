"""Who may commit: resubmitted, restored, forked and rewound jobs over one sink."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.barriers.sinks.log import CommitEntry, OwnerEntry, SinkPaths
from holdfast.operators.sinks.files.committer import FileCommitter
from holdfast.operators.sinks.files.log import SinkSettings
from holdfast.operators.sinks.files.parquet import read_log
from holdfast.statebackends.errors import (
    AmbiguousWriteError,
    CommittableLostError,
    CorruptStateError,
    FencedError,
    OutputMayRepeatError,
    StorageUnavailableError,
    UnsupportedVersionError,
)
from holdfast.statebackends.storage import port as ops
from tests.operators.ports import DictStorage
from tests.operators.sinks.files.minijob import MiniJob, MortalStorage, Snapshot, committed, published


def job_at(epochs: int, storage: MortalStorage | None = None, job_id: str = "job-a") -> MiniJob:
    job = MiniJob(storage or MortalStorage({}), DictStorage(), job_id)
    job.start()
    for _ in range(epochs):
        job.emit(2)
        job.checkpoint()
    return job


def heir_of(job: MiniJob, snapshot: Snapshot, job_id: str = "job-b") -> MiniJob:
    return MiniJob(job.storage, job.state, job_id, restored=snapshot)


def test_an_unrelated_job_is_refused_and_told_who_owns_the_sink() -> None:
    job = job_at(1)
    with pytest.raises(FencedError) as caught:
        MiniJob(job.storage, job.state, "job-b").start()
    assert (caught.value.owner, caught.value.sink) == ("job-a", "out")


def test_a_job_restored_under_another_id_inherits_and_fences_the_older_owner() -> None:
    job = job_at(2)
    heir = heir_of(job, job.completed)
    heir.start()
    heir.emit(2)
    heir.checkpoint()
    job.emit(2)
    with pytest.raises(FencedError):
        job.checkpoint()
    assert committed(job.storage) == list(range(6))
    owners = [entry.job_id for entry in read_log(job.storage, "out") if isinstance(entry, OwnerEntry)]
    assert owners == ["job-a", "job-b"]


def test_the_second_fork_of_a_savepoint_is_refused() -> None:
    job = job_at(1)
    heir_of(job, job.completed, "job-b").start()
    with pytest.raises(FencedError):
        heir_of(job, job.completed, "job-c").start()


def test_an_older_owner_that_comes_back_is_refused() -> None:
    job = job_at(1)
    heir_of(job, job.completed).start()
    with pytest.raises(FencedError):
        job.start()


def test_an_heir_that_dies_before_its_first_checkpoint_inherits_again() -> None:
    job = job_at(1)
    heir = heir_of(job, job.completed)
    heir.start()
    heir.start()
    heir.emit(2)
    heir.checkpoint()
    assert committed(job.storage) == list(range(4))


def test_a_savepoint_commits_nothing_until_it_is_restored() -> None:
    job = job_at(1)
    job.emit(2)
    savepoint = job.snapshot()
    job.decide(savepoint, savepoint=True)
    assert committed(job.storage) == [0, 1]
    heir = heir_of(job, savepoint)
    heir.start()
    assert committed(job.storage) == [0, 1, 2, 3] == published(job.storage)


@pytest.mark.parametrize("job_id", ["job-a", "job-b"])
def test_a_rewind_below_committed_output_needs_the_flag(job_id: str) -> None:
    job = job_at(1)
    old = job.completed
    job.emit(2)
    job.checkpoint()
    rewound = heir_of(job, old, job_id)
    with pytest.raises(OutputMayRepeatError) as caught:
        rewound.start()
    assert (caught.value.restored, caught.value.committed) == (1, 2)
    rewound.allow_output_repeat = True
    rewound.checkpoint_id = job.checkpoint_id
    rewound.start()
    rewound.emit(2)
    rewound.checkpoint()
    assert committed(job.storage) == [0, 1, 2, 3, 2, 3]


def test_a_fresh_start_into_old_output_needs_the_flag() -> None:
    job = job_at(1)
    with pytest.raises(OutputMayRepeatError):
        MiniJob(job.storage, job.state).start()


def test_empty_epochs_commit_nothing() -> None:
    job = job_at(0)
    for _ in range(3):
        job.checkpoint()
    assert [type(entry) for entry in read_log(job.storage, "out")] == [OwnerEntry]
    assert published(job.storage) == []


def test_repeated_and_late_notices_commit_once() -> None:
    job = job_at(2)
    for number in (1, 2, 1):
        job.notify(number)
    assert [entry.checkpoint_id for entry in read_log(job.storage, "out") if isinstance(entry, CommitEntry)] == [1, 2]


def test_a_lost_staged_file_is_never_taken_for_committed() -> None:
    job = job_at(1)
    job.emit(2)
    snapshot = job.snapshot()
    job.decide(snapshot)
    staged = [path for path in job.storage.files if "/staged/" in path]
    del job.storage.files[staged[0]]
    with pytest.raises(CommittableLostError) as caught:
        job.notify(snapshot.checkpoint_id)
    assert (caught.value.path, caught.value.checkpoint) == (staged[0], 2)
    assert committed(job.storage) == [0, 1]


def test_a_moved_sink_path_with_output_to_commit_is_refused() -> None:
    job = job_at(1)
    job.emit(2)
    job.decide(job.snapshot())
    elsewhere = MiniJob(MortalStorage({}), job.state, restored=job.completed)
    with pytest.raises(CommittableLostError, match="path changed"):
        elsewhere.start()


def test_a_moved_sink_path_with_nothing_to_commit_starts_a_new_log() -> None:
    job = job_at(1)
    job.checkpoint()
    elsewhere = MiniJob(MortalStorage({}), job.state, restored=job.completed)
    elsewhere.start()
    elsewhere.emit(1)
    elsewhere.checkpoint()
    assert committed(elsewhere.storage) == [2]


class AmbiguousStorage(MortalStorage):
    """Conditional creates do or don't happen, and the answer never comes."""

    happens = True
    times = 0

    def execute(self, operation: ops.Operation) -> object:
        if isinstance(operation, ops.PutIfAbsent) and self.times:
            self.times -= 1
            if self.happens:
                super().execute(operation)
            raise AmbiguousWriteError("no answer", path=operation.path)
        return super().execute(operation)


@pytest.mark.parametrize("happens", [True, False])
def test_an_unknown_answer_is_read_back_before_anything_is_decided(happens: bool) -> None:
    storage = AmbiguousStorage({})
    job = job_at(1, storage)
    storage.happens, storage.times = happens, 2
    job.emit(2)
    job.checkpoint()
    assert committed(storage) == [0, 1, 2, 3]
    assert sum(isinstance(entry, CommitEntry) for entry in read_log(storage, "out")) == 2


def test_answers_that_never_come_fail_the_commit_and_delete_nothing() -> None:
    storage = AmbiguousStorage({})
    job = job_at(1, storage)
    storage.happens, storage.times = False, 100
    job.emit(2)
    with pytest.raises(StorageUnavailableError):
        job.checkpoint()
    storage.times = 0
    job.start()
    assert committed(storage) == [0, 1, 2, 3]


def test_a_zombie_that_commits_the_same_checkpoint_adds_nothing() -> None:
    job = job_at(1)
    job.emit(2)
    snapshot = job.snapshot()
    job.decide(snapshot)
    zombie = job.committer
    context = job.contexts[1]
    job.start()
    assert committed(job.storage) == [0, 1, 2, 3]
    zombie.notify_checkpoint_complete(snapshot.checkpoint_id)
    context.run_pool()
    assert context.failures == []
    assert committed(job.storage) == [0, 1, 2, 3]


def test_a_zombie_of_an_older_submission_can_not_commit_behind_a_fresh_start() -> None:
    job = job_at(0)
    job.emit(2)
    job.decide(job.snapshot())
    zombie, context = job.committer, job.contexts[1]
    fresh = MiniJob(job.storage, job.state)
    fresh.attempt, fresh.checkpoint_id = job.attempt, job.checkpoint_id
    fresh.start()
    zombie.notify_checkpoint_complete(job.checkpoint_id)
    context.run_pool()
    assert [type(error) for error in context.failures] == [FencedError]
    fresh.emit(2)
    fresh.checkpoint()
    assert committed(job.storage) == [0, 1]


def test_a_zombie_that_knows_another_checkpoint_is_fenced_by_the_commits_of_a_later_attempt() -> None:
    job = job_at(1)
    job.emit(2)
    lost = job.snapshot()
    zombie, context = job.committer, job.contexts[1]
    job.start()
    job.emit(2)
    job.checkpoint()
    zombie.notify_checkpoint_complete(lost.checkpoint_id)
    context.run_pool()
    assert [type(error) for error in context.failures] == [FencedError]
    assert committed(job.storage) == [0, 1, 2, 3]


def test_an_older_attempt_that_opens_the_log_late_does_not_fence_the_newer_one() -> None:
    job = job_at(0)
    job.attempt = 5
    job.start()
    late = MiniJob(job.storage, job.state)
    late.attempt = 3
    late.start()
    job.emit(2)
    job.checkpoint()
    job.start()
    job.emit(2)
    job.checkpoint()
    assert committed(job.storage) == [0, 1, 2, 3]


def test_a_damaged_or_newer_log_is_refused_by_name() -> None:
    job = job_at(1)
    path = SinkPaths("out").log(1)
    job.storage.files[path] = b"{"
    with pytest.raises(CorruptStateError) as caught:
        job.start()
    assert caught.value.path == path
    job.storage.files[path] = msgspec.json.encode({"type": "commit", "version": 99})
    with pytest.raises(UnsupportedVersionError):
        job.start()


def test_committables_are_listed_as_external_and_pending_work_ends() -> None:
    job = job_at(0)
    job.emit(2)
    snapshot = job.snapshot()
    (external,) = job.committer.external_files(snapshot.checkpoint_id)
    assert external.startswith("/sink/_holdfast/out/staged/part-out-")
    assert not job.committer.has_pending_work()
    job.committer.notify_checkpoint_complete(snapshot.checkpoint_id)
    assert job.committer.has_pending_work()
    job.run_pool()
    assert not job.committer.has_pending_work()
    assert job.committer.external_files(2) == ()


def test_a_fresh_start_over_committed_rows_is_refused_before_anything_is_dropped() -> None:
    storage = job_at(2).storage

    def committer(path: str, *, allowed: bool = False) -> FileCommitter:
        operator = FileCommitter(SinkSettings(path, "out", 1, lambda _: storage), "")
        operator.allow_output_repeat = allowed
        return operator

    with pytest.raises(OutputMayRepeatError, match="Remove that folder") as caught:
        committer("/rows").check_fresh_start()
    assert (caught.value.sink, caught.value.committed) == ("out", 2)
    committer("/rows", allowed=True).check_fresh_start()
    storage = MortalStorage({})
    committer("/elsewhere").check_fresh_start()
