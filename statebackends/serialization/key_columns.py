"""Keys of one batch, vectorised: hashes, key groups and canonical bytes are computed once, at the first access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import InvalidKeyError
from holdfast.statebackends.serialization import key_hash, key_types
from holdfast.statebackends.serialization.key_fields import KeyFieldType, NestedRows
from holdfast.statebackends.serialization.key_group_columns import key_groups_of_hashes

TUPLE_TAG = b"\x09"
"""First byte of the canonical encoding of a tuple; its fields follow, each with tag and self-delimiting body."""


class ArrowKeyColumn:
    """Implements `state.KeyColumn`; immutable. Made by `keys.KeyType.column` and `column_of_values`."""

    __slots__ = ("_arrays", "_encoded", "_fields", "_groups", "_hashes", "_is_tuple", "_max_parallelism", "_operator")

    def __init__(
        self,
        fields: tuple[KeyFieldType, ...],
        is_tuple: bool,
        arrays: Sequence[pa.Array],
        max_parallelism: int,
        operator: str | None,
    ) -> None:
        self._fields = fields
        self._is_tuple = is_tuple
        self._arrays = list(arrays)
        self._max_parallelism = max_parallelism
        self._operator = operator
        self._hashes: key_hash.Hashes | None = None
        self._groups: npt.NDArray[np.int32] | None = None
        self._encoded: list[bytes] | None = None

    def __len__(self) -> int:
        return len(self._arrays[0])

    @property
    def arrays(self) -> Sequence[pa.Array]:
        """One Arrow array per key field, cast to the declared type, without nulls."""
        return self._arrays

    def hashes(self) -> key_hash.Hashes:
        """Key hash v1 of each row. Raises InvalidKeyError if a text isn't valid UTF-8."""
        if self._hashes is None:
            try:
                columns = [field.hashes(array) for field, array in zip(self._fields, self._arrays, strict=True)]
            except UnicodeDecodeError as error:
                raise InvalidKeyError(
                    f"operator {self._operator!r}: a key is not valid UTF-8: {error}",
                    operator=self._operator,
                    subtask=None,
                    value=None,
                ) from error
            self._hashes = key_hash.hash_columns(columns) if self._is_tuple else columns[0]
        return self._hashes

    @property
    def key_groups(self) -> npt.NDArray[np.int32]:
        """Key group of each row."""
        if self._groups is None:
            self._groups = key_groups_of_hashes(self.hashes(), self._max_parallelism)
        return self._groups

    def encoded(self) -> list[bytes]:
        """Canonical key bytes of each row."""
        if self._encoded is None:
            if self._is_tuple:
                columns = [
                    field.encoded(array, nested=True) for field, array in zip(self._fields, self._arrays, strict=True)
                ]
                self._encoded = [TUPLE_TAG + b"".join(row) for row in zip(*columns, strict=True)]
            else:
                self._encoded = self._fields[0].encoded(self._arrays[0])
        return self._encoded

    def values(self) -> list[Any]:
        """The keys as Python values, scalars or tuples."""
        columns = [array.to_pylist() for array in self._arrays]
        return list(zip(*columns, strict=True)) if self._is_tuple else columns[0]

    def take(self, indices: npt.NDArray[Any] | Sequence[int] | pa.Array) -> ArrowKeyColumn:
        """The keys of some rows, in the order of `indices`, with what was already computed of them."""
        picked = indices if isinstance(indices, pa.Array) else pa.array(np.asarray(indices, np.int64))
        rows = picked.to_numpy(zero_copy_only=False)
        taken = ArrowKeyColumn(
            self._fields, self._is_tuple, [a.take(picked) for a in self._arrays], self._max_parallelism, self._operator
        )
        taken._hashes = None if self._hashes is None else self._hashes[rows]
        taken._groups = None if self._groups is None else self._groups[rows]
        encoded = self._encoded
        taken._encoded = None if encoded is None else [encoded[row] for row in rows.tolist()]
        return taken


def cast_field(field: KeyFieldType, array: pa.Array | pa.ChunkedArray) -> pa.Array:
    """An array of the field's Arrow type with equal values. Raises ValueError or ArrowInvalid for other types, nulls and losses."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.type != field.arrow_type:
        if not pa.types.is_null(array.type) and type(key_types.field_of_arrow(array.type)) is not type(field):
            raise ValueError(f"a column of type {array.type} is not {field.text}")
        array = array.cast(field.arrow_type)
    if array.null_count:
        row = pc.index(array.is_null(), pa.scalar(True)).as_py()
        raise ValueError(f"the key of row {row} is null")
    field.check_column(array)
    return array


def arrays_of_tuples(fields: Sequence[KeyFieldType], encoded: Sequence[bytes]) -> list[pa.Array]:
    """One array per field, from encoded tuples. Raises CorruptStateError."""
    rows = NestedRows(encoded)
    rows.skip_tag(TUPLE_TAG[0])
    arrays = [field.array_of_nested(rows) for field in fields]
    rows.finish()
    return arrays


def arrays_of_exact_tuples(fields: Sequence[KeyFieldType], values: Sequence[Any]) -> list[pa.Array] | None:
    """Columns of tuples whose members have exactly their field's Python class; None if a member needs a further check."""
    if set(map(type, values)) != {tuple} or set(map(len, values)) != {len(fields)}:
        return None
    arrays = []
    for field, members in zip(fields, zip(*values, strict=True), strict=True):
        array = key_types.array_of_exact(field, members)
        if array is None:
            return None
        arrays.append(array)
    return arrays
