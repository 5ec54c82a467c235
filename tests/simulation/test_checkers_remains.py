"""What is left behind, what is held in memory, and how time goes: one rule broken a test, and what excuses it."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.barriers.elements import Batch
from holdfast.barriers.exchange.credits import CreditAnnouncement, ReceiverCredit, SenderCredit
from holdfast.barriers.messages import (
    AckAnswers,
    AckBatch,
    AcknowledgeCheckpoint,
    AckStatus,
    CheckpointKind,
    Heartbeat,
    SubtaskMetrics,
    TaskState,
)
from holdfast.chaos.checkers.liveness import CHECKPOINT_MS_MAX, END_MS_MAX
from holdfast.chaos.checkers.observations import Answered, Lifecycle, PhaseBegan, Requested, Stored
from holdfast.chaos.checkers.retention import DISCARD_MS_MAX
from holdfast.coordinator.checkpoints.pending import PendingStatus
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.statebackends.errors import StorageUnavailableError
from holdfast.statebackends.storage.port import DeleteFile, ListFolder
from tests.simulation.checker_world import JOB, OUT, STATE, Story, graph, process


@pytest.fixture
def story() -> Story:
    story = Story()
    story.begin()
    story.complete(1)
    return story


def end(story: Story, newest: int = 1) -> list[str]:
    """The job finishes."""
    story.finish(newest)
    story.end()
    return story.broken


# ------------------------------------------------------------------------------------------------------------- retention


def finish_without_dropping(story: Story) -> None:
    metadata, story.metadata = story.metadata, {}
    story.finish(1)
    story.metadata = metadata


def test_checkpoints_of_a_finished_job_are_kept(story: Story) -> None:
    finish_without_dropping(story)
    story.end()
    assert story.broken == ["I16"]


@pytest.fixture
def retaining() -> Story:
    """A job that keeps its final checkpoint, which is its second."""
    story = Story()
    story.graph = graph(retain_on_finish=True)
    story.begin()
    story.complete(1)
    story.complete(2, CheckpointKind.FINAL)
    return story


def test_the_final_checkpoint_that_a_finished_job_is_to_keep_is_kept(retaining: Story) -> None:
    retaining.drop(1)
    finish_without_dropping(retaining)
    retaining.end()
    assert retaining.violations == []


def test_the_final_checkpoint_that_a_finished_job_is_to_keep_is_gone(retaining: Story) -> None:
    assert end(retaining, 2) == ["I16"]
    assert "was to keep checkpoint 2" in retaining.violations[0][1]


def test_of_the_final_checkpoint_that_a_finished_job_keeps_a_file_is_gone(retaining: Story) -> None:
    retaining.drop(1)
    finish_without_dropping(retaining)
    retaining.delete(f"{JOB}/chk-2/count-0-1")
    retaining.end()
    assert "I16" in retaining.broken


def test_a_finished_job_keeps_more_than_its_final_checkpoint(retaining: Story) -> None:
    finish_without_dropping(retaining)
    retaining.end()
    assert retaining.broken == ["I16"]


@pytest.mark.parametrize(("writer", "broken"), [(1, ["I23"]), (2, [])])
def test_what_completed_checkpoints_shared_goes_with_the_last_of_them(story: Story, writer: int, broken: list[str]) -> None:
    """What 2 wrote, which was aborted, is for the next recovery."""
    story.claim(2)
    story.abort(2)
    story.write(f"{JOB}/shared/{writer}-1-op-0-n-000001.sst", b"state")
    finish_without_dropping(story)
    story.drop(1)
    story.drop(2)
    story.end()
    assert story.broken == broken


@pytest.mark.parametrize("change", ["killed", "paused"])
def test_a_coordinator_that_died_need_not_drop_them(story: Story, change: str) -> None:
    finish_without_dropping(story)
    story.tell(Lifecycle(story.now_ms, "coordinator-1", "coordinator", change))
    story.end()
    assert story.violations == []


@pytest.mark.parametrize("fate", ["", "lie", "postponed"])
def test_a_deletion_that_failed_is_an_excuse(story: Story, fate: str) -> None:
    """Of one that was done, and told as failed, too."""
    result = True if fate == "lie" else StorageUnavailableError("no", path="x")
    story.tell(Stored(story.now_ms, "coordinator-1", STATE, DeleteFile(f"{JOB}/chk-1/_claim"), result, fate=fate))
    finish_without_dropping(story)
    story.end()
    assert story.violations == []


def discard(story: Story, answer: AckStatus = AckStatus.DISCARDED) -> str:
    """Checkpoint 2 is aborted; the file of a late acknowledgement, which the leader answers."""
    story.claim(2)
    story.abort(2)
    states = story.states(2, 0)["count" * 6]
    ack = AcknowledgeCheckpoint(1, 2, "count" * 6, 0, states)
    batch = AckBatch(1, 0, "s", (ack,))
    story.tell(Requested(story.now_ms, "worker-0.1", "acks", AckBatch(1, 0, "s", ())))  # what it asks meanwhile is something else
    story.tell(Answered(story.now_ms, "coordinator-1", "worker-0.1", "acks", AckAnswers(1, (answer,)), batch))
    return f"{JOB}/chk-2/count-0-1"


def test_what_came_too_late_is_left_behind(story: Story) -> None:
    discard(story)
    story.look()
    assert story.violations == []
    story.now_ms += DISCARD_MS_MAX
    story.look()
    assert story.broken == ["I24"]


def test_what_came_too_late_is_deleted(story: Story) -> None:
    story.delete(discard(story))
    story.now_ms += DISCARD_MS_MAX
    story.look()
    assert story.violations == []


def test_a_lost_answer_to_a_deletion_is_an_excuse(story: Story) -> None:
    path = discard(story)
    story.tell(Stored(story.now_ms, "coordinator-1", STATE, DeleteFile(path), False))
    story.now_ms += DISCARD_MS_MAX
    story.look()
    assert story.violations == []


def test_a_leader_that_died_discards_nothing(story: Story) -> None:
    discard(story)
    story.tell(Lifecycle(story.now_ms, "coordinator-1", "coordinator", "killed"))
    story.now_ms += DISCARD_MS_MAX
    story.look()
    assert story.violations == []


# ----------------------------------------------------------------------------------------------------------------- sinks


def staged_by_the_first_attempt(story: Story) -> None:
    story.stage(story.staged_name(2), (1, 1))
    story.now_ms += 1
    story.fail_over(1)
    story.complete(2, CheckpointKind.FINAL)
    story.drop(1)


def test_nobody_looks_for_what_a_dead_attempt_staged(story: Story) -> None:
    staged_by_the_first_attempt(story)
    assert end(story, 2) == ["I24"]


def test_a_sweep_that_looked_is_not_judged(story: Story) -> None:
    staged_by_the_first_attempt(story)
    listing = ListFolder("_holdfast/ledger/staged")
    story.tell(Stored(story.now_ms, "worker-0.1", OUT, listing, [story.staged_name(2, attempt=1)]))
    assert end(story, 2) == []


def test_a_worker_in_trouble_need_not_look(story: Story) -> None:
    staged_by_the_first_attempt(story)
    story.tell(Lifecycle(story.now_ms, "worker-0.1", "worker", "paused"))
    assert end(story, 2) == []


def test_a_savepoint_protects_what_its_attempt_staged(story: Story) -> None:
    story.complete(2, CheckpointKind.SAVEPOINT)
    story.stage(story.staged_name(2), (1, 1))
    story.fail_over(1)
    story.complete(3, CheckpointKind.FINAL)
    story.drop(1)
    assert end(story, 3) == []


def test_what_a_zombie_staged_is_left(story: Story) -> None:
    name = story.staged_name(2)
    story.fail_over(1)
    story.stage(name, (1, 1))
    assert end(story) == []


def test_the_last_attempt_leaves_something_staged(story: Story) -> None:
    story.stage(story.staged_name(2), (1, 1))
    assert end(story) == ["I24"]


def test_a_file_is_in_its_place_and_never_committed(story: Story) -> None:
    story.write("_holdfast/ledger/data/part-a.parquet", b"rows", OUT)
    assert end(story) == ["I24"]


def test_a_committed_file_is_not_shown_to_plain_readers(story: Story) -> None:
    name = story.staged_name(1)
    story.stage(name, (1, 1))
    story.commit(1, name, publish=False)
    story.delete(f"_holdfast/ledger/staged/{name}", OUT)
    assert end(story) == ["I19"]


# -------------------------------------------------------------------------------------------------------------- recovery


def test_a_file_without_an_owner_is_found(story: Story) -> None:
    story.write(f"{JOB}/chk-1/stray", b"state")
    story.end()
    assert story.broken == ["I24"]


def test_what_a_recovery_takes_away_is_no_orphan(story: Story) -> None:
    story.claim(2)
    story.abort(2)
    story.write(f"{JOB}/chk-2/late", b"state")
    story.write(f"{JOB}/chk-7/late", b"of an id that was dropped")
    story.tell(PhaseBegan(story.now_ms, "liveness"))
    assert story.violations == []
    assert f"{STATE}/{JOB}/chk-2/late" in story.files  # it was only tried


def test_an_unknown_file_in_the_jobs_directory(story: Story) -> None:
    story.write(f"{JOB}/other/1-a", b"state")
    story.end()
    assert story.broken == ["I24"]


@pytest.mark.parametrize(("name", "broken"), [("1-1-op-0-n-000001.sst", []), ("nobody", ["I24"])])
def test_a_shared_file_that_nobody_refers_to(story: Story, name: str, broken: list[str]) -> None:
    """A recovery takes away what a decided id wrote, and nothing else."""
    story.write(f"{JOB}/shared/{name}", b"state")
    story.end()
    assert story.broken == broken


def test_a_damaged_newest_checkpoint_stops_a_recovery(story: Story) -> None:
    story.files[f"{STATE}/{JOB}/chk-1/_metadata"] = b"{"
    story.tell(PhaseBegan(story.now_ms, "liveness"))
    assert story.broken == ["I29"]


def test_a_recovery_that_would_begin_elsewhere(story: Story) -> None:
    del story.files[f"{STATE}/{JOB}/chk-1/_metadata"]  # unseen: a store that forgets
    story.tell(PhaseBegan(story.now_ms, "liveness"))
    assert story.broken == ["I29"]


# ------------------------------------------------------------------------------------------------------ time and liveness


def subtask(watermark_ms: int = 0, **parts: Any) -> Any:
    key = SimpleNamespace(vertex="count" * 6, subtask=0)
    found = SimpleNamespace(
        key=key,
        attempt=1,
        _input=SimpleNamespace(watermark_ms=watermark_ms),
        chain=SimpleNamespace(nodes=(), head=SimpleNamespace(operator=None, uid="count")),
        state=TaskState.CREATED,
        mailbox=parts.get("mailbox", []),
        _checkpoints=SimpleNamespace(_aborted=parts.get("aborted", [])),
    )
    return SimpleNamespace(subtask=found, gate=parts.get("gate"), outputs=parts.get("outputs", ()))


def worker(*subtasks: Any, unanswered: int = 0, seen: int = 0, name: str = "worker-0.1") -> Any:
    session = SimpleNamespace(unanswered_count=unanswered, _seen=range(seen))
    return process(name, session=session, subtasks=lambda: subtasks)


def test_a_watermark_goes_back(story: Story) -> None:
    for watermark_ms in (5, 9, 9, 8):
        story.live_workers = [worker(subtask(watermark_ms))]
        story.look()
    assert story.broken == ["I10"]


def test_a_watermark_of_another_process_begins_anew(story: Story) -> None:
    for name, watermark_ms in (("worker-0.1", 9), ("worker-0.2", 1)):
        story.live_workers = [worker(subtask(watermark_ms), name=name)]
        story.look()
    assert story.violations == []


def test_a_heartbeat_tells_of_a_watermark_that_went_back(story: Story) -> None:
    for attempt, watermark_ms in ((1, 5), (1, None), (2, 3), (2, 2)):
        beat = Heartbeat(0, "s", attempt, (SubtaskMetrics("v", 0, watermark_ms=watermark_ms),))
        story.tell(Requested(story.now_ms, "worker-0.1", "heartbeat", beat))
    assert story.broken == ["I10"]


def test_no_checkpoint_completes_once_faults_are_over(story: Story) -> None:
    story.tell(PhaseBegan(story.now_ms, "liveness"))
    story.claim(2)
    story.now_ms += CHECKPOINT_MS_MAX
    story.look()
    story.look()
    assert story.broken == ["I30"]
    assert "2 (acknowledged by none)" in story.violations[0][1]


def test_a_job_that_completes_checkpoints_has_to_end(story: Story) -> None:
    story.tell(PhaseBegan(story.now_ms, "liveness"))
    story.complete(2)
    story.now_ms += CHECKPOINT_MS_MAX
    story.look()
    assert story.violations == []
    story.now_ms += END_MS_MAX
    story.look()
    assert story.broken == ["I30"]


def test_faults_may_hold_a_job_up(story: Story) -> None:
    story.now_ms += END_MS_MAX
    story.look()
    assert story.violations == []


# ---------------------------------------------------------------------------------------------------------------- bounds


def gate(sizes: list[int], *, batches: int = 2, size_max: int = 100) -> Any:
    """A gate of one channel with batches of these sizes."""
    queue = deque(SimpleNamespace(element=Batch(rows=[{}]), size=size, is_restored=False) for size in sizes)
    return SimpleNamespace(_queues=[queue], _credits=[ReceiverCredit(allocated_bytes=size_max, allocated_batches=batches)])


@pytest.mark.parametrize(("sizes", "broken"), [([40, 40], []), ([500], []), ([1, 1, 1], ["I17"]), ([60, 60], ["I17"])])
def test_a_channel_holds_what_its_credit_allows(story: Story, sizes: list[int], broken: list[str]) -> None:
    story.live_workers = [worker(subtask(gate=gate(sizes)))]
    story.look()
    assert story.broken == broken


def test_what_a_channel_inherits_from_a_snapshot_takes_no_credit(story: Story) -> None:
    inheriting = gate([1] * 13 + [40, 40])
    for queued in list(inheriting._queues[0])[:13]:
        queued.is_restored = True
    story.live_workers = [worker(subtask(gate=inheriting))]
    story.look()
    assert story.broken == []


@pytest.mark.parametrize(("sizes", "broken"), [([90], []), ([40, 40], []), ([500], []), ([1, 1, 1], ["I17"]), ([60, 60], ["I17"])])
def test_a_channel_sends_what_its_credit_allows(story: Story, sizes: list[int], broken: list[str]) -> None:
    credit = SenderCredit()
    credit.announced(CreditAnnouncement(100, 2, 0, 0))
    for size in sizes:
        credit.sent(size)
    output = SimpleNamespace(_channels=[SimpleNamespace(pending_count=0, _credit=credit)])
    story.live_workers = [worker(subtask(outputs=(output,)))]
    story.look()
    assert story.broken == broken


def test_a_worker_holds_too_much(story: Story) -> None:
    output = SimpleNamespace(_channels=[SimpleNamespace(pending_count=2_001, _credit=SenderCredit())])
    for host in (
        worker(unanswered=10_001),
        worker(seen=4_097),
        worker(subtask(mailbox=range(10_001))),
        worker(subtask(aborted=range(129))),
        worker(subtask(outputs=(output,))),
    ):
        story.violations.clear()
        story.live_workers = [host]
        story.look()
        assert story.broken == ["I17"]


def coordinator(
    pending: int = 0,
    finished: int = 0,
    *,
    now_ms: int = 0,
    paused: bool = False,
    status: PendingStatus = PendingStatus.AWAITING_ACKS,
    state: JobState = JobState.RUNNING,
) -> Any:
    kind = SimpleNamespace(kind=CheckpointKind.CHECKPOINT)
    entry = SimpleNamespace(request=kind, checkpoint_id=1, started_ms=0, status=status)
    machine = SimpleNamespace(
        pending=[entry] * pending,
        _queue=(),
        _completed=SimpleNamespace(_recent=()),
        _aborted_folders=(),
        failures=SimpleNamespace(_failed=()),
        stats=SimpleNamespace(_finished=range(finished)),
    )
    config = SimpleNamespace(max_concurrent_checkpoints=1, checkpoint_timeout_ms=2_000)
    master = SimpleNamespace(
        coordinator=machine,
        setup=SimpleNamespace(submission=1, graph=SimpleNamespace(config=config)),
        lifecycle=SimpleNamespace(exceptions=SimpleNamespace(_exceptions=())),
        triggers=SimpleNamespace(_triggers=()),
        slot_pool=SimpleNamespace(slots=()),
        state=state,
    )
    found = process("coordinator-1", services=[SimpleNamespace(_master=master, closed=False, epoch=1)])
    found.process.paused = paused
    found.clock = SimpleNamespace(monotonic_ms=lambda: now_ms)
    return found


@pytest.mark.parametrize(("held", "broken"), [({}, []), ({"pending": 2}, ["I17"]), ({"finished": 21}, ["I17"])])
def test_a_coordinator_holds_what_it_may(story: Story, held: dict[str, Any], broken: list[str]) -> None:
    story.live_coordinators = [coordinator(**held)]
    story.look()
    assert story.broken == broken


@pytest.mark.parametrize(
    ("second", "broken"),
    [
        ({"now_ms": 2_200}, ["I17"]),
        ({"now_ms": 2_100}, []),  # at its next turn
        ({"now_ms": 2_200, "paused": True}, []),
        ({"now_ms": 2_200, "status": PendingStatus.ABORTING}, []),
        ({"now_ms": 2_200, "state": JobState.SUSPENDED}, []),  # it leads the job no more
        ({"now_ms": 2_200, "pending": 0}, []),
    ],
)
def test_a_checkpoint_without_time_left_is_given_up(story: Story, second: dict[str, Any], broken: list[str]) -> None:
    for look in ({"pending": 1, "now_ms": 2_001}, {"pending": 1, **second}):
        story.live_coordinators = [coordinator(**look)]
        story.look()
    assert story.broken == broken
