"""The log of a partition and the journal, below any client: sequences, epochs, and what a process that dies leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka.record.default_records import DefaultRecordBatchBuilder

from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.journal import Journal
from tests.servers.kafka.partition import REMEMBERED_BATCHES, PartitionLog
from tests.servers.kafka.records import SEQUENCE_MAX, CorruptBatchError, headers_of, is_commit, marker, records_of
from tests.servers.kafka.transactions import EPOCH_MAX, TIMEOUT_MS_MAX, TransactionCoordinator


@pytest.fixture
def log(tmp_path: Path) -> Iterator[PartitionLog]:
    log = PartitionLog(tmp_path / "log", segment_bytes_max=300)
    yield log
    log.close()


def batch(*rows: bytes, sequence: int = 0, producer: int = 7, epoch: int = 0, transactional: bool = False, codec: int = 0) -> bytes:
    builder = DefaultRecordBatchBuilder(2, codec, transactional, producer, epoch, sequence, 1 << 20)
    for offset, value in enumerate(rows):
        assert builder.append(offset, 1000 + offset, value, value, []) is not None
    return bytes(builder.build())


def append(log: PartitionLog, data: bytes) -> int:
    """Base offset of a batch, or of the one that it repeats."""
    ((header, _),) = headers_of(data)
    known = log.check(header)
    return log.append(header, data) if known is None else known


def rows(log: PartitionLog, offset: int = 0) -> list[tuple[int, bytes | None]]:
    data = log.read(offset, 1 << 20, log.end_offset)
    return [
        (each.offset, each.value) for header, start in headers_of(data) for each in records_of(data[start : start + header.size])
    ]


def reopened(log: PartitionLog) -> PartitionLog:
    log.close()
    return PartitionLog(log._folder, segment_bytes_max=300)


def test_a_repeated_batch_is_written_once(log: PartitionLog) -> None:
    first, second = batch(b"a", b"b"), batch(b"c", sequence=2)
    assert [append(log, each) for each in (first, second, first, second)] == [0, 2, 0, 2]
    again = reopened(log)
    assert append(again, second) == 2
    assert rows(again) == [(0, b"a"), (1, b"b"), (2, b"c")]
    again.close()
    log._recover()


def test_only_the_last_batches_of_a_producer_are_remembered(log: PartitionLog) -> None:
    for sequence in range(REMEMBERED_BATCHES + 1):
        append(log, batch(b"x", sequence=sequence))
    assert append(log, batch(b"x", sequence=1)) == 1
    with pytest.raises(RefusedError) as refused:
        append(log, batch(b"x", sequence=0))
    assert refused.value.code is Code.OUT_OF_ORDER_SEQUENCE_NUMBER


@pytest.mark.parametrize(("sequence", "epoch"), [(3, 0), (0, 0), (1, 1)])
def test_a_gap_of_sequences_is_refused(log: PartitionLog, sequence: int, epoch: int) -> None:
    append(log, batch(b"a", b"b"))
    with pytest.raises(RefusedError) as refused:
        append(log, batch(b"c", sequence=sequence, epoch=epoch))
    assert refused.value.code is Code.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_sequences_wrap(log: PartitionLog) -> None:
    append(log, batch(b"a", b"b", sequence=SEQUENCE_MAX - 1))
    assert append(log, batch(b"c", sequence=0)) == 2


def test_an_older_epoch_is_refused_also_after_a_marker_alone_raised_it(log: PartitionLog) -> None:
    append(log, batch(b"a", transactional=True))
    log.end_transaction(7, 1, 0, commit=False)
    for one in (log, again := reopened(log)):
        if one is log:
            log._recover()
        with pytest.raises(RefusedError) as refused:
            append(one, batch(b"b", sequence=1, transactional=True))
        assert refused.value.code is Code.INVALID_PRODUCER_EPOCH
    again.close()


def test_markers_are_written_once_and_say_what_was_aborted(log: PartitionLog) -> None:
    append(log, batch(b"a", transactional=True))
    append(log, batch(b"b", producer=8, transactional=True))
    assert log.stable_offset == 0
    for _ in range(2):
        log.end_transaction(7, 0, 0, commit=False)
    assert (log.stable_offset, log.end_offset) == (1, 3)
    log.end_transaction(8, 0, 0, commit=True)
    assert log.stable_offset == log.end_offset == 4
    again = reopened(log)
    assert again.aborted == [(7, 0, 2)]
    assert again.aborted_between(3, 4) == []
    assert (again.stable_offset, again.end_offset) == (4, 4)
    again.close()
    log._recover()


def test_a_batch_that_was_cut_off_as_it_was_written_is_gone(log: PartitionLog) -> None:
    whole = batch(b"a" * 100)
    append(log, whole)
    (path,) = log._folder.glob("*.log")
    for length in (1, 60, len(whole) - 1):
        with path.open("ab") as file:
            file.write(batch(b"b" * 100, sequence=1)[:length])
        log._close_segments()
        log._places = []
        log._recover()
        assert (log.end_offset, path.stat().st_size) == (1, len(whole))
    assert append(log, batch(b"b", sequence=1)) == 1


def test_reading_goes_over_segments_and_stops_at_a_size(log: PartitionLog) -> None:
    for number in range(10):
        append(log, batch(b"%d" % number * 50, sequence=number))
    assert len(list(log._folder.glob("*.log"))) > 2
    assert [offset for offset, _ in rows(log, 4)] == [4, 5, 6, 7, 8, 9]
    assert len(list(headers_of(log.read(4, 1, 10)))) == 1
    assert len(list(headers_of(log.read(4, 1 << 20, 6)))) == 2
    assert log.read(10, 100, 10) == b""
    again = reopened(log)
    assert rows(again) == rows(again, 0)
    assert again.end_offset == 10
    again.close()
    log._recover()


def test_compaction_opens_compressed_batches(log: PartitionLog) -> None:
    append(log, batch(b"k" * 200, b"l" * 200, codec=1))
    append(log, batch(b"k" * 200, sequence=2))
    log.compact()
    assert [offset for offset, _ in rows(log)] == [1, 2]
    assert log.end_offset == 3


@pytest.mark.parametrize("data", [b"x", b"\0" * 61, batch(b"a")[:-1]])
def test_what_is_no_batch_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        list(headers_of(data))


def test_markers_tell_commits_from_aborts() -> None:
    assert [is_commit(marker(5, 7, 0, 1000, commit=commit)) for commit in (True, False)] == [True, False]


# ------------------------------------------------------------------------------------------------------------------------ journal


def test_the_journal_keeps_the_last_fact_of_a_key_and_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.put("topic", "a", count=1)
    journal.put("topic", "a", count=2)
    journal.put("topic", "b", count=1)
    journal.remove("topic", "b")
    journal.close()
    with path.open("ab") as file:
        file.write(b'{"kind": "topic", "name": ["c"')
    again = Journal(path)
    assert again.of_kind("topic") == [(("a",), {"kind": "topic", "name": ["a"], "count": 2})]
    assert len(path.read_bytes().splitlines()) == 1
    again.close()


@pytest.fixture
def transactions(tmp_path: Path) -> Iterator[TransactionCoordinator]:
    journal = Journal(tmp_path / "journal.jsonl")
    yield TransactionCoordinator(journal)
    journal.close()


def test_a_repeated_request_for_an_epoch_fences_not_its_own_producer(transactions: TransactionCoordinator) -> None:
    producer, epoch = transactions.init_producer("t", 1000, -1, -1)
    assert transactions.init_producer("t", 1000, producer, epoch) == (producer, 1)
    assert transactions.init_producer("t", 1000, producer, epoch) == (producer, 1)
    assert transactions.init_producer("t", 1000, -1, -1) == (producer, 2)
    with pytest.raises(RefusedError) as refused:
        transactions.init_producer("t", 1000, producer, 1)
    assert refused.value.code is Code.PRODUCER_FENCED


def test_a_producer_whose_epochs_are_used_up_gets_another_id(transactions: TransactionCoordinator) -> None:
    producer, _ = transactions.init_producer("t", 1000, -1, -1)
    transactions.transactions["t"].epoch = EPOCH_MAX
    other, epoch = transactions.init_producer("t", 1000, -1, -1)
    assert other != producer
    assert epoch == 0


def test_a_commit_that_is_repeated_is_answered_as_the_first_and_another_outcome_is_not(
    transactions: TransactionCoordinator,
) -> None:
    who = ("t", *transactions.init_producer("t", 1000, -1, -1))
    with pytest.raises(RefusedError, match="INVALID_TXN_STATE"):
        transactions.end(*who, commit=True)  # there is nothing to commit
    transactions.add_partitions(*who, [("topic", 0)], 0)
    transactions.end(*who, commit=True)
    with pytest.raises(RefusedError, match="CONCURRENT_TRANSACTIONS"):
        transactions.end(*who, commit=True)
    (prepared,) = transactions.prepared()
    transactions.complete(prepared)
    transactions.end(*who, commit=True)
    with pytest.raises(RefusedError, match="INVALID_TXN_STATE"):
        transactions.end(*who, commit=False)


def test_requests_that_are_refused(transactions: TransactionCoordinator) -> None:
    for transactional_id, timeout_ms, code in (
        ("", 1000, "INVALID_REQUEST"),
        ("t", TIMEOUT_MS_MAX + 1, "INVALID_TRANSACTION_TIMEOUT"),
    ):
        with pytest.raises(RefusedError, match=code):
            transactions.init_producer(transactional_id, timeout_ms, -1, -1)
    with pytest.raises(RefusedError, match="INVALID_PRODUCER_ID_MAPPING"):
        transactions.add_partitions("t", 1, 0, [], 0)
    producer, epoch = transactions.init_producer("t", 1000, -1, -1)
    for partition in (0, 1):
        with pytest.raises(RefusedError, match="INVALID_TXN_STATE"):
            transactions.verify("t", producer, epoch, "topic", partition)
        transactions.add_partitions("t", producer, epoch, [("topic", 0)], 0)
    transactions.verify("t", producer, epoch, "topic", 0)
