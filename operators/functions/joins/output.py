"""What all joins of two streams share: the keys that `on=` names, the columns of the result, and how a batch of it is made.

The key's columns come once, under the names that they have on the left, then the other columns of the left, then those of the
right. A row without a partner has nulls for the other side. A null equals nothing, not even another null."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.barriers.elements import Batch
from holdfast.operators.functions.schema import RowType, undeclared_error
from holdfast.operators.functions.selectors import ColumnKeySelector, key_selector
from holdfast.statebackends.errors import GraphError
from holdfast.statebackends.serialization.key_columns import ArrowKeyColumn

How: TypeAlias = Literal["inner", "left", "right", "full"]
"""Rows of which side come out without a partner, too: of none, the left, the right, or both."""
On: TypeAlias = str | Sequence[str | tuple[str, str]]
"""A column of both sides; a pair (left column, right column); or several columns and pairs, all of which must be equal."""
Suffixes: TypeAlias = tuple[str, str]
"""What is added to columns of the left, and of the right, that both sides have."""
Mask: TypeAlias = npt.NDArray[np.bool_]


class JoinKeySelector(ColumnKeySelector):
    """Takes the key from columns that may be null: such a row goes where the key goes that has zeros or empty texts instead."""

    def keys(self, batch: Batch, *, max_parallelism: int, operator: str, subtask: int | None = None) -> ArrowKeyColumn:
        """Keys of all rows; those of `without_key` are none."""
        columns = batch.columns()
        arrays = [_filled(columns.column(name)) for name in self.names]
        return self.key_type.column(arrays, max_parallelism=max_parallelism, operator=operator)

    def without_key(self, batch: Batch) -> Mask | None:
        """Rows with a null in the key; None: no row has one."""
        columns = batch.columns()
        found: Mask | None = None
        for name in self.names:
            column = columns.column(name)
            if column.null_count:
                nulls = column.is_null().to_numpy(zero_copy_only=False)
                found = nulls if found is None else found | nulls
        return found


def _filled(array: pa.Array) -> pa.Array:
    if not array.null_count:
        return array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):  # Arrow fills no nulls of views
        array = array.cast(pa.string() if pa.types.is_string_view(array.type) else pa.binary())
    return array.fill_null(_zero(array.type))


def _zero(data_type: pa.DataType) -> pa.Scalar:
    types = pa.types
    if types.is_string(data_type) or types.is_large_string(data_type) or types.is_string_view(data_type):
        return pa.scalar("", data_type)
    if types.is_fixed_size_binary(data_type):
        return pa.scalar(bytes(data_type.byte_width), data_type)
    if types.is_binary(data_type) or types.is_large_binary(data_type) or types.is_binary_view(data_type):
        return pa.scalar(b"", data_type)
    if types.is_boolean(data_type):
        return pa.scalar(False, data_type)
    return pa.scalar(Decimal(0) if types.is_decimal(data_type) else 0, data_type)


@dataclass(frozen=True, slots=True)
class JoinSide:
    """One input of a join: its rows, and the key in them."""

    row_type: RowType
    selector: JoinKeySelector

    @property
    def key_is_nullable(self) -> bool:
        return any(self.row_type.column(name, "join").nullable for name in self.selector.names)

    @property
    def columns(self) -> list[pa.Field]:
        """All but the key's, as they are in the result: of no dictionary."""
        keys = self.selector.names
        return [_plain(field) for field in self.row_type.schema or () if field.name not in keys]

    def values(self, columns: pa.RecordBatch) -> list[pa.Array]:
        """Those columns of a batch, in the types of the result."""
        found = []
        for field in self.columns:
            column = columns.column(field.name)
            found.append(column if column.type == field.type else column.cast(field.type))
        return found

    def key_values(self, columns: pa.RecordBatch) -> list[pa.Array]:
        """The key's columns of a batch, in the types of the key; with nulls."""
        pairs = zip(self.selector.names, self.selector.key_type.arrow_types, strict=True)
        return [columns.column(name).cast(data_type) for name, data_type in pairs]


def _plain(field: pa.Field) -> pa.Field:
    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def join_sides(on: On, left: RowType, right: RowType, operator: str) -> tuple[JoinSide, JoinSide]:
    """Both inputs with the keys that `on` names. Raises GraphError naming the operator: undeclared columns, keys of unequal types.

    A tuple of two names is one of columns if both sides have both; else it is a pair."""
    for row_type in (left, right):
        if row_type.schema is None:
            raise undeclared_error(operator, "columns")
    pairs = _pairs(on, left, right, operator)
    found = []
    for row_type, names in ((left, [one for one, _ in pairs]), (right, [other for _, other in pairs])):
        selector = key_selector(names, None, row_type, operator)
        found.append(JoinSide(row_type, JoinKeySelector(names, selector.key_type)))
    one, other = (side.selector for side in found)
    if one.key_type != other.key_type:
        raise GraphError(
            f"operator {operator!r}: its keys have different types: {one!r} of the left is {one.key_type_text}, {other!r} of the "
            f"right {other.key_type_text}: cast one of them in front of it",
            operator=operator,
        )
    return found[0], found[1]


def _pairs(on: On, left: RowType, right: RowType, operator: str) -> list[tuple[str, str]]:
    if isinstance(on, str):
        return [(on, on)]
    if not isinstance(on, list | tuple) or not on:
        raise GraphError(
            f"operator {operator!r}: on= is a column, a pair (left, right), or several of them, not {on!r}", operator=operator
        )
    if isinstance(on, tuple) and len(on) == 2 and isinstance(on[0], str) and isinstance(on[1], str):
        both = all(name in side.names for name in on for side in (left, right))
        return [(on[0], on[0]), (on[1], on[1])] if both else [(on[0], on[1])]
    pairs: list[tuple[str, str]] = []
    for each in on:
        pair = (each, each) if isinstance(each, str) else each
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(name, str) for name in pair):
            raise GraphError(f"operator {operator!r}: on= has {each!r}, which is neither a column nor a pair", operator=operator)
        pairs.append((pair[0], pair[1]))
    return pairs


def check_how(how: Any, operator: str) -> How:
    """Raises GraphError naming the operator."""
    if how not in get_args(How):
        raise GraphError(f"operator {operator!r}: how is {', '.join(get_args(How))}, not {how!r}", operator=operator)
    found: How = how
    return found


@dataclass(frozen=True, slots=True)
class JoinOutput:
    """Columns of a join's result."""

    row_type: RowType
    key_count: int
    extra_count: int
    left_count: int

    @property
    def schema(self) -> pa.Schema:
        assert self.row_type.schema is not None
        return self.row_type.schema

    def batch(
        self,
        keys: Sequence[pa.Array],
        left: Sequence[pa.Array] | None,
        right: Sequence[pa.Array] | None,
        times: npt.NDArray[np.int64],
        extra: Sequence[pa.Array] = (),
    ) -> Batch:
        """Rows of the result. `left` and `right`: the columns beside the key; None: the rows have no partner there."""
        middle = self.key_count + self.extra_count
        fields, count = list(self.schema), len(times)
        ones = _nulls(fields[middle : middle + self.left_count], count) if left is None else left
        others = _nulls(fields[middle + self.left_count :], count) if right is None else right
        columns = pa.RecordBatch.from_arrays([*keys, *extra, *ones, *others], schema=self.schema)
        return Batch(columns=columns, timestamps=times)


def _nulls(fields: Sequence[pa.Field], count: int) -> list[pa.Array]:
    return [pa.nulls(count, field.type) for field in fields]


def join_output(
    left: JoinSide,
    right: JoinSide,
    how: How,
    suffixes: Suffixes | None,
    operator: str,
    *,
    extra: Sequence[pa.Field] = (),
) -> JoinOutput:
    """The key's columns, `extra` ones of the join's own, columns of the left, columns of the right.

    Raises GraphError naming the operator and the columns, if two have one name; with `suffixes`, if they still have."""
    keeps_left, keeps_right = how in ("left", "full"), how in ("right", "full")
    nullable_key = (keeps_left and left.key_is_nullable) or (keeps_right and right.key_is_nullable)
    key_type = left.selector.key_type
    keys = [pa.field(name, kind, nullable_key) for name, kind in zip(left.selector.names, key_type.arrow_types, strict=True)]
    ones = [field.with_nullable(field.nullable or keeps_right) for field in left.columns]
    others = [field.with_nullable(field.nullable or keeps_left) for field in right.columns]
    own = [field.name for field in (*keys, *extra)]
    if suffixes is not None:
        ones, others = _renamed(ones, others, own, suffixes, operator)
    names = [*own, *(field.name for field in (*ones, *others))]
    clashing = sorted({name for name in names if names.count(name) > 1})
    if clashing:
        raise GraphError(
            f"operator {operator!r}: its result would have two columns of one name: {', '.join(clashing)}; rename them in front of "
            'it, or give suffixes=("", "_right"), which columns that both sides have get',
            operator=operator,
            columns=clashing,
        )
    schema = pa.schema([*keys, *extra, *ones, *others])
    return JoinOutput(RowType(schema), len(keys), len(extra), len(ones))


def _renamed(
    left: list[pa.Field], right: list[pa.Field], own: list[str], suffixes: Suffixes, operator: str
) -> tuple[list[pa.Field], list[pa.Field]]:
    if not isinstance(suffixes, list | tuple) or len(suffixes) != 2 or not all(isinstance(each, str) for each in suffixes):
        raise GraphError(f"operator {operator!r}: suffixes are two texts, not {suffixes!r}", operator=operator)
    both = {field.name for field in left} & {field.name for field in right} | set(own)
    renamed = []
    for fields, suffix in ((left, suffixes[0]), (right, suffixes[1])):
        renamed.append([field.with_name(field.name + suffix) if field.name in both else field for field in fields])
    return renamed[0], renamed[1]
