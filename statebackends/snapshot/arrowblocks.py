"""The record batches of an Arrow IPC file by their metadata: what each unpacks to, without unpacking any.

Source: Arrow's format (File.fbs, Message.fbs): a footer of blocks; a message a block, with its rows and where its buffers lie; a
packed buffer begins with its unpacked length."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

_MAGIC = b"ARROW1"
_METADATA_BYTES_MAX = 64 << 20
"""Of a footer, or of one batch's message: a buffer takes 16 bytes of it."""
_RECORD_BATCH, _DICTIONARY_BATCH = 3, 2
"""Kinds of messages."""
_PAST_HEADER = 8
"""A continuation mark and the length of the metadata; old files have the length alone, and are refused."""


@dataclass(frozen=True, slots=True)
class Block:
    """One record batch, or the values of a dictionary."""

    rows: int
    values: int
    """Of all columns, and of what is nested in them."""
    unpacked_bytes: int


def blocks_of(source: pa.NativeFile) -> Iterator[Block]:
    """The batches of a file. Raises ValueError for what is none, struct.error for numbers that are cut off."""
    size = source.size()
    tail = source.read_at(10, max(0, size - 10))
    if len(tail) < 10 or tail[4:] != _MAGIC:
        raise ValueError("not an Arrow file")
    (length,) = struct.unpack("<i", tail[:4])
    if not 0 < length <= min(size - 10, _METADATA_BYTES_MAX):
        raise ValueError(f"an Arrow file with a footer of {length} bytes")
    footer = _Table(source.read_at(length, size - 10 - length))
    for field in (2, 3):
        for place in footer.vector(field, 24):
            offset, metadata_length, body_length = struct.unpack_from("<qi4xq", footer.data, place)
            yield _block(source, size, offset, metadata_length, body_length)


def _block(source: pa.NativeFile, size: int, offset: int, metadata_length: int, body_length: int) -> Block:
    if not (_PAST_HEADER < metadata_length <= _METADATA_BYTES_MAX and offset >= 0 and body_length >= 0):
        raise ValueError(f"a batch at {offset} with {metadata_length} bytes of metadata")
    if offset + metadata_length + body_length > size:
        raise ValueError(f"a batch at {offset} that is not within the file")
    message = _Table(source.read_at(metadata_length, offset)[_PAST_HEADER:])
    kind, header = message.number(1, "<B"), message.table(2)
    if kind == _DICTIONARY_BATCH and header is not None:
        header = header.table(1)
    elif kind != _RECORD_BATCH:
        header = None
    if header is None:
        raise ValueError(f"no batch at {offset}")
    is_packed = header.table(3) is not None
    unpacked = 0
    for place in header.vector(2, 16):
        start, length = struct.unpack_from("<qq", header.data, place)
        if start < 0 or length < 0 or start + length > body_length:
            raise ValueError(f"a buffer of the batch at {offset} that is not within it")
        if is_packed and length >= 8:
            (said,) = struct.unpack("<q", source.read_at(8, offset + metadata_length + start))
            length = length if said < 0 else said
        unpacked += length
    values = sum(max(0, struct.unpack_from("<q", header.data, place)[0]) for place in header.vector(1, 16))
    return Block(max(0, header.number(0, "<q")), values, unpacked)


class _Table:
    """A table of FlatBuffers; raises ValueError or struct.error for what is none."""

    def __init__(self, data: bytes, position: int | None = None) -> None:
        self.data = data
        self._position = struct.unpack_from("<I", data, 0)[0] if position is None else position
        self._fields = self._position - struct.unpack_from("<i", data, self._position)[0]
        if self._fields < 0:
            raise ValueError("metadata that is no table")

    def _place(self, field: int) -> int:
        """Where a field is; 0: it is not there."""
        (size,) = struct.unpack_from("<H", self.data, self._fields)
        if 4 + 2 * field >= size:
            return 0
        (offset,) = struct.unpack_from("<H", self.data, self._fields + 4 + 2 * field)
        return self._position + offset if offset else 0

    def number(self, field: int, form: str) -> int:
        place = self._place(field)
        found: int = struct.unpack_from(form, self.data, place)[0] if place else 0
        return found

    def table(self, field: int) -> _Table | None:
        place = self._place(field)
        return _Table(self.data, place + struct.unpack_from("<I", self.data, place)[0]) if place else None

    def vector(self, field: int, size: int) -> Iterator[int]:
        """Where each of its elements of so many bytes begins."""
        place = self._place(field)
        if place:
            start = place + struct.unpack_from("<I", self.data, place)[0]
            (count,) = struct.unpack_from("<I", self.data, start)
            if start + 4 + count * size > len(self.data):
                raise ValueError(f"metadata with a list of {count}")
            yield from range(start + 4, start + 4 + count * size, size)
