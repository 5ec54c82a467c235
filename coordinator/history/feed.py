"""The newest records of all jobs that this process leads, in memory, for those who follow along.

A ring: nobody who reads slowly or not at all holds anything back. Who asks for what has left it reads the history's files, and
misses only what was lost there, too."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

RECORDS_MAX = 10_000
BYTES_MAX = 16 << 20
"""Of the records that are kept, over all jobs: the oldest go first."""


@dataclass(frozen=True, slots=True)
class FedRecord:
    """A record as the history of its job has it."""

    job_id: str
    job_name: str
    epoch: int
    number: int
    line: bytes
    """As `records.encode_line` makes it."""


@dataclass(frozen=True, slots=True)
class FeedPage:
    """What a reader gets."""

    records: tuple[FedRecord, ...]
    next: int
    """Where to read on."""
    missed: bool
    """Records between the place asked for and these have left the ring."""


@dataclass(slots=True)
class HistoryFeed:
    """Thread-safe. Places count records since the process began; they mean nothing elsewhere."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _records: deque[FedRecord] = field(default_factory=deque)
    _size: int = 0
    _end: int = 0
    _listeners: dict[int, Callable[[], None]] = field(default_factory=dict)
    _listener: int = 0

    @property
    def start(self) -> int:
        """Place of the oldest record that is kept."""
        with self._lock:
            return self._end - len(self._records)

    @property
    def end(self) -> int:
        """Place of the next record."""
        with self._lock:
            return self._end

    def publish(self, record: FedRecord) -> None:
        """Add a record; those who listen are called from here, and must not block."""
        with self._lock:
            self._records.append(record)
            self._end += 1
            self._size += len(record.line)
            while len(self._records) > 1 and (len(self._records) > RECORDS_MAX or self._size > BYTES_MAX):
                self._size -= len(self._records.popleft().line)
            listeners = tuple(self._listeners.values())
        for listener in listeners:
            listener()

    def read(self, place: int, limit: int) -> FeedPage:
        """Up to `limit` records from a place on."""
        with self._lock:
            start = self._end - len(self._records)
            first = max(place, start)
            offset = min(first - start, len(self._records))
            chosen = tuple(islice(self._records, offset, offset + limit))
        return FeedPage(chosen, first + len(chosen), missed=place < start)

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each record; the answer ends that, and may be called twice."""
        with self._lock:
            self._listener += 1
            number = self._listener
            self._listeners[number] = listener

        def leave() -> None:
            with self._lock:
                self._listeners.pop(number, None)

        return leave
