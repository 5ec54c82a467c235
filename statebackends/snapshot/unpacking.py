"""Bound on what a table unpacks to, checked before it is unpacked: a file of a few KiB may stand for more than any memory holds.

The bound is UNPACKED_RATIO_MAX times the file's bytes, and at least UNPACKED_BYTES_MAX. Rows that differ, as those of a state do,
can't be packed that closely; large equal values can, and a setting of the environment allows more.

The check unpacks almost nothing. In an Arrow IPC file it reads the footer of blocks and each block's message, with its rows and the
places of its buffers; a packed buffer begins with its unpacked length (File.fbs, Message.fbs). In a Parquet file it reads the
footer and the headers of all pages (parquet.thrift: FileMetaData, PageHeader; Thrift's compact protocol): a reader allocates by the
pages' headers, and the row groups' metadata may say something else. pyarrow does not show these headers, and some footers end the
process when pyarrow (26.0) is asked for a column's metadata. What the values mean is for row_rules.py."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import InvalidConfigError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

_MAGIC = b"ARROW1"
_METADATA_BYTES_MAX = 64 << 20
"""Bytes of a footer, or of one batch's message, which has 16 for each buffer."""
_SCHEMA, _DICTIONARY_BATCH, _RECORD_BATCH = 1, 2, 3
"""Types of messages."""
_CONTINUATION = 0xFFFFFFFF
"""Mark before each message of a stream."""
_PAST_HEADER = 8
"""Bytes of a continuation mark and the metadata's length. Old files have the length alone, and are refused."""


@dataclass(frozen=True, slots=True)
class Block:
    """One record batch, or the values of a dictionary."""

    rows: int
    values: int
    """Values of all columns, nested ones included."""
    unpacked_bytes: int


def blocks_of(source: pa.NativeFile) -> Iterator[Block]:
    """The batches of an Arrow IPC file. Raises ValueError for a malformed file, struct.error for one that is cut off."""
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
    """A table of FlatBuffers. Raises ValueError or struct.error for malformed bytes."""

    def __init__(self, data: bytes, position: int | None = None) -> None:
        self.data = data
        self._position = struct.unpack_from("<I", data, 0)[0] if position is None else position
        self._fields = self._position - struct.unpack_from("<i", data, self._position)[0]
        if self._fields < 0:
            raise ValueError("metadata that is no table")

    def _place(self, field: int) -> int:
        """Position of a field; 0: the table lacks it."""
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
        """Positions of a vector's elements, `size` bytes each."""
        place = self._place(field)
        if place:
            start = place + struct.unpack_from("<I", self.data, place)[0]
            (count,) = struct.unpack_from("<I", self.data, start)
            if start + 4 + count * size > len(self.data):
                raise ValueError(f"metadata with a list of {count}")
            yield from range(start + 4, start + 4 + count * size, size)


_HEADER_BYTES = 1 << 10
_HEADER_BYTES_MAX = 1 << 20
"""Bytes of a page's header, whose statistics may hold two values."""
_FOOTER_BYTES_MAX = 16 << 20
"""Bytes of a footer. A row group of 131,072 rows takes 0.5 to 2 KB of it, or 60 KB where ten columns hold texts of thousands of
bytes, so this is enough for more than a thousand million rows of one subtask."""
_VALUES_MAX = 2_000_000
"""Values in a footer; a row group of ten columns has some hundreds. As Python objects they take up to 150 bytes each."""
_DEPTH_MAX = 8
_SCHEMA_DEPTH_MAX = 64
"""Depth of a schema; a list within a list takes three levels."""

DICTIONARY_PAGE = 2
DICTIONARY_ENCODINGS = (2, 8)
DELTA_BYTE_ARRAY = 7
"""Encoding of texts by their difference from the one before."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a column."""

    kind: int
    packed_bytes: int
    unpacked_bytes: int
    """Bytes of the encoded page. Values that are indices into a dictionary may be far longer."""
    values: int
    """Nulls included."""
    encoding: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column in one row group: its type from the schema, its numbers (at least 0) from the footer."""

    path: str
    kind: int
    """Physical type of its values (parquet.thrift: Type); TEXTS for values of no fixed length."""
    width: int
    """Bytes of a value of fixed length; else 0."""
    values: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    rows: int
    chunks: list[Chunk]


_Leaf: TypeAlias = tuple[tuple[bytes, ...], dict[int, Any]]
TEXTS = 6
"""Physical type of values of no fixed length (BYTE_ARRAY)."""
_FIXED = 7
_WIDTHS = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8}


def row_groups_of(source: pa.NativeFile) -> list[RowGroup]:
    """The row groups of a Parquet file. Raises ValueError for a malformed file."""
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
    """(path, element) of each column of a schema: a tree in which an element comes before its children.

    Field numbers of SchemaElement: 1 type, 2 bytes of a value of fixed length, 4 name, 5 number of children."""
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
    """Field numbers of ColumnMetaData: 1 type, 3 path, 5 values, 7 packed bytes, 9 and 11 starts.

    A reader goes by the schema, so a chunk that differs from it is refused."""
    kind, name = _number(leaf[1]), b".".join(path).decode()
    if found[1] != kind or tuple(found[3]) != path:
        raise ValueError(f"a Parquet file whose column {name!r} is another one in its schema")
    start, dictionary = _number(found[9]), _number(found.get(11) or 0)
    width = _number(leaf.get(2, 0)) if kind == _FIXED else _WIDTHS.get(kind, 0)
    first = dictionary if 0 < dictionary < start else start
    return Chunk(name, kind, width, _number(found[5]), first, _number(found[7]))


def _number(found: Any) -> int:
    """A count, size or position. Raises TypeError for another type, ValueError for a negative one."""
    if type(found) is not int:
        raise TypeError(f"{found!r} is no number")
    if found < 0:
        raise ValueError(f"a Parquet file whose footer says {found}")
    return found


def pages_of(source: pa.NativeFile, start: int, length: int, values: int) -> Iterator[Page]:
    """The pages of a column chunk of `length` bytes at `start`, with `values` values. Raises ValueError for malformed ones."""
    position, left = start, values
    while left > 0 and position < start + length:
        page, size = _page_at(source, position)
        if page.packed_bytes < 0 or page.unpacked_bytes < 0 or page.values < 0:
            raise ValueError(f"a page at {position} of {page.packed_bytes} bytes and {page.values} values")
        yield page
        position += size + page.packed_bytes
        left -= 0 if page.kind == DICTIONARY_PAGE else page.values


def _page_at(source: pa.NativeFile, position: int) -> tuple[Page, int]:
    """(page whose header is at a position, bytes of the header)."""
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
    # field numbers of PageHeader: 1 type, 2 and 3 sizes; 5, 7 and 8 the headers of data, of a dictionary, of data in version 2
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
    """Reader of Thrift's compact protocol. Raises IndexError at the end of the bytes, ValueError for malformed ones."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.position = 0
        self._values = 0

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
        self._values += 1
        if depth > _DEPTH_MAX or self._values > _VALUES_MAX:
            raise ValueError("nested without end" if depth > _DEPTH_MAX else f"metadata of more than {_VALUES_MAX:,} values")
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
        """An element of a list. A flag has a byte of its own here; as a field of a struct its type is its value."""
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


UNPACKED_BYTES_MAX = 256 << 20
"""Bytes to which any table may unpack."""
UNPACKED_RATIO_MAX = 1_000
"""Multiple of its file's bytes to which a table may unpack, if that is more than UNPACKED_BYTES_MAX."""
SETTING = "HOLDFAST_UNPACKED_BYTES_MAX"
"""Environment variable: bytes, instead of UNPACKED_BYTES_MAX."""
ROW_BYTES = 64
"""Bytes that a row counts at least: the objects made of it take as many, whatever its columns are."""
_VALUE_BYTES = 8
"""Bytes that a value counts at least, nested ones too: nulls of no type take none in an Arrow file."""
_MEASURED_ROWS, _MEASURED_BYTES = 1 << 12, 16 << 20


class Unpacked:
    """Count of the bytes to which one table unpacks, with its bound."""

    def __init__(self, packed_bytes: int) -> None:
        self.allowed = max(_allowed_of_any(), UNPACKED_RATIO_MAX * packed_bytes)
        self._packed_bytes = packed_bytes
        self.bytes = 0

    def add(self, count: int) -> None:
        """Raises ValueError above the bound."""
        self.bytes += count
        if self.bytes > self.allowed:
            raise ValueError(
                f"{self._packed_bytes} bytes that unpack to more than {self.allowed}; if the table is to be trusted, set {SETTING} "
                "in the environment of all that read it to what it may have"
            )

    def allows(self, count: int) -> bool:
        return self.bytes + count <= self.allowed

    def copy(self) -> Unpacked:
        """A count for one more pass over the table."""
        copied = Unpacked(self._packed_bytes)
        copied.bytes = self.bytes
        return copied


def check_arrow(source: pa.NativeFile) -> Unpacked:
    """Refuse an Arrow IPC file that unpacks to more than its bound, or is malformed. Raises ValueError, and pyarrow's errors."""
    unpacked = Unpacked(source.size())
    try:
        for block in blocks_of(source):
            unpacked.add(max(block.unpacked_bytes, ROW_BYTES * block.rows, _VALUE_BYTES * block.values))
    except struct.error as error:
        raise ValueError(f"not an Arrow file: {error}") from error
    return unpacked


def check_stream(data: bytes | memoryview) -> Unpacked:
    """As `check_arrow`, of one Arrow IPC stream, which must be all of the bytes: Arrow takes one that stops between two batches for
    a whole one. Raises ValueError."""
    unpacked, size, position = Unpacked(len(data)), len(data), 0
    source = pa.BufferReader(pa.py_buffer(data))
    try:
        while True:
            mark, length = struct.unpack_from("<Ii", data, position)
            if mark != _CONTINUATION or not 0 <= length <= min(size - position - _PAST_HEADER, _METADATA_BYTES_MAX):
                raise ValueError(f"no message of {length} bytes can be at {position} of {size}")
            if length == 0:
                break
            message = _Table(bytes(data[position + _PAST_HEADER : position + _PAST_HEADER + length]))
            body_length = message.number(3, "<q")
            if body_length < 0:
                raise ValueError(f"a message at {position} with {body_length} bytes of body")
            if position or message.number(1, "<B") != _SCHEMA:
                block = _block(source, size, position, _PAST_HEADER + length, body_length)
                unpacked.add(max(block.unpacked_bytes, ROW_BYTES * block.rows, _VALUE_BYTES * block.values))
            position += _PAST_HEADER + length + body_length
    except struct.error as error:
        raise ValueError(f"cut off at {position}: {error}") from error
    if position + _PAST_HEADER != size:
        raise ValueError(f"{size - position - _PAST_HEADER} bytes behind the end of the stream")
    return unpacked


def checked_batch(batch: pa.RecordBatch, unpacked: Unpacked) -> pa.RecordBatch:
    """A batch of a file that `check_arrow` accepted, validated, with its dictionary and view values counted at full length.

    Raises ValueError, and pyarrow's errors."""
    batch.validate(full=True)  # a wrong offset or dictionary index would read memory that is not the column's
    for column in batch.columns:
        kind = column.type
        if pa.types.is_dictionary(kind):
            unpacked.add(int(_lengths(column.dictionary)[column.indices.drop_null().to_numpy()].sum()))
        elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
            unpacked.add(int(_lengths(column).sum()))
    return batch


def check_parquet(source: pa.NativeFile) -> int:
    """Refuse a Parquet file that unpacks to more than its bound, judged by its pages. Returns the bytes of an average row, or more.

    Raises ValueError, and pyarrow's errors."""
    unpacked = Unpacked(source.size())
    numbered = _Numbered(source)
    groups = row_groups_of(source)
    for number, group in enumerate(groups):
        fixed, texts = group.rows * ROW_BYTES, list[_Texts]()
        for chunk in group.chunks:
            pages = _counted(pages_of(source, chunk.start, chunk.length, chunk.values), unpacked)
            if chunk.kind == TEXTS:
                texts.append(_Texts(number, chunk.path, pages))
            else:
                fixed += chunk.width * sum(page.values for page in pages if page.kind != DICTIONARY_PAGE)
        unpacked.add(fixed)
        numbered.paths = [each.path for each in texts]
        for each in texts:
            unpacked.add(each.bytes(numbered, unpacked))
    return unpacked.bytes // max(1, sum(group.rows for group in groups))


def _counted(pages: Iterator[Page], unpacked: Unpacked) -> list[Page]:
    """The pages of a column, none of which alone may exceed the bound, since a reader holds one at a time."""
    found = []
    for page in pages:
        if not unpacked.allows(page.unpacked_bytes):
            unpacked.add(page.unpacked_bytes)
        found.append(page)
    return found


class _Numbered:
    """The texts of a Parquet file as indices into its dictionaries; opens the file at the first call."""

    def __init__(self, source: pa.NativeFile) -> None:
        self.source = source
        self.paths: list[str] = []
        self._file: pq.ParquetFile | None = None

    def batches(self, group: int, path: str, rows: int) -> Iterator[pa.RecordBatch]:
        """One column of one row group."""
        import pyarrow.parquet as pq

        if self._file is None:
            self._file = pq.ParquetFile(self.source, read_dictionary=self.paths, pre_buffer=False)
        yield from self._file.iter_batches(rows, row_groups=[group], columns=[path], use_threads=False)


@dataclass(frozen=True, slots=True)
class _Texts:
    """A column of texts or bytes in one row group."""

    group: int
    path: str
    pages: list[Page]

    def bytes(self, numbered: _Numbered, unpacked: Unpacked) -> int:
        """An upper bound of its bytes if the bound of the table allows that; else its bytes, or more than are allowed."""
        data = [page for page in self.pages if page.kind != DICTIONARY_PAGE]
        plain = sum(page.unpacked_bytes for page in data)
        numbers = sum(page.values for page in data if page.encoding in DICTIONARY_ENCODINGS)
        deltas = [page for page in data if page.encoding == DELTA_BYTE_ARRAY]
        longest = max((page.unpacked_bytes for page in self.pages if page.kind == DICTIONARY_PAGE), default=0)
        if numbers * longest > _MEASURED_BYTES:  # a reader's batches would have few rows: nearly each dictionary has many values
            longest = self._longest(numbered)
        if deltas:
            return plain + numbers * longest + self._of_deltas(numbered.source, unpacked, deltas)
        if not unpacked.allows(plain + numbers * longest):
            return self._counted(numbered, unpacked)
        return plain + numbers * longest

    def _longest(self, numbered: _Numbered) -> int:
        """Bytes of the longest value of its dictionary, which pyarrow reads whole with the first row."""
        first = next(numbered.batches(self.group, self.path, 1), None)
        return max((int(_lengths(each.dictionary).max(initial=0)) for each in _dictionaries(first)), default=0)

    def _counted(self, numbered: _Numbered, unpacked: Unpacked) -> int:
        """Bytes of all values, counted until they exceed the bound."""
        total = 0
        for batch in numbered.batches(self.group, self.path, _MEASURED_ROWS):
            for found in _dictionaries(batch):
                total += int(_lengths(found.dictionary)[found.indices.drop_null().to_numpy()].sum())
            if not unpacked.allows(total):
                break
        return total

    def _of_deltas(self, source: pa.NativeFile, unpacked: Unpacked, pages: list[Page]) -> int:
        """Bytes of values in DELTA_BYTE_ARRAY pages. No value is longer than its page; if that is too much, they are counted."""
        import pyarrow.parquet as pq

        bound = sum(page.values * page.unpacked_bytes for page in pages)
        if unpacked.allows(bound) or "." in self.path:  # a single row of a nested column may be too much to read
            return bound
        rows = max(1, _MEASURED_BYTES // max(page.unpacked_bytes for page in pages))
        file = pq.ParquetFile(source, pre_buffer=False)
        total = 0
        for batch in file.iter_batches(rows, row_groups=[self.group], columns=[self.path], use_threads=False):
            total += batch.nbytes
            if not unpacked.allows(total):
                break
        return total


def _dictionaries(batch: pa.RecordBatch | None) -> Iterator[pa.DictionaryArray]:
    """Dictionary arrays within a batch's columns."""
    for column in () if batch is None else batch.columns:
        yield from _nested_dictionaries(column)


def _nested_dictionaries(array: pa.Array) -> Iterator[pa.DictionaryArray]:
    kind = array.type
    if pa.types.is_dictionary(kind):
        yield array
    elif pa.types.is_struct(kind):
        for each in array.flatten():
            yield from _nested_dictionaries(each)
    elif pa.types.is_map(kind):
        yield from _nested_dictionaries(array.keys)
        yield from _nested_dictionaries(array.items)
    elif pa.types.is_nested(kind):
        yield from _nested_dictionaries(array.flatten())


def _lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each value; an upper bound for nested values."""
    types = pa.types
    if types.is_string_view(values.type) or types.is_binary_view(values.type):
        return _view_lengths(values)
    if any(each(values.type) for each in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        lengths: npt.NDArray[np.int64] = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        return lengths
    try:
        return np.full(len(values), values.type.bit_width // 8, np.int64)
    except ValueError:  # no fixed width
        return np.full(len(values), values.nbytes, np.int64)


def _view_lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each value of an array of views: the first of the four ints of its view. pyarrow (26.0) has no function for it."""
    buffer = values.buffers()[1]
    if buffer is None or not len(values):
        return np.zeros(len(values), np.int64)
    views = np.frombuffer(buffer, np.int32).reshape(-1, 4)[values.offset : values.offset + len(values)]
    return np.where(values.is_valid().to_numpy(zero_copy_only=False), views[:, 0], 0).astype(np.int64)


def _allowed_of_any() -> int:
    text = os.environ.get(SETTING)
    if text is None:
        return UNPACKED_BYTES_MAX
    if not text.isdecimal() or int(text) < 1:
        raise InvalidConfigError(f"{SETTING} is {text!r} and has to be a number of bytes, at least 1", setting=SETTING)
    return int(text)
