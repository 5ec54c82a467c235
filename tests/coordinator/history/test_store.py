"""Files of a history: written once, pruned, and read with gaps and damage named."""

from __future__ import annotations

import pytest

from holdfast.coordinator.history import store
from holdfast.coordinator.history.recorder import WriteHistory
from holdfast.coordinator.history.records import HistoryDamage, HistoryGap, HistoryPage, Position, encode_line
from holdfast.coordinator.history.store import (
    HistoryFaults,
    HistoryQuery,
    HistoryWriter,
    find_faults,
    parse_position,
    read_history,
)
from holdfast.statebackends.errors import InvalidConfigError, StorageUnavailableError
from holdfast.statebackends.layout import JobPaths, parse_history_name
from holdfast.statebackends.storage.port import ListFiles, PutIfAbsent, run_flow
from tests.coordinator.world import JOB, DictStorage

PATHS = JobPaths(JOB)


def lines(first: int, count: int, *, kind: str = "checkpoint", state: str = "") -> bytes:
    facts = {"state": state} if state else {"id": 1}
    return b"".join(encode_line(number, 100 + number, kind, facts) for number in range(first, first + count))


def put(storage: DictStorage, epoch: int, first: int, content: bytes) -> None:
    assert storage.execute(PutIfAbsent(PATHS.history(epoch, first), content))


def read(storage: DictStorage, **query: object) -> HistoryPage:
    return run_flow(read_history(PATHS, HistoryQuery(**query), 5), storage)  # type: ignore[arg-type]


def places(page: HistoryPage) -> list[tuple[int, int]]:
    return [(each.epoch, each.number) for each in page.entries]


def ended(number: int) -> bytes:
    return lines(number, 1, kind="state", state="SUSPENDED")


# ----------------------------------------------------------------------------------------------------------------- write


def test_file_is_created_once_and_a_repetition_is_ours() -> None:
    storage, writer = DictStorage(), HistoryWriter(PATHS, 3)
    action = WriteHistory(1, lines(1, 2))
    assert run_flow(writer.write(action), storage)
    assert run_flow(writer.write(action), storage)
    assert not run_flow(writer.write(WriteHistory(1, lines(1, 3))), storage)
    assert places(read(storage)) == [(3, 1), (3, 2)]


def test_oldest_files_go_first_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DictStorage()
    size = len(lines(1, 10))
    monkeypatch.setattr(store, "HISTORY_BYTES_MAX", 3 * size + 20)
    for first in (1, 11):
        put(storage, 9, first, lines(first, 10))
    storage.execute(PutIfAbsent(f"{PATHS.histories}/notes.txt", b"not ours"))
    writer = HistoryWriter(PATHS, 10)
    for first in (1, 11, 21):
        assert run_flow(writer.write(WriteHistory(first, lines(first, 10))), storage)
    left = [path.rpartition("/")[2] for path in storage.execute(ListFiles(PATHS.histories))]
    assert sorted(left) == ["10-1.jsonl", "10-11.jsonl", "10-21.jsonl", "notes.txt"]


def test_number_of_files_is_bounded_and_the_newest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    storage, writer = DictStorage(), HistoryWriter(PATHS, 1)
    monkeypatch.setattr(store, "HISTORY_FILES_MAX", 2)
    monkeypatch.setattr(store, "HISTORY_BYTES_MAX", 10)
    for first in (1, 2, 3):
        assert run_flow(writer.write(WriteHistory(first, lines(first, 1))), storage)
    assert [path.rpartition("/")[2] for path in storage.execute(ListFiles(PATHS.histories))] == ["1-3.jsonl"]


def test_write_that_storage_refuses_raises() -> None:
    class Down(DictStorage):
        def execute(self, operation: object) -> object:
            raise StorageUnavailableError("down")

    with pytest.raises(StorageUnavailableError):
        run_flow(HistoryWriter(PATHS, 1).write(WriteHistory(1, lines(1, 1))), Down())


# ------------------------------------------------------------------------------------------------------------------ read


def test_job_without_a_history_has_an_empty_page() -> None:
    assert read(DictStorage()) == HistoryPage((), as_of_ms=5)


def test_pages_go_on_where_the_last_one_ended_over_files_and_epochs() -> None:
    storage = DictStorage()
    put(storage, 2, 1, lines(1, 3))
    put(storage, 2, 4, lines(4, 1) + ended(5))
    put(storage, 10, 1, lines(1, 2))
    found: list[tuple[int, int]] = []
    after, more = None, True
    while more:
        page = read(storage, after=after, limit=2)
        assert not page.gaps
        found += places(page)
        after, more = parse_position(page.next), page.more
    assert found == [(2, 1), (2, 2), (2, 3), (2, 4), (2, 5), (10, 1), (10, 2)]
    later = read(storage, after=after)
    assert (later.entries, later.next, later.more) == ((), "10-2", False)


def test_a_checkpoint_that_ended_with_the_job_is_explained_behind_its_end_and_nothing_is_missing() -> None:
    storage = DictStorage()
    put(storage, 1, 1, lines(1, 2) + ended(3) + lines(4, 1, kind="explanation"))
    put(storage, 2, 1, lines(1, 1, kind="explanation") + lines(2, 1))
    put(storage, 3, 1, lines(1, 1))
    assert read(storage).gaps == (HistoryGap(2, 2, None, None),)
    assert read(storage, after=Position(1, 4)).gaps == (HistoryGap(2, 2, None, None),)


def test_an_explanation_in_a_file_of_its_own_behind_the_end_is_no_gap_for_who_begins_there() -> None:
    """The job's end is written at once, and so is what comes later."""
    storage = DictStorage()
    put(storage, 1, 1, lines(1, 2) + ended(3))
    put(storage, 1, 4, lines(4, 1, kind="explanation"))
    put(storage, 2, 1, lines(1, 1))
    assert read(storage).gaps == ()
    assert read(storage, after=Position(1, 4)).gaps == ()
    assert read(storage, after=Position(1, 3)).gaps == ()
    for limit in (1, 2, 3):
        assert read(storage, newest=True, limit=limit).gaps == ()


def test_lost_records_show_as_gaps() -> None:
    storage = DictStorage()
    put(storage, 2, 4, lines(4, 2))  # 1 to 3 went to make room
    put(storage, 2, 9, lines(9, 1))  # 6 to 8 were lost
    put(storage, 3, 1, lines(1, 1))  # the leader of epoch 2 did not say that it had ended
    assert read(storage).gaps == (HistoryGap(2, 0, 4, 3), HistoryGap(2, 5, 9, 3), HistoryGap(2, 9, None, None))
    assert read(storage, after=Position(2, 9)).gaps == (HistoryGap(2, 9, None, None),)
    assert read(storage, after=Position(2, 4), limit=1).gaps == ()


def test_damaged_lines_and_files_are_named_and_skipped() -> None:
    storage = DictStorage()
    put(storage, 1, 1, lines(1, 1) + b'{"number": 2\n' + lines(3, 1))
    put(storage, 1, 4, lines(5, 1) + lines(5, 1))  # the first line has another number than its place
    put(storage, 1, 6, b"\x00\xff" * 50)
    put(storage, 1, 7, b"[" * 100_000)
    put(storage, 1, 8, b"x" * (store._FILE_BYTES_MAX + 1))
    page = read(storage)
    assert places(page) == [(1, 1), (1, 3), (1, 5)]
    assert page.gaps == ()
    assert [(each.path.rpartition("/")[2], each.line) for each in page.damage] == [
        ("1-1.jsonl", 2),
        ("1-4.jsonl", 1),
        ("1-6.jsonl", 1),
        ("1-7.jsonl", 1),
        ("1-8.jsonl", 0),
    ]
    assert all(isinstance(each, HistoryDamage) and each.reason for each in page.damage)


def test_faults_of_a_whole_history_are_those_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DictStorage()
    put(storage, 2, 4, lines(4, 2) + b"garbage\n")
    put(storage, 2, 9, lines(9, 1))
    put(storage, 3, 1, lines(1, 1))
    put(storage, 3, 7, b"x" * (store._FILE_BYTES_MAX + 1))
    page = read(storage)
    for size in (store.PAGE_FILES_MAX, 1):
        monkeypatch.setattr(store, "PAGE_FILES_MAX", size)
        assert run_flow(find_faults(PATHS), storage) == HistoryFaults(page.damage, page.gaps)


def test_faults_that_are_named_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DictStorage()
    monkeypatch.setattr(store, "FAULTS_MAX", 3)
    put(storage, 1, 1, b"x\n" * 5)
    put(storage, 1, 6, b"x\n" * 5)
    found = run_flow(find_faults(PATHS), storage)
    assert ([each.line for each in found.damage], found.left_out) == ([1, 2, 3], 7)


def broken(content: bytes) -> bytes:
    """With a line break in the middle of its first line."""
    return content[:9] + b"\n" + content[9:]


def numbered(*numbers: int) -> bytes:
    return b"".join(lines(number, 1) for number in numbers)


@pytest.mark.parametrize(
    ("content", "found", "damaged", "gaps"),
    [
        (lines(4, 1) + broken(lines(5, 1)) + lines(6, 3), [4, 6, 7, 8], [2, 3], 0),
        (broken(lines(4, 1)) + lines(5, 1), [5], [1, 2], 0),
        (lines(4, 1) + broken(lines(5, 1)) + broken(lines(6, 1)) + lines(7, 1), [4, 7], [2, 3, 4, 5], 0),
        (lines(4, 1) + b"\n\n" + lines(5, 2), [4, 5, 6], [2, 3], 0),
        (lines(4, 1) + lines(5, 1)[:-1] + lines(6, 3), [4, 7, 8], [2], 1),  # two that were run together
        (numbered(4, 7, 8), [4, 7, 8], [], 1),  # 5 and 6 were taken out
        (numbered(4, 994, 6, 7), [4, 6, 7], [2], 0),
        (numbered(4, 5, 996), [4, 5], [3], 0),
        (numbered(4, 5, 5, 6), [4, 5, 6], [3], 0),
        (numbered(4, 5, 4, 5, 6), [4, 5, 6], [3, 4], 0),
        (numbered(6, 5, 4), [5], [1, 3], 0),
    ],
)
def test_a_line_that_is_broken_hides_no_line_behind_it(content: bytes, found: list[int], damaged: list[int], gaps: int) -> None:
    storage = DictStorage()
    put(storage, 1, 1, lines(1, 3))
    put(storage, 1, 4, content)
    page = read(storage)
    assert [number for _, number in places(page)] == [1, 2, 3, *found]
    assert [each.line for each in page.damage] == damaged
    assert len(page.gaps) == gaps
    singly, after, more = list[int](), None, True
    while more:
        part = read(storage, after=after, limit=1)
        singly += [number for _, number in places(part)]
        assert len(singly) <= 20
        after, more = parse_position(part.next), part.more
    assert singly == [1, 2, 3, *found], "page by page"


def test_kinds_filter_and_unknown_kinds_pass() -> None:
    storage = DictStorage()
    put(storage, 1, 1, lines(1, 2) + lines(3, 1, kind="drill") + lines(4, 1))
    page = read(storage, kinds=frozenset({"drill"}))
    assert (places(page), page.next) == ([(1, 3)], "1-4")
    assert [each.kind for each in read(storage).entries] == ["checkpoint", "checkpoint", "drill", "checkpoint"]


def test_newest_records_are_read_from_the_end() -> None:
    storage = DictStorage()
    for first in range(1, 101, 10):
        put(storage, 1, first, lines(first, 10))
    page = read(storage, limit=15, newest=True)
    assert places(page) == [(1, number) for number in range(86, 101)]
    assert (page.gaps, page.next, page.more) == ((), "1-100", False)


def backwards(storage: DictStorage, **query: object) -> list[HistoryPage]:
    """Pages from the newest on, as a reader who goes on has them."""
    pages = [read(storage, newest=True, **query)]
    while pages[-1].since:
        pages.append(read(storage, newest=True, before=parse_position(pages[-1].since), **query))
        assert len(pages) <= 200
    return pages


@pytest.mark.parametrize("limit", [1, 7, 50, 100, 1_000])
def test_a_reader_goes_backwards_over_all_records(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DictStorage()
    for epoch in (1, 4):
        for first in range(1, 51, 10):
            put(storage, epoch, first, lines(first, 10 if first < 41 else 9) + (ended(50) if first == 41 else b""))
    monkeypatch.setattr(store, "PAGE_FILES_MAX", 3)
    found = [place for page in reversed(backwards(storage, limit=limit)) for place in places(page)]
    assert found == [(epoch, number) for epoch in (1, 4) for number in range(1, 51)]


def test_a_page_of_rare_kinds_says_where_its_look_began(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DictStorage()
    for first in range(1, 101, 10):
        put(storage, 1, first, lines(first, 9) + lines(first + 9, 1, kind="drill" if first == 1 else "checkpoint"))
    monkeypatch.setattr(store, "PAGE_FILES_MAX", 4)
    pages = backwards(storage, kinds=frozenset({"drill"}))
    assert [page.since for page in pages] == ["1-61", "1-21", ""]
    assert [places(page) for page in pages] == [[], [], [(1, 10)]]
    assert [page.gaps for page in pages] == [(), (), ()]


def test_what_is_in_front_of_a_position_is_not_behind_it() -> None:
    storage = DictStorage()
    put(storage, 1, 1, lines(1, 10))
    put(storage, 2, 1, lines(1, 5))
    assert places(read(storage, newest=True, before=Position(2, 1), limit=3)) == [(1, 8), (1, 9), (1, 10)]
    assert places(read(storage, newest=True, before=Position(1, 4))) == [(1, 1), (1, 2), (1, 3)]
    assert places(read(storage, newest=True, before=Position(1, 1))) == []
    assert read(storage, newest=True, before=Position(1, 1)).since == ""


def test_page_is_read_from_a_bounded_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DictStorage()
    for first in range(1, 101, 10):
        put(storage, 1, first, lines(first, 10))
    monkeypatch.setattr(store, "PAGE_BYTES_MAX", 2 * len(lines(1, 10)))
    page = read(storage, kinds=frozenset({"nothing"}))
    assert (page.entries, page.more, page.next) == ((), True, "1-20")


def test_page_is_read_from_a_bounded_number_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DictStorage()
    for first in range(1, 101):
        put(storage, 1, first, lines(first, 1))
    monkeypatch.setattr(store, "PAGE_FILES_MAX", 20)
    page = read(storage, kinds=frozenset({"nothing"}))
    assert (page.entries, page.more, page.next) == ((), True, "1-20")
    assert places(read(storage, newest=True, limit=50)) == [(1, number) for number in range(81, 101)]


def test_files_that_are_too_large_do_not_keep_a_reader_in_front_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DictStorage()
    monkeypatch.setattr(store, "_FILE_BYTES_MAX", 1_000)
    monkeypatch.setattr(store, "PAGE_BYTES_MAX", 1_000)
    for first in (1, 2, 3):
        put(storage, 1, first, b"x" * 1_001)
    put(storage, 1, 4, lines(4, 1))
    after = None
    pages: list[HistoryPage] = []
    while not pages or pages[-1].more:
        pages.append(read(storage, after=after))
        after = parse_position(pages[-1].next)
        assert len(pages) <= 4
    assert places(pages[-1]) == [(1, 4)]
    assert [each.path.rpartition("/")[2] for page in pages for each in page.damage] == ["1-1.jsonl", "1-2.jsonl", "1-3.jsonl"]


@pytest.mark.parametrize("text", ["1", "-", "a-1", "1-", "1-2-3", "²-1", "9" * 50, "1-1\n"])
def test_malformed_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError):
        parse_position(text)


def test_only_our_names_are_files_of_a_history() -> None:
    assert parse_history_name("12-7.jsonl") == (12, 7)
    for name in ("0-1.jsonl", "1-0.jsonl", "01-1.jsonl", "1-1.json", "1-1.jsonl.tmp", "../1-1.jsonl"):
        assert parse_history_name(name) is None


def test_page_reads_so_many_files_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kinds are rare, and files small: each is a request to storage."""
    storage = DictStorage()
    for number in range(1, 10):
        put(storage, 1, number, lines(number, 1, kind="state" if number == 9 else "checkpoint"))
    monkeypatch.setattr(store, "PAGE_FILES_MAX", 4)
    kinds = frozenset({"state"})
    first = read(storage, kinds=kinds)
    assert (places(first), first.next, first.more) == ([], "1-4", True)
    second = read(storage, kinds=kinds, after=parse_position(first.next))
    third = read(storage, kinds=kinds, after=parse_position(second.next))
    assert (places(second), places(third), third.more) == ([], [(1, 9)], False)
    newest = read(storage, kinds=kinds, limit=2, newest=True)
    assert (places(newest), newest.gaps) == ([(1, 9)], ())
