"""SHELL: performs the operations of a target's flows: calls of the target, and reads of the staged rows that it gets.

Each staged file is read once in a commit, whatever its steps: one that a step does not end stays open at its row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.operators.sinks.calls import CallPort
from holdfast.operators.sinks.targets.positions import ALL_ROWS
from holdfast.operators.sinks.targets.target import ApplyRows, CommitTarget, FileSlice, FindMissing, OpenTarget
from holdfast.statebackends.errors import CommittableLostError, CorruptStateError, InvalidConfigError, ObjectMissingError
from holdfast.statebackends.storage.port import ReadFile, StatFile, Storage, transfers_of

BATCH_ROWS = 65_536
"""Rows of a batch that a target gets, at most."""

READ_AHEAD_BYTES = 8 << 20
"""Bytes of staged files that are read at one time: many writers leave many small ones."""

_File = tuple[str, str]
"""Folder and name."""


class _OpenFile:
    """One staged file, at one of its rows."""

    def __init__(self, piece: FileSlice, data: bytes) -> None:
        self.key: _File = (piece.folder, piece.name)
        try:
            self._file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise self._corrupt(error) from error
        self.rows: int = self._file.metadata.num_rows
        self._rewind()

    def _rewind(self) -> None:
        self._batches = self._file.iter_batches(BATCH_ROWS)
        self._batch: pa.RecordBatch | None = None
        self._first = 0
        """Row of the file that is the first of the batch."""

    def read(self, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        """Rows [start, stop). Only a call that goes back decodes anything twice."""
        if stop > self.rows:
            raise self._corrupt(f"it has {self.rows} rows, and {stop} were staged")
        if start < self._first:
            self._rewind()
        while start < stop:
            batch = self._batch
            if batch is None or start >= self._first + batch.num_rows:
                self._first += 0 if batch is None else batch.num_rows
                self._batch = self._decode_next()
                continue
            offset = start - self._first
            part = batch.slice(offset, min(stop - start, batch.num_rows - offset))
            start += part.num_rows
            yield part

    def _decode_next(self) -> pa.RecordBatch:
        try:
            return next(self._batches)
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise self._corrupt(error) from error

    def _corrupt(self, why: object) -> CorruptStateError:
        path = "/".join(self.key)
        words = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
        return CorruptStateError(f"staged file {path} is damaged: {words}", path=path, reason=str(words))


class StagedRows:
    """Reads slices of staged files; those of one commit go forward."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._folders: dict[str, Storage] = {}
        self._sizes: dict[_File, int] = {}
        """Bytes of files that were found and are still to be read."""
        self._ahead: dict[_File, bytes] = {}
        """Files that were read and are still to be opened."""
        self._open: _OpenFile | None = None

    def find_missing(self, files: Sequence[_File]) -> _File | None:
        """One of these files that is gone; None: all are there."""
        wanted = [key for key in dict.fromkeys(files) if key not in self._sizes and not self._has(key)]
        for key, size in zip(wanted, self._each(wanted, StatFile), strict=True):
            if size is None:
                return key
            self._sizes[key] = size
        return None

    def _has(self, key: _File) -> bool:
        return key in self._ahead or (self._open is not None and self._open.key == key)

    def _each(self, keys: Sequence[_File], operation: Callable[[str], Any]) -> list[Any]:
        """Results of an operation on each file, done at one time where the storage gains by it."""
        calls = [partial(self._folder(folder).execute, operation(name)) for folder, name in keys]
        sizes = [self._sizes.get(key, 0) for key in keys]
        return transfers_of(self._storage).run(calls, sizes)

    def _folder(self, location: str) -> Storage:
        found = self._folders.get(location)
        if found is None:
            found = self._folders[location] = self._storage.at(location)
        return found

    def batches(self, slices: Sequence[FileSlice]) -> Iterator[pa.RecordBatch]:
        """Their rows, in order, each file read when its turn has come. Raises ObjectMissingError, CorruptStateError."""
        for index, piece in enumerate(slices):
            yield from self._opened(slices[index:]).read(piece.start, piece.stop)

    def _opened(self, slices: Sequence[FileSlice]) -> _OpenFile:
        """The first file, opened."""
        key = (slices[0].folder, slices[0].name)
        if self._open is None or self._open.key != key:
            self._open = None
            if key not in self._ahead:
                self._read_ahead(slices)
            self._open = _OpenFile(slices[0], self._ahead.pop(key))
        return self._open

    def _read_ahead(self, slices: Sequence[FileSlice]) -> None:
        """Read the first file, and those behind it as far as they are small."""
        keys: list[_File] = []
        size = 0
        for piece in slices:
            key = (piece.folder, piece.name)
            size += self._sizes.get(key, 0)
            if keys and (size > READ_AHEAD_BYTES or key not in self._sizes):
                break
            keys.append(key)
        self._ahead = dict(zip(keys, self._each(keys, ReadFile), strict=True))
        for key in keys:
            self._sizes.pop(key, None)

    def forget(self) -> None:
        """A commit has ended: nothing of it is held."""
        self._open = None
        self._ahead.clear()
        self._sizes.clear()


class _Given:
    """The rows that one call of `apply` gets: how many it took, and what went wrong as they were read."""

    def __init__(self, batches: Iterator[pa.RecordBatch], rows: int) -> None:
        self._batches = batches
        self.left = rows
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._batches:
                self.left -= batch.num_rows
                yield batch
        except Exception as error:
            self.error = error
            raise


class TargetPort(CallPort):
    """Implements `Storage` for a committer's flows."""

    def __init__(self, target: CommitTarget, storage: Storage) -> None:
        super().__init__(storage)
        self._target = target
        self._rows = StagedRows(storage)

    def execute(self, operation: Any) -> Any:
        match operation:
            case OpenTarget():
                return self._target.open(operation.owner)
            case ApplyRows():
                return self._apply(operation)
            case FindMissing():
                return self._rows.find_missing([(operation.folder, name) for name in operation.names]) is not None
            case _:
                return super().execute(operation)

    def _apply(self, operation: ApplyRows) -> None:
        missing = self._rows.find_missing([(piece.folder, piece.name) for piece in operation.slices])
        if missing is not None:
            raise self._lost(operation, "/".join(missing))
        given = _Given(self._rows.batches(operation.slices), sum(piece.stop - piece.start for piece in operation.slices))
        try:
            self._target.apply(iter(given), operation.expected, operation.position)
        except Exception as error:
            if given.error is None:
                raise
            raise self._why(operation, given.error) from error  # a client may have put it into an error of its own
        if given.error is not None:
            raise self._why(operation, given.error)
        if given.left:
            sink_id = operation.position.sink_id
            raise InvalidConfigError(
                f"sink {sink_id}: its target returned from apply() before it took all batches, {given.left} rows are left, which "
                "are lost: their position is committed",
                sinks=[sink_id],
            )
        if operation.position.row == ALL_ROWS:
            self._rows.forget()

    def _why(self, operation: ApplyRows, error: Exception) -> Exception:
        return self._lost(operation, error.path) if isinstance(error, ObjectMissingError) else error

    @staticmethod
    def _lost(operation: ApplyRows, path: str) -> CommittableLostError:
        wanted = operation.position
        return CommittableLostError(
            f"sink {wanted.sink_id}: {path} of checkpoint {wanted.checkpoint_id}, or of one before, is missing and was not "
            "committed",
            sink=wanted.sink_id,
            path=path,
            checkpoint=wanted.checkpoint_id,
        )
