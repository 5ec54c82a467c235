"""The order of rows in tables of list state, which other tools may have changed.

Positions are 0, 1, 2 ... for each key and namespace. Rows in this order stay; others are sorted. Two rows with one position are
refused, since their order is not known; a missing position is an element that was removed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.layout import NAMESPACE, POSITION
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.snapshot.deltas import row_codes

_BUCKETS = 1 << 20
_Rows = npt.NDArray[np.int64]


def in_list_order(table: pa.Table, key_type: KeyType, max_parallelism: int) -> pa.Table:
    """A table that decode_keyed_table read, with the elements of each list in order. Raises ValueError or pyarrow's errors."""
    if not table.num_rows:
        return table
    positions = positions_of(table)
    names = [*key_columns(key_type), NAMESPACE]
    keys = table.select(names)
    if _is_in_order(positions, keys):
        # Every list begins with a 0: a list that is there twice is found by its first rows.
        starts = np.flatnonzero(positions == 0)
        suspects = _suspects(keys, starts, key_type, max_parallelism)
        if len(suspects):
            _sorted_rows(positions[suspects], keys.take(pa.array(suspects)), key_type, max_parallelism)
        return table
    return table.take(pa.array(_sorted_rows(positions, keys, key_type, max_parallelism)))


def positions_of(table: pa.Table) -> npt.NDArray[Any]:
    """Positions in a table that is not empty, int32 or int64. Raises ValueError for a wrong type, nulls or negative ones."""
    index = table.schema.get_field_index(POSITION)
    if index < 0:
        raise ValueError(f"no column {POSITION!r}, or twice")
    column = table.column(index)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if not pa.types.is_integer(column.type):
        raise ValueError(f"column {POSITION!r} is {column.type} and has to be int32")
    if column.null_count:
        raise ValueError(f"null in column {POSITION!r}")
    positions: npt.NDArray[Any] = (column if column.type == pa.int32() else column.cast(pa.int64())).to_numpy()
    if positions.min() < 0:
        raise ValueError(f"{positions.min()} in column {POSITION!r}")
    return positions


def _is_in_order(positions: npt.NDArray[Any], keys: pa.Table) -> bool:
    """Whether each row begins a list, or continues that of the row before it."""
    begins = positions[1:] == 0
    if positions[0] != 0 or not ((np.diff(positions) == 1) | begins).all():
        return False
    for column in keys.columns:
        same = pc.equal(column.slice(1), column.slice(0, len(column) - 1)).to_numpy()
        if not (begins | same).all():
            return False
    return True


def _suspects(keys: pa.Table, starts: _Rows, key_type: KeyType, max_parallelism: int) -> _Rows:
    """Rows among `starts` that may share key and namespace with another: those with equal hashes."""
    firsts = keys if len(starts) == len(keys) else keys.take(pa.array(starts))
    arrays = [firsts.column(name) for name in key_columns(key_type)]
    hashes = key_type.column(arrays, max_parallelism=max_parallelism).hashes()
    namespaces = firsts.column(NAMESPACE)
    if pc.any(pc.not_equal(namespaces, namespaces[0])).as_py():
        codes = namespaces.combine_chunks().dictionary_encode().indices.to_numpy().astype(np.uint32)
        hashes = hashes ^ (codes * np.uint32(0x9E3779B1))
    ordered = np.sort(hashes)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(again):
        return starts[:0]
    touched = np.zeros(_BUCKETS, np.bool_)
    touched[again % _BUCKETS] = True
    return starts[touched[hashes % _BUCKETS]]


def _sorted_rows(positions: npt.NDArray[Any], keys: pa.Table, key_type: KeyType, max_parallelism: int) -> _Rows:
    """Indices of rows by list, then position; lists in the order of their first rows. Raises ValueError for a repeated position."""
    codes, _ = row_codes([keys], key_type, max_parallelism, ())
    order: _Rows = np.lexsort((positions, codes))
    codes, positions = codes[order], positions[order]
    twice = np.flatnonzero((codes[1:] == codes[:-1]) & (positions[1:] == positions[:-1]))
    if len(twice):
        row = int(twice[0])
        shown = [column[int(order[row])].as_py() for column in keys.columns]
        raise ValueError(
            f"two rows have the {POSITION} {positions[row]} of key {(shown[0] if len(shown) == 2 else tuple(shown[:-1]))!r}, "
            f"namespace {shown[-1]!r}"
        )
    return order
