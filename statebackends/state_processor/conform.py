"""Rows of one keyed state that somebody else made, judged and brought into the form in which a savepoint holds them.

Keys are hashed anew: a row whose key group is not that of its key would never be found again. Values are cast only where
nothing is lost, and checked one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.statebackends.errors import CorruptStateError, HoldfastError, InvalidConfigError, InvalidKeyError, StateValueError
from holdfast.statebackends.handles import StateMeta
from holdfast.statebackends.layout import KEY_GROUP, MAP_KEY, NAMESPACE, POSITION, TTL_STAMP, VALUE
from holdfast.statebackends.serialization.column_types import loses_nothing
from holdfast.statebackends.serialization.keys import KeyType, key_columns
from holdfast.statebackends.serialization.state_serializer import StateCodec
from holdfast.statebackends.serialization.type_serializer import TypeSpec
from holdfast.statebackends.snapshot.row_rules import RowRules

_POSITION_HINT = f"; leave {POSITION!r} out to have elements in the order of the rows"


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The table of one state of one operator."""

    operator: str
    meta: StateMeta
    key_type: KeyType
    max_parallelism: int
    schema: pa.Schema
    codec: StateCodec | None
    """None: a state with columns of its own."""
    stamp_ms: int = 0
    """Of values with a TTL that come without a stamp of their own."""

    def conform(self, batch: pa.RecordBatch | pa.Table, first_row: int = 0) -> pa.Table:
        """The batch with the columns of the schema, in its order and types.

        `key_group` may be missing, else it must be right; so may `namespace` (then there is one), `position` (then rows are in
        order) and `ttl_stamp_ms`. `first_row`: how many rows came before, for errors. Raises InvalidKeyError, StateValueError,
        InvalidConfigError; each names operator, state and, where there is one, the row."""
        self._check_columns(batch)
        columns: dict[str, pa.Array] = {}
        keys = [self._whole(batch, name, first_row, InvalidKeyError) for name in key_columns(self.key_type)]
        try:
            column = self.key_type.column(keys, max_parallelism=self.max_parallelism, operator=self.operator)
            groups = column.key_groups
        except InvalidKeyError as error:
            raise InvalidKeyError(
                f"state {self.meta.name!r}: {error.message}", **{**error.fields, "state": self.meta.name}
            ) from error
        columns.update(zip(key_columns(self.key_type), column.arrays, strict=True))
        columns[KEY_GROUP] = pa.array(groups)
        self._check_groups(batch, groups, first_row)
        for field in self.schema:
            if field.name not in columns:
                columns[field.name] = self._column(batch, field, first_row)
        return pa.Table.from_arrays([columns[name] for name in self.schema.names], schema=self.schema)

    def _check_columns(self, batch: pa.RecordBatch | pa.Table) -> None:
        names = batch.schema.names
        optional = (KEY_GROUP, NAMESPACE, POSITION, TTL_STAMP)
        missing = [name for name in self.schema.names if name not in names and name not in optional]
        unknown = [name for name in names if name not in self.schema.names or names.count(name) > 1]
        if missing or unknown:
            wrong = f"no column {missing[0]!r}" if missing else f"column {unknown[0]!r} is not its own, or there twice"
            raise InvalidConfigError(
                f"{self._who}: {wrong}; its columns are: {', '.join(self.schema.names)}",
                **self._named,
                column=(missing + unknown)[0],
            )

    def _check_groups(self, batch: pa.RecordBatch | pa.Table, groups: Any, first_row: int) -> None:
        if KEY_GROUP not in batch.schema.names:
            return
        given = self._whole(batch, KEY_GROUP, first_row, InvalidKeyError)
        if not pa.types.is_integer(given.type):
            self._refuse(InvalidKeyError, first_row, f"column {KEY_GROUP!r} is {given.type}")
        wrong = np.flatnonzero(given.to_numpy(zero_copy_only=False) != groups)
        if len(wrong):
            row = int(wrong[0])
            reason = f"{KEY_GROUP} is {given[row]}, and that of its key is {groups[row]}; leave the column out to have it computed"
            self._refuse(InvalidKeyError, first_row + row, reason)

    def _column(self, batch: pa.RecordBatch | pa.Table, field: pa.Field, first_row: int) -> pa.Array:
        if field.name not in batch.schema.names:
            if field.name == POSITION:
                return pa.array(np.arange(first_row, first_row + batch.num_rows, dtype=np.int32))
            missing = self.stamp_ms if field.name == TTL_STAMP else 0 if pa.types.is_integer(field.type) else b""
            return pa.array([missing] * batch.num_rows, field.type)
        array = _combined(batch.column(field.name))
        if not field.nullable and array.null_count:
            self._refuse(StateValueError, first_row + _first_null(array), f"column {field.name!r} is null")
        array = self._cast(array, field, first_row)
        spec = self._spec(field.name)
        if spec is not None:
            self._check_values(array, spec, first_row)
        return array

    def _spec(self, column: str) -> TypeSpec | None:
        if self.codec is None:
            return None
        return self.codec.value if column == VALUE else self.codec.map_key if column == MAP_KEY else None

    def _cast(self, array: pa.Array, field: pa.Field, first_row: int) -> pa.Array:
        if array.type == field.type:
            return array
        spec = self._spec(field.name)
        if not loses_nothing(array.type, field.type, None if spec is None else spec.shape):
            wanted = spec.text if spec is not None and "decimal" in spec.text else field.type
            self._refuse(StateValueError, first_row, f"column {field.name!r} is {array.type} and has to be {wanted}")
        try:
            return array.cast(field.type)
        except (pa.ArrowException, ValueError) as error:
            self._refuse(
                StateValueError,
                first_row + _first_failing(array, lambda part: part.cast(field.type)),
                f"column {field.name!r}: {error}",
            )

    def _check_values(self, array: pa.Array, spec: TypeSpec, first_row: int) -> None:
        try:
            values = spec.from_arrow(array)
        except CorruptStateError as error:
            self._refuse(StateValueError, first_row + _first_failing(array, spec.from_arrow), error.message)
        for row, value in enumerate(values):
            try:
                spec.check(value)
            except StateValueError as error:
                self._refuse(StateValueError, first_row + row, error.message)

    def _whole(self, batch: pa.RecordBatch | pa.Table, name: str, first_row: int, kind: type[HoldfastError]) -> pa.Array:
        array = _combined(batch.column(name))
        if array.null_count:
            self._refuse(kind, first_row + _first_null(array), f"column {name!r} is null")
        return array

    def check_distinct(self, table: pa.Table) -> None:
        """Refuse two rows of one entry: only one of them would be found. All rows of a key must be in the table."""
        twice = self.rules.repeated(table)
        if twice is not None:
            raise InvalidKeyError(
                f"{self._who}: two rows have {twice}{_POSITION_HINT if POSITION in twice else ''}",
                **self._named,
                value=repr(twice)[:200],
            )

    @property
    def rules(self) -> RowRules:
        """By which readers judge the rows."""
        return RowRules(self.key_type, self.max_parallelism, self.meta, self.codec, self.schema)

    def lists(self, table: pa.Table) -> list[bytes]:
        """Which list each row is an element of: its key and namespace."""
        arrays = [table.column(name) for name in key_columns(self.key_type)]
        encoded = self.key_type.column(arrays, max_parallelism=self.max_parallelism, operator=self.operator).encoded()
        namespaces = table.column(NAMESPACE).to_pylist()
        return [b"%d:%b%b" % (len(key), key, mark) for key, mark in zip(encoded, namespaces, strict=True)]

    @property
    def _who(self) -> str:
        return f"operator {self.operator!r}, state {self.meta.name!r}"

    @property
    def _named(self) -> dict[str, Any]:
        return {"operator": self.operator, "state": self.meta.name}

    def _refuse(self, kind: type[HoldfastError], row: int, reason: str) -> NoReturn:
        raise kind(f"{self._who}, row {row}: {reason}", **self._named, row=row)


def _combined(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _first_null(array: pa.Array) -> int:
    return int(pc.index(array.is_null(), True).as_py())


def _first_failing(array: pa.Array, convert: Callable[[pa.Array], Any]) -> int:
    """The first row that a conversion fails on."""
    start, stop = 0, len(array)
    while stop - start > 1:
        middle = (start + stop) // 2
        try:
            convert(array.slice(start, middle - start))
        except (pa.ArrowException, ValueError, CorruptStateError):
            stop = middle
        else:
            start = middle
    return start
