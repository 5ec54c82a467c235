"""Rows of list state on their way to a reader, each list judged as a restore judges it: what it would refuse is refused here.

Held are keys, namespaces and positions, without values, of a stretch of whole key groups; rows pass through as they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from statebackends.keyedtables import KEY_GROUP, NAMESPACE, POSITION, key_columns
from statebackends.keys import KeyType
from statebackends.listorder import in_list_order, positions_of
from statebackends.snapshots.tables import conform

STRETCH_ROWS = 1 << 17
"""Rows judged together, but for a key group of more."""


def identity_columns(key_type: KeyType) -> list[str]:
    """Columns that say which element of which list a row is."""
    return [KEY_GROUP, *key_columns(key_type), NAMESPACE, POSITION]


def judged_lists(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, key_type: KeyType, max_parallelism: int
) -> Iterator[pa.RecordBatch]:
    """The batches, which come in key-group order; `schema` has the types of their key columns and namespace.

    Raises ValueError or pyarrow's errors for positions that mean nothing; for one that is there twice after these rows."""
    keys = pa.schema([schema.field(name) for name in identity_columns(key_type)[:-1]])
    held: list[pa.Table] = []
    rows = 0
    for batch in batches:
        if batch.num_rows:
            held.append(_identities(batch, keys))
            rows += batch.num_rows
            positions_of(held[-1])
        yield batch
        if rows >= STRETCH_ROWS:
            held = _judge_whole_groups(held, key_type, max_parallelism)
            rows = sum(map(len, held))
    if held:
        in_list_order(pa.concat_tables(held), key_type, max_parallelism)


def _identities(batch: pa.RecordBatch, keys: pa.Schema) -> pa.Table:
    """A copy: a slice of a batch would keep its values in memory."""
    table = pa.Table.from_batches([conform(batch, keys)])
    index = batch.schema.get_field_index(POSITION)
    if index >= 0:  # as it is, since its type is judged, too; a table without one, likewise
        table = table.append_column(POSITION, batch.column(index))
    return table.take(pa.array(np.arange(len(table))))


def _judge_whole_groups(held: list[pa.Table], key_type: KeyType, max_parallelism: int) -> list[pa.Table]:
    """Judges all but the last key group, of which more rows may come; that is what is returned."""
    newest = held[-1].column(KEY_GROUP)[-1].as_py()
    if held[0].column(KEY_GROUP)[0].as_py() == newest:
        return held
    table = pa.concat_tables(held)
    cut = int(np.searchsorted(table.column(KEY_GROUP).to_numpy(), newest))
    in_list_order(table.slice(0, cut), key_type, max_parallelism)
    rest = table.slice(cut)
    return [rest.take(pa.array(np.arange(len(rest))))]
