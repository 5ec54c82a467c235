"""Summaries of a sink's log repeat the entries, whatever dies or races while they are written; nothing depends on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from holdfast.barriers.sinks import log as sinklog
from holdfast.barriers.sinks import reading as sinkreading
from holdfast.barriers.sinks.log import CommitEntry, LogEntry, OwnerEntry, SinkPaths, StagedFile, decode_summary, encode_summary
from holdfast.barriers.sinks.reading import read_log_flow
from holdfast.operators.sinks.files import summaries
from holdfast.operators.sinks.files.summaries import summarise_flow
from holdfast.statebackends.errors import CorruptStateError, ObjectMissingError, OutputMayRepeatError, StorageUnavailableError
from holdfast.statebackends.storage import port as ops
from tests.operators.ports import DictStorage
from tests.operators.sinks.files.minijob import Crash, MiniJob, MortalStorage, committed

SINK = SinkPaths("out")
SOME = 4


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summaries of four entries, looked for behind two."""
    for module in (sinklog, sinkreading, summaries):
        monkeypatch.setattr(module, "SUMMARY_ENTRIES", SOME)
    monkeypatch.setattr(sinkreading, "SINGLES_MIN", 2)


def entry(sequence: int) -> LogEntry:
    if sequence % 5 == 0:
        return OwnerEntry(1, sequence, sequence // 5 + 1, f"n{sequence}", "job", 1, 0, "", 9)
    files = tuple(StagedFile(f"part-\n-{sequence}-{number}.parquet", number) for number in range(sequence % 3))
    return CommitEntry(1, sequence, sequence // 5 + 1, "n", "job", 1, sequence, 3, files, "w", 9)


def log_of(length: int) -> DictStorage:
    return DictStorage({SINK.log(number): msgspec.json.encode(entry(number)) for number in range(length)})


def summarise(storage: DictStorage, stop: int) -> None:
    done = None
    for _ in range(stop):
        done = ops.run_flow(summarise_flow(SINK, stop, done), storage)


def summaries_of(storage: DictStorage) -> dict[str, bytes]:
    return {path: content for path, content in storage.files.items() if "/summaries/" in path}


def assert_true(storage: DictStorage) -> int:
    """Each summary has the bytes of its entries; returns how many there are."""
    found = summaries_of(storage)
    for path, content in found.items():
        first = int(path.rpartition("/")[2].removesuffix(".jsonl"))
        lines = content.split(b"\n")[1:-1]
        assert lines == [storage.files[SINK.log(first + index)] for index in range(SOME)]
        assert decode_summary(content, first) is not None
    return len(found)


def reads(storage: DictStorage, sequence: int = 0) -> tuple[list[LogEntry], int]:
    """Entries of the log, and the number of reads that they took."""
    storage.log.clear()
    entries = ops.run_flow(read_log_flow(SINK, sequence), storage)
    return entries, len(storage.log)


@pytest.mark.parametrize("length", range(2 * SOME + 3))
@pytest.mark.parametrize("start", range(SOME + 2))
def test_a_log_reads_the_same_with_summaries_and_without(length: int, start: int) -> None:
    storage = log_of(length)
    plain, _ = reads(storage, start)
    assert plain == [entry(number) for number in range(start, length)]
    summarise(storage, length)
    assert assert_true(storage) == length // SOME
    assert reads(storage, start)[0] == plain


def test_a_long_log_takes_a_read_for_each_summary() -> None:
    storage = log_of(50 * SOME + 1)
    summarise(storage, 50 * SOME + 1)
    entries, count = reads(storage)
    assert len(entries) == 50 * SOME + 1
    assert count == 50 + 2 + 3  # two entries first; at the end the last entry, no summary, and no entry


def test_a_short_log_takes_no_more_reads_than_it_did() -> None:
    assert [reads(log_of(length))[1] for length in range(3)] == [1, 2, 4]
    assert reads(log_of(1))[1] == 2


@pytest.mark.parametrize("missing", range(5))
def test_the_entries_are_read_where_a_summary_is_missing(missing: int) -> None:
    storage = log_of(5 * SOME)
    summarise(storage, 5 * SOME)
    del storage.files[SINK.summary(missing * SOME)]
    assert reads(storage)[0] == [entry(number) for number in range(5 * SOME)]


def _version(content: bytes) -> bytes:
    return content.replace(b'"version":1', b'"version":2', 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-9],
        lambda content: content.replace(b'"rows":3', b'"rows":4', 1),
        lambda content: content + b"{}\n",
        lambda content: b"[" * 100_000,
        lambda content: b"\xff" * 40,
        _version,
    ],
)
def test_a_summary_that_is_damaged_or_of_another_version_is_passed_over(damage: object) -> None:
    storage = log_of(3 * SOME)
    summarise(storage, 3 * SOME)
    path = SINK.summary(SOME)
    assert callable(damage)
    storage.files[path] = damage(storage.files[path])
    assert reads(storage)[0] == [entry(number) for number in range(3 * SOME)]


def test_a_summary_under_another_name_is_not_believed() -> None:
    storage = log_of(3 * SOME)
    summarise(storage, 3 * SOME)
    storage.files[SINK.summary(SOME)] = storage.files[SINK.summary(0)]
    assert reads(storage)[0] == [entry(number) for number in range(3 * SOME)]


def test_entries_that_cannot_be_read_have_no_summary() -> None:
    storage = log_of(2 * SOME)
    storage.files[SINK.log(1)] = b"{"
    summarise(storage, 2 * SOME)
    assert list(summaries_of(storage)) == [SINK.summary(SOME)]
    with pytest.raises(CorruptStateError, match="000000000001"):
        reads(storage)
    assert encode_summary(0, [b"{\n}"]) is None


def test_entries_too_long_for_one_summary_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sinklog, sinkreading, summaries):
        monkeypatch.setattr(module, "SUMMARY_BYTES_MAX", 100)
    storage = log_of(2 * SOME)
    summarise(storage, 2 * SOME)
    assert not summaries_of(storage)
    assert len(reads(storage)[0]) == 2 * SOME


def test_the_bytes_of_a_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden: what is stored must open for good."""
    monkeypatch.setattr(sinklog, "SUMMARY_ENTRIES", 2)
    golden = (
        b'{"version":1,"first":4,"entries":2,"checksum":"xxh3_128:87eaf5f697298840a04cbe49ea7a2887"}\n'
        b'{"type":"commit","version":1,"sequence":4,"owner":1,"owner_nonce":"n","job_id":"j","attempt":3,"checkpoint_id":7,"rows":5,'
        b'"files":[{"name":"part-1.parquet","rows":5}],"writer_nonce":"w","written_ms":9}\n'
        b'{"type":"owner","version":1,"sequence":5,"owner":2,"owner_nonce":"m","job_id":"j","attempt":4,"restored_checkpoint_id":7,'
        b'"arrow_schema":"","written_ms":9}\n'
    )
    entries = [
        CommitEntry(1, 4, 1, "n", "j", 3, 7, 5, (StagedFile("part-1.parquet", 5),), "w", 9),
        OwnerEntry(1, 5, 2, "m", "j", 4, 7, "", 9),
    ]
    assert encode_summary(4, [msgspec.json.encode(entry) for entry in entries]) == golden
    assert decode_summary(golden, 4) == entries


ROWS, EPOCHS = 2, 3 * SOME


def run(job: MiniJob) -> None:
    job.start()
    while job.position < ROWS * EPOCHS:
        job.emit(ROWS)
        job.checkpoint()


@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_operation_leaves_true_summaries_and_every_row_once(after: bool) -> None:
    whole = MortalStorage({})
    run(MiniJob(whole, DictStorage()))
    assert assert_true(whole) == EPOCHS // SOME
    for dies_at in range(whole.changes):
        storage = MortalStorage({})
        job = MiniJob(storage, DictStorage())
        storage.dies_at, storage.after = dies_at, after
        with pytest.raises(Crash):
            run(job)
        assert_true(storage)
        storage.dies_at = None
        job.abort_undecided()
        run(job)
        assert committed(storage) == list(range(ROWS * EPOCHS))
        assert assert_true(storage) >= 2


def test_a_log_of_an_older_version_gets_its_summaries_one_commit_after_another() -> None:
    storage = MortalStorage({})
    job = MiniJob(storage, DictStorage())
    run(job)
    for path in summaries_of(storage):
        del storage.files[path]
    job.start()
    found = [assert_true(storage)]
    for _ in range(3):
        job.emit(1)
        job.checkpoint()
        found.append(assert_true(storage))
    assert found == [2, 3, 3, 4]  # the start writes two: behind its opening, and behind the restored commit
    assert job.committed() == list(range(job.position))


def test_a_restored_committer_and_a_stranger_judge_a_log_by_its_summaries_as_by_its_entries() -> None:
    storage = MortalStorage({})
    first = MiniJob(storage, DictStorage())
    run(first)
    assert summaries_of(storage)
    with pytest.raises(OutputMayRepeatError) as refused:
        MiniJob(storage, DictStorage()).start()  # the same job, its state lost
    assert refused.value.fields["committed"] == EPOCHS
    with pytest.raises(OutputMayRepeatError):
        first.committer.check_fresh_start()
    again = MiniJob(storage, DictStorage(), restored=first.completed)
    again.start()
    again.emit(1)
    again.checkpoint()
    assert committed(storage) == list(range(again.position))


def test_a_summary_that_cannot_be_written_holds_up_no_commit() -> None:
    class Full(MortalStorage):
        def execute(self, operation: ops.Operation) -> object:
            if isinstance(operation, ops.PutIfAbsent) and "/summaries/" in operation.path:
                raise StorageUnavailableError("full", path=operation.path)
            return super().execute(operation)

    storage = Full({})
    run(MiniJob(storage, DictStorage()))
    assert committed(storage) == list(range(ROWS * EPOCHS))
    assert not summaries_of(storage)
    tried = [each for each in storage.log if isinstance(each, ops.ListFolder) and each.prefix.endswith("/summaries")]
    assert len(tried) < EPOCHS // 2, "not once for each commit"


def test_the_log_of_a_missing_folder_is_empty() -> None:
    assert reads(DictStorage({}))[0] == []
    with pytest.raises(ObjectMissingError):
        DictStorage({}).execute(ops.ReadFile(SINK.summary(0)))


def _without_files(first: int, entries: list[bytes]) -> bytes | None:
    """Whole and of the right sum: but the last entry has no rows."""
    last = msgspec.json.decode(entries[-1], type=LogEntry)
    bare = msgspec.structs.replace(last, files=()) if isinstance(last, CommitEntry) else last
    return encode_summary(first, [*entries[:-1], msgspec.json.encode(bare)])


def _unchecked(content: bytes, first: int) -> list[LogEntry]:
    return [msgspec.json.decode(line, type=LogEntry) for line in content.splitlines()[1:]]


def _ahead(paths: SinkPaths, stop: int, done: frozenset[int] | None) -> Any:
    """It repeats entries that are there, and not known to be durable."""
    return summarise_flow(paths, stop + SOME, done)


@pytest.mark.parametrize(
    ("name", "sabotage", "check"),
    [
        ("encode_summary", _without_files, lambda: test_a_log_reads_the_same_with_summaries_and_without(start=0, length=2 * SOME)),
        ("decode_summary", _unchecked, test_a_summary_under_another_name_is_not_believed),
        ("summarise_flow", _ahead, lambda: test_a_death_at_any_operation_leaves_true_summaries_and_every_row_once(False)),
    ],
    ids=["a summary lies", "what lies is believed", "a commit is told before it is there"],
)
def test_broken_rules_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, sabotage: Any, check: Callable[[], None]) -> None:
    check()
    for module in (summaries, sinkreading):
        monkeypatch.setattr(module, name, sabotage, raising=False)
    with pytest.raises((AssertionError, ObjectMissingError)):
        check()
