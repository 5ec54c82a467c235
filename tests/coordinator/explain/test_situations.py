"""Built situations, each with its first cause, whose it is, and the one setting: all of them have to be right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import CheckpointKind, TaskState
from holdfast.coordinator.explain.explanation import explain
from holdfast.coordinator.explain.records import CauseKind
from holdfast.coordinator.views import ExceptionView, HookFailureView, HookRestoreView, HookWaitView, ScheduleView
from holdfast.statebackends.settings import RocksDBConfig
from tests.coordinator.explain.building import COMMITTER, HEALTHY, JOB, MIB, NOW, SINK, SOURCE, WINDOW, Built


@dataclass
class Case:
    name: str
    change: Callable[[Built], None]
    first: CauseKind
    setting: str | None = None
    """`name=new` of the recommended setting; a `!` in front: with the next submission only."""
    place: str = ""
    """Part of the place of the first cause."""
    text: str = ""
    """Part of what the first cause says."""


CASES: list[Case] = []


def situation(
    first: CauseKind, setting: str | None = None, place: str = "", *, text: str = ""
) -> Callable[[Callable[[Built], None]], Callable[[Built], None]]:
    def add(change: Callable[[Built], None]) -> Callable[[Built], None]:
        CASES.append(Case(change.__name__, change, first, setting, place, text))
        return change

    return add


# ---------------------------------------------------------------------------------------- healthy: no alarm for any


@situation(CauseKind.USUAL)
def healthy(it: Built) -> None:
    pass


@situation(CauseKind.USUAL)
def healthy_with_a_hiccup(it: Built) -> None:
    it.ack(WINDOW, [2], store=550)


@situation(CauseKind.USUAL)
def healthy_and_nothing_to_compare_with(it: Built) -> None:
    it.compared = 0
    it.all_acks(store=4_000)


@situation(CauseKind.USUAL)
def healthy_though_its_subtasks_are_skewed_as_ever(it: Built) -> None:
    it.ack(WINDOW, [0], size=400 * MIB, state=4_000 * MIB, store=700)


@situation(CauseKind.USUAL)
def healthy_while_backpressured(it: Built) -> None:
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.USUAL)
def healthy_and_in_progress(it: Built) -> None:
    it.status, it.age_ms = "IN_PROGRESS", 300
    it.missing(WINDOW, 0, 1, 2, 3)


@situation(CauseKind.USUAL)
def healthy_savepoint_that_stores_everything(it: Built) -> None:
    it.kind, it.age_ms = CheckpointKind.SAVEPOINT, 60_000
    it.all_acks(size=40 * MIB, store=20_000)


@situation(CauseKind.USUAL)
def healthy_slow_checkpoint_among_slow_ones_with_a_long_interval(it: Built) -> None:
    it.tune(checkpoint_interval_ms=300_000, checkpoint_timeout_ms=600_000)
    it.schedule = ScheduleView(300_000, 100_000)
    it.usual = {"end_to_end_ms": 60_000, "store_ms": 59_000}
    it.age_ms = 80_000
    it.all_acks(store=58_000)


@situation(CauseKind.USUAL)
def healthy_between_two_checkpoints(it: Built) -> None:
    it.status = None


@situation(CauseKind.USUAL)
def healthy_on_small_times(it: Built) -> None:
    it.usual = {"end_to_end_ms": 3, "store_ms": 1, "alignment_ms": 0, "start_delay_ms": 0, "sync_ms": 0}


@situation(CauseKind.USUAL)
def healthy_from_workers_of_before(it: Built) -> None:
    it.all_acks(store=-1, encode=240)


@situation(CauseKind.USUAL)
def healthy_pending_savepoint(it: Built) -> None:
    it.status, it.kind, it.age_ms = "IN_PROGRESS", CheckpointKind.SAVEPOINT, 40_000
    it.missing(WINDOW, 0)


# ------------------------------------------------------------------------------------------------------- barriers


def held_up(it: Built, ms: int = 20_000) -> None:
    """Barriers wait in front of the window, as those behind it do."""
    it.age_ms = ms + 5_000
    it.ack(WINDOW, align=ms)
    it.ack(SINK, start=ms)
    it.ack(COMMITTER, [0], start=ms)


@situation(CauseKind.BUSY_VERTEX, "unaligned_checkpoints=true", "count per carrier")
def a_busy_window_holds_barriers_up(it: Built) -> None:
    held_up(it)
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.BUSY_VERTEX, "unaligned_checkpoints=true", "table")
def backpressure_is_followed_downstream_to_its_busy_end(it: Built) -> None:
    held_up(it)
    it.pressed(SOURCE, WINDOW)
    it.busy(SINK)


@situation(CauseKind.SKEW, "unaligned_checkpoints=true", "subtask 2 on h2")
def skewed_keys(it: Built) -> None:
    held_up(it)
    it.pressed(SOURCE)
    it.busy(WINDOW, [2])
    it.records[WINDOW, 2] = 90_000


@situation(CauseKind.BUSY_SUBTASK, "unaligned_checkpoints=true", "subtask 3 on h3")
def one_subtask_is_slow_with_as_many_records(it: Built) -> None:
    held_up(it)
    it.pressed(SOURCE)
    it.busy(WINDOW, [3])


@situation(CauseKind.OUTSIDE, "unaligned_checkpoints=true", "table")
def a_sink_waits_for_its_target(it: Built) -> None:
    held_up(it)
    it.pressed(SOURCE, WINDOW)
    it.busy(SINK, share=20)
    it.busy(COMMITTER, [0], share=10)


@situation(CauseKind.BUSY_VERTEX, "!parallelism=8", "count per carrier")
def barriers_overtake_already(it: Built) -> None:
    it.tune(unaligned_checkpoints=True)
    held_up(it)
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.BUSY_VERTEX, "aligned_checkpoint_timeout_ms=0")
def barriers_overtake_too_late(it: Built) -> None:
    it.tune(unaligned_checkpoints=True, aligned_checkpoint_timeout_ms=15_000)
    held_up(it)
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.BUSY_VERTEX, "!parallelism=8")
def an_at_least_once_job_can_t_overtake(it: Built) -> None:
    it.tune(checkpointing_mode="at_least_once")
    held_up(it)
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.SKEW, None)
def skew_that_no_setting_mends(it: Built) -> None:
    it.overtakable = False
    held_up(it)
    it.pressed(SOURCE)
    it.busy(WINDOW, [1])
    it.records[WINDOW, 1] = 90_000


@situation(CauseKind.NO_LONGER_SEEN, None)
def what_held_it_up_is_over(it: Built) -> None:
    held_up(it)
    it.age_ms = 300_000


@situation(CauseKind.NO_LONGER_SEEN, None)
def workers_that_tell_no_shares(it: Built) -> None:
    held_up(it)
    for vertex in (SOURCE, WINDOW, SINK):
        for subtask in range(4):
            it.shares[vertex, subtask] = None


@situation(CauseKind.SLOW_SYNC, None, "orders subtask 1")
def a_slow_hook_upstream_makes_those_behind_it_late(it: Built) -> None:
    it.age_ms = 30_000
    it.ack(SOURCE, [1], sync=8_000)
    it.ack(WINDOW, align=8_000)
    it.ack(SINK, start=8_050)
    it.ack(COMMITTER, [0], start=8_100)


@situation(CauseKind.BUSY_VERTEX, "unaligned_checkpoints=true", "count per carrier")
def all_checkpoints_are_too_slow_for_the_interval(it: Built) -> None:
    held_up(it, 25_000)
    it.usual = {"end_to_end_ms": 25_400, "alignment_ms": 25_000, "start_delay_ms": 25_000}
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.BUSY_VERTEX, None, "orders")
def a_busy_source_takes_its_trigger_late(it: Built) -> None:
    it.age_ms = 20_000
    for vertex in (SOURCE, WINDOW, SINK):
        it.ack(vertex, start=9_000)
    it.ack(COMMITTER, [0], start=9_000)
    it.busy(SOURCE)


@situation(CauseKind.NO_LONGER_SEEN, None, "orders")
def a_source_took_its_trigger_late_and_nothing_shows_why(it: Built) -> None:
    it.age_ms = 60_000
    for vertex in (SOURCE, WINDOW, SINK):
        it.ack(vertex, start=29_000)
    it.ack(COMMITTER, [0], start=29_000)


def in_one_call(it: Built, subtask: int, step_ms: int) -> None:
    """The loop of a worker does not come back from the window; its source waits for its turn."""
    it.shares[SOURCE, subtask] = it.shares[WINDOW, subtask] = (1_000, 0)
    it.metrics[WINDOW, subtask] = {"step_ms": step_ms}


@situation(CauseKind.LONG_CALL, None, "count per carrier (uid counts) subtask 1 on h1")
def a_call_that_does_not_end_holds_a_pending_checkpoint_up(it: Built) -> None:
    it.status, it.age_ms = "IN_PROGRESS", 20_000
    for vertex in (SOURCE, WINDOW, SINK):
        it.missing(vertex, 1)
    it.missing(COMMITTER, 0)
    in_one_call(it, 1, 22_000)


@situation(CauseKind.LONG_CALL, None, "count per carrier (uid counts) subtask 1 on h1")
def a_call_that_has_lasted_as_long_as_a_young_checkpoint(it: Built) -> None:
    it.tune(checkpoint_interval_ms=1_000)
    it.schedule = ScheduleView(1_000, -3_000)
    it.status, it.age_ms = "IN_PROGRESS", 4_000
    for vertex in (SOURCE, WINDOW, SINK):
        it.missing(vertex, 1)
    it.missing(COMMITTER, 0)
    in_one_call(it, 1, 3_500)


@situation(CauseKind.BUSY_VERTEX, "unaligned_checkpoints=true", "count per carrier")
def a_call_of_a_second_is_one_of_many(it: Built) -> None:
    it.status, it.age_ms = "IN_PROGRESS", 20_000
    for vertex in (WINDOW, SINK):
        it.missing(vertex, 1)
    it.missing(COMMITTER, 0)
    it.pressed(SOURCE)
    it.busy(WINDOW)
    it.metrics[WINDOW, 1] = {"step_ms": 1_400}


@situation(CauseKind.LONG_CALL, None, "count per carrier (uid counts) subtask 1 on h1")
def expired_behind_a_call_that_still_lasts(it: Built) -> None:
    it.status, it.reason, it.failed_after_ms, it.age_ms = "FAILED", "expired", 120_000, 125_000
    it.missing(SOURCE, 1)
    it.missing(WINDOW, 1)
    in_one_call(it, 1, 124_000)


@situation(CauseKind.NO_LONGER_SEEN, None, "orders")
def a_call_that_began_behind_a_checkpoint_is_no_cause_of_it(it: Built) -> None:
    it.age_ms = 60_000
    for vertex in (SOURCE, WINDOW, SINK):
        it.ack(vertex, start=29_000)
    it.ack(COMMITTER, [0], start=29_000)
    in_one_call(it, 1, 15_000)


# ----------------------------------------------------------------------------------------------- state and storage


@situation(CauseKind.SLOW_STORAGE, "checkpoint_interval_ms=21000")
def slow_storage(it: Built) -> None:
    it.age_ms = 20_000
    it.all_acks(store=10_000)


@situation(CauseKind.SLOW_STORAGE, "!incremental_checkpoints=true")
def slow_storage_of_full_checkpoints(it: Built) -> None:
    it.tune(incremental_checkpoints=False)
    it.age_ms = 20_000
    it.all_acks(store=10_000)


@situation(CauseKind.SLOW_STORAGE, "!checkpoint_interval_ms=21000")
def slow_storage_of_a_job_that_has_ended(it: Built) -> None:
    it.state, it.schedule = "CANCELED", None
    it.age_ms = 20_000
    it.all_acks(store=10_000)


@situation(CauseKind.SLOW_STORAGE, None)
def slow_storage_that_still_leaves_room(it: Built) -> None:
    it.all_acks(store=2_500)


@situation(CauseKind.SLOW_HOST, None, "on h2")
def one_host_stores_slowly(it: Built) -> None:
    for vertex in (SOURCE, WINDOW, SINK):
        it.ack(vertex, [2], store=6_000)


@situation(CauseKind.SLOW_HOST, None, "on h1")
def one_host_encodes_slowly(it: Built) -> None:
    for vertex in (SOURCE, WINDOW, SINK):
        it.ack(vertex, [1], encode=4_000)


@situation(CauseKind.SLOW_STORE, None, "count per carrier (uid counts) subtask 0")
def one_upload_hangs(it: Built) -> None:
    it.ack(WINDOW, [0], store=7_000)


@situation(CauseKind.STATE_SKEW, None, "subtask 3")
def one_subtask_has_most_of_the_state(it: Built) -> None:
    it.ack(WINDOW, [3], store=4_000, size=30 * MIB, state=200 * MIB)


@situation(CauseKind.BASE_REWRITE, None, "count per carrier")
def an_increment_rewrites_its_base(it: Built) -> None:
    it.ack(WINDOW, store=4_000, size=40 * MIB, state=40 * MIB)


@situation(CauseKind.MORE_STATE, "!incremental_checkpoints=true")
def much_more_state(it: Built) -> None:
    it.tune(incremental_checkpoints=False)
    it.all_acks(store=4_000, size=80 * MIB, state=80 * MIB)


@situation(CauseKind.MORE_STATE, "checkpoint_interval_ms=17000")
def many_changes_since_the_last_one(it: Built) -> None:
    it.age_ms = 20_000
    it.all_acks(store=8_000, size=20 * MIB)


@situation(CauseKind.SMALL_FILES, "!pack_threshold=4194304", "count per carrier")
def thousands_of_small_files(it: Built) -> None:
    it.ack(WINDOW, store=5_000, files=900)


@situation(CauseKind.SLOW_ENCODE, None, "subtask 1")
def encoding_takes_long(it: Built) -> None:
    it.ack(WINDOW, [1], encode=4_000)


@situation(CauseKind.STORE_STALLED, "!rocksdb_write_buffer_bytes=67108864", "count per carrier (uid counts) subtask 1")
def rocksdb_has_no_room_in_one_subtask(it: Built) -> None:
    it.ack(WINDOW, [1], encode=4_000, stalled=3_600)
    it.ack(WINDOW, [0], encode=400, stalled=350)


@situation(CauseKind.STORE_STALLED, "!rocksdb_write_buffer_bytes=2097152", "count per carrier")
def rocksdb_has_no_room_for_much_more_state(it: Built) -> None:
    it.tune(rocksdb=RocksDBConfig(write_buffer_bytes=MIB))
    it.ack(WINDOW, encode=6_000, stalled=5_500, size=9 * HEALTHY["size"])


@situation(CauseKind.STORE_STALLED, "!rocksdb_write_buffers_bytes_max=134217728", "count per carrier")
def rocksdb_has_no_room_and_its_memtables_may_not_grow(it: Built) -> None:
    it.tune(rocksdb=RocksDBConfig(write_buffer_bytes=64 * MIB, write_buffers_bytes_max=64 * MIB))
    it.ack(WINDOW, encode=6_000, stalled=5_500)


@situation(CauseKind.SLOW_ENCODE, None, "subtask 1")
def rocksdb_waited_a_little_and_encoding_took_long(it: Built) -> None:
    it.ack(WINDOW, [1], encode=4_000, stalled=500)


@situation(CauseKind.USUAL)
def healthy_though_rocksdb_waited(it: Built) -> None:
    it.ack(WINDOW, encode=50, stalled=45)


@situation(CauseKind.SLOW_ACKNOWLEDGE, None, "table")
def an_acknowledgement_is_under_way_for_long(it: Built) -> None:
    it.ack(SINK, [1], ack=6_000)


@situation(CauseKind.SLOW_DECIDE, "checkpoint_interval_ms=19000")
def the_state_directory_is_slow(it: Built) -> None:
    it.age_ms, it.decide_ms = 20_000, 9_000


@situation(CauseKind.SLOW_STORAGE, "checkpoint_interval_ms=31000")
def storage_has_always_been_slow(it: Built) -> None:
    it.age_ms = 30_000
    it.usual = {"end_to_end_ms": 15_100, "store_ms": 15_000, "store_rate": HEALTHY["size"] // 15}
    it.all_acks(store=15_000)


# --------------------------------------------------------------------------------------------------------- pending


def pending(it: Built, *missing: tuple[str, int], age_ms: int = 30_000) -> None:
    it.status, it.age_ms = "IN_PROGRESS", age_ms
    for vertex, subtask in missing:
        it.missing(vertex, subtask)


@situation(CauseKind.LOST_WORKER, None, "subtask 1")
def the_worker_of_the_missing_one_is_gone(it: Built) -> None:
    pending(it, (WINDOW, 1))
    it.workers[1] = {"registered": False}


@situation(CauseKind.HUNG_WORKER, None, "subtask 0")
def the_worker_of_the_missing_ones_is_silent(it: Built) -> None:
    pending(it, (SOURCE, 0), (WINDOW, 0), (SINK, 0), (COMMITTER, 0))
    it.workers[0] = {"last_seen_ms": NOW - 20_000}


@situation(CauseKind.TASK_NOT_RUNNING, None, "subtask 2")
def a_task_still_restores(it: Built) -> None:
    pending(it, (WINDOW, 2))
    it.states[WINDOW, 2] = TaskState.INITIALIZING


@situation(CauseKind.BUSY_VERTEX, "unaligned_checkpoints=true", "table")
def a_pending_one_waits_behind_records(it: Built) -> None:
    pending(it, *((vertex, subtask) for vertex in (WINDOW, SINK) for subtask in range(4)), (COMMITTER, 0))
    it.pressed(SOURCE, WINDOW)
    it.busy(SINK)


@situation(CauseKind.DECIDING, None)
def the_decision_does_not_come(it: Built) -> None:
    it.status, it.age_ms = "IN_PROGRESS", 40_000


@situation(CauseKind.SLOW_STORAGE, "checkpoint_interval_ms=60000")
def the_missing_ones_are_storing_as_all_are(it: Built) -> None:
    pending(it, (SINK, 2), (SINK, 3))
    acked = {key: value for key, value in it.acks.items() if value is None}
    it.all_acks(store=20_000)
    it.acks.update(acked)


@situation(CauseKind.NOT_KNOWN, None, "table")
def an_idle_subtask_does_not_answer(it: Built) -> None:
    pending(it, (SINK, 1))


# ---------------------------------------------------------------------------------------------------------- failed


def failed(it: Built, reason: str, message: str = "", after_ms: int = 4_000) -> None:
    it.status, it.reason, it.message, it.failed_after_ms = "FAILED", reason, message, after_ms


@situation(CauseKind.BUSY_VERTEX, "unaligned_checkpoints=true", "count per carrier")
def expired_since_barriers_were_held_up(it: Built) -> None:
    failed(it, "expired", after_ms=120_000)
    it.age_ms = 125_000
    it.missing(WINDOW, 0, 1, 2, 3)
    it.missing(SINK, 0, 1, 2, 3)
    it.missing(COMMITTER, 0)
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.NOT_KNOWN, None, "table")
def expired_for_no_reason_that_is_seen(it: Built) -> None:
    failed(it, "expired", after_ms=120_000)
    it.age_ms = 121_000
    it.missing(SINK, 3)


@situation(CauseKind.LOST_WORKER, None, "subtask 3")
def expired_with_a_worker_that_is_gone(it: Built) -> None:
    failed(it, "expired", after_ms=120_000)
    it.age_ms = 121_000
    it.missing(SINK, 3)
    it.workers[3] = {"registered": False}


@situation(CauseKind.STATE_TOO_LARGE, "!memory_snapshot_bytes_max=20971520")
def declined_since_its_state_is_too_large(it: Built) -> None:
    text = "counts (1): StateOverflowError: 9 MiB are more than the memory backend sends; raise memory_snapshot_bytes_max"
    failed(it, "asynchronous_part_failed", text)


@situation(CauseKind.STORAGE_FULL, None)
def no_space_left(it: Built) -> None:
    failed(it, "asynchronous_part_failed", "counts (1): StorageUnavailableError: [Errno 28] No space left on device")


@situation(CauseKind.STORAGE_FAILED, None)
def storage_refused(it: Built) -> None:
    failed(it, "asynchronous_part_failed", "counts (1): StorageUnavailableError: 503 Slow Down")


@situation(CauseKind.DECLINED, None)
def declined_by_a_function(it: Built) -> None:
    failed(it, "declined", "counts (1): ValueError: can't be frozen")


@situation(CauseKind.IN_FLIGHT_LIMIT, "!inflight_bytes_max=536870912")
def too_much_in_flight(it: Built) -> None:
    it.tune(unaligned_checkpoints=True)
    failed(it, "in_flight_limit", "counts (1): 300000000 bytes are in flight at subtask 1, of 268435456 that may be")


@situation(CauseKind.LOST_WORKER, None)
def a_worker_was_lost_meanwhile(it: Built) -> None:
    failed(it, "job_failure", "WorkerLost: nothing was heard from the worker in slot 2")
    lost = ExceptionView("WorkerLost: nothing was heard from the worker in slot 2", "", NOW - 1_000, "", -1, "slot-2", 1)
    it.exceptions = (lost,)


@situation(CauseKind.TASK_FAILED, None, "count per carrier (uid counts) subtask 0")
def a_function_failed_meanwhile(it: Built) -> None:
    failed(it, "job_failure", "UserFunctionError: boom")
    it.exceptions = (ExceptionView("UserFunctionError: boom", "", NOW - 1_000, WINDOW, 0, "slot-0", 1),)


@situation(CauseKind.LEADER_CHANGED, None)
def another_leader(it: Built) -> None:
    failed(it, "leader_changed")


@situation(CauseKind.STORAGE_FAILED, None)
def its_metadata_could_not_be_stored(it: Built) -> None:
    failed(it, "finalize_failure", "timed out")


@situation(CauseKind.SUBSUMED, None)
def subsumed(it: Built) -> None:
    failed(it, "subsumed", "checkpoint 42 completed")


# ---------------------------------------------------------------------------------------------------- master hooks


def no_task_was_triggered(it: Built) -> None:
    for vertex in (SOURCE, WINDOW, SINK):
        it.missing(vertex, 0, 1, 2, 3)
    it.missing(COMMITTER, 0)


@situation(CauseKind.MASTER_HOOK_TIMEOUT, "!master_hook_timeout_ms=20000", text="from master hook 'ledger'")
def a_master_hook_gave_no_answer(it: Built) -> None:
    failed(it, "trigger_failure", "no answer in time from master hook 'ledger'", after_ms=10_000)
    it.hook_failure = HookFailureView(("ledger",), timed_out=True)
    no_task_was_triggered(it)
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.MASTER_HOOK_TIMEOUT, "!master_hook_timeout_ms=20000", text="master hook 'ledger'")
def the_process_of_a_master_hook_was_killed_at_its_time(it: Built) -> None:
    failed(it, "trigger_failure", "master hook 'ledger': no answer in time; its process was killed", after_ms=10_000)
    it.hook_failure = HookFailureView(("ledger",), timed_out=True)
    no_task_was_triggered(it)


@situation(CauseKind.MASTER_HOOK_TIMEOUT, None, text="'books', 'ledger'")
def master_hooks_have_no_longer_time_to_give(it: Built) -> None:
    failed(it, "trigger_failure", "no answer in time from master hook 'books', 'ledger'", after_ms=600_000)
    it.hook_failure = HookFailureView(("books", "ledger"), timed_out=True)
    it.tune(master_hook_timeout_ms=600_000, checkpoint_timeout_ms=900_000)
    no_task_was_triggered(it)


@situation(CauseKind.MASTER_HOOK_TIMEOUT, "checkpoint_timeout_ms=20000", text="from master hook 'ledger'")
def it_expired_while_a_master_hook_was_called(it: Built) -> None:
    failed(it, "expired", "no answer in time from master hook 'ledger'", after_ms=10_000)
    it.hook_failure = HookFailureView(("ledger",), timed_out=True)
    it.tune(checkpoint_timeout_ms=10_000, master_hook_timeout_ms=30_000)
    no_task_was_triggered(it)
    it.workers[3] = {"registered": False}


@situation(CauseKind.MASTER_HOOK_FAILED, None, text="master hook 'ledger': OSError: no answer in time: the ledger is closed")
def a_master_hook_raised(it: Built) -> None:
    failed(it, "trigger_failure", "master hook 'ledger': OSError: no answer in time: the ledger is closed", after_ms=20)
    it.hook_failure = HookFailureView(("ledger",), timed_out=False)
    no_task_was_triggered(it)


@situation(CauseKind.STORAGE_FAILED, None, text="its id could not be claimed in storage: StorageUnavailableError")
def its_id_could_not_be_claimed(it: Built) -> None:
    failed(it, "trigger_failure", "StorageUnavailableError: master hook 'ledger' is no folder", after_ms=20)
    it.has_id = False


@situation(CauseKind.NOT_KNOWN, None, text="its tasks were not triggered: no answer in time from master hook 'ledger'")
def a_record_from_before_hooks_were_named_is_quoted(it: Built) -> None:
    failed(it, "trigger_failure", "no answer in time from master hook 'ledger'", after_ms=20)
    no_task_was_triggered(it)


@situation(CauseKind.SLOW_MASTER_HOOK, None, text="master hook 'ledger' has not answered for 30.0 s")
def a_pending_one_waits_for_a_master_hook(it: Built) -> None:
    pending(it)
    no_task_was_triggered(it)
    it.hooks = HookWaitView(("ledger",), "books", 40)
    it.pressed(SOURCE)
    it.busy(WINDOW)
    it.workers[3] = {"registered": False}


@situation(CauseKind.BUSY_VERTEX, "unaligned_checkpoints=true", "table")
def a_pending_one_whose_master_hooks_have_answered(it: Built) -> None:
    a_pending_one_waits_behind_records(it)
    it.hooks = HookWaitView((), "ledger", 40)


def waits_for_a_hook(it: Built, state: str, failed_tries: int = 0) -> None:
    it.state, it.status = state, None
    it.changes["hook_restore"] = HookRestoreView(("ledger",), NOW - 12_000, failed_tries)


_NOT_BACK = "master hook 'ledger' is not back at the checkpoint after 12.0 s, and no task is deployed before"


@situation(CauseKind.WAITS_FOR_MASTER_HOOK, None, text=f"{_NOT_BACK}; master_hook_timeout_ms is 10000")
def a_new_job_waits_for_a_master_hook(it: Built) -> None:
    waits_for_a_hook(it, "CREATED")


@situation(CauseKind.WAITS_FOR_MASTER_HOOK, None, text=f"{_NOT_BACK} (2 calls of hooks have failed)")
def a_restart_waits_for_a_master_hook(it: Built) -> None:
    waits_for_a_hook(it, "RESTARTING", 2)
    it.exceptions = (ExceptionView("ValueError: boom", "", NOW - 13_000, WINDOW, 2, "slot-2", 1),)


@situation(CauseKind.WAITS_FOR_WORKERS)
def a_new_job_waits_for_a_worker_and_a_master_hook(it: Built) -> None:
    waits_for_a_hook(it, "CREATED")
    it.workers[3] = {"registered": False}


@situation(CauseKind.TASK_FAILED)
def a_restart_has_its_pause_before_it_waits_for_a_master_hook(it: Built) -> None:
    a_restart_waits_for_a_master_hook(it)
    it.changes["restarts_at_ms"] = NOW + 1_000


@situation(CauseKind.SLOW_MASTER_HOOK, None, text="its master hooks took 8.0 s of that, before any task was triggered; 'ledger'")
def a_master_hook_took_most_of_its_time(it: Built) -> None:
    it.all_acks(start=8_020)
    it.hooks = HookWaitView((), "ledger", 8_000)
    it.pressed(SOURCE)
    it.busy(WINDOW)


@situation(CauseKind.BUSY_VERTEX, "unaligned_checkpoints=true", "count per carrier")
def a_master_hook_took_little_of_its_time(it: Built) -> None:
    a_busy_window_holds_barriers_up(it)
    it.hooks = HookWaitView((), "ledger", 3_000)


@situation(CauseKind.USUAL)
def healthy_with_a_master_hook(it: Built) -> None:
    it.hooks = HookWaitView((), "ledger", 300)


# --------------------------------------------------------------------------------------------------------- missing


def absent(it: Built, schedule: ScheduleView | None = None, state: str = "RUNNING") -> None:
    it.status, it.state, it.schedule = None, state, schedule


@situation(CauseKind.PAUSED, "checkpoint_interval_ms=10000")
def paused(it: Built) -> None:
    absent(it, ScheduleView(None))
    it.tune(checkpoint_interval_ms=None)


@situation(CauseKind.BACKLOG, "checkpoint_interval_during_backlog_ms=100000")
def none_during_a_backlog(it: Built) -> None:
    absent(it, ScheduleView(None))
    it.tune(checkpoint_interval_during_backlog_ms=0)
    it.backlog = True


@situation(CauseKind.MINIMUM_PAUSE, "min_pause_ms=10000")
def a_pause_longer_than_the_interval(it: Built) -> None:
    absent(it, ScheduleView(10_000, 40_000, pause_left_ms=40_000))
    it.tune(min_pause_ms=60_000)


@situation(CauseKind.SAVEPOINT_PENDING, None)
def a_savepoint_goes_first(it: Built) -> None:
    absent(it, ScheduleView(10_000, -3_000, pending=1, savepoints=1))


@situation(CauseKind.CHECKPOINT_PENDING, None)
def one_is_under_way(it: Built) -> None:
    absent(it, ScheduleView(10_000, -3_000, pending=1))


@situation(CauseKind.NOT_ALL_RUNNING, None, "subtask 3")
def a_task_does_not_run(it: Built) -> None:
    absent(it, ScheduleView(10_000, -3_000, tasks_refuse=True))
    it.states[SINK, 3] = TaskState.INITIALIZING


@situation(CauseKind.TASK_FAILED, None, "subtask 1")
def the_job_restarts(it: Built) -> None:
    absent(it, ScheduleView(10_000, None, tasks_refuse=True), "RESTARTING")
    it.exceptions = (ExceptionView("UserFunctionError: boom", "", NOW - 1_000, WINDOW, 1, "slot-1", 1),)


@situation(CauseKind.WAITS_FOR_WORKERS, None)
def workers_have_not_come(it: Built) -> None:
    absent(it, ScheduleView(10_000, None, tasks_refuse=True), "CREATED")
    it.workers[3] = {"registered": False}


@situation(CauseKind.RECONCILING, None)
def a_new_leader_waits_for_workers(it: Built) -> None:
    absent(it, ScheduleView(10_000, None, tasks_refuse=True), "RECONCILING")


@situation(CauseKind.STOPPED, None)
def the_job_has_ended(it: Built) -> None:
    absent(it, None, "CANCELED")


@situation(CauseKind.ENDING, None)
def the_last_checkpoint_has_begun(it: Built) -> None:
    absent(it, ScheduleView(10_000, -1_000, pending=1, is_ending=True))


@situation(CauseKind.DELETIONS, None)
def deletions_pile_up(it: Built) -> None:
    absent(it, ScheduleView(10_000, -5_000, deleting=7))


# ---------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_first_cause_and_the_setting_are_right(case: Case) -> None:
    it = Built()
    case.change(it)
    found = explain(it.made())
    assert found.first_cause.kind is case.first, [cause.text for cause in found.causes]
    if case.place:
        assert case.place in str(found.first_cause.place), found.first_cause
    assert case.text in found.first_cause.text
    setting = found.setting
    shown = None if setting is None else f"{'' if setting.command else '!'}{setting.name}={str(setting.new).lower()}"
    assert shown == case.setting, [cause.text for cause in found.causes]
    if setting is not None and setting.command:
        assert setting.command == f"holdfast checkpoints {JOB} --set {setting.name}={str(setting.new).lower()}"
    if case.first is CauseKind.USUAL:
        assert found.is_usual
        assert found.setting is None
    assert all("\n" not in cause.text and len(cause.text) < 2_000 for cause in found.causes)


def test_there_are_forty_situations_and_healthy_ones_among_them() -> None:
    assert len(CASES) >= 40
    assert sum(case.first is CauseKind.USUAL for case in CASES) >= 10


def test_each_phase_stands_beside_the_median_of_those_before() -> None:
    it = Built()
    it.ack(WINDOW, [0], store=7_000)
    found = explain(it.made())
    rows = [(view.phase.value, view.longest_ms, view.median_ms, view.is_unusual) for view in found.phases]
    assert rows == [
        ("start_delay", 20, 20, False),
        ("alignment", 30, 30, False),
        ("sync", 10, 10, False),
        ("encode", 40, 40, False),
        ("store", 7_000, 200, True),
        ("acknowledge", 20, 20, False),
        ("decide", 15, 15, False),
        ("notify", 20, 20, False),
    ]
    assert found.compared == 20
    assert str(found.phases[4].place) == "count per carrier (uid counts) subtask 0 on h0"


def test_one_that_is_among_the_recent_ones_is_not_compared_with_itself() -> None:
    it = Built(compared=2)
    it.recent = (*it._recent(), replace(it._recent()[0], checkpoint_id=41, end_to_end_ms=1))
    found = explain(it.made())
    assert found.compared == 2
    assert {view.median_ms for view in found.phases} == {-1}


@pytest.mark.parametrize("name", ["\x1b[31m\n<b>evil</b>", "\ud800" + "x" * 5_000])
def test_names_of_users_break_no_line(name: str) -> None:
    it = Built()
    it.ack(WINDOW, [0], store=7_000)
    made = it.made()
    vertices = [replace(vertex, name=name) for vertex in made.job.graph.vertices]
    job = replace(made.job, graph=replace(made.job.graph, vertices=tuple(vertices)))
    found = explain(replace(made, job=job))
    for cause in found.causes:
        assert cause.text.isprintable()
        assert len(cause.text.encode()) < 1_000


@pytest.mark.parametrize(("state", "is_usual"), [("CANCELED", True), ("FINISHED", True), ("FAILED", False), ("UNKNOWN", False)])
def test_the_end_of_a_job_is_no_alarm_unless_it_failed(state: str, is_usual: bool) -> None:
    it = Built()
    absent(it, None, state)
    found = explain(it.made())
    assert (found.first_cause.kind, found.is_usual, found.setting) == (CauseKind.STOPPED, is_usual, None)


def test_of_a_job_without_a_next_checkpoint_the_snapshot_that_it_goes_back_to_is_named() -> None:
    """As `holdfast status` names it: what a stopped job has completed besides is deleted."""
    it = Built()
    absent(it, None, "FINISHED")
    assert it.cut is not None
    it.cut = replace(it.cut, checkpoint_id=92, kind=CheckpointKind.STOP_SAVEPOINT, timestamp_ms=NOW - 2_000)
    assert explain(it.made()).summary == "no checkpoint is triggered; the newest completed one, stop-savepoint 92, began 2.0 s ago"
    it.cut = None
    assert explain(it.made()).summary == "no checkpoint is triggered"
