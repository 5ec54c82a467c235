"""Readers of a sink's log share its rows: each row once, at whatever cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.barriers.sinks.log import CommitEntry, LogEntry, OwnerEntry, StagedFile
from holdfast.operators.sinks.files.committed import FileRows, admit, digest_of, rows_of, shared
from tests.examples import examples


def log_of(*commits: tuple[int, ...] | None) -> list[LogEntry]:
    """Rows of each file of each commit; None: a takeover."""
    entries: list[LogEntry] = []
    for number, rows in enumerate(commits):
        if rows is None:
            entries.append(OwnerEntry(1, number, 1, "n", "job", 1, 0, "", 9))
        else:
            files = tuple(StagedFile(f"{number}-{index}", count) for index, count in enumerate(rows))
            entries.append(CommitEntry(1, number, 1, "n", "job", 1, number, sum(rows), files, "w", 9))
    return entries


def test_takeovers_and_files_without_rows_are_passed_over() -> None:
    assert rows_of(log_of(None, (3, 0), None, (2,))) == [FileRows("1-0", 0, 3), FileRows("3-0", 0, 2)]


@pytest.mark.parametrize(
    ("files_max", "rows_max", "taken"),
    [(None, None, 5), (1, None, 2), (2, None, 3), (3, None, 4), (4, None, 5), (None, 1, 2), (None, 5, 3), (None, 8, 5)],
)
def test_a_batch_has_as_many_commits_as_fit_and_one_at_least(files_max: int | None, rows_max: int | None, taken: int) -> None:
    log = log_of(None, (2, 3), None, (2,), (1,))
    assert admit(log, files_max=files_max, rows_max=rows_max) == taken


COMMITS = st.lists(st.none() | st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=12)


@settings(max_examples=examples(100), deadline=None)
@given(
    commits=COMMITS,
    rows_max=st.integers(1, 12),
    by_files=st.booleans(),
    tasks=st.integers(0, 4) | st.just(10**9),
    cut=st.none() | st.integers(1, 4),
)
def test_batches_and_tasks_give_each_row_once_and_come_to_the_end(
    commits: list[tuple[int, ...] | None], rows_max: int, by_files: bool, tasks: int, cut: int | None
) -> None:
    log, position, found = log_of(*commits), 0, []
    while position < len(log):
        limit = {"files_max": rows_max} if by_files else {"rows_max": rows_max}
        taken = admit(log[position:], **limit)
        assert taken > 0
        batch = rows_of(log[position : position + taken])
        position += taken
        parts = shared(batch, tasks, may_cut=lambda name: cut is not None, cut_rows_min=cut or 1)
        pieces = [piece for part in parts for piece in part]
        assert [row for piece in pieces for row in rows_in(piece)] == [row for piece in batch for row in rows_in(piece)]
        assert cut is not None or pieces == batch
        assert all(piece in batch or piece.rows >= (cut or 0) for piece in pieces)
        assert len(parts) <= (tasks or 64)
        found += batch
    assert found == rows_of(log)


def rows_in(piece: FileRows) -> list[tuple[str, int]]:
    return [(piece.name, row) for row in range(piece.start, piece.stop)]


def always(name: str) -> bool:
    return True


def never(name: str) -> bool:
    return False


def test_many_small_files_are_shared_by_rows() -> None:
    pieces = [FileRows(str(number), 0, 10) for number in range(1000)]
    assert {len(part) for part in shared(pieces, 10, may_cut=always)} == {100}
    assert len(shared(pieces, may_cut=always)) == 64
    assert len(shared([FileRows(str(number), 0, 3_000_000) for number in range(100)], may_cut=never)) == 100
    assert shared([], may_cut=always) == []


def test_tasks_have_as_many_rows_as_each_other_whatever_the_files_have() -> None:
    pieces = [FileRows("a", 0, 1), FileRows("b", 0, 4_239_867), FileRows("c", 7, 1_760_139)]
    parts = shared(pieces, may_cut=always)
    assert [sum(piece.rows for piece in part) for part in parts] == [1_000_000] * 6
    assert [part[0] for part in parts[4:]] == [FileRows("b", 3_999_999, 4_239_867), FileRows("c", 760_139, 1_760_139)]
    assert shared(pieces, 2, may_cut=lambda name: name == "c") == [pieces[:2], pieces[2:]]


def test_no_part_is_smaller_than_a_read_is_worth() -> None:
    assert shared([FileRows("a", 0, 100_000)], 10**9, may_cut=always) == [[FileRows("a", 0, 100_000)]]
    cut = shared([FileRows("a", 0, 300_000)], 3_000_000, may_cut=always)
    assert [[piece.rows for piece in part] for part in cut] == [[65_536], [65_536], [65_536], [103_392]]


def test_a_digest_tells_entries_of_two_logs_apart() -> None:
    log, other = log_of(None, (1,), (1,)), log_of(None, (2,), (1,))
    assert digest_of(log[1]) != digest_of(other[1])
    assert digest_of(log[2]) == digest_of(other[2])
    assert all(digest_of(one) != digest_of(two) for one, two in pairwise(log))
