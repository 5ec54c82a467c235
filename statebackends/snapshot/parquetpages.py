"""The column chunks and pages of a Parquet file by footer and headers: what each unpacks to, without unpacking any.

A row group's metadata may say anything; the pages' headers are what a reader believes and allocates by. pyarrow does not show
them, and ends the process over some footers when it is asked for a column's metadata (26.0): so both are read here.
Source: the Parquet format (parquet.thrift: FileMetaData, PageHeader) and Thrift's compact protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

_HEADER_BYTES = 1 << 10
_HEADER_BYTES_MAX = 1 << 20
"""A header holds statistics of its page, and these may hold two values."""
_FOOTER_BYTES_MAX = 16 << 20
"""A row group of 131,072 rows takes 0.5 to 2 KB of it, and 60 KB where ten columns hold texts of thousands of bytes: so this is
more than a thousand million rows of one subtask. As objects here it takes up to 80 times as much."""
_DEPTH_MAX = 8
_SCHEMA_DEPTH_MAX = 64
"""Three of them are a list within a list."""

DICTIONARY_PAGE = 2
DICTIONARY_ENCODINGS = (2, 8)
DELTA_BYTE_ARRAY = 7
"""Of texts: each says only how it differs from the one before it."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a column."""

    kind: int
    packed_bytes: int
    unpacked_bytes: int
    """Of the page, encoded; values may be far longer where they are numbers of a dictionary's."""
    values: int
    """Nulls included."""
    encoding: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column in one row group. What it is is as in the schema; numbers are what the footer says, at least 0."""

    path: str
    kind: int
    """Of its values: one of KINDS, or a text."""
    width: int
    """Bytes of a value of fixed length."""
    values: int
    start: int
    length: int
    lowest: bytes | None
    """Statistics, if there are any."""
    highest: bytes | None


@dataclass(frozen=True, slots=True)
class RowGroup:
    rows: int
    chunks: list[Chunk]


_Leaf: TypeAlias = tuple[tuple[bytes, ...], dict[int, Any]]
TEXTS = 6
"""The kind of values of no fixed length."""
_FIXED = 7
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}


def row_groups_of(source: pa.NativeFile) -> list[RowGroup]:
    """The row groups of a file. Raises ValueError for what is none."""
    size = source.size()
    tail = source.read_at(8, max(0, size - 8))
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or not 0 < length <= min(size - 8, _FOOTER_BYTES_MAX):
        raise ValueError("not a Parquet file")
    try:
        footer = _Compact(source.read_at(length, size - 8 - length)).struct()
        leaves = list(_leaves(iter(footer[2])))
        groups = [
            RowGroup(_number(group[3]), [_chunk(column[3], *leaf) for column, leaf in zip(group[1], leaves, strict=True)])
            for group in footer.get(4, ())
        ]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"a Parquet file whose footer is none: {error!r}") from error
    if sum(chunk.length for group in groups for chunk in group.chunks) > size:  # each byte is read once, then
        raise ValueError("a Parquet file whose columns are longer than it is")
    return groups


def _leaves(elements: Iterator[dict[int, Any]], above: tuple[bytes, ...] | None = None, depth: int = 0) -> Iterator[_Leaf]:
    """The columns of a schema, which is a tree whose elements come before their children, by their paths.

    Field numbers of SchemaElement: 1 type, 2 bytes of a value of fixed length, 4 name, 5 children."""
    if depth > _SCHEMA_DEPTH_MAX:
        raise ValueError("a Parquet file whose columns are nested without end")
    element = next(elements, {})
    path = () if above is None else (*above, element[4])  # the root's name is no part of a path
    children = _number(element.get(5) or 0)
    if not children and path:
        yield path, element
    for _ in range(children):
        yield from _leaves(elements, path, depth + 1)


def _chunk(found: dict[int, Any], path: tuple[bytes, ...], leaf: dict[int, Any]) -> Chunk:
    """Field numbers of ColumnMetaData: 1 type, 3 path, 5 values, 7 packed bytes, 9 and 11 starts, 12 statistics.

    A reader goes by the schema, whatever the chunk says of itself: so what differs is refused."""
    kind, name = _number(leaf[1]), b".".join(path).decode()
    if found[1] != kind or tuple(found[3]) != path:
        raise ValueError(f"a Parquet file whose column {name!r} is another one in its schema")
    start, dictionary = _number(found[9]), _number(found.get(11) or 0)
    width = _number(leaf.get(2, 0)) if kind == _FIXED else _WIDTHS.get(kind, 0)
    said = found.get(12) or {}
    lowest, highest = (each if isinstance(each, bytes) else None for each in (said.get(6), said.get(5)))
    first = dictionary if 0 < dictionary < start else start
    return Chunk(name, kind, width, _number(found[5]), first, _number(found[7]), lowest, highest)


def _number(found: Any) -> int:
    """Counts, sizes and places. Raises TypeError for what is none, ValueError for one below 0."""
    if type(found) is not int:
        raise TypeError(f"{found!r} is no number")
    if found < 0:
        raise ValueError(f"a Parquet file whose footer says {found}")
    return found


def pages_of(source: pa.NativeFile, start: int, length: int, values: int) -> Iterator[Page]:
    """The pages of a column chunk at `start` with `values` values. Raises ValueError for what are none."""
    position, left = start, values
    while left > 0 and position < start + length:
        page, size = _page_at(source, position)
        if page.packed_bytes < 0 or page.unpacked_bytes < 0 or page.values < 0:
            raise ValueError(f"a page at {position} of {page.packed_bytes} bytes and {page.values} values")
        yield page
        position += size + page.packed_bytes
        left -= 0 if page.kind == DICTIONARY_PAGE else page.values


def _page_at(source: pa.NativeFile, position: int) -> tuple[Page, int]:
    """The page whose header is at a position, and the bytes of the header."""
    wanted = _HEADER_BYTES
    while True:
        data = source.read_at(wanted, position)
        reader = _Compact(data)
        try:
            header = reader.struct()
            break
        except IndexError as error:
            if len(data) < wanted or wanted >= _HEADER_BYTES_MAX:
                raise ValueError(f"no header of a page at {position}") from error
            wanted *= 32
    # field numbers of PageHeader: 1 type, 2 and 3 sizes, 5, 7 and 8 what is said of data, a dictionary, and data in version 2
    own = header.get(5) or header.get(7) or header.get(8) or {}
    is_second = 8 in header
    try:
        page = Page(header[1], header[3], header[2], own.get(1, 0), own.get(4 if is_second else 2, 0))
    except (KeyError, AttributeError) as error:
        raise ValueError(f"no header of a page at {position}") from error
    if not all(isinstance(each, int) for each in (page.kind, page.packed_bytes, page.unpacked_bytes, page.values, page.encoding)):
        raise ValueError(f"no header of a page at {position}")
    return page, reader.position


class _Compact:
    """A reader of Thrift's compact protocol. Raises IndexError at the end of the bytes, ValueError for what is none."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Fields by their numbers."""
        if depth > _DEPTH_MAX:
            raise ValueError("nested without end")
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._signed()
            found[number] = self._value(head & 15, depth)
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise ValueError("nested without end")
        match kind:
            case 1 | 2:
                return kind == 1
            case 3:
                return self._byte()
            case 4 | 5 | 6:
                return self._signed()
            case 7:
                return self._skip(8)
            case 8:
                count = self._unsigned()
                start = self.position
                self._skip(count)
                return self._data[start : start + count]
            case 9 | 10:
                head = self._byte()
                count = head >> 4 if head >> 4 < 15 else self._unsigned()
                if count > len(self._data):  # an element has at least a byte
                    raise IndexError
                return [self._element(head & 15, depth + 1) for _ in range(count)]
            case 12:
                return self.struct(depth + 1)
        raise ValueError(f"type {kind} in the header of a page")

    def _element(self, kind: int, depth: int) -> Any:
        """Of a list, in which a flag has a byte of its own; a field's is in the field's type."""
        return self._byte() == 1 if kind in (1, 2) else self._value(kind, depth)

    def _byte(self) -> int:
        found = self._data[self.position]
        self.position += 1
        return found

    def _skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self._data):
            raise IndexError

    def _unsigned(self) -> int:
        number = shift = 0
        while True:
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
            shift += 7
            if shift > 63:
                raise ValueError("a number without end in the header of a page")

    def _signed(self) -> int:
        number = self._unsigned()
        return (number >> 1) ^ -(number & 1)
