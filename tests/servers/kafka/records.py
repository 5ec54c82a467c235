"""Record batches of Kafka's message format 2, as far as a broker looks inside: their headers, the markers that end a transaction,
and which records compaction keeps. Source: Kafka's DefaultRecordBatch, and its documentation, "Record Batch"."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kafka.record.default_records import DefaultRecordBatch
from kafka.record.util import calc_crc32c, decode_varint, encode_varint

HEADER = struct.Struct(">qiibIhiqqqhii")
LENGTH_END = 12
"""Bytes of base offset and length, which the length does not count."""
_CRC_OFFSET = 17
_CHECKED_OFFSET = 21
"""The checksum covers all from here: base offset and leader epoch, which a broker writes, stand before it."""
_CODEC_MASK = 0x07
_TRANSACTIONAL = 0x10
_CONTROL = 0x20
_MARKER_KEY = struct.Struct(">hh")
_MARKER_VALUE = struct.Struct(">hi")
SEQUENCE_MAX = 2**31 - 1


class BatchHeader(NamedTuple):
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    first_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def size(self) -> int:
        return self.length + LENGTH_END

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & _CONTROL)

    @property
    def last_sequence(self) -> int:
        """Sequences wrap to 0 behind the largest number."""
        return add_to_sequence(self.base_sequence, self.last_offset_delta)


class CorruptBatchError(ValueError):
    """Bytes that are no whole batches of format 2."""


def add_to_sequence(sequence: int, count: int) -> int:
    return (sequence + count) & SEQUENCE_MAX


def headers_of(data: bytes | memoryview) -> Iterator[tuple[BatchHeader, int]]:
    """(header, position) of each batch, one behind the other. Raises CorruptBatchError."""
    position = 0
    while position < len(data):
        if len(data) - position < HEADER.size:
            raise CorruptBatchError(f"{len(data) - position} bytes at {position} are no batch")
        header = BatchHeader._make(HEADER.unpack_from(data, position))
        if header.magic != 2 or header.length < HEADER.size - LENGTH_END or position + header.size > len(data):
            raise CorruptBatchError(f"at {position}: magic {header.magic}, {header.size} bytes of {len(data)}")
        yield header, position
        position += header.size


def placed(data: bytes | memoryview, base_offset: int) -> bytearray:
    """A batch at its place in the log, which its checksum doesn't cover; the leader epoch of the only leader is 0."""
    batch = bytearray(data)
    struct.pack_into(">q", batch, 0, base_offset)
    struct.pack_into(">i", batch, LENGTH_END, 0)
    return batch


def _sealed(batch: bytearray) -> bytearray:
    struct.pack_into(">i", batch, 8, len(batch) - LENGTH_END)
    struct.pack_into(">I", batch, _CRC_OFFSET, calc_crc32c(memoryview(batch)[_CHECKED_OFFSET:]))
    return batch


def marker(base_offset: int, producer_id: int, producer_epoch: int, now_ms: int, *, commit: bool) -> bytes:
    """The batch of one control record that ends a producer's transaction in a partition."""
    key, value = _MARKER_KEY.pack(0, int(commit)), _MARKER_VALUE.pack(0, 0)
    record = bytearray(b"\x00\x00\x00")  # attributes, deltas of time and offset
    for field in (key, value):
        encode_varint(len(field), record.append)
        record.extend(field)
    record.append(0)  # headers
    attributes = _TRANSACTIONAL | _CONTROL
    header = HEADER.pack(base_offset, 0, 0, 2, 0, attributes, 0, now_ms, now_ms, producer_id, producer_epoch, -1, 1)
    batch = bytearray(header)
    encode_varint(len(record), batch.append)
    return bytes(_sealed(batch + record))


def is_commit(batch: bytes | bytearray) -> bool:
    """Whether a control batch is a commit; else it is an abort."""
    record = next(iter(DefaultRecordBatch(batch)))
    return bool(_MARKER_KEY.unpack(record.key)[1] == 1)


class KeyedRecord(NamedTuple):
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None


def records_of(batch: bytes | memoryview) -> Iterator[KeyedRecord]:
    for record in DefaultRecordBatch(batch):
        yield KeyedRecord(record.offset, record.timestamp, record.key, record.value)


def filtered(batch: bytes | memoryview, keep: Callable[[int], bool]) -> bytes:
    """A batch without the records whose offsets are not kept. Its offsets, its producer and its sequences stay those of the whole;
    none may remain. What was compressed is not afterwards."""
    header = BatchHeader._make(HEADER.unpack_from(batch))
    opened = DefaultRecordBatch(batch)
    iter(opened)  # decompresses
    body = bytes(opened._buffer)
    position, kept, count = opened._pos, bytearray(), 0
    for _ in range(header.record_count):
        length, start = decode_varint(body, position)
        _, after = decode_varint(body, decode_varint(body, start)[1])  # attributes, delta of time
        delta, _ = decode_varint(body, after)
        if keep(header.base_offset + delta):
            kept += body[position : start + length]
            count += 1
        position = start + length
    head = HEADER.pack(*header._replace(attributes=header.attributes & ~_CODEC_MASK, record_count=count))
    return bytes(_sealed(bytearray(head) + kept))
