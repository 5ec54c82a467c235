"""A user goes back to an older snapshot: which output counts then, and what must not be although he said that it may repeat."""

from __future__ import annotations

import math

import pytest

from holdfast.barriers.jobgraph import Submission
from holdfast.barriers.messages import CheckpointKind
from holdfast.chaos.checkers.descent import EVERYTHING, descent
from holdfast.chaos.cluster.users import older_snapshots
from holdfast.coordinator.ha.records import RestorePoint, SubmissionRecord
from tests.simulation.checker_world import JOB, Story, graph, ledger


def submissions(*rows: tuple[int, int, bool]) -> dict[int, SubmissionRecord]:
    """(first id, base, whether output may repeat) of each."""
    return {
        number: SubmissionRecord(
            number,
            1,
            Submission(graph(), allow_output_repeat=repeat),
            RestorePoint(base, f"chk-{base}", 0) if base else None,
            first,
            "n",
        )
        for number, (first, base, repeat) in enumerate(rows, start=1)
    }


@pytest.mark.parametrize(
    ("rows", "ranges"),
    [
        ([], EVERYTHING),
        ([(1, 0, False), (4, 3, False), (6, 2, False)], EVERYTHING),
        ([(1, 0, False), (6, 2, True)], ((0, 2), (6, math.inf))),
        ([(1, 0, False), (6, 2, True), (9, 7, False)], ((0, 2), (6, math.inf))),
        ([(1, 0, False), (6, 2, True), (9, 7, True)], ((0, 2), (6, 7), (9, math.inf))),
        ([(1, 0, False), (6, 2, True), (9, 4, True)], ((0, 4), (9, math.inf))),
        ([(1, 0, False), (6, 2, True), (9, 3, False)], ((0, 3), (9, math.inf))),
        ([(1, 0, False), (6, 5, True)], EVERYTHING),
    ],
)
def test_a_line_is_cut_where_its_user_went_back(rows: list[tuple[int, int, bool]], ranges: tuple[tuple[int, float], ...]) -> None:
    assert descent(submissions(*rows)) == ranges


def gone_back(*, repeat: bool = True) -> Story:
    """Checkpoints 1 and 2 with one row each; the job begins again at 1, and gives the second row again."""
    story = Story(sinks=ledger((1, 1), (1, 2), (1, 3)))
    story.begin()
    for checkpoint in (1, 2):
        name = story.staged_name(checkpoint)
        story.stage(name, (1, checkpoint))
        story.complete(checkpoint)
        story.commit(checkpoint, name)
    story.lead()
    story.submit(2, RestorePoint(1, story.folder(1), 0), first=3, repeat=repeat)
    story.fail_over(1)
    return story


def end(story: Story, *rows: tuple[int, int]) -> list[str]:
    name = story.staged_name(3)
    story.stage(name, *rows)
    story.complete(3, CheckpointKind.FINAL)
    story.drop(1)
    story.drop(2)
    story.commit(3, name)
    story.finish(3)
    story.end()
    return story.broken


def test_what_lies_behind_the_snapshot_is_written_again() -> None:
    assert end(gone_back(), (1, 2), (1, 3)) == []


def test_what_lies_in_front_of_it_is_not() -> None:
    assert "I3" in end(gone_back(), (1, 1), (1, 2), (1, 3))
    assert "I5" in end(gone_back(), (1, 3))


def test_nobody_goes_back_without_being_told_to() -> None:
    assert "I22" in gone_back(repeat=False).broken


def test_the_line_that_was_left_commits_nothing_once_the_sink_has_its_new_owner() -> None:
    story = gone_back()
    story.log("owner", attempt=story.attempt)
    name = story.staged_name(3, 1, attempt=1)
    story.stage(name, (1, 3))
    story.attempt = 1
    story.commit(2, name)
    assert "I15" in story.broken


def test_a_savepoint_of_a_failed_attempt_counts_on_the_line_of_those_who_went_on_from_it_alone() -> None:
    """Savepoint 2 is taken, its attempt fails, and 3 comes from checkpoint 1. Somebody begins with the savepoint; then with 3."""
    story = Story(sinks=ledger((1, 1), (1, 2)))
    story.begin()
    first, second = story.staged_name(1), story.staged_name(2)
    story.stage(first, (1, 1))
    story.complete(1)
    story.commit(1, first)
    story.stage(second, (1, 2))
    story.complete(2, CheckpointKind.SAVEPOINT)
    story.fail_over(1)
    again = story.staged_name(3)
    story.stage(again, (1, 2))
    story.complete(3)
    story.commit(3, again)
    story.lead()
    story.submit(2, RestorePoint(2, story.folder(2), 0, CheckpointKind.SAVEPOINT, explicit=True), first=4, repeat=True)
    story.fail_over(2)
    story.commit(2, second)
    assert story.broken == []
    story.lead()
    story.submit(3, RestorePoint(3, story.folder(3), 0), first=5, repeat=True)
    story.fail_over(3)
    story.complete(5, CheckpointKind.FINAL)
    for number in (1, 3):
        story.drop(number)
    story.finish(5)
    story.end()
    assert story.broken == []


def test_a_user_can_name_what_is_older_than_the_newest_and_stands() -> None:
    story = Story()
    story.begin()
    for number in (1, 2, 3):
        story.complete(number)
    story.drop(1)
    story.complete(4, CheckpointKind.SAVEPOINT)
    story.claim(5)
    story.abort(5)
    story.complete(6)
    savepoint = story.claims[4].folder
    assert older_snapshots(story.state, JOB, story.store("/savepoints"), ()) == ["2", "3", "4", savepoint]
    assert older_snapshots(story.state, JOB, story.store("/savepoints"), {savepoint}) == ["2", "3", savepoint]
