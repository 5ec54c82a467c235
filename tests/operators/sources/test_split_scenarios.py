"""Scenario group Z, its splits: row by row, on the real enumerator and readers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.statebackends.errors import HoldfastError
from tests.operators.sources.splitjob import Outside, SplitJob
from tests.scenarios.splits import SPLITS, Case
from tests.scenarios.targets import POSITIONS


class Play:
    """One case: an outside, and jobs that read it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.outside = Outside()
        self.options = options
        self.jobs: dict[str, SplitJob] = {}
        self.go("x")

    def go(self, name: str) -> None:
        if name not in self.jobs:
            self.jobs[name] = SplitJob(self.outside, **self.options)
        self.job = self.jobs[name]

    def act(self, step: str) -> None:
        word = step.rstrip("0123456789")
        number = int(step[len(word) :] or 0)
        job, outside = self.job, self.outside
        if step.startswith("+"):
            outside.rows[step[1]] = outside.rows.get(step[1], 0) + int(step[2:])
        elif step.startswith("end:"):
            outside.ended.add(step[4:])
        elif step.startswith("lose:"):
            outside.oldest[step[5]] = int(step[6:])
        elif step.startswith("@"):
            self.go(step[1:])
        elif step.startswith(("from", "crash")):
            self.restore(step)
        elif step.startswith("mix"):
            first, second = map(int, step[3:].split("-"))
            job.mix(job.snapshots[first], job.snapshots[second])
        elif word == "ack":
            job.acknowledge([number] if step != word else range(job.readers))
        elif word == "done":
            job.notify(number)
        elif word == "abort":
            del job.snapshots[number]
        elif word == "fail":
            outside.discoveries_to_fail = max(1, number)
        else:
            self.simple[step]()

    def restore(self, step: str) -> None:
        source, _, readers = step.partition("*")
        job, parallelism = self.job, int(readers) if readers else None
        if source == "crash":
            job.restore(job.completed, parallelism)
        elif source.startswith("from-"):
            job.restore(self.jobs[source[5]].snapshots[int(source[6:])], parallelism)
        else:
            job.restore(job.snapshots[int(source[4:])], parallelism)

    @property
    def simple(self) -> dict[str, Callable[[], Any]]:
        job, outside = self.job, self.outside
        return {
            "find": job.find,
            "ask": job.ask,
            "hand": job.hand,
            "get": job.get,
            "read": job.read,
            "go": job.go,
            "cut": job.cut,
            "save": lambda: job.take(),
            "ck": lambda: job.notify(job.take().id),
            "break": lambda: setattr(outside, "fails_fetch", True),
            "twice": lambda: setattr(outside, "finds_twice", True),
        }


def told_of(error: Exception) -> str:
    position = "".join(map(str, getattr(error, "position", ())))
    return f"{type(error).__name__} {getattr(error, 'split', '')}{position}".strip()


def ranges(rows: list[tuple[str, int]]) -> str:
    """`a0-2,5`: rows 0, 1, 2, 5 of split a, in this order."""
    runs: dict[str, list[list[int]]] = defaultdict(list)
    for split, number in rows:
        if runs[split] and runs[split][-1][-1] == number - 1:
            runs[split][-1][1:] = [number]
        else:
            runs[split].append([number])
    return " ".join(split + ",".join("-".join(map(str, run)) for run in runs[split]) for split in sorted(runs))


def play(case: Case) -> Case:
    """The case, with the outcome that it has."""
    scene, found = Play(case.options), []
    for part in case.steps.split("|"):
        error = ""
        try:
            for step in part.split():
                scene.act(step)
        except (HoldfastError, OSError) as raised:
            error = told_of(raised)
        found.append(" ".join(said for said in (scene.job.where(), error) if said))
    told = " ".join(f"{split}{position}" for split, position in sorted(scene.outside.told.items()))
    kept = {number: scene.job.kept(number) for number in case.kept}
    return Case(case.id, case.what, case.steps, " | ".join(found), ranges(scene.job.rows), told, kept, case.options)


@pytest.mark.parametrize("case", SPLITS, ids=lambda case: case.id)
def test_a_row_of_the_table(case: Case) -> None:
    assert play(case) == case


def test_ids_are_given_once_and_go_on_behind_the_positions() -> None:
    ids = [case.id for case in SPLITS]
    assert ids == sorted(set(ids))
    assert min(ids) > max(case.id for case in POSITIONS)
