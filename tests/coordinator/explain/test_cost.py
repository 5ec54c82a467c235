"""The cost of explanations: bounded by the number of subtasks. What is read of them is counted; how long it takes is what
`benchmarks/explain.py` measures."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import asdict, replace

from benchmarks import explain as bench
from holdfast.coordinator.explain.explanation import explain
from holdfast.coordinator.explain.health import derive_health
from holdfast.coordinator.explain.records import Situation
from holdfast.coordinator.views import SubtaskCheckpointView, SubtaskView

READS_MAX = 200
"""Fields that are read of one subtask, of its part in the checkpoint and of what it tells of itself: far more than are needed."""


class Reads:
    """Fields that were read since the last look."""

    count = 0


class CountedPart(SubtaskCheckpointView, frozen=True, gc=False):
    def __getattribute__(self, name: str) -> Any:
        Reads.count += 1
        return object.__getattribute__(self, name)


class CountedSubtask(SubtaskView, frozen=True):
    def __getattribute__(self, name: str) -> Any:
        Reads.count += 1
        return object.__getattribute__(self, name)


def counted(situation: Situation) -> Situation:
    """The same situation, whose subtasks count what is read of them."""
    vertices = tuple(
        replace(vertex, subtasks=tuple(CountedSubtask(*_values(each)) for each in vertex.subtasks))
        for vertex in situation.job.vertices
    )
    checkpoint = situation.checkpoint
    if checkpoint is not None:
        parts = {
            key: replace(vertex, subtasks=tuple(CountedPart(*_values(each)) for each in vertex.subtasks))
            for key, vertex in checkpoint.vertices.items()
        }
        checkpoint = replace(checkpoint, vertices=parts)
    return replace(situation, job=replace(situation.job, vertices=vertices), checkpoint=checkpoint)


def _values(struct: Any) -> list[Any]:
    return list(asdict(struct).values())


def reads(name: str, parallelism: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(bench, "PARALLELISM", parallelism)
    situation = counted(bench.situations()[name])
    Reads.count = 0
    explain(situation)
    derive_health(situation)
    return Reads.count


@pytest.mark.parametrize("name", bench.situations())
def test_twice_as_many_subtasks_are_twice_the_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    some, twice = reads(name, 30, monkeypatch), reads(name, 60, monkeypatch)
    assert 0 < some < READS_MAX * 30 * bench.VERTICES
    assert twice < 2.2 * some, "it grows with the subtasks, and not with their square"
