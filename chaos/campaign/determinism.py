"""Whether a run repeats: the second run has an interpreter of its own, with another PYTHONHASHSEED.

That finds a wall clock, random numbers from outside of the seed, the order of sets, and memory that outlives a run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from holdfast.chaos.campaign.minimise import breaks
from holdfast.chaos.campaign.runner import HANG, LIMIT_S, RUN_SEED, Outcome, SeedRunner, Task
from holdfast.chaos.cluster.results import RunResult, ViolationRecord

DETERMINISM = "determinism"
"""Named like an invariant: a run differs from its repetition."""

HASH_SEEDS = ("101", "202")
"""PYTHONHASHSEED of the first and of the second run: strings hash differently, so sets of them are in another order."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that differs in two runs of one request."""

    event: int
    """Number of the event, from 1."""
    first: str
    second: str
    """Lines of the two traces; empty where a trace has ended before."""

    def __str__(self) -> str:
        first, second = (" ".join(line.split()) or "the end of the run" for line in (self.first, self.second))
        return (
            f"event {self.event} is not the same when the run is repeated: first `{first}`, then `{second}`. "
            "A run may not depend on a wall clock, on random numbers of its own, or on the order of a set"
        )


def first_difference(first: Outcome, second: Outcome) -> Difference | None:
    """The first difference of two runs with their whole traces; None if they are equal."""
    lines = itertools.zip_longest(first.events, second.events, fillvalue="")
    for number, (one, other) in enumerate(lines, start=1):
        if one != other:
            return Difference(number, one, other)
    # without the dependences of a user's sinks, which come from runs without faults
    results = [msgspec.structs.replace(each.result, dependences=()) for each in (first, second)]
    if results[0] != results[1]:
        return Difference(len(first.events) + 1, _ending(*results), _ending(*reversed(results)))
    return None


def _ending(result: RunResult, other: RunResult) -> str:
    """Fields of a result that differ in the other."""
    names = [name for name in RunResult.__struct_fields__ if getattr(result, name) != getattr(other, name)]
    return "result: " + ", ".join(f"{name}={getattr(result, name)!r}" for name in names)


def run_twice(tasks: Iterable[Task], *, jobs: int, entry: str = RUN_SEED, limit_s: float = LIMIT_S) -> Iterator[Outcome]:
    """Outcomes in the order of the tasks; one that differs from its repetition breaks `determinism` beside its other violations."""
    firsts, seconds = itertools.tee(tasks)
    once = max(1, jobs // 4)  # a second run costs an interpreter's start, a first one does not
    with (
        SeedRunner(once, entry=entry, limit_s=limit_s, hash_seed=HASH_SEEDS[0]) as warm,
        SeedRunner(max(1, jobs - once), entry=entry, limit_s=limit_s, hash_seed=HASH_SEEDS[1], runs_per_process=1) as fresh,
        contextlib.closing(warm.run(replace(task, events=None) for task in firsts)) as first_outcomes,
        contextlib.closing(fresh.run(replace(task, events=None) for task in seconds)) as second_outcomes,
    ):
        for first, second in zip(first_outcomes, second_outcomes, strict=True):
            yield _judge(first, second)


def _judge(first: Outcome, second: Outcome) -> Outcome:
    for outcome in (first, second):
        if breaks(outcome.result, HANG):  # the limit of real time is not repeatable
            return outcome
    difference = first_difference(first, second)
    if difference is None:
        return Outcome(first.result)
    told = [str(difference), *(str(each) for each in first.result.dependences)]
    violation = ViolationRecord(DETERMINISM, "\n".join(told))  # first: its other violations may come from that
    return Outcome(msgspec.structs.replace(first.result, violations=(violation, *first.result.violations)))
