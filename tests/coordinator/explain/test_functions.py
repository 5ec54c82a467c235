"""In which function a missing subtask is: whom to ask, and what is made of what workers say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import CodeLine, FailureReason, SampledStack, SubtaskKey, TaskState, WorkerAnswer
from holdfast.coordinator.explain.explanation import explain
from holdfast.coordinator.explain.functions import workers_to_ask
from holdfast.coordinator.explain.records import CauseKind, Explanation
from tests.coordinator.explain.building import NOW, SINK, SOURCE, WINDOW, Built

CODE = (
    CodeLine("main", "/spark/worker.py", 7),
    CodeLine("Worker.run_once", "/p/loop.py", 10, own=True),
    CodeLine("ProcessOperator.process_batch", "/p/process.py", 20, own=True),
    CodeLine("Prices.look_up", "/jobs/prices.py", 42),
    CodeLine("SSLSocket.read", "/usr/lib/python3.11/ssl.py", 1166),
    CodeLine("ThreadPool._serve", "/p/pool.py", 9, own=True),
    CodeLine("DirectoryStorage.execute", "/p/directory.py", 99, own=True),
)
WAITS = (0, 1)
LOOKS_UP = (0, 1, 2, 3)
READS = (0, 1, 2, 3, 4)


def stack(frames: Sequence[int], samples: int = 20, *, vertex: str = WINDOW, subtask: int = 2, on_cpu: int = 0) -> SampledStack:
    return SampledStack("MainThread", tuple(frames), samples, on_cpu, samples - on_cpu, vertex, subtask)


IDLE = SampledStack("MainThread", WAITS, 20, 0, 20, idle=True)
POOL = SampledStack("holdfast-pool-0", (5,), 20, 0, 20, idle=True)
STORES = SampledStack("holdfast-pool-1", (5, 6), 18, 0, 18)
FOREIGN = SampledStack("users-own-thread", (3, 4), 20, 0, 20)


def late(*missing: tuple[str, int]) -> Built:
    it = Built(status="IN_PROGRESS", age_ms=30_000)
    for vertex, subtask in missing:
        it.missing(vertex, subtask)
    return it


def explained(it: Built, *stacks: SampledStack, key: SubtaskKey | None = None, samples: int = 20) -> Explanation:
    answer = WorkerAnswer(1, 2, "s", 1, "q", "stacks", samples=samples, sampled_ms=950, code=CODE, stacks=stacks)
    return explain(replace(it.made(), looks=((key or SubtaskKey(WINDOW, 2), answer),)))


def test_the_function_of_the_user_is_named_with_file_line_and_place() -> None:
    found = explained(late((WINDOW, 2)), stack(LOOKS_UP), POOL, FOREIGN)
    assert found.first_cause.kind is CauseKind.IN_FUNCTION
    assert found.first_cause.text == (
        "count per carrier (uid counts) subtask 2 on h2 was in Prices.look_up (/jobs/prices.py:42) in 20 of 20 looks over 950 ms"
    )
    assert found.first_cause.place is not None
    assert (found.first_cause.place.subtask, found.causes[0].kind) == (2, CauseKind.MISSING_ACKS)


def test_what_it_waits_in_further_down_is_named_too() -> None:
    text = explained(late((WINDOW, 2)), stack(READS, 18), stack(LOOKS_UP, 2)).first_cause.text
    assert "was in Prices.look_up (/jobs/prices.py:42), there in SSLSocket.read (ssl.py:1166) in 18 of 20 looks" in text


def test_work_is_told_from_waiting() -> None:
    assert explained(late((WINDOW, 2)), stack(LOOKS_UP, on_cpu=19)).first_cause.text.endswith("over 950 ms, at work")


def test_a_worker_that_works_for_another_of_its_subtasks() -> None:
    found = explained(late((SOURCE, 2), (WINDOW, 2)), stack(LOOKS_UP), key=SubtaskKey(SOURCE, 2))
    assert found.first_cause.text.startswith("the worker of orders subtask 2 on h2 works for another: count per carrier")
    assert found.first_cause.place is not None
    assert found.first_cause.place.uid == "counts"


def test_state_that_is_being_stored() -> None:
    found = explained(late((WINDOW, 2)), IDLE, POOL, STORES)
    assert "stores state, and was in DirectoryStorage.execute (/p/directory.py:99) in 18 of 20 looks" in found.first_cause.text


@pytest.mark.parametrize(
    "stacks",
    [
        (),
        (IDLE, POOL),
        (IDLE, POOL, FOREIGN),
        (stack(LOOKS_UP, 4), stack(WAITS, 5), IDLE),
        (stack((77,)),),
        (stack(()),),
    ],
    ids=["nothing", "idle", "another thread", "here and there", "no such line", "no frames"],
)
def test_what_tells_nothing_changes_nothing(stacks: tuple[SampledStack, ...]) -> None:
    it = late((WINDOW, 2))
    assert explained(it, *stacks) == explain(it.made())


def test_the_advice_is_that_of_the_cause_before() -> None:
    it = late((WINDOW, 2))
    it.tune(unaligned_checkpoints=False)
    it.pressed(SOURCE)
    it.busy(WINDOW)
    without, found = explain(it.made()), explained(it, stack(LOOKS_UP, on_cpu=20))
    assert found.setting == without.setting
    assert found.causes[:-1] == without.causes


# ------------------------------------------------------------------------------------------------------------ whom to ask


def test_the_first_in_line_are_asked_and_two_at_most() -> None:
    it = late((SOURCE, 1), *((vertex, subtask) for vertex in (WINDOW, SINK) for subtask in range(4)))
    assert workers_to_ask(it.made()) == (SubtaskKey(SOURCE, 1),)
    it = late(*((vertex, subtask) for vertex in (WINDOW, SINK) for subtask in range(4)))
    it.busy(WINDOW, [3])
    assert workers_to_ask(it.made()) == (SubtaskKey(WINDOW, 3), SubtaskKey(WINDOW, 0))


def test_nobody_is_asked_where_the_cause_is_seen_or_nothing_is_wrong() -> None:
    assert workers_to_ask(Built().made()) == ()
    assert workers_to_ask(Built(status=None).made()) == ()
    soon = late((WINDOW, 2))
    soon.age_ms = 200
    assert workers_to_ask(soon.made()) == ()
    assert workers_to_ask(late().made()) == ()
    lost = late((WINDOW, 2))
    lost.workers[2] = {"registered": False}
    assert workers_to_ask(lost.made()) == ()
    silent = late((WINDOW, 2))
    silent.workers[2] = {"last_seen_ms": NOW - 60_000}
    assert workers_to_ask(silent.made()) == ()
    restarting = late((WINDOW, 2))
    restarting.states[WINDOW, 2] = TaskState.INITIALIZING
    assert workers_to_ask(restarting.made()) == ()


# ------------------------------------------------------------------------------------------- of those that have ended


def expired_behind_a_look(*missing: tuple[str, int]) -> Built:
    """The job as it was five seconds before the checkpoint expired."""
    it = Built(status="FAILED", reason=FailureReason.EXPIRED, age_ms=115_000, failed_after_ms=120_000)
    for vertex, subtask in missing:
        it.missing(vertex, subtask)
    return it


def test_of_one_that_has_expired_the_look_before_its_end_names_the_function() -> None:
    found = explained(expired_behind_a_look((WINDOW, 2)), stack(LOOKS_UP))
    assert [cause.kind for cause in found.causes][:2] == [CauseKind.EXPIRED, CauseKind.MISSING_ACKS]
    assert "was in Prices.look_up (/jobs/prices.py:42)" in found.first_cause.text
    assert (found.subject, found.is_usual) == ("failed", False)


def test_one_that_has_acknowledged_since_the_look_is_not_to_blame() -> None:
    it = expired_behind_a_look((SINK, 1))
    assert explained(it, stack(LOOKS_UP)) == explain(it.made())


def test_nobody_is_to_blame_for_a_failover() -> None:
    it = expired_behind_a_look((WINDOW, 2))
    it.reason = FailureReason.JOB_FAILOVER
    assert explained(it, stack(LOOKS_UP)) == explain(it.made())


def test_a_slow_one_waited_for_the_subtask_that_acknowledged_last() -> None:
    it = Built()
    it.ack(WINDOW, [2], align=20_000)
    found = explained(it, stack(LOOKS_UP))
    assert (found.subject, found.first_cause.kind) == ("completed", CauseKind.IN_FUNCTION)
    assert explained(it, stack(LOOKS_UP), key=SubtaskKey(WINDOW, 1)) == explain(it.made())


def test_a_worker_that_was_silent_before_the_end_hung_and_one_that_is_silent_since_says_nothing() -> None:
    it = expired_behind_a_look((WINDOW, 2))
    it.workers[2] = {"last_seen_ms": NOW - 60_000}
    assert explain(it.made()).first_cause.kind is CauseKind.HUNG_WORKER
    it.age_ms = 125_000
    assert explain(it.made()).first_cause.kind is not CauseKind.HUNG_WORKER


def test_nobody_is_asked_about_one_that_has_ended() -> None:
    assert workers_to_ask(expired_behind_a_look((WINDOW, 2)).made()) == ()
