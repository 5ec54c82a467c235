"""What a table unpacks to is bounded before it is unpacked: a file of a few KiB may stand for more than any memory holds.

The bound is a multiple of the file's own bytes, and never less than an amount that any process has. Rows that differ, as those of a
state do, can't be packed as closely as that; large values that are all the same can, and then the setting allows more."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.snapshot.arrowblocks import blocks_of
from holdfast.statebackends.snapshot.parquetpages import (
    DELTA_BYTE_ARRAY,
    DICTIONARY_ENCODINGS,
    DICTIONARY_PAGE,
    TEXTS,
    Page,
    pages_of,
    row_groups_of,
)

UNPACKED_BYTES_MAX = 256 << 20
"""What any table may unpack to."""
UNPACKED_RATIO_MAX = 1_000
"""A table may unpack to so many times its file's bytes, if that is more."""
SETTING = "HOLDFAST_UNPACKED_BYTES_MAX"
"""Of the environment: bytes, in place of UNPACKED_BYTES_MAX."""
ROW_BYTES = 64
"""A row counts as at least so many: what it is turned into takes them, whatever its columns do."""
_VALUE_BYTES = 8
"""A value, nested ones among them, counts as at least so many: nulls of no type have none in an Arrow file."""
_MEASURED_ROWS, _MEASURED_BYTES = 1 << 12, 16 << 20


class Unpacked:
    """Counts what one table unpacks to."""

    def __init__(self, packed_bytes: int) -> None:
        self.allowed = max(_allowed_of_any(), UNPACKED_RATIO_MAX * packed_bytes)
        self._packed_bytes = packed_bytes
        self.bytes = 0

    def add(self, count: int) -> None:
        """Raises ValueError when it is too much."""
        self.bytes += count
        if self.bytes > self.allowed:
            raise ValueError(
                f"{self._packed_bytes} bytes that unpack to more than {self.allowed}; if the table is to be trusted, set {SETTING} "
                "in the environment of all that read it to what it may have"
            )

    def allows(self, count: int) -> bool:
        return self.bytes + count <= self.allowed

    def copy(self) -> Unpacked:
        """For one more pass over the table."""
        copied = Unpacked(self._packed_bytes)
        copied.bytes = self.bytes
        return copied


def check_arrow(source: pa.NativeFile) -> Unpacked:
    """Refuse an Arrow file that unpacks to too much. Raises ValueError, also for what is none; errors of pyarrow."""
    unpacked = Unpacked(source.size())
    try:
        for block in blocks_of(source):
            unpacked.add(max(block.unpacked_bytes, ROW_BYTES * block.rows, _VALUE_BYTES * block.values))
    except struct.error as error:
        raise ValueError(f"not an Arrow file: {error}") from error
    return unpacked


def checked_batch(batch: pa.RecordBatch, unpacked: Unpacked) -> pa.RecordBatch:
    """A batch of a file that `check_arrow` took, if it is what it says, and its values are no more when each has its own bytes."""
    batch.validate(full=True)  # offsets, and numbers of dictionaries: whatever uses a wrong one reads what it must not
    for column in batch.columns:
        kind = column.type
        if pa.types.is_dictionary(kind):
            unpacked.add(int(_lengths(column.dictionary)[column.indices.drop_null().to_numpy()].sum()))
        elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
            unpacked.add(int(_lengths(column).sum()))
    return batch


def check_parquet(source: pa.NativeFile) -> int:
    """Refuse a Parquet file that unpacks to too much, by its pages; gives the bytes of a row, on average, or more.

    Raises ValueError, and errors of pyarrow."""
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
    """All of a column. A reader holds one at a time; no single one may be too much."""
    found = []
    for page in pages:
        if not unpacked.allows(page.unpacked_bytes):
            unpacked.add(page.unpacked_bytes)
        found.append(page)
    return found


class _Numbered:
    """The texts of a file as numbers of its dictionaries', opened when that is asked for."""

    def __init__(self, source: pa.NativeFile) -> None:
        self.source = source
        self.paths: list[str] = []
        self._file: pq.ParquetFile | None = None

    def batches(self, group: int, path: str, rows: int) -> Iterator[pa.RecordBatch]:
        """Of one column in one row group."""
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
        """An upper bound if it is allowed, else what it unpacks to, or more than is allowed."""
        data = [page for page in self.pages if page.kind != DICTIONARY_PAGE]
        plain = sum(page.unpacked_bytes for page in data)
        numbers = sum(page.values for page in data if page.encoding in DICTIONARY_ENCODINGS)
        deltas = [page for page in data if page.encoding == DELTA_BYTE_ARRAY]
        longest = max((page.unpacked_bytes for page in self.pages if page.kind == DICTIONARY_PAGE), default=0)
        if deltas:
            return plain + numbers * longest + self._of_deltas(numbered.source, unpacked, deltas)
        if not unpacked.allows(plain + numbers * longest):
            longest = self._longest(numbered)
        if not unpacked.allows(plain + numbers * longest):
            return self._counted(numbered, unpacked)
        return plain + numbers * longest

    def _longest(self, numbered: _Numbered) -> int:
        """Bytes of the longest value of its dictionary, which comes whole with the first row."""
        first = next(numbered.batches(self.group, self.path, 1), None)
        return max((int(_lengths(each.dictionary).max(initial=0)) for each in _dictionaries(first)), default=0)

    def _counted(self, numbered: _Numbered, unpacked: Unpacked) -> int:
        """How often each value is there, until that is too much."""
        total = 0
        for batch in numbered.batches(self.group, self.path, _MEASURED_ROWS):
            for found in _dictionaries(batch):
                total += int(_lengths(found.dictionary)[found.indices.drop_null().to_numpy()].sum())
            if not unpacked.allows(total):
                break
        return total

    def _of_deltas(self, source: pa.NativeFile, unpacked: Unpacked, pages: list[Page]) -> int:
        """No value is longer than its page; where that says too little, the values are counted, few at a time."""
        bound = sum(page.values * page.unpacked_bytes for page in pages)
        if unpacked.allows(bound) or "." in self.path:  # of a nested one a single row may be too much
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
    """Those within its columns: more than one if a path names more."""
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
    """Bytes of each value, or more of one that is nested."""
    types = pa.types
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if any(each(values.type) for each in (*texts, types.is_string_view, types.is_binary_view)):
        lengths: npt.NDArray[np.int64] = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        return lengths
    try:
        return np.full(len(values), values.type.bit_width // 8, np.int64)
    except ValueError:  # no fixed width
        return np.full(len(values), values.nbytes, np.int64)


def _allowed_of_any() -> int:
    text = os.environ.get(SETTING)
    if text is None:
        return UNPACKED_BYTES_MAX
    if not text.isdecimal() or int(text) < 1:
        raise InvalidConfigError(f"{SETTING} is {text!r} and has to be a number of bytes, at least 1", setting=SETTING)
    return int(text)
