"""What `_metadata` says of operators and states, as a table: a row a state, and one for an operator without any."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from holdfast.statebackends.state_processor.contents import StoredSnapshot, StoredState, states_of

SCHEMA = pa.schema(
    [
        pa.field("operator", pa.utf8(), nullable=False),
        pa.field("operator_id", pa.utf8(), nullable=False),
        pa.field("name", pa.utf8(), nullable=False),
        pa.field("parallelism", pa.int32(), nullable=False),
        pa.field("max_parallelism", pa.int32(), nullable=False),
        pa.field("operator_size", pa.int64(), nullable=False),
        pa.field("state", pa.utf8()),
        pa.field("kind", pa.utf8()),
        pa.field("key_type", pa.utf8()),
        pa.field("value_type", pa.utf8()),
        pa.field("format", pa.utf8()),
        pa.field("size", pa.int64()),
        pa.field("entries", pa.int64()),
    ]
)
"""Sizes are bytes. Null: `state` and all behind it of an operator without state; `size` of native files, which hold all states of
their operator; `key_type` of operator state, and `entries` of keyed state."""


def metadata_table(snapshot: StoredSnapshot) -> pa.Table:
    """Operators in their order, states by name. Raises CorruptStateError."""
    rows: list[dict[str, Any]] = []
    for operator in snapshot.metadata.operators:
        own = {
            "operator": operator.uid,
            "operator_id": operator.operator_id,
            "name": operator.name,
            "parallelism": operator.parallelism,
            "max_parallelism": operator.max_parallelism,
            "operator_size": operator.size,
        }
        rows += [own | _described(state) for state in states_of(operator).values()] or [own]
    return pa.Table.from_pylist(rows, SCHEMA)


def _described(state: StoredState) -> dict[str, Any]:
    meta = state.meta
    return {
        "state": meta.name,
        "kind": meta.kind,
        "key_type": meta.key_type,
        "value_type": meta.value_type,
        "format": state.format,
        "size": None if state.size < 0 else state.size,
        "entries": None if state.entries < 0 else state.entries,
    }
