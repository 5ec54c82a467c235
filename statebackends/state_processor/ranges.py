"""A state of a new savepoint written by many processes: each gets the rows of some subtasks' key groups and writes their files.

Names are of one writer and one try, so that a task that is repeated, or lives on after its driver gave it up, writes over
nothing; whoever asked names in `_metadata` what it was told of, and nothing else. Knows no Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.statebackends import errors
from holdfast.statebackends.errors import HoldfastError, StorageUnavailableError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.keygroups import assign_key_groups
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.storedcodecs import codec_of_meta
from holdfast.statebackends.snapshot.parts import file_name
from holdfast.statebackends.state_processor.conform import StateLayout
from holdfast.statebackends.state_processor.places import place_of
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.sorting import KeyGroupSorter
from holdfast.statebackends.state_processor.tablefiles import write_table
from holdfast.statebackends.storage.port import UploadFile

SUBTASK_COLUMN = "__holdfast_subtask"


class WrittenRange(msgspec.Struct, frozen=True):
    """A file that a task wrote; or why it could not, with `error` not empty."""

    subtask: int
    name: str = ""
    length: int = 0
    checksum: str = ""
    error: str = ""
    """Class of the error, of which the message and the fields (JSON) follow."""
    message: str = ""
    fields: str = "{}"

    @staticmethod
    def failed(error: HoldfastError, subtask: int) -> WrittenRange:
        fields = msgspec.json.encode(error.fields, enc_hook=repr).decode()
        return WrittenRange(subtask, error=type(error).__name__, message=error.message, fields=fields)

    def check(self) -> None:
        """Raises the error that the task met."""
        if self.error:
            kind: type[HoldfastError] = getattr(errors, self.error, HoldfastError)
            raise kind(self.message, **msgspec.json.decode(self.fields))


@dataclass(frozen=True, slots=True)
class RangeTask:
    """What every task is told."""

    uid: str
    meta: StateMeta
    key_type: str
    max_parallelism: int
    parallelism: int
    schema: pa.Schema
    stamp_ms: int
    location: str
    """Of the savepoint's folder: a path that all processes see, or a URL."""
    writer: str
    """In the name of every file."""

    @staticmethod
    def of(layout: StateLayout, parallelism: int, location: str, writer: str) -> RangeTask:
        key_type, schema = layout.key_type.text, layout.schema
        return RangeTask(
            layout.operator, layout.meta, key_type, layout.max_parallelism, parallelism, schema, layout.stamp_ms, location, writer
        )

    def layout(self) -> StateLayout:
        key_type = KeyType.parse(self.key_type)
        codec = codec_of_meta(self.meta)
        return StateLayout(self.uid, self.meta, key_type, self.max_parallelism, self.schema, codec, self.stamp_ms)

    def numbered(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches with the subtask of each row; rows of a batch with a bad key go to subtask 0, which refuses them."""
        key_type = KeyType.parse(self.key_type)
        for batch in batches:
            keys = [batch.column(name) for name in key_columns(key_type)]
            try:
                groups = key_type.column(keys, max_parallelism=self.max_parallelism, operator=self.uid).key_groups
                subtasks = groups.astype(np.int64) * self.parallelism // self.max_parallelism
            except HoldfastError:
                subtasks = np.zeros(batch.num_rows, np.int64)
            yield batch.append_column(SUBTASK_COLUMN, pa.array(subtasks.astype(np.int32)))

    def write(self, batches: Iterable[pa.RecordBatch], attempt: str) -> Iterator[WrittenRange]:
        """Write a file for each subtask among numbered rows, which must be all rows of these subtasks; `attempt` is no other's.

        What is wrong with rows is told, for trying again would not mend it; StorageUnavailableError is raised. Memory: as
        sorting.py says."""
        subtask = 0
        try:
            place = place_of(self.location)
            with PartReader(place.storage, lambda path, *, operator: path) as scratch:
                rows = KeyGroupSorter(self.layout(), scratch.new_path)
                subtasks: set[int] = set()
                for batch in batches:
                    found = np.unique(batch.column(SUBTASK_COLUMN).to_numpy())
                    subtasks.update(map(int, found))
                    subtask = int(found[0]) if len(found) else subtask
                    rows.add(batch.drop_columns([SUBTASK_COLUMN]))
                for subtask in sorted(subtasks):
                    local = scratch.new_path("table")
                    groups = assign_key_groups(self.max_parallelism, self.parallelism, subtask)
                    write_table(local, self.schema, rows.tables(groups))
                    what = f"{self.writer}-{attempt}-{file_name(self.meta.name)}.parquet"
                    name = f"{file_name(self.uid)}-{subtask}-{what}"
                    length, checksum = place.storage.execute(UploadFile(local, f"{place.folder}/{name}"))
                    scratch.discard(local)
                    yield WrittenRange(subtask, name, length, checksum)
        except StorageUnavailableError:
            raise
        except HoldfastError as error:
            error.message += f" (rows are counted in the task of subtask {subtask})"
            yield WrittenRange.failed(error, subtask)


def as_row(written: WrittenRange) -> dict[str, Any]:
    return msgspec.structs.asdict(written)
