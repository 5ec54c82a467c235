"""Master hooks in the cores: when they are called, and what becomes of a checkpoint or an attempt whose hook is late or fails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.messages import CheckpointKind, Deploy, FailureReason, TaskState, TriggerCheckpoint
from holdfast.coordinator.checkpoints import actions, events
from holdfast.coordinator.dispatcher.hook_calls import outcome_of
from holdfast.coordinator.dispatcher.published import capture
from holdfast.coordinator.dispatcher.submit import Starter, resume_submission
from holdfast.coordinator.hooks.calls import HookCall, HookCallKind, HookReply, HookVerdict
from holdfast.coordinator.jobmaster import actions as job_actions
from holdfast.coordinator.jobmaster import events as job_events
from holdfast.coordinator.jobmaster.execution import HOOK_TRIES_MAX, HOOKS_GRACE_MS
from holdfast.coordinator.jobmaster.job import JobState
from holdfast.coordinator.views import HookFailureView, HookRestoreView, HookWaitView
from holdfast.statebackends.snapshot.metadata import HookState
from holdfast.statebackends.storage.port import run_flow
from tests.coordinator.bench import A, B, Bench, of
from tests.coordinator.rig import Rig
from tests.coordinator.world import JOB
from tests.examples import examples
from tests.scenarios.hooks import ONE, TWO, bench_with, fail_over, metadata_of, reply_of, running_rig

STATE = HookState("one", 1, b"x")


def triggers(bench: Bench) -> list[int]:
    return [action.checkpoint_id for action in bench.all(actions.SendTriggers)]


def test_tasks_are_triggered_once_every_hook_has_answered_with_the_time_that_the_hooks_were_told() -> None:
    bench = bench_with("one", "two")
    bench.trigger()
    bench.now = 50
    bench.handle(events.HookAnswered(1, "two", None))
    assert not triggers(bench)
    bench.handle(events.HookAnswered(1, "one", STATE))
    (sent,) = bench.all(actions.SendTriggers)
    assert {sent.timestamp_ms} == {action.timestamp_ms for action in bench.all(actions.TriggerHook)} == {1_000_000}
    bench.ack_all(1)
    (write,) = bench.all(actions.WriteMetadata)
    assert (write.hooks, bench.completed) == ((STATE,), [1])


def test_g02_a_request_waits_while_hooks_run_and_follows_when_they_have_answered() -> None:
    bench = bench_with("one")
    bench.trigger()
    bench.request(CheckpointKind.SAVEPOINT)
    assert bench.machine.schedule(0).is_preparing
    assert bench.pending == [1]
    bench.handle(events.HookAnswered(1, "one", None))
    assert bench.pending == [1, 2]
    assert [action.checkpoint_id for action in bench.all(actions.TriggerHook)] == [1, 2]


def test_g14_no_task_is_triggered_if_one_stopped_while_hooks_ran() -> None:
    bench = bench_with("one")
    bench.trigger()
    bench.run_tasks(B, state=TaskState.CANCELING)
    bench.handle(events.HookAnswered(1, "one", STATE))
    assert (triggers(bench), bench.reasons) == ([], {1: FailureReason.NOT_ALL_TASKS_RUNNING.value})


def test_a_hook_without_an_answer_in_its_time_aborts_as_trigger_failure_and_fails_no_job() -> None:
    bench = bench_with("one", "two", master_hook_timeout_ms=200, tolerable_failed_checkpoints=0)
    for number in (1, 2, 3):
        bench.trigger()
        bench.handle(events.HookAnswered(number, "one", None))
        bench.advance(bench.now + 200)
    assert set(bench.reasons.values()) == {FailureReason.TRIGGER_FAILURE.value}
    assert (triggers(bench), bench.all(actions.FailJob), bench.machine.failures.count) == ([], [], 0)
    (view, *_) = bench.machine.stats.view().history
    assert view.failure_message == "no answer in time from master hook 'two'"
    assert view.hook_failure == HookFailureView(("two",), timed_out=True)
    assert bench.machine.is_quiet


@pytest.mark.parametrize("timed_out", [False, True])
def test_a_failed_checkpoint_says_for_which_hook_it_failed_whatever_its_text(timed_out: bool) -> None:
    bench = bench_with("one", "two's")
    bench.trigger()
    bench.handle(events.HookFailed(1, "two's", "no answer in time, it says", timed_out=timed_out))
    (view, *_) = bench.machine.stats.view().history
    assert view.hook_failure == HookFailureView(("two's",), timed_out=timed_out)


def test_one_that_expires_while_hooks_are_called_names_those_that_are_missing() -> None:
    bench = bench_with("one", "two", "three", checkpoint_timeout_ms=100, master_hook_timeout_ms=5_000)
    bench.trigger()
    bench.handle(events.HookAnswered(1, "two", None))
    bench.advance(bench.now + 100)
    (view, *_) = bench.machine.stats.view().history
    assert (view.failure_reason, view.hook_failure) == ("expired", HookFailureView(("one", "three"), timed_out=True))


def test_a_checkpoint_that_fails_for_something_else_names_no_hook() -> None:
    bench = bench_with("one", checkpoint_timeout_ms=100)
    bench.trigger()
    bench.handle(events.HookAnswered(1, "one", None))
    bench.advance(bench.now + 100)
    (view, *_) = bench.machine.stats.view().history
    assert (view.failure_reason, view.hook_failure) == ("expired", None)


def test_views_name_the_hooks_that_a_checkpoint_waits_for_and_how_long_it_did() -> None:
    bench = bench_with("one", "two", "three")
    bench.trigger()
    seen = [bench.machine.stats.view().history[0].hooks]
    for now, name in ((50, "two"), (70, "three"), (90, "one")):
        bench.now = now
        bench.handle(events.HookAnswered(1, name, None))
        seen.append(bench.machine.stats.view().history[0].hooks)
    bench.ack_all(1)
    first, second = HookWaitView(("one", "three", "two")), HookWaitView(("one", "three"), "two", 50)
    assert seen == [first, second, HookWaitView(("one",), "three", 70), HookWaitView((), "one", 90)]
    assert bench.machine.stats.view().history[0].hooks == seen[-1]


def test_answers_that_nobody_awaits_change_nothing() -> None:
    bench = bench_with("one")
    bench.trigger()
    for stale in (events.HookAnswered(2, "one", STATE), events.HookFailed(7, "one", ""), events.HookAnswered(1, "x", STATE)):
        assert bench.handle(stale) == []
    bench.handle(events.HookAnswered(1, "one", STATE))
    for stale in (events.HookAnswered(1, "one", None), events.HookFailed(1, "one", "twice")):
        assert bench.handle(stale) == []
    bench.ack_all(1)
    assert bench.all(actions.WriteMetadata)[0].hooks == (STATE,)


def test_a_failover_while_hooks_run_aborts_the_checkpoint() -> None:
    bench = bench_with("one")
    bench.trigger()
    bench.handle(events.JobFailing("a task failed"))
    assert (bench.machine.is_quiet, bench.reasons) == (True, {1: FailureReason.JOB_FAILOVER.value})
    assert bench.handle(events.HookAnswered(1, "one", STATE)) == []


def test_savepoints_have_the_states_too() -> None:
    bench = bench_with("one")
    bench.request(CheckpointKind.SAVEPOINT)
    bench.handle(events.HookAnswered(1, "one", STATE))
    bench.ack_all(1)
    assert bench.all(actions.WriteMetadata)[0].hooks == (STATE,)


@given(st.lists(st.sampled_from(["trigger", "one", "two", "fail", "time", "stop", "run", "ack", "stale"]), max_size=40))
@settings(max_examples=examples(200), deadline=None)
def test_no_task_is_triggered_without_every_hook_and_every_id_is_decided(steps: list[str]) -> None:
    bench = bench_with("one", "two", master_hook_timeout_ms=20, checkpoint_timeout_ms=30, tolerable_failed_checkpoints=10**6)
    answered: dict[int, set[str]] = {}
    for step in steps:
        newest = bench.machine.next_checkpoint_id - 1
        match step:
            case "trigger":
                bench.trigger()
            case "one" | "two":
                answered.setdefault(newest, set()).add(step)
                bench.handle(events.HookAnswered(newest, step, STATE if step == "one" else None))
            case "fail":
                bench.handle(events.HookFailed(newest, "two", "it raised"))
            case "time":
                bench.advance(bench.now + 15)
            case "stop":
                bench.run_tasks(B, state=TaskState.CANCELING)
            case "run":
                bench.run_tasks()
            case "ack":
                bench.ack_all(newest)
            case _:
                bench.handle(events.HookAnswered(newest - 1, "one", None))
    assert all(answered[number] == {"one", "two"} for number in triggers(bench))
    assert len(triggers(bench)) == len(set(triggers(bench)))
    for _ in steps:  # what waits comes one after the other, each until its hooks are late
        bench.advance(bench.now + 100)
    assert bench.machine.is_quiet
    assert all(write.hooks == (STATE,) for write in bench.all(actions.WriteMetadata))
    assert A in bench.tasks


# ---------------------------------------------------------------------------------------------------------- restoring


def failing(call: HookCall) -> list[HookReply]:
    return [HookReply(HookVerdict.FAILED, message="no route")] if call.kind is HookCallKind.RESTORE else reply_of(call)


def restores(rig: Any) -> list[tuple[int, str, int]]:
    return [(each.attempt, each.name, each.checkpoint_id) for each in of(rig.actions, job_actions.RestoreHook)]


def test_no_task_is_deployed_before_every_hook_is_back() -> None:
    rig = running_rig(master_hooks=("one",))
    rig.checkpoint()
    rig.hooks = lambda call: [] if call.kind is HookCallKind.RESTORE else reply_of(call)
    fail_over(rig)
    assert rig.state == "RESTARTING"
    shown = capture(rig.master, 0, rig.wall_ms, monotonic_ms=rig.now).job()
    assert (shown.hook_restore, rig.wall_ms) == (HookRestoreView(("one",), 1_000), 6_000), "since the first call"
    assert not any(command.deployment.attempt == 2 for command in rig.commands(0, Deploy))
    rig.feed(job_events.HookRestored(1, 1, "one"))
    assert rig.state == "RESTARTING", "of an older attempt"
    rig.feed(job_events.HookRestored(2, 1, "one"))
    assert (rig.state, rig.master.lifecycle.next.hook_restore) == ("RUNNING", None)
    assert any(command.deployment.attempt == 2 for command in rig.commands(0, Deploy))


def test_a_hook_that_can_not_be_restored_is_tried_again_and_fails_the_job_after_some_tries_which_keeps_its_checkpoints() -> None:
    rig = running_rig(master_hooks=("one",))
    rig.checkpoint()
    rig.hooks = failing
    fail_over(rig)
    shown = rig.master.lifecycle.next.hook_restore
    assert shown is not None
    assert (shown.missing, shown.since_ms, shown.failed_tries > 1) == (("one",), 1_000, True)
    rig.pass_time(60_000)
    assert restores(rig)[1:] == [(2, "one", 1)] * HOOK_TRIES_MAX
    assert rig.master.state in (JobState.FAILING, JobState.FAILED)
    assert "master hook 'one' could not be restored: no route" in (rig.master.lifecycle.failure or "")
    assert metadata_of(rig, 1).hooks == (ONE,)


def test_a_hook_fails_while_an_attempt_is_prepared_that_only_finishes_the_job() -> None:
    rig = running_rig(master_hooks=("one",))
    for slot in (0, 1):
        rig.report(slot, 1, TaskState.RUNNING, drained=True)
    for slot in (0, 1):
        rig.acknowledge(slot, 1, 1)
    tries: list[int] = []

    def hooks(call: HookCall) -> list[HookReply]:
        tries.append(call.checkpoint_id)
        return failing(call) if len(tries) == 1 else reply_of(call)

    rig.hooks = hooks
    assert rig.master.lifecycle.finishing == 1
    fail_over(rig)
    rig.pass_time(10_000)
    assert (tries, rig.state) == ([1, 1], "RUNNING")


def test_a_hook_that_comes_back_in_time_lets_the_job_go_on() -> None:
    rig = running_rig(master_hooks=("one", "two"))
    rig.checkpoint()
    tries: list[str] = []

    def hooks(call: HookCall) -> list[HookReply]:
        if call.kind is HookCallKind.RESTORE:
            tries.append(call.name)
        return failing(call) if len(tries) < 5 else reply_of(call)

    rig.hooks = hooks
    fail_over(rig)
    rig.pass_time(10_000)
    assert rig.state == "RUNNING"
    assert rig.deployment(0).restored_checkpoint_id == 1


# What a hook still does for an earlier try is not over when the next one begins: its calls run one after the other.

DONE, FAILED = HookReply(), HookReply(HookVerdict.FAILED, message="no route")
UNKNOWN = HookReply(HookVerdict.UNKNOWN_VERSION, known=(9,))


def silent(call: HookCall) -> list[HookReply]:
    return reply_of(call) if call.kind is HookCallKind.TRIGGER else []


def failed_over(*names: str) -> Rig:
    """A job that goes back to checkpoint 1, and whose hooks have been called for that and have not answered."""
    rig = running_rig(master_hooks=names)
    rig.checkpoint()
    rig.actions.clear()
    rig.hooks = silent
    fail_over(rig)
    return rig


def asked(rig: Rig) -> list[job_actions.RestoreHook]:
    """Calls of hooks since this was last asked."""
    found = of(rig.actions, job_actions.RestoreHook)
    rig.actions.clear()
    return found


def failed_tries(rig: Rig) -> int:
    shown = rig.master.lifecycle.next.hook_restore
    return 0 if shown is None else shown.failed_tries


def test_a_late_success_of_an_earlier_try_lets_no_task_be_deployed_before_the_hook_is_back() -> None:
    rig = failed_over("one", "two")
    one, two = asked(rig)
    rig.feed(outcome_of(two, FAILED))
    rig.pass_time(500)
    one_again, two_again = asked(rig)
    rig.feed(outcome_of(one, DONE))
    rig.feed(outcome_of(two_again, DONE))
    shown = rig.master.lifecycle.next.hook_restore
    assert shown is not None
    assert (rig.state, shown.missing) == ("RESTARTING", ("one",)), "its second call runs still"
    rig.feed(outcome_of(one_again, DONE))
    assert rig.state == "RUNNING"


@pytest.mark.parametrize("late", [FAILED, UNKNOWN])
def test_a_late_failure_of_an_earlier_try_fails_neither_the_next_one_nor_the_job(late: HookReply) -> None:
    rig = failed_over("one", "two")
    one, two = asked(rig)
    rig.feed(outcome_of(two, FAILED))
    rig.feed(outcome_of(one, late))
    rig.pass_time(500)
    one_again, two_again = asked(rig)
    rig.feed(outcome_of(one, late))
    assert (rig.state, failed_tries(rig)) == ("RESTARTING", 1)
    rig.feed(outcome_of(one_again, DONE))
    rig.feed(outcome_of(two_again, DONE))
    assert rig.state == "RUNNING"


def test_a_hook_that_is_not_back_in_its_time_is_asked_again_and_its_late_outcome_does_not_count() -> None:
    rig = failed_over("one", "two")
    one, two = asked(rig)
    rig.feed(outcome_of(two, DONE))
    rig.pass_time(one.timeout_ms + HOOKS_GRACE_MS)
    one_again, two_again = asked(rig)
    shown = rig.master.lifecycle.next.hook_restore
    assert shown == HookRestoreView(("one", "two"), 1_000, 1)
    for outcome in (outcome_of(one, DONE), outcome_of(two_again, DONE)):
        rig.feed(outcome)
        assert rig.state == "RESTARTING"
    rig.feed(outcome_of(one_again, DONE))
    assert rig.state == "RUNNING"
    rig.pass_time(one.timeout_ms + HOOKS_GRACE_MS)
    assert rig.state == "RUNNING", "nobody is awaited any more"


def test_between_two_tries_all_hooks_that_were_late_are_named() -> None:
    rig = failed_over("one", "two", "three")
    one, three, _ = asked(rig)
    rig.feed(outcome_of(three, DONE))
    rig.now += one.timeout_ms + HOOKS_GRACE_MS
    rig.feed(events.DeadlineReached())
    shown = rig.master.lifecycle.next.hook_restore
    assert (shown, asked(rig)) == (HookRestoreView(("one", "two"), 1_000, 1), [])


def test_hooks_without_an_outcome_fail_the_job_after_some_tries_which_keeps_its_checkpoints() -> None:
    """Whatever becomes of a call in the port, a job that waits for ever is no answer."""
    rig = failed_over("one", "two")
    rig.pass_time(200_000)
    assert [(each.try_number, each.name) for each in asked(rig)] == [
        (number, name) for number in range(1, HOOK_TRIES_MAX + 1) for name in ("one", "two")
    ]
    assert rig.master.state in (JobState.FAILING, JobState.FAILED)
    assert "master hook 'one', 'two' could not be restored: no answer in time" in (rig.master.lifecycle.failure or "")
    assert metadata_of(rig, 1).hooks == (ONE, TWO)


def test_hooks_that_are_never_reset_keep_a_job_from_its_first_start_and_fail_it() -> None:
    rig = Rig(master_hooks=("one",))
    rig.hooks = silent
    rig.actions.clear()
    rig.open(rig.setup)
    for slot in (0, 1):
        rig.register(slot)
    assert (rig.state, [each.try_number for each in asked(rig)]) == ("CREATED", [1])
    rig.pass_time(200_000)
    assert [each.try_number for each in asked(rig)] == [*range(2, HOOK_TRIES_MAX + 1)]
    assert rig.master.state in (JobState.FAILING, JobState.FAILED)


@given(st.lists(st.tuples(st.sampled_from(["one", "two"]), st.sampled_from([DONE, DONE, FAILED, None])), max_size=40))
@settings(max_examples=examples(400), deadline=None)
def test_no_task_is_deployed_while_a_hook_is_at_work(steps: list[tuple[str, HookReply | None]]) -> None:
    """As the port does, the calls of a hook end in their order, however late."""
    rig = failed_over("one", "two")
    at_work: dict[str, list[job_actions.RestoreHook]] = {"one": [], "two": []}
    for name, reply in steps:
        for call in asked(rig):
            at_work[call.name].append(call)
        if reply is None:
            rig.pass_time(500)
        elif at_work[name]:
            rig.feed(outcome_of(at_work[name].pop(0), reply))
        if rig.state == "RUNNING":
            assert at_work == {"one": [], "two": []}
            return


def test_a_new_leader_of_a_running_job_restores_nothing_and_its_checkpoints_have_their_hooks() -> None:
    """The job goes on from where it is: to take its hooks back would part them from it."""
    rig = running_rig(master_hooks=("one",))
    rig.checkpoint()
    starter = Starter("successor", "", "directory", 0)
    rig.open(run_flow(resume_submission(JOB, starter), rig.storage))
    for slot in (0, 1):
        rig.register(slot, attempt=1)
    assert (rig.state, restores(rig)) == ("RUNNING", [])
    number = rig.checkpoint()
    assert metadata_of(rig, number).hooks == (ONE,)
    assert rig.commands(0, TriggerCheckpoint)[-1].checkpoint_id == number
