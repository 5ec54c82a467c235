"""Scenario groups Q and Z, row by row, on a `StagedSink`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.statebackends.errors import HoldfastError
from tests.operators.sinks.files.minijob import Snapshot
from tests.operators.sinks.targets.targetjob import Directories, Outside, TargetJob
from tests.scenarios.targets import POSITIONS, SINKS, Case

CASES = SINKS + POSITIONS


class Play:
    """One case: an outside, and a job for each state directory."""

    def __init__(self, options: dict[str, Any], outside: Outside | None = None) -> None:
        self.outside = outside or Outside()
        self.options = options
        self.known: dict[str, Directories] = {}
        self.jobs: dict[str, TargetJob] = {}
        self.kept: Any = None
        self.go("x")
        self.job.start()

    def go(self, name: str) -> None:
        store, _, job = name.partition(":")
        if store not in self.jobs:
            state = Directories(f"/{store}", self.known)
            self.jobs[store] = TargetJob(self.outside, state, f"job-{job or 'a'}", self.options)
        self.job = self.jobs[store]

    def act(self, step: str) -> None:
        word, allowed = step.rstrip("!"), step.endswith("!")
        job, number = self.job, int("".join(sign for sign in word.rpartition("-")[2] if sign.isdigit()) or 0)
        if word.startswith("+"):
            job.emit(number)
        elif word.startswith("@"):
            self.go(word[1:])
        elif word.startswith("done"):
            job.notify(number)
        elif word.startswith("from-"):
            job.restore(self.jobs[word[5]].snapshots[number], allowed=allowed)
        elif word.startswith("from"):
            job.restore(job.snapshots[number], allowed=allowed)
        elif word in ("fresh", "crash"):
            job.restore(Snapshot(0, 0, []) if word == "fresh" else job.completed, allowed=allowed)
        else:
            self.simple[word]()

    @property
    def simple(self) -> dict[str, Callable[[], Any]]:
        job, outside = self.job, self.outside
        return {
            "snap": lambda: job.decide(job.snapshot()),
            "ck": job.checkpoint,
            "save": lambda: job.decide(job.snapshot(), savepoint=True),
            "abort": lambda: job.abort(job.snapshot()),
            "stop": self.stop,
            "again": job.wake,
            "later": lambda: job.later(1_000),
            "lose": job.lose_staged,
            "mute": lambda: setattr(outside, "mute_next", True),
            "deaf": lambda: setattr(outside, "deaf_from", outside.calls),
            "half": lambda: setattr(outside, "deaf_from", outside.calls + 1),
            "empty": outside.lose,
            "keep": lambda: setattr(self, "kept", (list(outside.rows), outside.stored)),
            "backup": self.go_back,
        }

    def stop(self) -> None:
        self.job.checkpoint()
        while self.job.committer.has_pending_work():
            self.job.run_pool()

    def go_back(self) -> None:
        self.outside.rows, self.outside.stored = self.kept

    def seen(self) -> Iterator[str]:
        yield from map(str, self.outside.seen)


def play(case: Case, outside: Outside | None = None) -> str:
    options = dict(case.options)
    commits = options.pop("commits", None)
    scene, found = Play(options, outside), []
    for part in case.steps.split("|"):
        error = ""
        try:
            for step in part.split():
                scene.act(step)
        except HoldfastError as raised:
            error = type(raised).__name__
            scene.outside.deaf_from = None
        found.append(" ".join([*scene.seen(), *([error] if error else [])]))
    if commits is not None:
        assert scene.outside.commits == commits
    return " | ".join(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_row_of_the_table(case: Case) -> None:
    expected = " | ".join(part.strip() for part in case.outside.split("|"))
    assert play(case) == expected, case.what


def test_ids_are_given_once() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("decided", [True, False], ids=["savepoint", "undecided"])
def test_files_that_a_later_attempt_has_restored_and_not_committed_stay_for_its_savepoint(decided: bool) -> None:
    scene = Play({})
    job = scene.job
    for step in ("+3", "ck", "+3", "snap"):
        scene.act(step)
    mute, job.run_pool = job.run_pool, lambda: None  # type: ignore[method-assign]
    job.restore(job.completed)
    job.run_pool = mute  # type: ignore[method-assign]
    saved = job.snapshot()  # the rows of checkpoint 2 are not outside yet
    if decided:
        job.decide(saved, savepoint=True)
    for path in [path for path in job.state.files if path.startswith("job-a/chk-2/")]:
        del job.state.files[path]  # subsumed
    scene.act("from1")
    scene.act("from3")
    assert scene.outside.rows == [0, 1, 2, 3, 4, 5]


def test_files_that_nothing_can_name_go_though_the_sweeping_attempt_has_taken_a_snapshot() -> None:
    scene = Play({})
    job = scene.job
    for step in ("+3", "ck", "+3"):
        scene.act(step)
    job.abort(job.snapshot())
    drive, job.run_pool = job.run_pool, lambda: None  # type: ignore[method-assign]
    job.restore(job.completed)
    job.decide(job.snapshot())
    job.run_pool = drive  # type: ignore[method-assign]
    job.run_pool()
    assert not [path for path in job.state.files if "/staged/" in path]
