"""In which function a missing subtask is: whom to ask, and what is made of what workers say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from holdfast.barriers.messages import CodeLine, SampledStack, SubtaskKey, TaskState, WorkerAnswer
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
