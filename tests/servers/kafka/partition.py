"""One partition: its log in segment files, and what a broker keeps in memory of it: where each batch lies, the last batches of each
producer, open and aborted transactions. All of that is read from the batches' headers when a log is opened again.

Source: Kafka's UnifiedLog and ProducerStateManager."""

from __future__ import annotations

import bisect
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.servers.kafka.errors import Code, RefusedError
from tests.servers.kafka.records import (
    HEADER,
    BatchHeader,
    add_to_sequence,
    filtered,
    is_commit,
    marker,
    placed,
    records_of,
)

SEGMENT_BYTES_MAX = 64 << 20
REMEMBERED_BATCHES = 5
"""Of a producer, as it has at most that many in flight."""


class Place(NamedTuple):
    """Where a batch lies."""

    base_offset: int
    last_offset: int
    segment: int
    position: int
    size: int
    max_timestamp: int


class Aborted(NamedTuple):
    producer_id: int
    first_offset: int
    last_offset: int
    """That of the marker."""


class Written(NamedTuple):
    first_sequence: int
    last_sequence: int
    base_offset: int


@dataclass
class Producer:
    epoch: int
    batches: deque[Written] = field(default_factory=lambda: deque(maxlen=REMEMBERED_BATCHES))
    open_since: int | None = None
    """First offset of its open transaction."""


class PartitionLog:
    """`end_offset`: the next record's; it is the high watermark too, for there is one replica. `start_offset`: of the first record
    that was not deleted."""

    def __init__(self, folder: Path, *, segment_bytes_max: int = SEGMENT_BYTES_MAX, start_offset: int = 0) -> None:
        self._folder = folder
        self._segment_bytes_max = segment_bytes_max
        self.start_offset = start_offset
        self.end_offset = 0
        self.aborted: list[Aborted] = []
        self.producers: dict[int, Producer] = {}
        self._places: list[Place] = []
        self._segments: dict[int, int] = {}  # base offset -> file
        self._active_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._recover()

    # ------------------------------------------------------------------------------------------------------------------ writing

    def check(self, header: BatchHeader) -> int | None:
        """The base offset of a batch that was appended before, None for a new one.

        Raises RefusedError: an older epoch, or sequences that don't follow its producer's last."""
        if header.producer_id < 0:
            return None
        producer = self.producers.get(header.producer_id)
        if producer is None:
            return None  # a producer that the log has forgotten may go on anywhere
        if header.producer_epoch < producer.epoch:
            raise RefusedError(Code.INVALID_PRODUCER_EPOCH, f"epoch {header.producer_epoch}, current {producer.epoch}")
        if header.producer_epoch > producer.epoch:
            expected = 0
        else:
            for written in producer.batches:
                if (written.first_sequence, written.last_sequence) == (header.base_sequence, header.last_sequence):
                    return written.base_offset
            expected = add_to_sequence(producer.batches[-1].last_sequence, 1) if producer.batches else 0
        if header.base_sequence != expected:
            raise RefusedError(Code.OUT_OF_ORDER_SEQUENCE_NUMBER, f"sequence {header.base_sequence}, expected {expected}")
        return None

    def append(self, header: BatchHeader, batch: bytes | memoryview) -> int:
        """Base offset of a batch that was checked."""
        base_offset = self.end_offset
        self._write(header._replace(base_offset=base_offset), placed(batch, base_offset))
        return base_offset

    def end_transaction(self, producer_id: int, producer_epoch: int, now_ms: int, *, commit: bool) -> None:
        """The marker, which is written once: one transaction is open, or none."""
        producer = self.producers.get(producer_id)
        if producer is not None and producer.epoch > producer_epoch:
            return
        if (producer is None or producer.open_since is None) and not self._fences(producer, producer_epoch):
            return
        batch = marker(self.end_offset, producer_id, producer_epoch, now_ms, commit=commit)
        self._write(BatchHeader._make(HEADER.unpack_from(batch)), batch)

    @staticmethod
    def _fences(producer: Producer | None, producer_epoch: int) -> bool:
        return producer is not None and producer_epoch > producer.epoch

    def _write(self, header: BatchHeader, batch: bytes | bytearray) -> None:
        if not self._segments or self._active_bytes >= self._segment_bytes_max:
            self._open_segment(header.base_offset)
            self._active_bytes = 0
        segment = next(reversed(self._segments))
        os.write(self._segments[segment], batch)
        self._note(header, batch, segment, self._active_bytes)
        self._active_bytes += len(batch)

    def _note(self, header: BatchHeader, batch: bytes | bytearray, segment: int, position: int) -> None:
        place = Place(header.base_offset, header.last_offset, segment, position, header.size, header.max_timestamp)
        self._places.append(place)
        self.end_offset = header.last_offset + 1
        if header.producer_id < 0:
            return
        producer = self.producers.setdefault(header.producer_id, Producer(header.producer_epoch))
        if header.producer_epoch > producer.epoch:
            producer.epoch = header.producer_epoch
            producer.batches.clear()
        if header.is_control:
            self._close_transaction(header, producer, commit=not header.record_count or is_commit(batch))
            return
        producer.batches.append(Written(header.base_sequence, header.last_sequence, header.base_offset))
        if header.is_transactional and header.record_count and producer.open_since is None:
            producer.open_since = header.base_offset

    def _close_transaction(self, header: BatchHeader, producer: Producer, *, commit: bool) -> None:
        if producer.open_since is not None and not commit:
            self.aborted.append(Aborted(header.producer_id, producer.open_since, header.last_offset))
        producer.open_since = None

    # ------------------------------------------------------------------------------------------------------------------ reading

    @property
    def stable_offset(self) -> int:
        """Of the first open transaction, or the end: those who read committed rows see none from here on."""
        opened = [producer.open_since for producer in self.producers.values() if producer.open_since is not None]
        return min(opened, default=self.end_offset)

    def read(self, offset: int, bytes_max: int, stop: int) -> bytes:
        """Whole batches, the first of which holds an offset or follows it, before offset `stop`; one at least, if there is one."""
        first = self._index_of(offset)
        last, size = first, 0
        while last < len(self._places) and self._places[last].base_offset < stop:
            size += self._places[last].size
            if last > first and size > bytes_max:
                break
            last += 1
        return b"".join(self._bytes_of(first, last))

    def _bytes_of(self, first: int, last: int) -> Iterator[bytes]:
        """Batches of an index range: one read a segment, where they lie one behind the other."""
        while first < last:
            segment, begin = self._places[first].segment, self._places[first].position
            end = begin
            while first < last and self._places[first].segment == segment:
                end += self._places[first].size
                first += 1
            yield os.pread(self._segments[segment], end - begin, begin)

    def aborted_between(self, start: int, stop: int) -> list[Aborted]:
        return [each for each in self.aborted if each.last_offset >= start and each.first_offset < stop]

    def offset_at(self, timestamp: int, stop: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record that is as young, before offset `stop`."""
        for place in self._places:
            if place.base_offset >= stop or place.max_timestamp < timestamp or place.last_offset < self.start_offset:
                continue
            for record in records_of(self._batch(place)):
                if record.timestamp >= timestamp and self.start_offset <= record.offset < stop:
                    return record.offset, record.timestamp
        return None

    def youngest(self) -> tuple[int, int] | None:
        """(offset, timestamp) of the record with the largest timestamp."""
        if not self._places:
            return None
        latest = max(place.max_timestamp for place in self._places)
        return self.offset_at(latest, self.end_offset)

    def _index_of(self, offset: int) -> int:
        return bisect.bisect_left(self._places, offset, key=lambda place: place.last_offset)

    def _batch(self, place: Place) -> bytes:
        return os.pread(self._segments[place.segment], place.size, place.position)

    # --------------------------------------------------------------------------------------------------------------- compaction

    def compact(self) -> None:
        """Of each key the last record stays, of those that are committed; tombstones, and what was aborted, go. Markers stay, and
        an empty batch for the sequences of a producer whose last batch it was. Records from the last stable offset on are not
        looked at."""
        stop = self.stable_offset
        last = self._last_offsets(stop)
        keepers = {producer.batches[-1].base_offset for producer in self.producers.values() if producer.batches}
        keepers.update(place.base_offset for place in self._places[-1:])  # else a log that is opened again would end earlier
        for segment in list(self._segments):
            parts = []
            for place in [place for place in self._places if place.segment == segment]:
                batch = self._batch(place)
                header = BatchHeader._make(HEADER.unpack_from(batch))
                if header.base_offset < stop and not header.is_control:
                    batch = filtered(batch, last.__contains__)
                    if not HEADER.unpack_from(batch)[12] and header.base_offset not in keepers:
                        continue
                parts.append(batch)
            self._replace_segment(segment, b"".join(parts))
        self._places = []
        self._close_segments()
        producers, aborted, end = self.producers, self.aborted, self.end_offset
        self._recover()
        self.producers, self.aborted, self.end_offset = producers, aborted, end

    def _last_offsets(self, stop: int) -> set[int]:
        """Offsets of the records that stay."""
        last: dict[bytes | None, int] = {}
        for place in self._places:
            batch = self._batch(place)
            header = BatchHeader._make(HEADER.unpack_from(batch))
            if header.base_offset >= stop or header.is_control or self._was_aborted(header):
                continue
            for record in records_of(batch):
                last.pop(record.key, None)
                if record.value is not None:
                    last[record.key] = record.offset
        return set(last.values())

    def _was_aborted(self, header: BatchHeader) -> bool:
        return header.is_transactional and any(
            each.producer_id == header.producer_id and each.first_offset <= header.base_offset < each.last_offset
            for each in self.aborted
        )

    def _replace_segment(self, segment: int, data: bytes) -> None:
        path = self._path_of(segment)
        whole = path.with_suffix(".tmp")
        whole.write_bytes(data)
        os.replace(whole, path)

    # ----------------------------------------------------------------------------------------------------------------- its files

    def _path_of(self, segment: int) -> Path:
        return self._folder / f"{segment:020d}.log"

    def _open_segment(self, base_offset: int) -> None:
        self._segments[base_offset] = os.open(self._path_of(base_offset), os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)

    def _recover(self) -> None:
        """What was cut off as it was written was never answered: it is taken away."""
        self.producers, self.aborted = {}, []
        for path in sorted(self._folder.glob("*.log")):
            segment = int(path.stem)
            self._open_segment(segment)
            file, size, position = self._segments[segment], path.stat().st_size, 0
            while size - position >= HEADER.size:
                header = BatchHeader._make(HEADER.unpack(os.pread(file, HEADER.size, position)))
                if position + header.size > size:
                    break
                batch = os.pread(file, header.size, position) if header.is_control else b""
                self._note(header, batch, segment, position)
                position += header.size
            os.ftruncate(file, position)
            self._active_bytes = position

    def _close_segments(self) -> None:
        for file in self._segments.values():
            os.close(file)
        self._segments.clear()

    def close(self) -> None:
        self._close_segments()
