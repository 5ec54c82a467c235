"""What a committer that opens a target may do, by what the target has stored: every rule of `CommitOwner.take`."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from holdfast.barriers.sinks.staged import ALL_ROWS, POSITION_VERSION, CommitMark, CommitPosition
from holdfast.operators.sinks.targets.positions import CommitOwner
from holdfast.statebackends.errors import (
    CommitPositionLostError,
    CorruptStateError,
    FencedError,
    HoldfastError,
    OutputMayRepeatError,
    UnsupportedVersionError,
)


def at(
    checkpoint_id: int,
    row: int = ALL_ROWS,
    *,
    owner: int = 4,
    job: str = "a",
    attempt: int = 2,
    sink: str = "out",
    line: str = "1",
    nonce: str = "",
    rows: str = "",
    reached: CommitMark | None = None,
) -> CommitPosition:
    """`rows`: names the rows that checkpoint has, if a job has taken others under the same id."""
    tag = f"{job}{checkpoint_id}{rows}" if checkpoint_id else ""
    nonce = nonce or f"n-{job}{line}{attempt}"
    return CommitPosition(
        POSITION_VERSION, sink, owner, nonce, job, attempt, checkpoint_id, row, line=line, tag=tag, reached=reached
    )


def staged(*checkpoint_ids: int, job: str = "a", rows: str = "") -> tuple[CommitMark, ...]:
    return tuple(CommitMark(each, tag=f"{job}{each}{rows}") for each in checkpoint_ids)


def owner(known: CommitPosition | None, restored: int, *pending: CommitMark, **changed: Any) -> CommitOwner:
    fields: dict[str, Any] = {"sink_id": "out", "job_id": "a", "attempt": 3, "nonce": "mine", "pending": pending, "line": "1"}
    return CommitOwner(**{**fields, "known": known, "restored_checkpoint_id": restored, **changed})


B: dict[str, Any] = {"job": "b"}
ALLOWED: dict[str, Any] = {"allow_output_repeat": True}
BACK = at(3, reached=at(10).mark)
"""The output was at 10, and a user went back to 3; no row has been repeated."""
REPEATED = at(4, line="2", rows="again", reached=CommitMark(10))
"""And now the rows behind 3 have come again, from another state directory, where ids go on behind 3."""

TAKEN: dict[str, tuple[CommitOwner, CommitPosition | None, tuple[int, int, int]]] = {
    # who opens, what is stored -> (owner, checkpoint, row) that the target has to store
    "an empty target": (owner(None, 0), None, (1, 0, -1)),
    "a new sink of a restored job": (owner(None, 9), None, (1, 0, -1)),
    "never committed, target emptied": (owner(at(0, owner=2), 3), None, (3, 0, -1)),
    "restart of the job (Q06)": (owner(at(4), 5, *staged(5)), at(4), (5, 4, -1)),
    "repeated commit (Q07)": (owner(at(4), 5, *staged(5)), at(5), (5, 5, -1)),
    "several checkpoints in one step": (owner(at(2), 7, *staged(3, 5, 7)), at(5), (5, 5, -1)),
    "state from before the first open": (owner(None, 5, *staged(5)), at(5), (5, 5, -1)),
    "opened, and nothing committed": (owner(None, 5, *staged(5)), at(0), (5, 0, -1)),
    "in the middle of a checkpoint": (owner(at(4), 5, *staged(5)), at(5, 100), (5, 5, 100)),
    "row by row forward": (owner(at(5, 50), 5, *staged(5)), at(5, 100), (5, 5, 100)),
    "its own first opening had no answer": (owner(at(5), 5), at(5, owner=7, attempt=3, nonce="mine"), (8, 5, -1)),
    "opened again in a commit (Q21)": (
        owner(at(5), 6, *staged(6), reopens=True),
        at(6, owner=7, attempt=3, nonce="mine"),
        (8, 6, -1),
    ),
    "a later attempt after an older one": (owner(at(5), 5, attempt=9), at(5, attempt=8), (5, 5, -1)),
    "an heir restored from the owner's newest state": (owner(at(4, **B), 5, *staged(5, **B)), at(5, **B), (5, 5, -1)),
    "an heir of lower attempt number": (owner(at(4, **B), 5, attempt=1), at(4, **B, attempt=30), (5, 4, -1)),
    "the job in a new state directory": (owner(at(4), 5, *staged(5), attempt=1, line="2"), at(5, attempt=30), (5, 5, -1)),
    "and its second attempt there": (owner(at(4), 5, *staged(5), attempt=2, line="2"), at(5, attempt=1, line="2"), (5, 5, -1)),
    "back in the first state directory": (owner(at(9, line="2"), 9, attempt=4), at(9, attempt=7, line="2"), (5, 9, -1)),
    "an older snapshot, allowed (Q20)": (owner(at(3), 3, **ALLOWED), at(5), (5, 3, -1)),
    "an older snapshot, allowed, mid-checkpoint": (owner(at(3), 3, **ALLOWED), at(5, 7), (5, 3, -1)),
    "an older snapshot with staged rows, allowed": (owner(at(1, 5), 3, **ALLOWED), at(5), (5, 1, 5)),
    "a fresh start, allowed": (owner(None, 0, **ALLOWED), at(5), (5, 0, -1)),
    "a fresh start in an emptied state directory, allowed": (owner(None, 0, attempt=1, line="2", **ALLOWED), at(5), (5, 0, -1)),
    "the job in two state directories, allowed": (owner(at(4), 5, attempt=1, line="2", **ALLOWED), at(5, line="3"), (5, 4, -1)),
    "allowed, and nothing beyond": (owner(at(4), 5, *staged(5), **ALLOWED), at(5, 7), (5, 5, 7)),
    "gone back, the attempt failed": (owner(at(3), 3, **ALLOWED), BACK, (5, 3, -1)),
    "gone back, an attempt that knows of it": (owner(BACK, 11, *staged(11)), BACK, (5, 3, -1)),
    "gone back, a user changed his mind": (owner(at(9), 10, *staged(10)), BACK, (5, 10, -1)),
    "gone back, rows came again, restart": (owner(BACK, 4, *staged(4, rows="again"), line="2"), REPEATED, (5, 4, -1)),
    "gone back, rows came again, state from before the open": (
        owner(at(3), 4, *staged(4, rows="again"), line="2", **ALLOWED),
        REPEATED,
        (5, 4, -1),
    ),
}

REFUSED: dict[str, tuple[CommitOwner, CommitPosition | None, type[HoldfastError]]] = {
    "two jobs on one sink (Q19)": (owner(None, 0), at(5, **B), FencedError),
    "two jobs, the other has no output yet": (owner(None, 0), at(0, **B), FencedError),
    "another job, allowed to repeat": (owner(None, 0, **ALLOWED), at(5, **B), FencedError),
    "an heir whom a third job preceded": (owner(at(4, **B), 5), at(4, job="c"), FencedError),
    "the owner behind its heir": (owner(at(4), 5, *staged(5)), at(5, **B), FencedError),
    "two state directories, one name": (owner(None, 0, attempt=1, line="2"), at(0, attempt=1), FencedError),
    "two state directories, one name, a later attempt": (owner(None, 0, attempt=9, line="2"), at(0, attempt=1), FencedError),
    "the first state directory behind the second": (owner(at(5), 5, attempt=9), at(5, attempt=1, line="2"), FencedError),
    "a third state directory behind the second": (owner(at(5), 5, line="3"), at(5, attempt=1, line="2"), FencedError),
    "a late attempt": (owner(at(4), 5, *staged(5), attempt=1), at(5), FencedError),
    "another committer of the same attempt": (owner(at(5), 5), at(5, attempt=3), FencedError),
    "another committer of the same attempt, allowed": (owner(at(5), 5, **ALLOWED), at(5, attempt=3), FencedError),
    "opened again in a commit, behind an heir": (owner(at(5), 6, *staged(6), reopens=True), at(5, **B), FencedError),
    "opened again in a commit, behind another line's commit": (
        owner(at(5), 6, *staged(6), reopens=True, **ALLOWED),
        at(6, line="2"),
        FencedError,
    ),
    "opened again in a commit, behind a later attempt": (owner(at(5), 6, reopens=True), at(5, attempt=4), FencedError),
    "another sink's place": (owner(None, 0), at(0, sink="other"), FencedError),
    "an older snapshot (Q20)": (owner(at(3), 3), at(5), OutputMayRepeatError),
    "an older snapshot, by one row": (owner(at(3), 3), at(4, 1), OutputMayRepeatError),
    "an heir of an older snapshot": (owner(at(3, **B), 3), at(5, **B), OutputMayRepeatError),
    "a fresh start": (owner(None, 0), at(1), OutputMayRepeatError),
    "other rows under the same id": (owner(at(4), 5, *staged(5)), at(5, rows="of a copy"), OutputMayRepeatError),
    "gone back, an older snapshot": (owner(at(3), 3), BACK, OutputMayRepeatError),
    "gone back, a snapshot between": (owner(at(6), 7, *staged(7)), BACK, OutputMayRepeatError),
    "gone back, the way forward is shut": (owner(at(9), 10, *staged(10), line="2"), REPEATED, OutputMayRepeatError),
    "an emptied target": (owner(at(4), 5), None, CommitPositionLostError),
    "an emptied target, allowed to repeat": (owner(at(4), 5, **ALLOWED), None, CommitPositionLostError),
    "a target from a backup": (owner(at(5), 6), at(4), CommitPositionLostError),
    "a target from a backup, allowed to repeat": (owner(at(5), 6, **ALLOWED), at(4), CommitPositionLostError),
    "a target from a backup, by rows": (owner(at(5, 100), 6), at(5, 50), CommitPositionLostError),
    "a target from a backup, whole known": (owner(at(5), 6), at(5, 50), CommitPositionLostError),
}


@pytest.mark.parametrize("case", TAKEN)
def test_who_may_goes_on_as_the_next_owner(case: str) -> None:
    who, stored, expected = TAKEN[case]
    taken = who.take(stored)
    assert (taken.owner, taken.checkpoint_id, taken.row) == expected
    assert (taken.nonce, taken.job_id, taken.attempt, taken.sink_id) == ("mine", "a", who.attempt, "out")
    assert taken.line == who.line


@pytest.mark.parametrize("case", REFUSED)
def test_who_may_not_is_refused_by_name(case: str) -> None:
    who, stored, error = REFUSED[case]
    with pytest.raises(error, match="sink out"):
        who.take(stored)


def test_whoever_takes_a_target_fences_all_before() -> None:
    """The stored position differs from each one that an older owner could expect, though no row has moved."""
    stored: CommitPosition | None = None
    seen = []
    for attempt, _ in itertools.product((1, 2, 3), range(3)):
        stored = owner(stored, 0, attempt=attempt, nonce=f"n{attempt}").take(stored)
        assert stored not in seen
        seen.append(stored)
    assert [position.owner for position in seen] == list(range(1, 10))


def test_an_attempt_that_wakes_late_takes_nothing_from_its_successor() -> None:
    first = owner(None, 0, attempt=1).take(None)
    second = owner(first, 1, attempt=2).take(first)
    with pytest.raises(FencedError, match="attempt 2"):
        owner(first, 1, attempt=1).take(second)


def test_ids_of_another_job_never_pass_for_committed() -> None:
    """Job b committed up to 9; job a starts from b's checkpoint 4 and counts 5, 6 ...: those are not in the target yet."""
    taken = owner(at(4, job="b"), 4, allow_output_repeat=True).take(at(9, job="b"))
    assert taken.has_all_of(4)
    assert not taken.has_all_of(5)


def test_what_a_snapshot_has_staged_is_not_taken_for_committed_by_another_line() -> None:
    """Savepoint 5 was taken, the job failed over to 4, and committed 6, with fewer rows than 5 has: the user goes back to 5."""
    back = owner(at(4), 5, *staged(5), **ALLOWED)
    taken = back.take(at(6))
    assert not taken.has_all_of(5)
    assert taken.repeated == 5
    again = back.take(taken)
    assert again.repeated == 5, "the attempt failed before its first checkpoint"
    assert [taken.moved(number).repeated for number in (5, 6)] == [5, 0]


def test_the_way_forward_is_open_until_rows_are_repeated() -> None:
    """Output at 10; a user goes back to 3, sees the mistake before a row was written, and starts from 10 again."""
    back = owner(at(3), 3, attempt=4, **ALLOWED).take(at(10))
    assert (back.checkpoint_id, back.reached) == (3, at(10).mark)
    forward = owner(at(10), 10, attempt=5)
    assert forward.take(back).mark == at(10).mark
    assert forward.take(back).reached is None
    repeated = back.moved(11, tag="a11")
    assert repeated.reached is None
    with pytest.raises(OutputMayRepeatError, match="committed, and the job starts at 10"):
        forward.take(repeated)


def test_a_first_opening_that_takes_effect_late_does_not_go_back_twice() -> None:
    """It was taken for lost, sent again and answered; meanwhile rows behind the old snapshot have come."""
    first = owner(at(3), 3, **ALLOWED)
    committed = first.take(at(10)).moved(4, 7, "again")
    late = first.take(committed)
    assert late == msgspec.structs.replace(committed, owner=committed.owner + 1)


def test_the_highest_point_lasts_until_it_is_passed_again() -> None:
    """In another state directory ids go on behind 3: an id below 10 is of other rows than those that were committed."""
    marks = [BACK.moved(number).reached for number in (4, 9, 10, 11)]
    assert marks == [CommitMark(10), CommitMark(10), None, None]
    assert REPEATED.highest == CommitMark(10)


def test_two_stores_with_one_job_name_lose_no_row() -> None:
    """Both begin empty, in state directories of their own; whichever is second is refused, by name, and changes nothing."""
    first = owner(None, 0, attempt=1, nonce="x", line="x").take(None)
    with pytest.raises(FencedError, match="another state directory"):
        owner(None, 0, attempt=1, nonce="y", line="y").take(first)
    committed = first.moved(1, tag="x1")
    with pytest.raises(FencedError, match="another state directory"):
        owner(None, 1, *staged(1), attempt=2, nonce="y", line="y").take(committed)


def test_nothing_but_its_own_rows_passes_for_committed() -> None:
    """Whatever is stored, under whatever id: what `take` returns as committed is what the state knows, by tag."""
    tags = ["a4", "a5", "other"]
    for number, tag, allowed in itertools.product((4, 5), tags, (False, True)):
        stored = CommitPosition(POSITION_VERSION, "out", 4, "n", "a", 2, number, line="1", tag=tag)
        try:
            taken = owner(at(4), 5, *staged(5), allow_output_repeat=allowed).take(stored)
        except OutputMayRepeatError:
            assert tag != f"a{number}"
            continue
        assert taken.mark in (at(4).mark, at(5).mark)
        assert taken.has_all_of(5) == (number == 5 and tag == "a5")


def test_progress_is_of_whole_checkpoints_and_rows() -> None:
    positions = [at(0), at(3, 1), at(3, 50), at(3), at(4, 1), at(5)]
    assert positions == sorted(positions, key=lambda position: position.progress)
    assert [at(5, 7).has_all_of(number) for number in (4, 5, 6)] == [True, False, False]
    assert [at(5, 7).rows_of(number) for number in (5, 6)] == [7, 0]


def test_an_encoded_position_is_short_text_and_comes_back() -> None:
    position = msgspec.structs.replace(at(12, 345, nonce="n-a2"), line="", tag="")
    assert CommitPosition.decode(position.encode()) == CommitPosition.decode(position.encode().decode()) == position
    assert position.encode() == (
        b'{"version":1,"sink_id":"out","owner":4,"nonce":"n-a2","job_id":"a","attempt":2,"checkpoint_id":12,"row":345}'
    )


def test_a_position_that_can_not_be_read_is_refused() -> None:
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        CommitPosition.decode(msgspec.structs.replace(at(1), version=2).encode())
    for damaged in (b"", b"{}", b"\xff", at(1).encode()[:-5], b'{"version":1}'):
        with pytest.raises(CorruptStateError):
            CommitPosition.decode(damaged, "table x")
