"""A sink that moved: what its job still has to commit gets into the old log, and nothing of another job does; whoever dies when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import holdfast.operators.sinks.files.committer as committer_module
from holdfast.barriers.sinks.log import FORK_PROPERTY, OwnerEntry, SinkFork, place_of
from holdfast.operators.sinks.files.log import end_log_flow
from holdfast.operators.sinks.files.parquet import read_log
from holdfast.statebackends.errors import CommittableLostError, FencedError
from tests.operators.ports import DictStorage
from tests.operators.sinks.files.minijob import ROOT, Crash, MiniJob, MortalStorage, Snapshot, committed, published

ELSEWHERE = "/elsewhere"
ROWS = 3
OLD = place_of(ROOT, "out")


def fork_of(ends: bool) -> dict[str, Any]:
    return {FORK_PROPERTY: msgspec.to_builtins(SinkFork(unnamed=OLD, ends=(OLD,) if ends else ()))}


def job_at(epochs: int) -> MiniJob:
    job = MiniJob(MortalStorage({}), DictStorage())
    job.start()
    for _ in range(epochs):
        job.emit(ROWS)
        job.checkpoint()
    return job


def savepoint_of(job: MiniJob) -> Snapshot:
    """Of rows that nobody has committed yet."""
    job.emit(ROWS)
    snapshot = job.snapshot()
    job.decide(snapshot, savepoint=True)
    return snapshot


def moved(job: MiniJob, snapshot: Snapshot, *, job_id: str = "job-a", ends: bool) -> MiniJob:
    """A job that goes on from a snapshot with its sink elsewhere."""
    new = MiniJob(job.storage, job.state, job_id, restored=snapshot)
    new.attempt = job.attempt if job_id == job.job_id else 0
    new.path, new.stores = ELSEWHERE, {ELSEWHERE: MortalStorage({}, ELSEWHERE), ROOT: job.storage}
    new.properties = fork_of(ends)
    return new


def forget_places(savepoint: Snapshot) -> None:
    """As an older Holdfast stored it."""
    nameless = []
    for entry in savepoint.committer:
        fields = msgspec.msgpack.decode(entry)
        del fields["place"]
        nameless.append(msgspec.msgpack.encode(fields))
    savepoint.committer = nameless


def elsewhere(job: MiniJob) -> MortalStorage:
    return job.stores[ELSEWHERE]


def test_a_job_that_moves_its_sink_commits_there_first_and_goes_on_elsewhere() -> None:
    job = job_at(2)
    new = moved(job, savepoint_of(job), ends=True)
    new.start()
    assert committed(job.storage) == published(job.storage) == list(range(9))
    new.emit(ROWS)
    new.checkpoint()
    assert committed(elsewhere(new)) == [9, 10, 11]
    assert committed(job.storage) == list(range(9))
    owners = [entry.job_id for entry in read_log(job.storage, "out") if isinstance(entry, OwnerEntry)]
    assert owners == ["job-a"], "the log was its own before"


def test_a_fork_of_a_job_that_runs_writes_nothing_into_its_output_and_neither_loses_a_row() -> None:
    job = job_at(1)
    savepoint = savepoint_of(job)
    before = dict(job.storage.files)
    fork = moved(job, savepoint, job_id="job-b", ends=False)
    fork.start()
    fork.emit(ROWS)
    fork.checkpoint()
    assert job.storage.files == before
    job.emit(ROWS)
    job.checkpoint()
    assert committed(job.storage) == list(range(9)), "what the savepoint held, too"
    assert committed(elsewhere(fork)) == [6, 7, 8]
    job.start()
    job.emit(ROWS)
    job.checkpoint()
    assert committed(job.storage) == list(range(12)), "and it recovers as if there were no fork"


def test_a_job_that_failed_over_behind_the_savepoint_writes_those_rows_itself() -> None:
    job = job_at(1)
    savepoint = savepoint_of(job)
    fork = moved(job, savepoint, job_id="job-b", ends=False)
    job.start()
    fork.start()
    job.emit(ROWS)
    job.checkpoint()
    assert committed(job.storage) == list(range(6))


def test_a_fork_that_fails_before_its_first_checkpoint_begins_again() -> None:
    job = job_at(1)
    fork = moved(job, savepoint_of(job), job_id="job-b", ends=False)
    for _ in range(3):
        fork.start()
        fork.emit(ROWS)
    fork.checkpoint()
    fork.start()
    fork.emit(ROWS)
    fork.checkpoint()
    assert committed(elsewhere(fork)) == list(range(6, 12))


def test_what_another_job_took_over_meanwhile_is_that_job_s() -> None:
    job = job_at(1)
    savepoint = savepoint_of(job)
    heir = MiniJob(job.storage, job.state, "job-b", restored=savepoint)
    heir.start()
    new = moved(job, savepoint, ends=True)
    new.start()
    new.emit(ROWS)
    new.checkpoint()
    assert committed(job.storage) == list(range(6))
    assert committed(elsewhere(new)) == [6, 7, 8]


def test_what_another_job_took_over_and_has_not_committed_is_waited_for() -> None:
    job = job_at(1)
    savepoint = savepoint_of(job)
    heir = MiniJob(job.storage, job.state, "job-b", restored=savepoint)
    heir.start(flows=1)
    new = moved(job, savepoint, ends=True)
    for _ in range(2):
        with pytest.raises(FencedError, match=r"owned by job job-b.* has not committed 3 rows of checkpoint 2"):
            new.start()
    assert elsewhere(new).files == {}
    heir.start()
    new.start()
    assert committed(job.storage) == list(range(6))


def test_entries_of_a_place_that_nobody_knows_are_given_up_and_no_reason_to_fail_for_ever() -> None:
    """A snapshot of an older Holdfast whose log was empty of staged files and whose graph is not stored."""
    job = job_at(1)
    savepoint = savepoint_of(job)
    forget_places(savepoint)
    new = moved(job, savepoint, ends=False)
    new.properties = {FORK_PROPERTY: msgspec.to_builtins(SinkFork())}
    new.start()
    new.emit(ROWS)
    new.checkpoint()
    new.start()
    assert committed(elsewhere(new)) == [6, 7, 8]
    assert committed(job.storage) == [0, 1, 2]


def test_an_attempt_that_lives_on_can_not_commit_behind_the_move() -> None:
    job = job_at(1)
    job.emit(ROWS)
    pending = job.snapshot()
    job.decide(pending)
    late, context = job.committer, job.contexts[1]
    new = moved(job, pending, ends=True)
    new.start()
    late.notify_checkpoint_complete(pending.checkpoint_id)
    context.run_pool()
    assert all(isinstance(error, FencedError) for error in context.failures)
    assert committed(job.storage) == list(range(6))


def test_until_the_old_log_has_everything_snapshots_hold_it_and_name_its_files() -> None:
    job = job_at(1)
    new = moved(job, savepoint_of(job), ends=True)
    new.start(flows=0)
    assert new.committer.has_pending_work()
    new.emit(ROWS)
    snapshot = new.snapshot()
    external = new.committer.external_files(snapshot.checkpoint_id)
    assert [entry.partition("/_holdfast/")[0] for entry in external] == [elsewhere(new).root, ROOT]
    new.decide(snapshot)
    new.start()
    assert committed(job.storage) == list(range(6))
    assert committed(elsewhere(new)) == [6, 7, 8]
    assert not new.committer.has_pending_work()


def test_without_the_coordinator_s_word_a_sink_elsewhere_still_loses_nothing() -> None:
    job = job_at(1)
    new = moved(job, savepoint_of(job), ends=True)
    new.properties = {}
    with pytest.raises(CommittableLostError):
        new.start()


def test_a_state_without_places_is_of_the_place_that_the_coordinator_names() -> None:
    job = job_at(1)
    savepoint = savepoint_of(job)
    forget_places(savepoint)
    new = moved(job, savepoint, ends=True)
    new.start()
    assert committed(job.storage) == list(range(6))


# ------------------------------------------------------------------------------------------------------------------ deaths


class Ledger:
    """Every row once, in the old output or in the new one, in this order, whatever died when."""

    def __init__(self, job: MiniJob, new: MiniJob) -> None:
        self.job, self.new = job, new

    def check(self) -> None:
        old, young = committed(self.job.storage), committed(elsewhere(self.new))
        assert old == list(range(len(old)))
        assert len(old) <= 6
        assert not young or len(old) == 6, "the new log begins when the old one has everything"
        assert young == list(range(6, 6 + len(young)))


def run_move(kill: int | None, *, after: bool, store: str) -> int:
    """A job moves its sink and dies at one change of a storage; how many changes there were."""
    job = job_at(1)
    savepoint = savepoint_of(job)
    new = moved(job, savepoint, ends=True)
    ledger = Ledger(job, new)
    target = new.stores[store]
    target.changes, target.dies_at, target.after = 0, kill, after
    for _ in range(2):
        try:
            new.start()
            while new.position < 12:
                new.emit(ROWS)
                new.checkpoint()
            break
        except Crash:
            ledger.check()
            target.dies_at = None
            new.abort_undecided()
    ledger.check()
    assert committed(elsewhere(new)) == published(elsewhere(new)) == list(range(6, 12))
    assert published(job.storage) == list(range(6))
    assert [path for path in job.storage.files if "/staged/" in path] == []
    return target.changes


@pytest.mark.parametrize("store", [ROOT, ELSEWHERE])
@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_operation_of_a_move_is_recovered_exactly(store: str, *, after: bool) -> None:
    changes = run_move(None, after=after, store=store)
    assert changes >= 4
    for kill in range(changes):
        run_move(kill, after=after, store=store)


def _forgets(original: Callable[..., Any]) -> Callable[..., Any]:
    def end_log_flow(*arguments: Any) -> Any:
        yield from ()

    return end_log_flow


def test_the_ledger_sees_a_move_that_drops_what_was_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_module, "end_log_flow", _forgets(end_log_flow))
    with pytest.raises(AssertionError):
        run_move(None, after=False, store=ROOT)


def test_a_commit_into_the_log_of_a_job_that_runs_would_end_it() -> None:
    """Why no fork does that: the job's next recovery would write those rows again, and may not."""
    job = job_at(1)
    wrong = moved(job, savepoint_of(job), job_id="job-b", ends=True)
    wrong.start()
    with pytest.raises(FencedError):
        job.start()
