"""The coordinator of transactions: who a transactional id's producer is, what its transaction holds, and how it ends. It writes no
log: it says which transactions wait for their markers, and is told when these are written.

Source: Kafka's TransactionCoordinator and TransactionMetadata (KIP-98, KIP-360, KIP-588; the client's side of KIP-890 is not
offered)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.journal import Journal

TIMEOUT_MS_MAX = 15 * 60 * 1000
EPOCH_MAX = 32766
NO_EPOCH = -1


class Status(StrEnum):
    """Values: as Kafka's ListTransactions says them."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


_PREPARED = (Status.PREPARE_COMMIT, Status.PREPARE_ABORT)
_AFTER = {Status.PREPARE_COMMIT: Status.COMPLETE_COMMIT, Status.PREPARE_ABORT: Status.COMPLETE_ABORT}


@dataclass
class PendingOffset:
    """A group's offset that takes effect with the transaction."""

    group: str
    topic: str
    partition: int
    offset: int
    leader_epoch: int
    metadata: str


@dataclass
class Transaction:
    transactional_id: str
    producer_id: int
    epoch: int = NO_EPOCH
    last_epoch: int = NO_EPOCH
    """The one before, when the producer itself asked for a new one: a repeat of that request is answered with `epoch`."""
    timeout_ms: int = 60_000
    status: Status = Status.EMPTY
    started_ms: int = 0
    partitions: list[tuple[str, int]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    offsets: list[PendingOffset] = field(default_factory=list)

    @property
    def is_prepared(self) -> bool:
        """Its outcome is decided, and not all markers are written."""
        return self.status in _PREPARED

    @property
    def commits(self) -> bool:
        return self.status is Status.PREPARE_COMMIT

    def to_json(self) -> dict[str, Any]:
        fields = {**vars(self), "offsets": [vars(each) for each in self.offsets]}
        del fields["transactional_id"]
        return fields

    @classmethod
    def from_json(cls, transactional_id: str, fields: dict[str, Any]) -> Transaction:
        fields = {name: value for name, value in fields.items() if name not in ("kind", "name")}
        fields["status"] = Status(fields["status"])
        fields["partitions"] = [(topic, index) for topic, index in fields["partitions"]]
        fields["offsets"] = [PendingOffset(**each) for each in fields["offsets"]]
        return cls(transactional_id, **fields)


class TransactionCoordinator:
    """Each change is in the journal before it is answered."""

    def __init__(self, journal: Journal, *, timeout_ms_max: int = TIMEOUT_MS_MAX) -> None:
        self._journal = journal
        self._timeout_ms_max = timeout_ms_max
        self.transactions = {
            transactional_id: Transaction.from_json(transactional_id, fact)
            for (transactional_id,), fact in journal.of_kind("transaction")
        }

    # ------------------------------------------------------------------------------------------------------- producers' requests

    def init_producer(
        self, transactional_id: str | None, timeout_ms: int, producer_id: int, producer_epoch: int
    ) -> tuple[int, int]:
        """(producer id, epoch). An id's producers of older epochs are fenced, and what they have open is aborted."""
        if transactional_id is None:
            return self._next_producer_id(), 0
        if not transactional_id:
            raise RefusedError(Code.INVALID_REQUEST, "empty transactional id")
        if not 0 < timeout_ms <= self._timeout_ms_max:
            raise RefusedError(Code.INVALID_TRANSACTION_TIMEOUT, f"{timeout_ms} ms, at most {self._timeout_ms_max}")
        transaction = self.transactions.get(transactional_id)
        if transaction is None:
            transaction = self.transactions[transactional_id] = Transaction(transactional_id, self._next_producer_id())
        if producer_id >= 0 and producer_id != transaction.producer_id and transaction.epoch != NO_EPOCH:
            raise RefusedError(Code.PRODUCER_FENCED, f"producer {producer_id}, current {transaction.producer_id}")
        if transaction.is_prepared:
            raise RefusedError(Code.CONCURRENT_TRANSACTIONS, transaction.status)
        if transaction.status is Status.ONGOING:
            if producer_id >= 0 and producer_epoch != transaction.epoch:
                raise RefusedError(Code.PRODUCER_FENCED, f"epoch {producer_epoch}, current {transaction.epoch}")
            self._fence(transaction)
            raise RefusedError(Code.CONCURRENT_TRANSACTIONS, "an open transaction is aborted")
        self._next_epoch(transaction, producer_epoch if producer_id >= 0 else None)
        transaction.timeout_ms, transaction.status = timeout_ms, Status.EMPTY
        self._save(transaction)
        return transaction.producer_id, transaction.epoch

    def add_partitions(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partitions: list[tuple[str, int]], now_ms: int
    ) -> None:
        transaction = self._current(transactional_id, producer_id, producer_epoch)
        new = [each for each in partitions if each not in transaction.partitions]
        if new or transaction.status is not Status.ONGOING:
            self._begin(transaction, now_ms)
            transaction.partitions += new
            self._save(transaction)

    def add_offsets(self, transactional_id: str, producer_id: int, producer_epoch: int, group: str, now_ms: int) -> None:
        transaction = self._current(transactional_id, producer_id, producer_epoch)
        if group not in transaction.groups or transaction.status is not Status.ONGOING:
            self._begin(transaction, now_ms)
            transaction.groups.append(group)
            self._save(transaction)

    def commit_offsets(
        self, transactional_id: str, producer_id: int, producer_epoch: int, group: str, offsets: list[PendingOffset]
    ) -> None:
        transaction = self.transactions.get(transactional_id)
        if transaction is None or transaction.producer_id != producer_id:
            raise RefusedError(Code.INVALID_PRODUCER_ID_MAPPING)
        if transaction.epoch != producer_epoch:
            raise RefusedError(Code.INVALID_PRODUCER_EPOCH, f"epoch {producer_epoch}, current {transaction.epoch}")
        if transaction.status is not Status.ONGOING or group not in transaction.groups:
            raise RefusedError(Code.INVALID_TXN_STATE, f"{transaction.status}, group {group}")
        places = {(each.group, each.topic, each.partition) for each in offsets}
        kept = [each for each in transaction.offsets if (each.group, each.topic, each.partition) not in places]
        transaction.offsets = kept + offsets
        self._save(transaction)

    def end(self, transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool) -> None:
        """Decided once this returns; the markers are still to be written."""
        transaction = self._known(transactional_id, producer_id, producer_epoch)
        wanted = Status.PREPARE_COMMIT if commit else Status.PREPARE_ABORT
        if transaction.status is Status.ONGOING:
            transaction.status = wanted
            self._save(transaction)
        elif transaction.status is wanted:
            raise RefusedError(Code.CONCURRENT_TRANSACTIONS, transaction.status)
        elif transaction.status is not _AFTER[wanted]:  # a repeat of what was done is answered as the first was
            raise RefusedError(Code.INVALID_TXN_STATE, transaction.status)

    # ------------------------------------------------------------------------------------------------------- the broker's questions

    def verify(self, transactional_id: str | None, producer_id: int, producer_epoch: int, topic: str, partition: int) -> None:
        """Before the first rows of a transaction go into a partition: it must be open, and hold the partition (KIP-890)."""
        transaction = self.transactions.get(transactional_id or "")
        if transaction is None or transaction.producer_id != producer_id:
            raise RefusedError(Code.INVALID_PRODUCER_ID_MAPPING, f"producer {producer_id} of {transactional_id}")
        if producer_epoch != transaction.epoch:
            raise RefusedError(Code.INVALID_PRODUCER_EPOCH, f"epoch {producer_epoch}, current {transaction.epoch}")
        if transaction.status is not Status.ONGOING or (topic, partition) not in transaction.partitions:
            raise RefusedError(Code.INVALID_TXN_STATE, f"{transaction.status}, {topic}-{partition}")

    def is_unstable(self, group: str, topic: str, partition: int) -> bool:
        """Whether a transaction that is not ended has an offset of a group."""
        place = (group, topic, partition)
        return any((each.group, each.topic, each.partition) == place for one in self.transactions.values() for each in one.offsets)

    def prepared(self) -> list[Transaction]:
        return [each for each in self.transactions.values() if each.is_prepared]

    def complete(self, transaction: Transaction) -> None:
        """All its markers are written."""
        transaction.status = _AFTER[transaction.status]
        transaction.partitions, transaction.groups, transaction.offsets = [], [], []
        self._save(transaction)

    def next_deadline_ms(self) -> int | None:
        opened = [each for each in self.transactions.values() if each.status is Status.ONGOING]
        return min((each.started_ms + each.timeout_ms for each in opened), default=None)

    def expire(self, now_ms: int) -> None:
        """Aborts what was open for too long, and fences its producer."""
        for transaction in self.transactions.values():
            if transaction.status is Status.ONGOING and transaction.started_ms + transaction.timeout_ms <= now_ms:
                self._fence(transaction)

    # ------------------------------------------------------------------------------------------------------------------- inside

    def _known(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction:
        transaction = self.transactions.get(transactional_id)
        if transaction is None or transaction.producer_id != producer_id:
            raise RefusedError(Code.INVALID_PRODUCER_ID_MAPPING, f"producer {producer_id} of {transactional_id!r}")
        if transaction.epoch != producer_epoch:
            raise RefusedError(Code.PRODUCER_FENCED, f"epoch {producer_epoch}, current {transaction.epoch}")
        return transaction

    def _current(self, transactional_id: str, producer_id: int, producer_epoch: int) -> Transaction:
        transaction = self._known(transactional_id, producer_id, producer_epoch)
        if transaction.is_prepared:
            raise RefusedError(Code.CONCURRENT_TRANSACTIONS, transaction.status)
        return transaction

    @staticmethod
    def _begin(transaction: Transaction, now_ms: int) -> None:
        if transaction.status is not Status.ONGOING:
            transaction.status, transaction.started_ms = Status.ONGOING, now_ms

    def _fence(self, transaction: Transaction) -> None:
        """The abort markers carry the next epoch, so that partitions refuse what comes late."""
        transaction.epoch, transaction.last_epoch = transaction.epoch + 1, NO_EPOCH
        transaction.status = Status.PREPARE_ABORT
        self._save(transaction)

    def _next_epoch(self, transaction: Transaction, expected: int | None) -> None:
        """`expected`: the epoch that a producer goes on from; None for a new producer, whose elders are fenced."""
        if transaction.epoch != NO_EPOCH and expected is not None and expected != transaction.epoch:
            if expected == transaction.last_epoch:
                return  # a repeat of a request that was answered
            raise RefusedError(Code.PRODUCER_FENCED, f"epoch {expected}, current {transaction.epoch}")
        if transaction.epoch >= EPOCH_MAX:
            transaction.producer_id, transaction.epoch, transaction.last_epoch = self._next_producer_id(), 0, NO_EPOCH
            return
        transaction.last_epoch = NO_EPOCH if expected is None else transaction.epoch
        transaction.epoch += 1

    def _next_producer_id(self) -> int:
        fact = self._journal.facts.get(("producer_id",), {"next": 1000})
        self._journal.put("producer_id", next=fact["next"] + 1)
        return int(fact["next"])

    def _save(self, transaction: Transaction) -> None:
        self._journal.put("transaction", transaction.transactional_id, **transaction.to_json())
