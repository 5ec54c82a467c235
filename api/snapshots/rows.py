"""Rows of one state of a snapshot, as dicts, in any format: open tables, native RocksDB files, operator lists.

Types come from the snapshot; user classes are not needed and pickled values stay bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from holdfast.statebackends.handles import OperatorState
from holdfast.statebackends.layout import POSITION, VALUE, part_path
from holdfast.statebackends.state_processor.contents import StoredState, states_of
from holdfast.statebackends.state_processor.reading import PartReader
from holdfast.statebackends.state_processor.rows import SUBTASK, state_batches, state_schema
from holdfast.statebackends.state_processor.values import plain_entry, python_rows
from holdfast.statebackends.storage.port import Storage

Row = dict[str, Any]

_SLICE_ROWS = 1_024


def read_rows(operator: OperatorState, name: str, storage: Storage, folder: str, *, limit: int) -> list[Row]:
    """Up to `limit` rows of a state, key group by key group, or subtask by subtask. Raises CorruptStateError."""
    state = states_of(operator).get(name)
    if state is None:
        return []
    with PartReader(storage, lambda path, *, operator: part_path(folder, path, operator=operator)) as reader:
        return list(islice(rows_of(reader, state), limit))


def rows_of(reader: PartReader, state: StoredState) -> Iterator[Row]:
    """All rows, a few at a time; entries of operator state as plain values. Raises CorruptStateError."""
    for batch in state_batches(reader, state, state_schema(reader, state)):
        for start in range(0, batch.num_rows, _SLICE_ROWS):
            rows = python_rows(batch.slice(start, _SLICE_ROWS))
            if state.is_keyed:
                yield from rows
            else:
                for row in rows:
                    yield {SUBTASK: row[SUBTASK], POSITION: row[POSITION], VALUE: plain_entry(row[VALUE])}
