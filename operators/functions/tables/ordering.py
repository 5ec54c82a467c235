"""Columns by which rows are compared: which ones can be, and their values in a batch."""

from __future__ import annotations

import pyarrow as pa

from holdfast.operators.functions.schema import RowType
from holdfast.statebackends.columnar.ordering import has_order
from holdfast.statebackends.errors import GraphError


def ordered_column(name: str, rows: RowType, operator: str) -> pa.DataType:
    """Type of a column that has an order. Raises GraphError, UnknownColumnError."""
    found = plain_type(rows.column(name, operator).type)
    if not has_order(found):
        raise GraphError(
            f"operator {operator!r}: column {name!r} is {found}, whose values have no order: numbers, booleans, text, "
            "binary values, decimal128, dates and times can be compared",
            operator=operator,
            column=name,
        )
    return found


def plain_type(data_type: pa.DataType) -> pa.DataType:
    """The type of a column's values, whether they are in a dictionary or not."""
    return data_type.value_type if pa.types.is_dictionary(data_type) else data_type


def plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
