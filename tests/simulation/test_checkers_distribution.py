"""What the next attempt is given of list, union and broadcast state (I27): one rule broken a test."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

import holdfast.coordinator.restore.assign as restore_module
from holdfast.barriers.messages import Deploy
from holdfast.chaos.campaign.user_runs import run_seed
from holdfast.chaos.cluster.world import RunRequest
from holdfast.chaos.workloads import WORKLOADS
from holdfast.statebackends.handles import FileHandle, InlineHandle, OperatorListHandle, OperatorSubtaskState, StateMeta
from holdfast.statebackends.redistribute import split_redistribute
from tests.simulation.checker_world import JOB, POSITIONS, STATE, Story, graph
from tests.simulation.workload_runs import Run

COUNTED = StateMeta("counted", "operator_union", "bytes")
RULES = StateMeta("rules", "operator_broadcast", "bytes")


def handle(meta: StateMeta, *entries: bytes) -> OperatorListHandle:
    return OperatorListHandle(meta, InlineHandle(msgspec.msgpack.encode(entries)), len(entries))


@dataclass
class ListStory(Story):
    """Two subtasks whose source stores lists of all three kinds."""

    parallelism: int = 2
    tables: tuple[bytes, bytes] = (b"r", b"r")
    """What each subtask stores as its rules."""

    def states(self, number: int, index: int) -> dict[str, dict[str, OperatorSubtaskState]]:
        states = super().states(number, index)
        (position,) = states["source" * 6]["source"].operator
        counted = handle(COUNTED, b"%d" % index)
        if index == 1:  # a file, so that entries are compared and not handles
            written = self.write(f"{JOB}/chk-{number}/list-counted-{index}", msgspec.msgpack.encode([b"1"]))
            counted = OperatorListHandle(COUNTED, written, 1)
        lists = (counted, position, handle(RULES, self.tables[index]))
        return {**states, "source" * 6: {"source": OperatorSubtaskState(operator=lists)}}


@pytest.fixture
def story() -> ListStory:
    story = ListStory()
    story.begin()
    story.complete(1)
    return story


def positions(*indexes: int) -> OperatorListHandle:
    return handle(POSITIONS, *(b"1 %d" % index for index in indexes))


def restore(story: Story, *given: tuple[OperatorListHandle, ...]) -> None:
    """Fail over to checkpoint 1, to so many subtasks; each is given these lists, and the keyed parts that it owns."""
    old = {operator.uid: operator for operator in story.metadata[1].operators}
    story.parallelism, story.graph = 2, graph(2)
    story.record_attempt(1)
    template = story.deployment(0, 1)
    for slot, lists in enumerate(given):
        wide = range(slot * 2 // len(given), ((slot + 1) * 2 - 1) // len(given) + 1)
        keyed = tuple(part for index in wide for part in old["count"].subtasks[index].keyed)
        states = {"source": OperatorSubtaskState(operator=lists), "count": OperatorSubtaskState(keyed=keyed)}
        subtasks = tuple(
            msgspec.structs.replace(each, subtask=slot, restore={uid: states[uid] for uid in each.restore})
            for each in template.subtasks
        )
        story.command(Deploy(msgspec.structs.replace(template, graph=graph(len(given)), subtasks=subtasks)), slot)


ALL = handle(COUNTED, b"0", b"1")
TABLE = handle(RULES, b"r")


def test_everything_is_dealt_out_as_it_must_be_at_any_parallelism(story: ListStory) -> None:
    restore(story, (ALL, positions(0), TABLE), (ALL, positions(1), TABLE))
    restore(story, (ALL, positions(0, 1), TABLE))
    restore(story, *[(ALL, positions(*dealt), TABLE) for dealt in ((0,), (1,), (), ())])
    assert story.broken == []


def test_handles_of_a_union_may_be_given_as_they_are(story: ListStory) -> None:
    whole = tuple(each for subtask in story.metadata[1].operators[0].subtasks for each in subtask.operator if each.state == COUNTED)
    assert isinstance(whole[1].part, FileHandle)
    restore(story, (*whole, positions(0), TABLE), (*whole, positions(1), TABLE))
    assert story.broken == []
    del story.files[f"{STATE}/{JOB}/chk-1/{whole[1].part.path}"]
    restore(story, (*whole, positions(0), TABLE), (*whole, positions(1), TABLE))
    assert story.broken == [], "what is gone meanwhile can't be judged"


@pytest.mark.parametrize("entries", [(), (b"0",), (b"1", b"0"), (b"0", b"1", b"1")], ids=repr)
@pytest.mark.parametrize("parallelism", [2, 4])
def test_a_subtask_is_given_another_union(story: ListStory, entries: tuple[bytes, ...], parallelism: int) -> None:
    wrong = handle(COUNTED, *entries)
    restore(story, *[(ALL if slot else wrong, positions(*([slot] if slot < 2 else [])), TABLE) for slot in range(parallelism)])
    assert story.broken == ["I27"]
    assert f"(0) is given {len(entries)} entries of union state counted" in story.violations[0][1]


@pytest.mark.parametrize("copies", [(), (TABLE, TABLE), (handle(RULES, b"other"),)], ids=["none", "two", "other"])
@pytest.mark.parametrize("parallelism", [2, 4])
def test_a_subtask_is_given_no_copy_or_two_or_another(
    story: ListStory, copies: tuple[OperatorListHandle, ...], parallelism: int
) -> None:
    restore(
        story, *[(ALL, positions(*([slot] if slot < 2 else [])), *((TABLE,) if slot else copies)) for slot in range(parallelism)]
    )
    assert story.broken == ["I27"]
    assert "(0) is given" in story.violations[0][1]


def test_list_state_is_judged_beside_the_others(story: ListStory) -> None:
    restore(story, (ALL, positions(0, 0), TABLE))
    assert story.broken == ["I27"]
    assert "of 2 list entries 1 are lost and 1 too many" in story.violations[0][1]


def test_copies_of_broadcast_state_differ_in_a_snapshot() -> None:
    story = ListStory(tables=(b"r", b"s"))
    story.begin()
    story.complete(1)
    assert story.broken == ["I27"]
    assert "copies of source's broadcast state rules differ" in story.violations[0][1]


# -------------------------------------------------------------------------------------------------------- in the simulator


@pytest.mark.parametrize("function", ["union_redistribute", "broadcast_redistribute"])
def test_a_run_whose_copied_state_is_dealt_out_like_list_state_is_found(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_module, function, split_redistribute)
    runs = [run_seed(RunRequest(seed, "broadcast", kinds=("rescale",))) for seed in range(20, 26)]
    assert "I27" in {violation.invariant for run in runs for violation in run.result.violations}


@pytest.mark.parametrize("function", ["union_redistribute", "broadcast_redistribute"])
def test_its_output_is_wrong_too(function: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(restore_module, function, split_redistribute)
    run = Run(WORKLOADS["broadcast"].make(random.Random(7)), 7, tmp_path)
    run.start()
    assert run.go_on(2)
    run.crash(4)
    run.finish()
    assert run.problems() != []
