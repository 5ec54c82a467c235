"""Numbers that users see: counts, a bounded history, summaries."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.api.flink import render_checkpoints
from holdfast.barriers.messages import AcknowledgeCheckpoint, CheckpointKind, CheckpointMetrics, FailureReason, SubtaskKey
from holdfast.coordinator import views
from holdfast.coordinator.checkpoints.checkpoint import CheckpointRequest, CompletedCheckpoint
from holdfast.coordinator.checkpoints.stats import HISTORY_MAX, RECENT_MAX, CheckpointStats
from holdfast.coordinator.history.records import describe_checkpoint
from holdfast.coordinator.views import Quantiles, RestoredView, summarise

TASKS = [SubtaskKey("V", 0), SubtaskKey("V", 1)]


def complete(stats: CheckpointStats, number: int, size: int = 10) -> None:
    stats.triggered(number, CheckpointRequest(), TASKS, 1_000)
    for task in TASKS:
        metrics = CheckpointMetrics(
            checkpointed_size=size, state_size=2 * size, sync_duration_ms=3, async_duration_ms=4, start_delay_ms=5
        )
        ack = AcknowledgeCheckpoint(1, number, task.vertex, task.subtask, {}, metrics)
        stats.acknowledged(ack, 1_000 + 10 * (task.subtask + 1))
    stats.completed(number, f"job/chk-{number}", 1_030)


def test_completed_checkpoint_sums_its_subtasks() -> None:
    stats = CheckpointStats()
    complete(stats, 1)
    view = stats.checkpoint(1)
    assert view is not None
    assert (view.status, view.checkpointed_size, view.state_size, view.end_to_end_ms) == ("COMPLETED", 20, 40, 30)
    assert (view.latest_ack_ms, view.location, view.is_savepoint) == (1_020, "job/chk-1", False)
    assert view.savepoint_format is None
    vertex = view.vertices["V"]
    assert [subtask.end_to_end_ms for subtask in vertex.subtasks] == [10, 20]
    assert vertex.summary["sync"].max == 3
    assert (vertex.summary["start_delay"].min, vertex.summary["start_delay"].max) == (3, 5), "10 ms less 7 ms of work, and as told"


def test_a_checkpoint_is_unaligned_if_a_subtask_was_and_tells_what_was_stored_in_flight() -> None:
    stats = CheckpointStats()
    stats.triggered(1, CheckpointRequest(), TASKS, 1_000)
    overtaken = CheckpointMetrics(bytes_persisted_during_alignment=700, unaligned=True)
    stats.acknowledged(AcknowledgeCheckpoint(1, 1, "V", 0), 1_010)
    aligned = stats.checkpoint(1)
    stats.acknowledged(AcknowledgeCheckpoint(1, 1, "V", 1, metrics=overtaken), 1_020)
    stats.completed(1, "job/chk-1", 1_030)
    view = stats.checkpoint(1)
    assert aligned is not None
    assert view is not None
    assert (render_checkpoints.checkpoint(aligned, "/s").checkpoint_type, aligned.persisted_bytes) == ("CHECKPOINT", 0)
    shown = render_checkpoints.checkpoint(view, "/s")
    assert (shown.checkpoint_type, shown.persisted_data, shown.tasks["V"].persisted_data) == ("UNALIGNED_CHECKPOINT", 700, 700)
    details = render_checkpoints.task_checkpoint(1, view.vertices["V"])
    assert details.summary.alignment.persisted.max == 700
    told = [(each.unaligned_checkpoint, each.alignment.persisted) for each in details.subtasks if each.className == "completed"]
    assert told == [(False, 0), (True, 700)]
    assert stats.view().summary["persisted_data"].max == 700


def test_quantiles_are_computed_for_who_looks_and_not_at_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def counted(values: Iterable[float]) -> Quantiles:
        computed.append(1)
        return summarise(values)

    monkeypatch.setattr(views, "summarise", counted)
    stats = CheckpointStats()
    complete(stats, 1)
    view = stats.checkpoint(1)
    assert view is not None
    assert not computed
    assert view.vertices["V"].summary["async"].p99 == 4
    assert computed


def test_pending_and_failed_checkpoints_are_shown_with_what_is_missing() -> None:
    stats = CheckpointStats()
    stats.triggered(1, CheckpointRequest(), TASKS, 1_000)
    stats.acknowledged(AcknowledgeCheckpoint(1, 1, "V", 1), 1_005)
    pending = stats.checkpoint(1)
    assert pending is not None
    assert (pending.status, pending.num_acknowledged_subtasks) == ("IN_PROGRESS", 1)
    assert [subtask.acknowledged for subtask in pending.vertices["V"].subtasks] == [False, True]
    stats.failed(1, FailureReason.EXPIRED, "no acknowledgement in time", 1_100)
    failed = stats.view().latest_failed
    assert failed is not None
    assert (failed.failure_reason, failed.failure_message, failed.failure_ms) == ("expired", "no acknowledgement in time", 1_100)


def test_id_that_failed_before_its_trigger_is_not_shown() -> None:
    stats = CheckpointStats()
    stats.failed(1, FailureReason.TRIGGER_FAILURE, "", 1)
    assert stats.view().counts.total == 0


def test_the_latest_of_each_kind_is_found_by_its_id_when_the_history_has_forgotten_it() -> None:
    """Flink's dashboard goes on from `latest.savepoint` to the details of that id."""
    stats = CheckpointStats()
    stats.triggered(1, CheckpointRequest(CheckpointKind.SAVEPOINT), TASKS, 1_000)
    stats.completed(1, "/sp/savepoint-1", 1_030)
    stats.triggered(2, CheckpointRequest(), TASKS, 1_000)
    stats.failed(2, FailureReason.EXPIRED, "no acknowledgement in time", 1_100)
    for number in range(3, HISTORY_MAX + 4):
        complete(stats, number)
    seen = stats.view()
    assert min(view.checkpoint_id for view in seen.history) > 2
    assert stats.checkpoint(1) == seen.latest_savepoint is not None
    assert stats.checkpoint(2) == seen.latest_failed is not None
    stats.dropped(1)
    found = stats.checkpoint(1)
    assert found is not None
    assert found.discarded, "a stop-savepoint that its own job claimed and deleted"
    assert stats.checkpoint(3) is None


def test_history_is_bounded_and_counts_go_on() -> None:
    stats = CheckpointStats()
    for number in range(1, 3 * HISTORY_MAX):
        complete(stats, number)
    view = stats.view()
    assert len(view.history) == HISTORY_MAX
    assert view.history[0].checkpoint_id == 3 * HISTORY_MAX - 1
    assert view.counts.completed == 3 * HISTORY_MAX - 1
    assert stats.checkpoint(1) is None


def test_dropped_checkpoint_is_marked_and_restores_are_counted() -> None:
    stats = CheckpointStats()
    complete(stats, 1)
    stats.dropped(1)
    stats.restored(RestoredView(1, 5, False, "job/chk-1"))
    view = stats.view()
    assert view.history[0].discarded
    assert view.counts.restored == 1
    assert view.latest_restored is not None


def test_quantiles_by_nearest_rank() -> None:
    assert summarise([]) == Quantiles()
    quantiles = summarise(range(1, 101))
    assert (quantiles.min, quantiles.max, quantiles.avg) == (1, 100, 50.5)
    assert (quantiles.p50, quantiles.p90, quantiles.p99, quantiles.p999) == (51, 91, 100, 100)


def test_a_list_shows_a_pending_checkpoint_in_numbers_alone() -> None:
    stats = CheckpointStats()
    stats.triggered(1, CheckpointRequest(), TASKS, 1_000)
    ack = AcknowledgeCheckpoint(1, 1, "V", 1, {}, CheckpointMetrics(checkpointed_size=3, state_size=5))
    for _ in range(2):  # a repeat counts once
        stats.acknowledged(ack, 1_040)
    (listed,) = stats.view().history
    shown = stats.checkpoint(1)
    assert shown is not None
    assert (listed.vertices, set(shown.vertices)) == ({}, {"V"})
    assert listed == replace(shown, vertices={})
    assert (listed.latest_ack_ms, listed.end_to_end_ms, listed.checkpointed_size, listed.state_size) == (1_040, 40, 3, 5)
    assert listed.num_acknowledged_subtasks == 1


def acknowledge(stats: CheckpointStats, number: int, subtask: int, at_ms: int, **fields: object) -> None:
    metrics = msgspec.convert(fields, CheckpointMetrics)
    stats.acknowledged(AcknowledgeCheckpoint(1, number, "V", subtask, {}, metrics), at_ms)


def test_the_phases_of_a_checkpoint_are_kept_beside_those_before_it() -> None:
    stats = CheckpointStats()
    stats.triggered(7, CheckpointRequest(), TASKS, 1_000)
    first = {"start_delay_ms": 5, "alignment_duration_ms": 10, "sync_duration_ms": 20, "async_duration_ms": 100}
    acknowledge(stats, 7, 0, 1_150, **first, store_duration_ms=80, checkpointed_size=4_000, state_size=9_000, new_files=3,
                stalled_duration_ms=15.4)  # fmt: skip
    acknowledge(stats, 7, 1, 1_040, start_delay_ms=30, sync_duration_ms=1, async_duration_ms=2)
    stats.completed(7, "job/chk-7", 1_190)
    view = stats.checkpoint(7)
    assert view is not None
    slow, old = view.vertices["V"].subtasks
    assert (slow.store_ms, slow.encode_ms, slow.acknowledge_ms, slow.new_files) == (80, 20, 15, 3)
    assert (old.store_ms, old.encode_ms, old.new_files) == (-1, -1, -1), "its worker does not tell"
    assert (slow.stalled_ms, old.stalled_ms) == (15, 0)
    assert (view.decide_ms, view.notify_ms) == (40, -1)
    (phases,) = stats.view().recent
    assert phases == views.CheckpointPhases(7, 190, 30, 10, 20, 20, 80, 15, 40, -1, 4_000, 9_000, 50_000, 3)


def test_when_its_subtasks_were_told_comes_with_the_next_acknowledgements() -> None:
    stats = CheckpointStats()
    complete(stats, 1)  # triggered at 1,000, complete after 30 ms
    stats.triggered(2, CheckpointRequest(), TASKS, 5_000)
    acknowledge(stats, 2, 0, 5_010, notified_checkpoint=1, notified_after_ms=45)
    acknowledge(stats, 2, 1, 5_020, notified_checkpoint=1, notified_after_ms=90.4)
    acknowledge(stats, 2, 1, 5_030, notified_checkpoint=99, notified_after_ms=1e15)
    view = stats.checkpoint(1)
    assert view is not None
    assert view.notify_ms == 60
    assert [phases.notify_ms for phases in stats.view().recent] == [60]


def test_when_subtasks_were_told_is_given_once_with_a_later_checkpoint() -> None:
    stats = CheckpointStats()
    complete(stats, 1)  # triggered at 1,000, complete after 30 ms
    assert stats.take_notified(1) == {}, "nobody has said so yet"
    stats.triggered(2, CheckpointRequest(), TASKS, 5_000)
    acknowledge(stats, 2, 0, 5_010, notified_checkpoint=1, notified_after_ms=45)
    acknowledge(stats, 2, 1, 5_020, notified_checkpoint=1, notified_after_ms=90)
    stats.completed(2, "job/chk-2", 5_040)
    assert stats.take_notified(1) == {}
    assert stats.take_notified(2) == {1: 60}
    assert stats.take_notified(3) == {}


@pytest.mark.parametrize(
    ("skew_ms", "start_delay", "answered"),
    [(0, 300, 100), (60, 360, 40), (3_600_000, 400, 0), (86_400_000, 400, 0)],
)
def test_a_worker_whose_clock_is_ahead_moves_no_more_than_there_is(skew_ms: int, start_delay: int, answered: int) -> None:
    """It took 1,000 ms by the coordinator's clock, of which 600 ms are the worker's own durations."""
    stats = CheckpointStats()
    stats.triggered(1, CheckpointRequest(), TASKS, 1_000)
    fields = {"alignment_duration_ms": 200, "sync_duration_ms": 100, "async_duration_ms": 300}
    acknowledge(stats, 1, 0, 2_000, start_delay_ms=300 + skew_ms, **fields)
    view = stats.checkpoint(1)
    assert view is not None
    subtask = view.vertices["V"].subtasks[0]
    assert (subtask.start_delay_ms, subtask.acknowledge_ms, subtask.end_to_end_ms) == (start_delay, answered, 1_000)
    assert view.vertices["V"].summary["start_delay"].max == start_delay


@pytest.mark.parametrize(
    ("after_ms", "notify_ms"),
    [(45, 15), (25, 0), (0, 0), (86_400_000, 3_980)],
    ids=["right", "a little behind", "behind within what is tolerated", "a day ahead"],
)
def test_when_a_worker_was_told_lies_between_the_end_and_its_next_word(after_ms: int, notify_ms: int) -> None:
    stats = CheckpointStats()
    complete(stats, 1)  # triggered at 1,000, complete after 30 ms
    stats.triggered(2, CheckpointRequest(), TASKS, 5_000)
    acknowledge(stats, 2, 0, 5_010, notified_checkpoint=1, notified_after_ms=after_ms)
    view = stats.checkpoint(1)
    assert view is not None
    assert view.notify_ms == notify_ms


def test_a_worker_that_was_told_long_before_the_end_has_a_wrong_clock_and_is_not_counted() -> None:
    stats = CheckpointStats()
    stats.triggered(1, CheckpointRequest(), TASKS, 1_000)
    for subtask in range(2):
        acknowledge(stats, 1, subtask, 9_000)
    stats.completed(1, "job/chk-1", 11_000)
    stats.triggered(2, CheckpointRequest(), TASKS, 20_000)
    acknowledge(stats, 2, 0, 20_010, notified_checkpoint=1, notified_after_ms=3_000)
    view = stats.checkpoint(1)
    assert view is not None
    assert view.notify_ms == -1, "not known; it was 0"
    acknowledge(stats, 2, 1, 20_020, notified_checkpoint=1, notified_after_ms=10_040)
    view = stats.checkpoint(1)
    assert view is not None
    assert view.notify_ms == 40


def test_an_overtaken_alignment_runs_beside_the_snapshot() -> None:
    stats = CheckpointStats()
    stats.triggered(1, CheckpointRequest(), TASKS, 1_000)
    acknowledge(stats, 1, 0, 1_110, start_delay_ms=10, alignment_duration_ms=80, async_duration_ms=90, unaligned=True)
    view = stats.checkpoint(1)
    assert view is not None
    assert view.vertices["V"].subtasks[0].acknowledge_ms == 10


def test_recent_phases_are_bounded_and_without_savepoints() -> None:
    stats = CheckpointStats()
    for number in range(1, 200):
        if number % 2:
            complete(stats, number)
        else:
            stats.triggered(number, CheckpointRequest(CheckpointKind.SAVEPOINT, folder="/s"), TASKS, 1_000)
            stats.completed(number, "/s", 1_010)
    assert [phases.checkpoint_id for phases in stats.view().recent] == list(range(161, 200, 2))
    assert len(stats._notified) <= 2 * RECENT_MAX


def test_sums_of_a_checkpoint_in_progress_go_on_from_view_to_view() -> None:
    stats = CheckpointStats()
    stats.triggered(1, CheckpointRequest(), TASKS, 1_000)
    for task, so_far in zip(TASKS, (7, 14), strict=True):
        metrics = CheckpointMetrics(checkpointed_size=7)
        for at_ms in (1_005, 1_090):  # the second is a repetition
            stats.acknowledged(AcknowledgeCheckpoint(1, 1, task.vertex, task.subtask, {}, metrics), at_ms + task.subtask)
        for _ in range(2):
            view = stats.checkpoint(1)
            assert view is not None
            assert (view.checkpointed_size, view.latest_ack_ms) == (so_far, 1_005 + task.subtask)


def test_the_slowest_subtasks_of_many_are_recorded_and_the_first_of_equal_ones() -> None:
    stats = CheckpointStats()
    tasks = [SubtaskKey(f"v{vertex}", subtask) for vertex in range(6) for subtask in range(4)]
    took_ms = {task: 50 if task.vertex in ("v2", "v4") else 10 for task in tasks} | {tasks[-1]: 90}
    stats.triggered(1, CheckpointRequest(), tasks, 1_000)
    for task in tasks:
        stats.acknowledged(AcknowledgeCheckpoint(1, 1, task.vertex, task.subtask), 1_000 + took_ms[task])
    stats.completed(1, "job/chk-1", 1_100)
    view = stats.checkpoint(1)
    assert view is not None
    slowest = [(each["vertex"], each["subtask"]) for each in describe_checkpoint(view, {})["slowest"]]
    equal = [("v2", subtask) for subtask in range(4)] + [("v4", subtask) for subtask in range(4)]
    assert slowest == [("v5", 3), *equal, ("v0", 0)]


def recalled(*numbers: int) -> list[CompletedCheckpoint]:
    return [CompletedCheckpoint(each, CheckpointKind.CHECKPOINT, f"job/chk-{each}", 10 * each, 500) for each in numbers]


def test_what_earlier_leaders_completed_gives_way_to_what_this_one_decides() -> None:
    stats = CheckpointStats()
    stats.recall(recalled(*range(1, HISTORY_MAX + 5)))
    assert [view.checkpoint_id for view in stats.view().history] == list(range(HISTORY_MAX + 4, 4, -1))
    for number in range(101, 101 + HISTORY_MAX):
        stats.triggered(number, CheckpointRequest(), TASKS, 1_000)
        stats.failed(number, FailureReason.EXPIRED, "", 2_000)
        assert len(stats.view().history) == HISTORY_MAX
    newest = stats.view().latest_completed
    assert newest is not None
    assert (newest.checkpoint_id, newest.state_size, newest.trigger_ms) == (HISTORY_MAX + 4, 500, 10 * (HISTORY_MAX + 4))
    assert stats.latest_completed == newest
    assert stats.capture().recall(HISTORY_MAX + 4) == newest
    assert stats.checkpoint(HISTORY_MAX + 4) is None, "its times are in the history of the job"
    complete(stats, 200)
    assert stats.latest_completed == stats.view().latest_completed == stats.checkpoint(200)


def test_one_of_an_earlier_leader_that_is_dropped_is_shown_as_such() -> None:
    stats = CheckpointStats()
    stats.recall(recalled(1, 2))
    stats.dropped(1)
    stats.dropped(2)
    stats.kept(2)
    view = stats.view()
    assert [(each.checkpoint_id, each.discarded) for each in view.history] == [(2, False), (1, True)]
    assert view.latest_completed == view.history[0]
