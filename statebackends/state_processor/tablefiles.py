"""Parquet files of keyed state and lists of operator state, written as they come: what a savepoint that no job takes is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.statebackends.handles import FileHandle, InlineHandle, OperatorListHandle, StateMeta
from holdfast.statebackends.snapshot.parts import file_name
from holdfast.statebackends.state_processor.reading import PartReader, scratch_errors
from holdfast.statebackends.state_processor.writing import ClaimedFolder

GROUP_ROWS = 1 << 17
"""Rows of one row group: what is held in memory."""
INLINE_BYTES = 20_480
"""Operator state of fewer bytes lives in `_metadata`, as that of a job does by default."""


def write_table(local: str, schema: pa.Schema, tables: Iterable[pa.Table | pa.RecordBatch]) -> None:
    """A local Parquet file of rows in key-group order; one with the schema alone if there are none."""
    with scratch_errors(local), pq.ParquetWriter(local, schema, compression="zstd", store_schema=True) as writer:
        held: list[pa.Table] = []
        for piece in tables:
            held.append(piece if isinstance(piece, pa.Table) else pa.Table.from_batches([piece], schema))
            if sum(table.num_rows for table in held) >= GROUP_ROWS:
                writer.write_table(pa.concat_tables(held), row_group_size=GROUP_ROWS)
                held = []
        writer.write_table(pa.concat_tables(held) if held else schema.empty_table(), row_group_size=GROUP_ROWS)


class TableFiles:
    """Names and writes the files of one savepoint."""

    def __init__(self, target: ClaimedFolder, scratch: PartReader) -> None:
        self._target = target
        self._scratch = scratch
        self._count = 0

    def name(self, operator: str, subtask: int, what: str) -> str:
        """A file name that was not given out before."""
        self._count += 1
        return f"{file_name(operator)}-{subtask}-{self._count}-{file_name(what)}"

    def write(
        self, operator: str, subtask: int, state: str, schema: pa.Schema, tables: Iterable[pa.Table | pa.RecordBatch]
    ) -> FileHandle:
        """One state's share of one subtask, in key-group order; a file with the schema alone if there are no rows."""
        local = self._scratch.new_path("table")
        write_table(local, schema, tables)
        handle = self._target.store(local, self.name(operator, subtask, f"{state}.parquet"))
        self._scratch.discard(local)
        return handle

    def write_list(self, operator: str, subtask: int, meta: StateMeta, entries: Sequence[bytes]) -> OperatorListHandle:
        """One operator state's share of one subtask."""
        encoded = msgspec.msgpack.encode(entries)
        if len(encoded) < INLINE_BYTES:
            return OperatorListHandle(meta, InlineHandle(encoded), len(entries))
        local = self._scratch.new_path("list")
        with scratch_errors(local):
            Path(local).write_bytes(encoded)
        handle = self._target.store(local, self.name(operator, subtask, f"list-{meta.name}"))
        self._scratch.discard(local)
        return OperatorListHandle(meta, handle, len(entries))
